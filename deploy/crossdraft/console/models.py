"""Models that a command serves in its own process, each in a thread of its own; its clients here need no port.

To be imported where they are run: torch takes seconds.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

from crossdraft.drafter.service import DrafterService, ServeDrafter, load_service, server_of
from crossdraft.engine.kv_cache import MemoryShare
from crossdraft.rpc.server import Server
from crossdraft.target.service import ServeTarget, target_server

Servers = dict[str, Server[Any, Any, Any]]  # by role


@asynccontextmanager
async def serving(target: ServeTarget | None, drafter: ServeDrafter | None) -> AsyncIterator[Servers]:
    """The services, at least one, for the time of the block.

    Raises:
        ValueError: as `target_server` and `drafter_server`.
        CannotListen: a port cannot be had.
    """
    async with AsyncExitStack() as stack:
        servers = await _loaded(target, drafter)
        for server in servers.values():
            await stack.enter_async_context(server)
        yield servers


async def _loaded(target: ServeTarget | None, drafter: ServeDrafter | None) -> Servers:
    """Of two models on one device the one whose KV cache takes what is there makes it last."""
    helping: list[DrafterService] = []
    servers: Servers = {}

    def load(*there: Any) -> None:
        if drafter is not None and not helping:
            model = drafter.model.beside(*there) if there else drafter.model
            helping.append(load_service(replace(drafter, model=model)))

    try:
        if target is not None and isinstance(target.model.budget, MemoryShare):
            servers["target"] = await target_server(target, load)
        elif target is not None:
            servers["target"] = await target_server(target)
        await asyncio.to_thread(load)
    except BaseException:
        for service in helping:
            await service.close()
        raise
    if drafter is not None:
        servers["drafter"] = server_of(helping[0], drafter)
    return servers

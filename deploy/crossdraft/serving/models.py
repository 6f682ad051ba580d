"""Services of models in this process: a target and a drafter, which its own clients reach without gRPC."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from crossdraft.drafter.service import DrafterService, load_service, server_of
from crossdraft.engine.served_model import ModelOptions
from crossdraft.rpc.server import Listening, Server
from crossdraft.session.models import Models
from crossdraft.target.service import TargetService, target_server

MODELS = TargetService, DrafterService
Served = tuple[ModelOptions, Listening]  # a model, and where
Servers = dict[str, Server[Any, Any, Any]]  # by role


@asynccontextmanager
async def serving(target: Served | None, drafter: Served | None) -> AsyncIterator[Servers]:
    """Servers of the models, at least one, for the time of the block.

    Of two models on one device the one whose KV cache takes what is there makes it last, and they step by turns. Raises
    ValueError: a model cannot be run, or the drafter reads other hidden states; CannotListen.
    """
    helping: list[DrafterService] = []
    servers: Servers = {}

    def load(*there: Any) -> None:
        if drafter is not None and not helping:
            helping.append(load_service(drafter[0].beside(*there) if there else drafter[0]))

    async with AsyncExitStack() as stack:
        try:
            if target is not None:
                beside = load if target[0].cache_mib is None else lambda *_: None
                servers["target"] = await target_server(*target, beside)
                stack.push_async_callback(servers["target"].drain)
            await asyncio.to_thread(load)
        except BaseException:
            for service in helping:
                await service.close()
            raise
        if drafter is not None:
            servers["drafter"] = server_of(helping[0], *drafter)
            stack.push_async_callback(servers["drafter"].drain)
        services = [each for server in servers.values() if isinstance(each := server.service, MODELS)]
        if len(services) == len(servers) == 2:
            own, helper = (service.running for service in services)
            _ = Models(own.description, own.tokenization, helper.description).reads_hidden
        threads = [service.running.thread for service in services]
        if len({thread.engine.device for thread in threads}) < len(threads):
            for thread in threads:
                thread.share_device()
        for server in servers.values():
            await server.start()
        yield servers

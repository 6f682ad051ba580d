"""A service's lifetime: listening, health, reflection, and an end that lets sessions finish."""

import asyncio
import json
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping
from types import MappingProxyType
from typing import Any, Generic, Protocol, Self, TextIO

import uvloop

from crossdraft.rpc.activity import Activity
from crossdraft.rpc.endpoint import Endpoint, Listening
from crossdraft.rpc.exposition import Exporter, Registry
from crossdraft.rpc.handlers import Answer, Ask, Handlers, Open, Role, Service
from crossdraft.rpc.heap import settle
from crossdraft.rpc.service_metrics import ModelUse, ServiceMetrics

__all__ = ["Listening", "Server", "Serving", "run", "serve"]


class Serving(Protocol):
    """What serves from the begin of a block to its end."""

    def ready_line(self) -> str:
        """One line of JSON that says where what is served."""
        ...

    async def __aenter__(self) -> object: ...

    async def __aexit__(self, *error: object) -> object: ...


class Server(Generic[Open, Ask, Answer]):
    """A gRPC server of one service. Must be made in a running event loop."""

    def __init__(
        self,
        role: Role[Open, Ask, Answer],
        service: Service[Open, Ask, Answer],
        listening: Listening,
        marks: Mapping[str, str | float] = MappingProxyType({}),  # what else the ready line says
        use: Callable[[], ModelUse] | None = None,  # of its model, for metrics; None: it has none
    ) -> None:
        self._marks = dict(marks)
        self._role = role
        self._service = service
        self._listening = listening
        handlers = Handlers(role, service, listening.sessions)
        self._endpoint = Endpoint(listening, {role.service: handlers.registered()})
        self.registry = Registry()
        self.registry.register(ServiceMetrics(role.name, service.description.model, handlers.activity, use))
        self._exporter = Exporter(self.registry)
        self.metrics = ""  # host:port where Prometheus reads, once it listens; empty: nowhere
        self._activity = handlers.activity

    @property
    def activity(self) -> Activity:
        """What its sessions do."""
        return self._activity

    @property
    def address(self) -> str:
        """host:port, once it listens."""
        return self._endpoint.address

    async def start(self) -> str:
        """Begins to listen; returns the address.

        Raises:
            CannotListen: the port is taken, or not for this user, or the host is not of this machine.
        """
        listening = self._listening
        if listening.metrics_port is not None:
            self.metrics = self._exporter.start(listening.host, listening.metrics_port)
            self._marks["metrics"] = self.metrics
        try:
            return await self._endpoint.start()
        except BaseException:
            await self._exporter.stop()
            raise

    async def drain(self) -> None:
        """Reports NOT_SERVING, takes no new session, lets open ones go on for the grace period, and ends."""
        await self._endpoint.drain()
        await self._exporter.stop()
        await self._service.close()

    def ready_line(self) -> str:
        """One line of JSON that says where what is served."""
        description = self._service.description
        return json.dumps(
            {
                "ready": True,
                "role": self._role.name,
                "address": self.address,
                "model": description.model,
                "fingerprint": description.fingerprint,
                **self._marks,
            }
        )

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.drain()


async def serve(server: Serving, output: TextIO = sys.stdout) -> None:
    """Serves until SIGTERM or SIGINT, then drains; prints the ready line on `output` once it listens.

    Raises:
        CannotListen: as `Server.start`.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    signals = (signal.SIGTERM, signal.SIGINT)
    for number in signals:
        loop.add_signal_handler(number, stop.set)
    try:
        async with server:
            settle()
            print(server.ready_line(), file=output, flush=True)
            await stop.wait()
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


def run(main: Coroutine[Any, Any, None]) -> None:
    """Runs a service's main coroutine on uvloop, whose streams cost a third less than asyncio's."""
    uvloop.run(main)

"""A service's lifetime: listening, health, reflection, and an end that lets sessions finish."""

import asyncio
import json
import signal
import sys
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Generic, Self, TextIO

import grpc
import uvloop
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from crossdraft.rpc.errors import CannotListen
from crossdraft.rpc.handlers import Answer, Ask, Handlers, Open, Role, Service
from crossdraft.rpc.transport import SERVER_OPTIONS, MessageLimit


@dataclass(frozen=True)
class Listening:
    """Where a server listens, and its limits.

    Raises:
        ValueError: a value is out of its range; the text says what is allowed.
    """

    host: str = "127.0.0.1"
    port: int = 0  # 0: any that is free
    limit: MessageLimit = field(default_factory=MessageLimit)
    grace_seconds: float = 10.0  # how long open sessions may go on after the order to stop

    def __post_init__(self) -> None:
        if not self.host:
            raise ValueError("host must not be empty; 0.0.0.0 listens on all interfaces")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port must be between 0 (any that is free) and 65535, got {self.port}")
        if not 0 <= self.grace_seconds < float("inf"):
            raise ValueError(f"grace_seconds must be 0 or more, got {self.grace_seconds}")


class Server(Generic[Open, Ask, Answer]):
    """A gRPC server of one service. Must be made in a running event loop."""

    def __init__(
        self,
        role: Role[Open, Ask, Answer],
        service: Service[Open, Ask, Answer],
        listening: Listening,
        marks: Mapping[str, str | float] = MappingProxyType({}),  # what else the ready line says
    ) -> None:
        self._marks = marks
        self._role = role
        self._service = service
        self._listening = listening
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # the stubs lack it
        self._server = grpc.aio.server(options=SERVER_OPTIONS + listening.limit.options())
        self._server.add_generic_rpc_handlers((Handlers(role, service).registered(),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (role.service, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        self.address = ""  # host:port, once it listens

    async def start(self) -> str:
        """Begins to listen; returns the address.

        Raises:
            CannotListen: the port is taken, or not for this user, or the host is not of this machine.
        """
        wanted = f"{self._listening.host}:{self._listening.port}"
        try:
            port = self._server.add_insecure_port(wanted)
        except RuntimeError as error:
            raise CannotListen(
                f"cannot listen on {wanted}: the port is taken or not allowed, or the host is not of this machine; "
                "choose another port, or 0 for any that is free"
            ) from error
        await self._server.start()
        await self._health.set(self._role.service, health_pb2.HealthCheckResponse.SERVING)
        self.address = f"{self._listening.host}:{port}"
        return self.address

    async def drain(self) -> None:
        """Reports NOT_SERVING, takes no new session, lets open ones go on for the grace period, and ends."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(self._listening.grace_seconds)
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


async def serve(server: Server[Open, Ask, Answer], output: TextIO = sys.stdout) -> None:
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
            print(server.ready_line(), file=output, flush=True)
            await stop.wait()
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


def run(main: Coroutine[Any, Any, None]) -> None:
    """Runs a service's main coroutine on uvloop, whose streams cost a third less than asyncio's."""
    uvloop.run(main)

"""Where a process is spoken to over gRPC: listening, health, reflection, and an end that lets calls finish."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from crossdraft.rpc.admission import SessionLimits
from crossdraft.rpc.errors import CannotListen
from crossdraft.rpc.security import FrontFiles, TlsFiles, server_credentials
from crossdraft.rpc.transport import SERVER_OPTIONS, ChannelOptions, MessageLimit

log = logging.getLogger(__name__)


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
    tls: TlsFiles | FrontFiles | None = None  # None: plaintext, for whoever can reach the port
    sessions: SessionLimits = field(default_factory=SessionLimits)
    metrics_port: int | None = None  # where Prometheus reads metrics over HTTP, 0: any that is free; None: nowhere

    def __post_init__(self) -> None:
        if not self.host:
            raise ValueError("host must not be empty; 0.0.0.0 listens on all interfaces")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port must be between 0 (any that is free) and 65535, got {self.port}")
        if not 0 <= (self.metrics_port or 0) <= 65535:
            raise ValueError(f"metrics_port must be between 0 (any that is free) and 65535, got {self.metrics_port}")
        if not 0 <= self.grace_seconds < float("inf"):
            raise ValueError(f"grace_seconds must be 0 or more, got {self.grace_seconds}")

    @property
    def local(self) -> bool:
        """Whether only this machine can reach it."""
        try:
            return ip_address(self.host.strip("[]")).is_loopback
        except ValueError:  # a name
            return self.host == "localhost"


def warn_if_open(listening: Listening, address: str) -> None:
    """Says that others can read and ask what passes over an address without TLS, if they can reach it."""
    if not listening.local:
        log.warning(
            "%s is open to whoever can reach it, unencrypted: give it a certificate (see its --help; "
            "`crossdraft certs` makes them), or listen on 127.0.0.1",
            address,
        )


class Endpoint:
    """One port with services on it, standard health and reflection among them. Must be made in a running event loop.

    Args:
        listening: where.
        services: what answers for each service, by its full name in the protos.
        options: of the connections.
    """

    def __init__(
        self,
        listening: Listening,
        services: "Mapping[str, grpc.GenericRpcHandler[bytes, bytes]]",
        options: ChannelOptions = SERVER_OPTIONS,
    ) -> None:
        self._listening = listening
        self._names = tuple(services)
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # the stubs lack it
        self._server = grpc.aio.server(options=options + listening.limit.options())
        self._server.add_generic_rpc_handlers(tuple(services.values()))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        self.address = ""  # host:port, once it listens

    async def start(self, serving: bool = True) -> str:
        """Begins to listen; returns the address.

        Args:
            serving: as `report` is told first.

        Raises:
            CannotListen: the port is taken, or not for this user, or the host is not of this machine.
            TlsError: certificate or key cannot be used.
        """
        wanted, tls = f"{self._listening.host}:{self._listening.port}", self._listening.tls
        credentials = None if tls is None else server_credentials(tls)
        try:
            if credentials is None:
                port = self._server.add_insecure_port(wanted)
            else:
                port = self._server.add_secure_port(wanted, credentials)
        except RuntimeError as error:
            raise CannotListen(
                f"cannot listen on {wanted}: the port is taken or not allowed, or the host is not of this machine; "
                "choose another port, or 0 for any that is free"
            ) from error
        await self._server.start()
        await self.report(serving)
        self.address = f"{self._listening.host}:{port}"
        if tls is None:
            warn_if_open(self._listening, self.address)
        return self.address

    async def report(self, serving: bool) -> None:
        """What the health service says of the services. Of the process, which has no name there, it says SERVING."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in self._names:
            await self._health.set(name, status)

    async def drain(self) -> None:
        """Reports NOT_SERVING, takes no new call, lets open ones go on for the grace period, and ends."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(self._listening.grace_seconds)

"""The front for gRPC clients, as what an actor hosts."""

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from crossdraft.rpc.endpoint import Listening
from crossdraft.rpc.security import FrontFiles
from crossdraft.rpc.transport import MessageLimit
from crossdraft.serving.cluster.directory import Role
from crossdraft.serving.cluster.files import contents
from crossdraft.serving.cluster.naming import digest_of
from crossdraft.serving.cluster.told import Fronted
from crossdraft.serving.configuration import Grpc, Resources
from crossdraft.serving.generation import GenerationOptions, GenerationServer, serve_generation
from crossdraft.serving.logs import LogFormat

if TYPE_CHECKING:
    from crossdraft.serving.cluster.measuring import Measuring

ANY_PORT = 0
ALL_ADDRESSES = ("0.0.0.0", "[::]", "::")


@dataclass(frozen=True)
class HostedGrpc:
    """The front for gRPC clients, as what an actor hosts."""

    told: Fronted
    grpc: Grpc
    grace_seconds: float  # for open outputs, when it is to stop

    role = Role.GRPC
    model = ""
    name = ""

    @property
    def port(self) -> int:
        """As Hosted.port."""
        return self.grpc.port

    @property
    def resources(self) -> Resources:
        """As Hosted.resources."""
        return self.grpc.resources

    @property
    def log_format(self) -> LogFormat:
        """As Hosted.log_format."""
        return self.told.log_format

    @property
    def digest(self) -> str:
        """As Hosted.digest."""
        alone = self.grpc.model_copy(update={"replicas": 1})
        files = [path for path in (self.grpc.certificate, self.grpc.key) if path is not None]
        return digest_of(self.told.digest, alone, self.grace_seconds, contents(files))

    async def server(self, host: str) -> "HostingGrpc":
        """As Hosted.server."""
        from crossdraft.serving.cluster.measuring import Measuring, rate_of  # Ray Serve, where it runs only

        grpc = self.grpc
        shown = None
        if grpc.certificate is not None and grpc.key is not None:
            shown = FrontFiles(grpc.certificate, grpc.key)
        limit = MessageLimit(grpc.max_request_mib)
        listening = Listening(grpc.host, grpc.port, limit, self.grace_seconds, shown)
        measuring = await asyncio.to_thread(Measuring, self.told)  # it asks Serve, and waits
        options = GenerationOptions(self.told.keys, rate_of(grpc), grpc.stalled_seconds)
        return HostingGrpc(serve_generation(measuring.outputs, listening, options), measuring, host, self.told.metrics)


class HostingGrpc:
    """The gRPC front's server, and its metrics beside it."""

    def __init__(self, server: GenerationServer, measuring: "Measuring", node: str, measured: bool) -> None:
        self._server = server
        self._exporter = measuring.exporter
        self._node = node
        self._measured = measured
        self.metrics = ""  # host:port, once it serves

    @property
    def address(self) -> str:
        """Where others find it: where it listens at all addresses of its node, at the one that the cluster knows."""
        host, _, port = self._server.address.rpartition(":")
        return f"{self._node if host in ALL_ADDRESSES else host}:{port}"

    async def start(self) -> str:
        """As Hosting.start."""
        await self._server.start()
        if self._measured:
            self.metrics = self._exporter.start(self._node, ANY_PORT)
        return self.address

    async def drain(self) -> None:
        """As Hosting.drain."""
        await self._server.drain()
        await self._exporter.stop()

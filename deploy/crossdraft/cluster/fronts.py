"""Fronts of a cluster: HTTP as the ingress of a Serve application, gRPC beside it, both over Serve's orchestrators.

The gRPC front is a replica with a server of its own: Serve's gRPC proxy calls methods with its own options, and has
neither this API's keys and limits, nor its end of outputs whose client does not read.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from fastapi import FastAPI
from grpc.aio import AioRpcError
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, RayServeException

from crossdraft.cluster.config import ANY_PORT, Process, deployment_name
from crossdraft.cluster.directory import announced, entry_of, node_address
from crossdraft.cluster.failover import ClusterBackend, LossMetrics, Lost, Refusal, Replies
from crossdraft.cluster.serve_grpc import Elsewhere, keep_alive
from crossdraft.cluster.servers import ServerReplica, certificate_of, listening
from crossdraft.cluster.status import APPLICATION, Entry, Role
from crossdraft.config.cluster import Grpc, Http
from crossdraft.rpc.errors import Overloaded
from crossdraft.rpc.logs import logged
from crossdraft.rpc.metrics import Exporter
from crossdraft.rpc.transport import MessageLimit
from crossdraft.serving.backend import OutputRequest
from crossdraft.serving.grpc import GenerationServer
from crossdraft.serving.http.app import make_app
from crossdraft.serving.http.middleware import HttpOptions
from crossdraft.serving.limits import GenerationOptions
from crossdraft.serving.metrics import MeasuredBackend, Metrics
from crossdraft.types.output import ServedModel, Written
from crossdraft.types.request import Asked

AGAIN = 1.0  # seconds before a client may try again where all replicas are full
keep_alive()  # now: Serve loads the class of a replica before it makes its server, and channels


def backend_of(process: Process, metrics: Metrics) -> MeasuredBackend:
    """That of a front's process. Waits for Serve."""
    orchestrators = {name: ServeOrchestrators(name) for name in process.models}
    losses = LossMetrics(metrics.registry, process.models)
    return MeasuredBackend(ClusterBackend(orchestrators, losses, search_seconds=process.target_wait_seconds), metrics)


def measuring(process: Process, metrics: Metrics) -> str:
    """Begins to measure, in the event loop; returns where Prometheus reads: host:port, empty: nowhere."""
    metrics.lag.start()
    return Exporter(metrics.registry).start(node_address(), ANY_PORT) if process.metrics else ""


class ServeOrchestrators:
    """The replicas that make a model's outputs; Serve sends each call to one with a short queue."""

    avoid = staticmethod(Elsewhere.avoid)

    def __init__(self, model: str) -> None:
        handle = serve.get_deployment_handle(deployment_name(Role.ORCHESTRATOR, model), APPLICATION)
        self._handle = handle.options(_by_reference=False)  # by gRPC

    async def models(self) -> tuple[ServedModel, ...]:
        """What one of them can serve; raises Lost."""
        with _foreign_errors():
            models: tuple[ServedModel, ...] = await self._handle.models.remote()
        return models

    async def written(self, asked: Asked, special: bool) -> Written | Refusal:
        """As `Backend.written`, of one of them; raises Lost."""
        with _foreign_errors():
            found: Written | Refusal = await self._handle.written.remote(asked, special)
        return found

    async def stream(self, request: OutputRequest) -> AsyncGenerator[Replies, None]:
        """The replies of one of them; raises Lost. Closing it early cancels the replica's work."""
        with _foreign_errors():
            response: Any = self._handle.options(stream=True).stream.remote(request)
            try:
                async for replies in response:
                    yield replies
            finally:
                response.cancel()


@contextmanager
def _foreign_errors() -> Iterator[None]:
    """Turns what Ray raises into what it means."""
    try:
        yield
    except BackPressureError as error:
        raise Overloaded("all orchestrators are at their limit of outputs; ask again later", AGAIN) from error
    except (RayError, RayServeException, AioRpcError) as error:
        raise Lost(f"{type(error).__name__}: {str(error).splitlines()[0]}") from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise Lost("it was stopped") from error


class Ingress:
    """A replica of the HTTP front; orchestrators are bound deployments, so that Serve starts them first."""

    def __init__(self, process: Process, *orchestrators: object) -> None:
        self._logged = ExitStack()
        self._logged.enter_context(logged(process.log_format))
        self._process = process

    def __serve_build_asgi_app__(self) -> FastAPI:  # Serve calls it in the replica
        http, metrics = self._process.own, Metrics()
        assert isinstance(http, Http)
        backend = backend_of(self._process, metrics)
        entry = entry_of(self._process, "", measuring(self._process, metrics))
        self._announcing = asyncio.get_running_loop().create_task(_announce(entry, metrics))
        return make_app(backend, HttpOptions(self._process.keys(), http, http, metrics.text))


async def _announce(entry: Entry, metrics: Metrics) -> None:
    async with announced(entry, lambda: (metrics.outputs, 0.0)):
        await asyncio.Event().wait()  # until the process ends


class GrpcFront(ServerReplica):
    """A replica of the gRPC front."""

    async def server(self, process: Process) -> GenerationServer:
        own = process.own
        assert isinstance(own, Grpc)
        where = listening(process, limit=MessageLimit(own.max_message_mib), tls=certificate_of(own))
        backend = await asyncio.to_thread(backend_of, process, metrics := Metrics())
        server = GenerationServer(backend, where, GenerationOptions(process.keys(), own))
        server.metrics = measuring(process, metrics)
        return server

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
from ray.serve.handle import DeploymentHandle

from crossdraft.cluster.config import ANY_PORT, Process, deployment_name
from crossdraft.cluster.directory import announced, entry_of, node_address
from crossdraft.cluster.failover import ClusterBackend, LossMetrics, Lost, Refusal, Replies
from crossdraft.cluster.orchestrators import Orchestrator
from crossdraft.cluster.serve_grpc import Elsewhere
from crossdraft.cluster.servers import ServerReplica, certificate_of, listening
from crossdraft.cluster.status import APPLICATION, Entry, Load, Role
from crossdraft.config.cluster import Front, Grpc, Http
from crossdraft.rpc.metrics import Exporter
from crossdraft.rpc.transport import MessageLimit
from crossdraft.serving.backend import OutputRequest, OverloadedError
from crossdraft.serving.grpc import GenerationServer
from crossdraft.serving.http.app import make_app
from crossdraft.serving.http.middleware import HttpOptions
from crossdraft.serving.limits import GenerationOptions, RateLimit
from crossdraft.serving.logs import logged
from crossdraft.serving.metrics import MeasuredBackend, Metrics
from crossdraft.types.output import ServedModel, Written
from crossdraft.types.request import Asked

MIB = 2**20
RETRY_SECONDS = 1.0  # before a client may try again where all replicas are full


class FrontBackend:
    """The backend of a front's process, with its metrics. Waits for Serve."""

    def __init__(self, process: Process) -> None:
        self.metrics = Metrics()
        names = {model: deployment_name(Role.ORCHESTRATOR, model) for model in process.models}
        handles = {
            model: ServeOrchestrators(serve.get_deployment_handle(name, APPLICATION)) for model, name in names.items()
        }
        losses = LossMetrics(self.metrics.registry, process.models)
        backend = ClusterBackend(handles, losses, search_seconds=process.target_wait_seconds)
        self.backend = MeasuredBackend(backend, self.metrics)
        self._exporter = Exporter(self.metrics.registry) if process.metrics else None

    def start(self) -> str:
        """Begins to measure, in the event loop; returns where Prometheus reads: host:port, empty: nowhere."""
        self.metrics.lag.start()
        return "" if self._exporter is None else self._exporter.start(node_address(), ANY_PORT)


class ServeOrchestrators:
    """The replicas of one deployment; Serve sends each call to one with a short queue."""

    avoid = staticmethod(Elsewhere.avoid)

    def __init__(self, handle: DeploymentHandle[Orchestrator]) -> None:
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
        raise OverloadedError(
            "all orchestrators are at their limit of outputs; ask again later", RETRY_SECONDS
        ) from error
    except (RayError, RayServeException, AioRpcError) as error:
        raise Lost(f"{type(error).__name__}: {str(error).splitlines()[0]}") from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise Lost("it was stopped") from error


class Ingress:
    """A replica of the HTTP front.

    Args:
        process: what it is.
        orchestrators: bound deployments, so that Serve starts them first.
    """

    def __init__(self, process: Process, *orchestrators: object) -> None:
        self._logged = ExitStack()
        self._logged.enter_context(logged(process.log_format))
        self._process = process

    def __serve_build_asgi_app__(self) -> FastAPI:  # Serve calls it in the replica
        http, front = self._process.own, FrontBackend(self._process)
        assert isinstance(http, Http)
        entry = entry_of(self._process, "", front.start())
        self._announcing = asyncio.get_running_loop().create_task(_announce(entry, front.metrics))
        options = HttpOptions(
            **vars(_limits(self._process, http)),
            max_bytes=int(http.max_body_mib * MIB),
            max_held_bytes=int(http.max_bodies_mib * MIB),
            max_choices=http.max_choices,
            metrics=front.metrics.text,
            cors=http.cors,
        )
        return make_app(front.backend, options)


async def _announce(entry: Entry, metrics: Metrics) -> None:
    async with announced(entry, lambda: Load(metrics.outputs)):
        await asyncio.Event().wait()  # until the process ends


def _limits(process: Process, front: Front) -> GenerationOptions:
    rate = None if front.rate is None else RateLimit(front.rate, front.burst)
    return GenerationOptions(process.keys(), rate, front.stalled_seconds)


class GrpcFront(ServerReplica):
    """A replica of the gRPC front."""

    async def server(self, process: Process) -> GenerationServer:
        """As `ServerReplica.server`."""
        own = process.own
        assert isinstance(own, Grpc)
        where = listening(process, limit=MessageLimit(own.max_message_mib), tls=certificate_of(own))
        front = await asyncio.to_thread(FrontBackend, process)
        server = GenerationServer(front.backend, where, _limits(process, own))
        server.metrics = front.start()
        return server

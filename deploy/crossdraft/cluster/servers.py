"""Replicas of Ray Serve that run gRPC servers and announce them to the directory: targets, drafters, gRPC fronts.

What Serve does for them, seen with Ray 2.60:

- A replica may open any port in its constructor, which may take as long as a model takes to load; only then it counts
  as running. Its node's address is Ray's (`node_address`). One that raises is tried again, three times for each
  replica, and then Serve says why and keeps what ran before.
- With a placement group the replica has the first bundle, and tasks that it starts may have the others; Serve removes
  the group, and so ends the tasks, with the replica.
- A replica that is to end runs `__del__`, a coroutine, and is killed after `graceful_shutdown_timeout_s`: time enough
  for open sessions. So also for `serve shutdown` and for fewer replicas.
- A health check is a call in the event loop; one that fails three times, or a process that is gone, is replaced.
- `record_autoscaling_stats` tells the controller of a replica's sessions, by which a policy scales.

What it does not: it sends no session to a replica and knows of none, so that orchestrators find services by the
directory; a replica with a fixed port may start while the one that it replaces has the same port and ends its sessions,
so both listen on it (SO_REUSEPORT); and where replicas start is Serve's choice.
"""

import asyncio
import logging
import math
import os
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.serve.config import AutoscalingContext
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from crossdraft.cluster.capacity import CPUS, GPUS
from crossdraft.cluster.config import (
    ANY_PORT,
    Configuration,
    DrafterService,
    Resources,
    Scale,
    Service,
    contents,
    tls_of,
    tls_paths,
    version_of,
)
from crossdraft.cluster.directory import Load, Role, announced, entry_of, node_address
from crossdraft.config.engine import NGRAM, NgramOptions
from crossdraft.config.fields import part_of
from crossdraft.config.service import LogFormat, SessionOptions
from crossdraft.engine.names import source_of
from crossdraft.rpc.security import TlsFiles
from crossdraft.rpc.server import Listening, Server, freeze_heap
from crossdraft.serving.grpc import GenerationServer
from crossdraft.serving.logs import logged

if TYPE_CHECKING:
    from crossdraft.drafter.ngram import ServeNgram
    from crossdraft.engine.served_model import ModelOptions

log = logging.getLogger(__name__)
OUTPUTS = "outputs"  # a metric of Serve's, for its autoscaling

AnyServer = Server[Any, Any, Any] | GenerationServer
ALL_ADDRESSES = ("0.0.0.0", "[::]", "::")


@dataclass(frozen=True)
class ServerConfig(ABC):
    """What replicas run; can be pickled."""

    role: Role
    model: str  # name of the served model; empty for a front
    name: str  # of a drafter, else empty
    port: int  # 0: any free one
    replicas: Scale
    resources: Resources  # of each process
    ranks: int  # processes of a replica, of which the first serves
    log_format: LogFormat
    grace_seconds: float  # for what is open, when one is stopped
    digest: str  # of everything that matters, file contents and the installed package included

    @property
    def host(self) -> str:
        """Where it listens, on the node where this is called."""
        return node_address()

    @abstractmethod
    def check_files(self) -> None:
        """Raises ValueError if the model or a file is not on this node, or cannot be used."""

    def check(self) -> None:
        """Whether a server could start on this node; loads nothing.

        Raises:
            ValueError: as `check_files`.
            CannotListen: the port is taken.
        """
        self.check_files()
        self.listening().check_free()

    def listening(self, **more: Any) -> Listening:
        """Where it listens; replicas of others, which they replace, may have the same port."""
        return Listening(self.host, self.port, grace_seconds=self.grace_seconds, shared=self.port > 0, **more)

    @abstractmethod
    async def server(self, host: str) -> AnyServer:
        """Makes the server, in the replica's process; `host` is the address of its node.

        Raises:
            ValueError: the options cannot be used.
        """


@dataclass(frozen=True)
class ModelServerConfig(ServerConfig):
    """A target or a drafter."""

    service: Service  # a DrafterService for a drafter
    tls: TlsFiles | None
    serve_metrics: bool

    @staticmethod
    def of(model: str, service: Service, configuration: Configuration) -> "ModelServerConfig":
        """That of a service of the served model with this name."""
        tls, grace, metrics = tls_of(configuration), configuration.grace_seconds, configuration.metrics
        alone = replace(service, replicas=Scale())  # their number replaces none of them
        drafter = service if isinstance(service, DrafterService) else None
        files = [*tls_paths(tls), *_files_of(service)]
        return ModelServerConfig(
            role=Role.TARGET if drafter is None else Role.DRAFTER,
            model=model,
            name="" if drafter is None else drafter.name,
            port=service.port,
            replicas=service.replicas,
            resources=service.resources.divided(service.tensor_parallel_size),
            ranks=service.tensor_parallel_size,
            log_format=configuration.log_format,
            grace_seconds=grace,
            digest=version_of(model, alone, tls, grace, metrics, configuration.log_format, contents(files)),
            service=service,
            tls=tls,
            serve_metrics=metrics,
        )

    def check_files(self) -> None:
        """As `ServerConfig.check_files`."""
        if self.service.model != NGRAM:
            source_of(self.service.model)
        if self.tls is not None:
            self.tls.load()
        missing = [path for path in _files_of(self.service) if not path.is_file()]
        if missing:
            raise ValueError(f"there is no file {missing[0]}: put it there, or correct its name")

    async def server(self, host: str) -> Server[Any, Any, Any]:
        """As `ServerConfig.server`; loads the model."""
        service = self.service
        listening = self.listening(
            tls=self.tls,
            sessions=part_of(SessionOptions, service),
            metrics_port=ANY_PORT if self.serve_metrics else None,
        )
        return await (await asyncio.to_thread(_model_server, service, listening))


def _files_of(service: Service) -> list[Path]:
    drafter = service if isinstance(service, DrafterService) else None
    own = (service.chat_template, *((drafter.frequencies, drafter.affinity) if drafter else ()))
    return [path for path in own if path is not None]


def _model_server(service: Service, listening: Listening) -> Coroutine[Any, Any, Server[Any, Any, Any]]:
    """Imports torch, which those that deploy or ask what runs need not; in a thread, as that takes seconds."""
    if service.model == NGRAM:
        from crossdraft.drafter.ngram import ServeNgram, ngram_server

        return _made(ngram_server, ServeNgram(part_of(NgramOptions, service), listening))
    from crossdraft.drafter.service import ServeDrafter, drafter_server
    from crossdraft.engine.served_model import ModelOptions
    from crossdraft.engine.tensor_parallel import run_ranks
    from crossdraft.target.service import ServeTarget, target_server

    model = ModelOptions.of(service.model, service.settings, service.max_sessions)
    if isinstance(service, DrafterService):
        return drafter_server(ServeDrafter(model, listening, service.affinity))
    return target_server(ServeTarget(model, listening, partial(run_ranks, host=node_address(), start=_started)))


async def _made(make: Callable[["ServeNgram"], Server[Any, Any, Any]], served: "ServeNgram") -> Server[Any, Any, Any]:
    """In the event loop, as a server must be."""
    return make(served)


def _started(options: "ModelOptions", host: str, port: int) -> list[Connection]:
    """As `StartRanks`: tasks, each with one of the other places of this replica's placement group."""
    group, key = get_current_placement_group(), secrets.token_bytes()
    assert group is not None
    run: Any = ray.remote(max_calls=1, max_retries=0)(_followed)  # its process ends with it
    with Listener((host, ANY_PORT), authkey=key) as listener:
        ends = []
        for number, has in enumerate(group.bundle_specs[1:], 1):
            takes = {"num_cpus": has.pop(CPUS, 0), "num_gpus": has.pop(GPUS, 0), "resources": has}
            task = run.options(**takes, scheduling_strategy=PlacementGroupSchedulingStrategy(group, number))
            ends.append(task.remote(options, number, host, port, listener.address, key))
        Thread(target=_end_with, args=(ends,), name="rank tasks", daemon=True).start()
        return [listener.accept() for _ in ends]


def _end_with(ends: list[Any]) -> None:
    """Ends this process when one of the tasks is lost, also with its node, of which no connection tells."""
    from crossdraft.engine.tensor_parallel import OWN_SECONDS

    try:
        ray.get(ray.wait(ends)[0])
    except RayError as error:
        if isinstance(error, RayTaskError):  # this process may meet the same, and say so itself
            time.sleep(OWN_SECONDS)
        log.critical("a rank of the model is lost, all end: %s", error)
        os._exit(1)


def _followed(options: "ModelOptions", number: int, host: str, port: int, address: Any, key: bytes) -> None:
    """Runs in a task."""
    from crossdraft.engine.tensor_parallel import follow

    follow(options, number, host, port, Client(address, authkey=key))


class ServerReplica:
    """One replica, which serves once its constructor has ended."""

    async def __init__(self, config: ServerConfig) -> None:  # type: ignore[misc]  # Serve awaits it
        """Raises what `config.server` does, and CannotListen."""
        self._serving = AsyncExitStack()
        self._serving.enter_context(logged(config.log_format))
        node = node_address()
        self._server = server = await config.server(node)
        await server.start()
        self._serving.push_async_callback(server.drain)
        freeze_heap()
        host, _, port = server.address.rpartition(":")
        address = f"{node if host in ALL_ADDRESSES else host}:{port}"  # the one that the cluster uses
        entry = entry_of(config.role, config.model, config.name, address, server.metrics, node)
        await self._serving.enter_async_context(announced(entry, _meter(server)))

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve calls it; for `by_outputs`."""
        return {OUTPUTS: float(self._server.work[0])}

    async def __del__(self) -> None:
        """Serve calls it: accepts nothing new, lets what is open go on for the grace period, and ends."""
        await self._serving.aclose()


def by_outputs(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Serve's autoscaling policy: how many replicas all outputs need; bounds and delays are Serve's."""
    metrics = context.aggregated_metrics or {}
    outputs = sum((metrics.get(OUTPUTS) or {}).values())
    config: Any = context.config
    return math.ceil(outputs / config.get_target_ongoing_requests()), {}


def _meter(server: AnyServer) -> Callable[[], Load]:
    """Its load since it was asked for last."""
    before, computed = time.monotonic(), server.work[1]

    def load() -> Load:
        nonlocal before, computed
        sessions, seconds = server.work
        now = time.monotonic()
        busy = (seconds - computed) / max(now - before, 1e-3)
        before, computed = now, seconds
        return Load(sessions, busy)

    return load

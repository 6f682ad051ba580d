"""Replicas of Ray Serve that run gRPC servers and announce them to the directory: targets, drafters, gRPC fronts.

What Serve does for them, seen with Ray 2.60: a replica counts as running once its constructor ends, which may take as
long as a model takes to load; one that is to end runs `__del__`, a coroutine, in which open sessions may go on; of a
placement group it has the first place, and tasks that it starts have the others. What Serve does not: orchestrators
find services by the directory; and a replica with a fixed port may start while the one that it replaces has it, so both
listen on it (SO_REUSEPORT).
"""

import asyncio
import logging
import math
import os
import secrets
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from functools import partial
from multiprocessing.connection import Client, Connection, Listener
from threading import Thread
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from crossdraft.cluster.config import ANY_PORT, CPUS, GPUS, Process
from crossdraft.cluster.directory import announced, entry_of, node_address
from crossdraft.cluster.status import Role
from crossdraft.config.cluster import DrafterService, Grpc, Service
from crossdraft.config.engine import NGRAM, NgramOptions
from crossdraft.config.fields import part_of
from crossdraft.config.service import SessionOptions
from crossdraft.engine.names import source_of
from crossdraft.rpc.errors import CannotListen
from crossdraft.rpc.logs import logged
from crossdraft.rpc.security import FrontFiles
from crossdraft.rpc.server import Listening, Server, freeze_heap, without_collections
from crossdraft.serving.grpc import GenerationServer
from crossdraft.types.statistics import ModelStatistics

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

    from crossdraft.engine.served_model import ModelOptions

log = logging.getLogger(__name__)
OUTPUTS = "outputs"  # a metric of Serve's, for its autoscaling
SHORTEST = 1e-3  # seconds between two looks

AnyServer = Server[Any, Any, Any] | GenerationServer
ALL_ADDRESSES = ("0.0.0.0", "[::]", "::")


def faults_of(node: str, processes: Sequence[Process]) -> str:
    """What `check` says of each, a line for each; runs on a node, in a task."""
    said = []
    for process in processes:
        try:
            check(process)
        except (ValueError, CannotListen) as error:
            said.append(f"{process.what} cannot be served on node {node}: {error}")
    return "\n".join(said)


def check(process: Process) -> None:
    """Whether one could start on this node; loads nothing. Raises ValueError: the model or a file is not on this node,
    or cannot be used; CannotListen: the port is taken."""
    own = process.own
    if isinstance(own, Service) and own.model != NGRAM:
        source_of(own.model)
    for files in (process.tls, certificate_of(own)):
        if files is not None:
            files.load()
    process.keys()
    missing = [path for path in process.files if not path.is_file()]
    if missing:
        raise ValueError(f"there is no file {missing[0]}: put it there, or correct its name")
    listening(process).check_free()


def listening(process: Process, **more: Any) -> Listening:
    """Where its server listens; replicas of others, which they replace, may have the same port."""
    host = process.own.host if isinstance(process.own, Grpc) else node_address()
    return Listening(host, process.port, grace_seconds=process.grace_seconds, shared=process.port > 0, **more)


def certificate_of(own: object) -> FrontFiles | None:
    """Of a gRPC front, for clients; None: plaintext."""
    if not isinstance(own, Grpc) or own.ssl_certfile is None or own.ssl_keyfile is None:
        return None
    return FrontFiles(own.ssl_certfile, own.ssl_keyfile)


def _model_server(service: Service, where: Listening) -> Coroutine[Any, Any, Server[Any, Any, Any]]:
    """Imports torch, which those that deploy or ask what runs need not; in a thread, as that takes seconds."""
    with without_collections():
        from crossdraft.drafter.service import drafter_server
        from crossdraft.engine.served_model import ModelOptions
        from crossdraft.engine.tensor_parallel import run_ranks
        from crossdraft.target.service import target_server

    model = ModelOptions.of(service.model, service.settings, service.max_sessions)
    if isinstance(service, DrafterService):
        return drafter_server(model, where)
    return target_server(model, where, run=partial(run_ranks, host=node_address(), start=_started))


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


class ServerReplica(ABC):
    """One replica with a gRPC server, which serves once its constructor has ended."""

    async def __init__(self, process: Process) -> None:  # type: ignore[misc]  # Serve awaits it
        """Raises what `server` does, and CannotListen."""
        self._serving = AsyncExitStack()
        self._serving.enter_context(logged(process.log_format))
        node = node_address()
        try:
            self._server = server = await self.server(process)
            await server.start()
        except (ValueError, CannotListen) as error:
            sys.tracebacklimit = 0  # of this process, which ends: Serve shows the traceback, and the text says it all
            raise error from None
        self._serving.push_async_callback(server.drain)
        freeze_heap()
        host, _, port = server.address.rpartition(":")
        address = f"{node if host in ALL_ADDRESSES else host}:{port}"  # the one that the cluster uses
        self._work, self._asked = server.work, time.monotonic()
        await self._serving.enter_async_context(announced(entry_of(process, address, server.metrics), self._load))

    def _load(self) -> tuple[int, float]:
        """Since it was asked for last; a step counts where it ends, so one that began before is more than there was."""
        (_, before), since = self._work, self._asked
        self._work, self._asked = self._server.work, time.monotonic()
        sessions, seconds = self._work
        return sessions, min(1.0, (seconds - before) / max(self._asked - since, SHORTEST))

    @abstractmethod
    async def server(self, process: Process) -> AnyServer:
        """Makes the server; raises ValueError if the options cannot be used."""

    async def __del__(self) -> None:
        """Serve calls it: accepts nothing new, lets what is open go on for the grace period, and ends."""
        await self._serving.aclose()


class ModelReplica(ServerReplica):
    """A target or a drafter."""

    _before: tuple[float, ModelStatistics] | None = None  # of a drafter with a model: when, and what it had done

    async def server(self, process: Process) -> Server[Any, Any, Any]:
        """As `ServerReplica.server`; loads the model."""
        own = process.own
        assert isinstance(own, Service)
        sessions, metrics = part_of(SessionOptions, own), ANY_PORT if process.metrics else None
        where = listening(process, tls=process.tls, sessions=sessions, metrics_port=metrics)
        if own.model == NGRAM:
            from crossdraft.drafter.ngram import ngram_server

            return ngram_server(part_of(NgramOptions, own), where)
        self._model = server = await (await asyncio.to_thread(_model_server, own, where))
        if process.role is Role.DRAFTER:
            self._before = (time.monotonic(), server.statistics())
        return server

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve calls it; for `by_outputs`: sessions of a target, and of a drafter those that it drafts for."""
        if self._before is None:
            return {OUTPUTS: float(self._server.work[0])}
        (since, before), now = self._before, time.monotonic()
        self._before = (now, after := self._model.statistics())
        return {OUTPUTS: ongoing(before, after) / max(now - since, SHORTEST)}


def ongoing(before: ModelStatistics, after: ModelStatistics) -> float:
    """Seconds that requests were computed or waited for it, in sum: for each second how many there were at once."""
    sessions = sum(size * (steps - before.batches.get(size, 0)) for size, steps in after.batches.items())
    computed = (after.seconds - before.seconds) * sessions / max(after.steps - before.steps, 1)
    return computed + after.queued_seconds - before.queued_seconds


def by_outputs(context: "AutoscalingContext") -> tuple[int, dict[str, Any]]:
    """Serve's autoscaling policy: how many replicas all outputs need; bounds and delays are Serve's."""
    metrics = context.aggregated_metrics or {}
    outputs = sum((metrics.get(OUTPUTS) or {}).values())
    config: Any = context.config
    return math.ceil(outputs / config.get_target_ongoing_requests()), {}

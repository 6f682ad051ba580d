"""`crossdraft serve`: one server in this process, until SIGTERM or SIGINT.

A line of JSON on stdout says when it is ready. All functions raise UsageError if an option is out of its range or does
not fit another one or the model, and CommandFailed if the model cannot be run or the address cannot be had.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import TYPE_CHECKING, Any

import uvloop
from prometheus_client.multiprocess import mark_process_dead

from crossdraft.cli.options import (
    ApiOptions,
    ConnectionOptions,
    CorsOptions,
    DrafterOptions,
    HttpApiOptions,
    LogOptions,
    ModelChoice,
    ModelSettings,
    OwnModels,
    ServiceOptions,
    TargetOptions,
    check_addresses,
)
from crossdraft.cli.workers import Workers, WorkerSettings
from crossdraft.client.api import addresses_of
from crossdraft.console.processes import end_with_stdin, threads_each
from crossdraft.console.running import STARTS_PROCESSES, CommandFailed, Run, UsageError, checked_options, needs_extra
from crossdraft.engine.names import NumberOutOfRangeError, laboratory, source_of
from crossdraft.rpc.clients import Patience
from crossdraft.rpc.errors import CannotListen
from crossdraft.rpc.handlers import SessionLimits
from crossdraft.rpc.metrics import Exporter
from crossdraft.rpc.security import TlsError
from crossdraft.rpc.server import Listening, Serving
from crossdraft.rpc.server import serve as serve_until_signalled
from crossdraft.rpc.transport import MessageLimit
from crossdraft.serving.backend import LocalBackend, LocalModel, LocalOptions, NamedDrafter
from crossdraft.serving.grpc import REQUEST_LIMIT, GenerationServer
from crossdraft.serving.limits import ConnectionLimits, GenerationOptions, Keys, RateLimit
from crossdraft.serving.logs import logged
from crossdraft.serving.metrics import SHARED_FOLDER, MeasuredBackend, Metrics, registry_of_all
from crossdraft.text.affinity import AffinityMismatch
from crossdraft.text.frequencies import FrequenciesError
from crossdraft.types.messages import checked_settings

if TYPE_CHECKING:
    from crossdraft.engine.loader import LoraModule, Pruning
    from crossdraft.engine.served_model import Emulation, ModelOptions
    from crossdraft.serving.http.server import HttpServer
    from crossdraft.serving.models import Servers

log = logging.getLogger(__name__)
MIB = 2**20
NOT_STARTED = {"target": "in-process:0", "drafter": "in-process:0"}  # addresses while options are checked


def serve_target(model: ModelChoice, target: TargetOptions, service: ServiceOptions) -> None:
    from crossdraft.target.service import ServeTarget, target_server

    own = _target_options(model.name, model.settings, target, service.max_sessions, model.pace)
    options = ServeTarget(own, _listening(service))
    _run(_serve(lambda: target_server(options), options.listening), service.log, service.until_stdin_ends)


def serve_drafter(model: ModelChoice, drafting: DrafterOptions, service: ServiceOptions) -> None:
    from crossdraft.drafter.service import ServeDrafter, drafter_server

    options = _model_options(model.name, model.settings, service.max_sessions, model.pace, drafting.logit_noise)
    options = replace(options, pruning=_pruning(drafting))
    served = ServeDrafter(options, _listening(service), drafting.affinity)
    _run(_serve(lambda: drafter_server(served), served.listening), service.log, service.until_stdin_ends)


def serve_ngram(max_ngram: int, min_ngram: int, memory_mib: int, service: ServiceOptions) -> None:
    """Serves a drafter that copies; match lengths are in letters."""
    from crossdraft.drafter.ngram import MatchLengths, ServeNgram, ngram_server

    with checked_options():
        options = ServeNgram(MatchLengths(max_ngram, min_ngram), _listening(service), memory_mib)

    async def made() -> Serving:
        return ngram_server(options)

    _run(_serve(made, options.listening), service.log, service.until_stdin_ends)


async def _serve(made: Callable[[], Awaitable[Serving]], listening: Listening) -> None:
    """A taken port is found before the model is loaded."""
    listening.check_free()
    await serve_until_signalled(await made())


def serve_http(api: ApiOptions, http: HttpApiOptions, connections: ConnectionOptions, allowed: CorsOptions) -> None:
    """Serves OpenAI's API, and gRPC beside it unless `grpc_port` is None."""
    try:
        from crossdraft.serving.http import HttpOptions, make_app
        from crossdraft.serving.http.server import HttpServer
    except ModuleNotFoundError as error:
        raise CommandFailed(f"HTTP {needs_extra('http')}") from error

    with checked_options():
        limited, local = _limits(api), _local_options(api)
        shared = bool(api.worker_of)
        listening = Listening(api.host, http.port, grace_seconds=api.grace_seconds, tls=api.ssl.files(), shared=shared)
        grpc = None if http.grpc_port is None else replace(listening, port=http.grpc_port, limit=REQUEST_LIMIT)
        options = HttpOptions(
            **vars(limited),
            max_bytes=int(http.max_body_mib * MIB),
            max_held_bytes=int(http.max_bodies_mib * MIB),
            max_choices=min(http.max_choices, local.max_outputs),
            cors=allowed.settings,
        )
        limits = ConnectionLimits(**vars(connections))

    if api.workers != 1 and not api.worker_of:
        _serve_workers(api, {"--port": http.port} | ({} if http.grpc_port is None else {"--grpc-port": http.grpc_port}))
        return

    async def serve(outputs: MeasuredBackend, metrics: Metrics, marks: Mapping[str, str]) -> None:
        app = make_app(outputs, replace(options, metrics=metrics.text))
        server = HttpServer(app, listening, {"model": api.name, **marks}, limits)
        others = {} if grpc is None else {"grpc": GenerationServer(outputs, grpc, limited)}
        await serve_until_signalled(ServerGroup(server, others))

    _serve_api(api, local, serve, [listening] if grpc is None else [listening, grpc])


def serve_grpc(api: ApiOptions, port: int, max_message_mib: int, metrics_port: int | None) -> None:
    """Serves crossdraft.v1.Generation, and metrics for Prometheus unless `metrics_port` is None."""
    with checked_options():
        limited, local = _limits(api), _local_options(api)
        limit, shared = MessageLimit(max_message_mib), bool(api.worker_of)
        listening = Listening(
            api.host, port, limit, api.grace_seconds, api.ssl.files(), metrics_port=metrics_port, shared=shared
        )
    if api.workers != 1 and not api.worker_of:
        _serve_workers(api, {"--port": port}, metrics_port)
        return

    async def serve(outputs: MeasuredBackend, metrics: Metrics, marks: Mapping[str, str]) -> None:
        server, exporter = GenerationServer(outputs, listening, limited), Exporter(metrics.registry)
        server.marks |= marks
        if metrics_port is not None and not shared:
            server.metrics = exporter.start(listening.host, metrics_port)
        try:
            await serve_until_signalled(server)
        finally:
            await exporter.stop()

    _serve_api(api, local, serve, [listening])


def _serve_api(
    api: ApiOptions,
    local: LocalOptions,
    serve: Callable[[MeasuredBackend, Metrics, Mapping[str, str]], Coroutine[Any, Any, None]],
    listening: Sequence[Listening],
) -> None:
    _local_model(api, NOT_STARTED)  # what is wrong with the options is said before a model is loaded
    tls = api.tls.files()

    async def outputs() -> None:
        for one in listening:
            one.check_free()
        metrics = Metrics()
        metrics.lag.start()
        async with AsyncExitStack() as stack:
            limits = SessionLimits(max(SessionLimits().sessions, local.max_outputs))
            place = Listening(api.host, grace_seconds=api.grace_seconds, tls=tls, sessions=limits)
            servers = await stack.enter_async_context(own_services(api.own, place))
            for server in servers.values():
                metrics.registry.register(server.own_metrics)
            models = (_local_model(api, {role: server.here for role, server in servers.items()}),)
            made = await stack.enter_async_context(LocalBackend(models, local))
            marks = {role: server.address for role, server in servers.items() if server.address != server.here}
            await serve(MeasuredBackend(made, metrics), metrics, marks)

    _run(outputs(), api.log, api.until_stdin_ends)


@asynccontextmanager
async def own_services(own: OwnModels, place: Listening) -> "AsyncIterator[Servers]":
    """Services of the models that run in this process, by role, for the time of the block.

    Raises:
        UsageError: an option does not fit.
        ValueError: a model cannot be run.
        CannotListen: a port cannot be had.
    """
    named = [model for model in (own.target_model, own.drafter_model) if model is not None]
    engine = own.settings.engine
    if not named:
        yield {}
        return
    with checked_options():
        places = [replace(place, port=port) for port in (own.target_port, own.drafter_port)]
    for one in places:
        one.check_free()
    for model in named:
        source_of(model)  # a name that is wrong is said before torch is imported
    from crossdraft.drafter.service import ServeDrafter
    from crossdraft.serving.models import serving
    from crossdraft.target.service import ServeTarget

    settings = replace(own.settings, engine=replace(engine, threads=engine.threads or threads_each(len(named))))
    target = drafter = None
    if own.target_model is not None:
        options = _target_options(own.target_model, settings, own.sampling, place.sessions.sessions)
        target = ServeTarget(options, places[0])
    if own.drafter_model is not None:
        options = _model_options(own.drafter_model, own.of_drafter(settings.engine), place.sessions.sessions)
        drafter = ServeDrafter(options, places[1])
    async with serving(target, drafter) as servers:
        yield servers


def _serve_workers(api: ApiOptions, ports: Mapping[str, int], metrics_port: int | None = None) -> None:
    """Serves an API with several processes; metrics of all of them at `metrics_port`, unless it is None."""
    if api.own.target_model or api.own.drafter_model:
        raise UsageError(
            "each of --workers would load the models: give --target and --drafter, and serve these by themselves"
        )
    _local_model(api, {})  # what is wrong with the options is said once, and not by each worker
    shares = WorkerSettings(api.workers, api.host, ports, api.grace_seconds)

    async def serve(folder: str) -> None:
        exporter = Exporter(registry_of_all(folder))
        workers = Workers(shares, {SHARED_FOLDER: folder}, partial(mark_process_dead, path=folder))
        if metrics_port is not None:
            workers.marks["metrics"] = exporter.start(api.host, metrics_port)
        try:
            await serve_until_signalled(workers)
        finally:
            await exporter.stop()

    with TemporaryDirectory(prefix="crossdraft-metrics-") as folder:
        _run(serve(folder), api.log, api.until_stdin_ends, STARTS_PROCESSES)


def _run(
    server: Coroutine[Any, Any, None],
    log: LogOptions,
    until_stdin_ends: bool,
    run: Run = uvloop.run,  # its streams cost a third less than asyncio's
) -> None:
    if until_stdin_ends:
        # A daemon, as nobody may ever write or close: it must not keep the process alive.
        Thread(target=end_with_stdin, daemon=True).start()
    try:
        with logged(log.log_format, log.log_level):
            run(server)
    except (AffinityMismatch, FrequenciesError, NumberOutOfRangeError, TlsError) as error:
        raise UsageError(str(error)) from error
    except (ValueError, CannotListen) as error:
        raise CommandFailed(str(error)) from error


def _listening(service: ServiceOptions) -> Listening:
    with checked_options():
        return Listening(
            service.host,
            service.port,
            MessageLimit(service.max_message_mib),
            service.grace_seconds,
            service.tls.files(),
            SessionLimits(service.max_sessions, service.max_sessions_per_peer, service.idle_seconds),
            service.metrics_port,
        )


def _target_options(
    name: str, settings: ModelSettings, target: TargetOptions, sessions: int, pace: str | None = None
) -> "ModelOptions":
    own = vars(target) | {"override_generation_config": _override(target.override_generation_config)}
    return replace(_model_options(name, settings, sessions, pace), **own)


def _model_options(
    name: str, settings: ModelSettings, sessions: int, pace: str | None = None, logit_noise: float = 0.0
) -> "ModelOptions":
    from crossdraft.engine.kv_cache import MemoryShare

    with checked_options():
        emulation = _emulation(pace, logit_noise)
        share = MemoryShare(settings.engine.gpu_memory_utilization, sessions)
    _check_template(settings.chat_template)
    more = {"emulation": emulation, "chat_template": settings.chat_template, "lora": _lora(settings.lora_modules)}
    return settings.engine.model_options(name, share, **more)


def _override(text: str) -> dict[str, Any]:
    """What --override-generation-config says."""
    try:
        return checked_settings(json.loads(text))
    except ValueError as error:
        raise UsageError(f"--override-generation-config {text}: {error}") from error


def _lora(given: list[str] | None) -> "LoraModule | None":
    """What --lora-modules says."""
    from crossdraft.engine.loader import LoraModule

    if not given:
        return None
    name, _, path = given[0].partition("=")
    if len(given) > 1 or not name or not path:
        raise UsageError(f"--lora-modules takes one adapter, as NAME=PATH, got {' '.join(given)}")
    return LoraModule(name, Path(path))


def _check_template(path: Path | None) -> None:
    """Before a model is loaded; raises UsageError if it cannot be read."""
    try:
        if path is not None:
            path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"cannot read --chat-template {path}: {why}") from error


def _emulation(pace: str | None, logit_noise: float) -> "Emulation | None":
    """What --pace and --logit-noise say; raises ValueError."""
    if pace is None and not logit_noise:
        return None
    emulation: Emulation = laboratory("emulation.steps", "--pace or --logit-noise").Emulation.parsed(pace, logit_noise)
    return emulation


def _pruning(drafting: DrafterOptions) -> "Pruning | None":
    """What --vocab-keep and --frequencies say together."""
    keep, frequencies = drafting.vocab_keep, drafting.frequencies
    if keep is None and frequencies is None:
        return None
    if keep is None or frequencies is None:
        raise UsageError("--vocab-keep and --frequencies go together: give both, or neither")
    from crossdraft.engine.loader import Pruning

    return Pruning(keep, frequencies)


def _limits(api: ApiOptions) -> GenerationOptions:
    """What --api-keys, --rate, --burst and --stalled-seconds say, for one process; raises ValueError."""
    workers = max(1, api.worker_of)
    return GenerationOptions(
        Keys.given(api.api_keys, api.api_key or ()),
        None if api.rate is None else RateLimit(api.rate / workers, ceil(api.burst / workers)),
        api.stalled_seconds,
    )


def _local_options(api: ApiOptions) -> LocalOptions:
    """Of one process, by --max-outputs, --...-wait-seconds and --tls-...; raises ValueError."""
    patience = Patience(reply_seconds=api.reply_wait_seconds, target_seconds=api.target_wait_seconds)
    return LocalOptions(ceil(api.max_outputs / max(1, api.worker_of)), patience, api.tls.files())


def _local_model(api: ApiOptions, own: Mapping[str, str]) -> LocalModel:
    """What --model, --target, --drafter and --untrusted-drafter say together, and own models at addresses by role."""
    untrusted, models = frozenset(api.untrusted_drafter or ()), api.own
    if not (api.target or models.target_model):
        raise UsageError("give --target-model, a model to run here, or --target, where one runs")
    given = replace(models.settings.engine, cache_mib=None).arguments
    if given and not (models.target_model or models.drafter_model):
        raise UsageError(f"{given[0]} is for --target-model and --drafter-model: leave it out without them")
    here = (own["target"],) if models.target_model else ()
    targets = here + (_addresses("--target", ",".join(api.target)) if api.target else ())
    drafters = tuple(_named_drafter(one, untrusted) for one in api.drafter or ())
    if models.drafter_model:
        drafters = NamedDrafter(models.drafter_model, (own["drafter"],)), *drafters
    unknown = untrusted - {one.name for one in drafters}
    if unknown:
        raise UsageError(f"--untrusted-drafter names {min(unknown)!r}, but no --drafter has that name")
    with checked_options():
        return LocalModel(api.name, targets, drafters, tuple(api.served_model_name or ()))


def _named_drafter(given: str, untrusted: frozenset[str]) -> NamedDrafter:
    name, equals, addresses = given.partition("=")
    if not (name and equals):
        raise UsageError(f"--drafter must be NAME=HOST:PORT, such as small=127.0.0.1:7002, got {given!r}")
    return NamedDrafter(name, _addresses("--drafter", addresses), name not in untrusted)


def _addresses(option: str, given: str) -> tuple[str, ...]:
    check_addresses(option, given)
    return addresses_of(given)


class ServerGroup(Serving):
    """A server and others beside it.

    Args:
        first: its ready line is printed, with the addresses of the others in it.
        others: by the names of their addresses in the ready line.
    """

    def __init__(self, first: "HttpServer", others: Mapping[str, GenerationServer]) -> None:
        self._first = first
        self._others = others
        self._all: list[HttpServer | GenerationServer] = [*others.values(), first]

    def ready_line(self) -> str:
        return json.dumps(
            json.loads(self._first.ready_line()) | {name: one.address for name, one in self._others.items()}
        )

    async def start(self) -> None:
        """Starts all; if one cannot listen, drains those that have started."""
        async with AsyncExitStack() as stack:
            for one in self._all:
                await one.start()
                stack.push_async_callback(one.drain)
            stack.pop_all()

    async def drain(self) -> None:
        async with asyncio.TaskGroup() as group:
            for one in self._all:
                group.create_task(one.drain())

"""`crossdraft serve`: one server in this process, until SIGTERM, SIGINT or SIGHUP.

A line of JSON on stdout says when it is ready. All functions raise UsageError if an option is out of its range or does
not fit another one or the model, and CommandFailed if the model cannot be run or the address cannot be had.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeVar

import uvloop
from prometheus_client.multiprocess import mark_process_dead

from crossdraft.cli.processes import checked_addresses, end_with_stdin, threads_each
from crossdraft.cli.running import (
    STARTS_PROCESSES,
    CommandFailed,
    Run,
    UsageError,
    checked_options,
    ending_at_once,
    flag_of,
    needs_extra,
)
from crossdraft.cli.workers import Workers
from crossdraft.config.api import ApiOptions, HttpSettings, RateOptions, ServedGrpc, ServedHttp
from crossdraft.config.engine import EngineOptions, NgramOptions, OwnModels
from crossdraft.config.fields import part_of
from crossdraft.config.request import NO_DRAFTER
from crossdraft.config.service import (
    ServedDrafter,
    ServedNgram,
    ServedTarget,
    ServerOptions,
    ServiceOptions,
    SessionOptions,
    TlsOptions,
)
from crossdraft.engine.names import WrongOptionError, check_laboratory, check_name, laboratory
from crossdraft.rpc.errors import CannotListen
from crossdraft.rpc.links import Patience
from crossdraft.rpc.logs import logged
from crossdraft.rpc.metrics import Exporter
from crossdraft.rpc.security import FrontFiles, TlsError, TlsFiles
from crossdraft.rpc.server import Listening, Serving, without_collections
from crossdraft.rpc.server import serve as serve_until_signalled
from crossdraft.rpc.transport import MessageLimit
from crossdraft.serving.backend import LocalBackend, LocalModel, LocalOptions, NamedDrafter
from crossdraft.serving.grpc import REQUEST_LIMIT, GenerationServer
from crossdraft.serving.limits import GenerationOptions, Keys
from crossdraft.serving.metrics import SHARED_FOLDER, MeasuredBackend, Metrics, registry_of_all
from crossdraft.text.affinity import AffinityMismatch
from crossdraft.text.frequencies import FrequenciesError

if TYPE_CHECKING:
    from crossdraft.engine.served_model import ModelOptions
    from crossdraft.serving.http.server import HttpServer
    from crossdraft.serving.models import Servers

log = logging.getLogger(__name__)
Files = TypeVar("Files", TlsFiles, FrontFiles)
EMULATION = "--pace or --logit-noise"  # what emulates other models
NOT_STARTED = {"target": "in-process:0", "drafter": "in-process:0"}  # addresses while options are checked


def serve_target(options: ServedTarget) -> None:
    name = _checked_model(options)
    with without_collections():
        from crossdraft.target.service import target_server

    served = _model_options(name, options, options), _listening(options)
    _run(lambda: _serve(lambda: target_server(*served)), options)


def serve_drafter(options: ServedDrafter) -> None:
    name = _checked_model(options)
    with without_collections():
        from crossdraft.drafter.service import drafter_server

    served = _model_options(name, options, options), _listening(options)
    _run(lambda: _serve(lambda: drafter_server(*served)), options)


def serve_ngram(options: ServedNgram) -> None:
    """Serves a drafter that copies; match lengths are in letters."""
    check_ports(options, options.host)
    from crossdraft.drafter.ngram import ngram_server

    with checked_options():
        served = part_of(NgramOptions, options), _listening(options)
    _run(lambda: _serve(lambda: ngram_server(*served)), options)


async def _serve(make: Callable[[], Serving | Awaitable[Serving]]) -> None:
    made = make()  # in the event loop
    await serve_until_signalled(made if isinstance(made, Serving) else await made)


def serve_http(api: ServedHttp) -> None:
    """Serves OpenAI's API, and gRPC beside it unless `grpc_port` is None."""
    check_ports(api, api.host)
    try:
        from crossdraft.serving.http import HttpOptions, make_app
        from crossdraft.serving.http.server import HttpServer
    except ModuleNotFoundError as error:
        raise CommandFailed(f"HTTP {needs_extra('http')}") from error

    with checked_options():
        limited, local = _limits(api), _local_options(api)
        listening = _front(api, api.port)
        grpc = None if api.grpc_port is None else replace(listening, port=api.grpc_port, limit=REQUEST_LIMIT)
        http = replace(part_of(HttpSettings, api), max_choices=min(api.max_choices, local.max_outputs))

    async def serve(outputs: MeasuredBackend, metrics: Metrics, marks: Mapping[str, str]) -> None:
        app = make_app(outputs, HttpOptions(limited.keys, limited.rates, http, metrics.text))
        server = HttpServer(app, listening, {"model": model_name(api), **marks}, api)
        both = None if grpc is None else HttpAndGrpc(server, GenerationServer(outputs, grpc, limited))
        await serve_until_signalled(both or server)

    _serve_api(api, local, serve)


def serve_grpc(api: ServedGrpc) -> None:
    """Serves crossdraft.v1.Generation, and metrics for Prometheus unless `metrics_port` is None."""
    check_ports(api, api.host)
    with checked_options():
        limited, local = _limits(api), _local_options(api)
        limit = MessageLimit(api.max_message_mib)
        listening = replace(_front(api, api.port), limit=limit, metrics_port=api.metrics_port)

    async def serve(outputs: MeasuredBackend, metrics: Metrics, marks: Mapping[str, str]) -> None:
        server, exporter = GenerationServer(outputs, listening, limited), Exporter(metrics.registry)
        server.marks |= marks
        if api.metrics_port is not None and not listening.shared:
            server.metrics = exporter.start(listening.host, api.metrics_port)
        try:
            await serve_until_signalled(server)
        finally:
            await exporter.stop()

    _serve_api(api, local, serve)


def _serve_api(
    api: ApiOptions,
    local: LocalOptions,
    serve: Callable[[MeasuredBackend, Metrics, Mapping[str, str]], Coroutine[Any, Any, None]],
) -> None:
    """Serves in this process, or with `workers`."""
    _local_model(api, NOT_STARTED)  # what is wrong with the options is said once, before a model is loaded
    if api.workers != 1 and not api.worker_of:
        _serve_workers(api)
        return
    elsewhere = dict(one.split("=") for one in api.models_at or ())

    async def outputs() -> None:
        metrics = Metrics()
        metrics.lag.start()
        async with AsyncExitStack() as stack:
            servers = {} if elsewhere else await stack.enter_async_context(own_services(api, _place(api)))
            for server in servers.values():
                metrics.registry.register(server.own_metrics)
            model = _local_model(api, elsewhere | {role: server.here for role, server in servers.items()})
            made = await stack.enter_async_context(LocalBackend(model, local))
            marks = {role: server.address for role, server in servers.items() if server.address != server.here}
            await serve(MeasuredBackend(made, metrics), metrics, marks)

    _run(outputs, api)


def _place(api: ApiOptions) -> Listening:
    """Where own models are served, on a port of each."""
    limits = SessionOptions(max_sessions=max(SessionOptions.max_sessions, api.max_outputs))
    return Listening(api.host, grace_seconds=api.grace_seconds, tls=tls_files(api), sessions=limits)


@asynccontextmanager
async def own_services(own: OwnModels, place: Listening, for_workers: bool = False) -> "AsyncIterator[Servers]":
    """Services of the models that run in this process, by role, for the time of the block, at this place on ports that
    are named; `for_workers`: those without one, too, to this machine alone. Raises UsageError: an option does not fit;
    ValueError: a model cannot be run; CannotListen: a port cannot be had."""
    named = [model for model in (own.target_model, own.drafter_model) if model is not None]
    if not named:
        yield {}
        return
    local, ports = replace(place, host="127.0.0.1", port=0, metrics_port=0), (own.target_port, own.drafter_port)
    with checked_options():
        places = [local if port is None and for_workers else replace(place, port=port) for port in ports]
    check_ports(own, place.host)
    async with AsyncExitStack() as stack:
        with ending_at_once():
            for model in named:
                await asyncio.to_thread(check_name, model)  # what is wrong with it is said before torch is imported
            servers = await _started(replace(own, threads=own.threads or threads_each(len(named))), places, stack)
        yield servers


async def _started(own: OwnModels, places: Sequence[Listening], stack: AsyncExitStack) -> "Servers":
    """Loads the models, and serves them until the stack is left."""
    _check_template(own.chat_template)
    with without_collections():
        from crossdraft.serving.models import serving

    each = zip((own.target_model, own.drafter_model), (own, own.of_drafter), places, strict=True)
    served = [None if name is None else (_model_options(name, given, at.sessions), at) for name, given, at in each]
    return await stack.enter_async_context(serving(*served))


def _serve_workers(api: ApiOptions) -> None:
    """Serves an API with several processes, and the metrics of all. Own models run in this one."""
    if tls_files(api) is not None and (api.target_model or api.drafter_model):
        raise UsageError(
            "--workers reach own models at 127.0.0.1, which no certificate of --tls-cert is for: serve these models by "
            "themselves, and give --target and --drafter"
        )

    given, metrics_port = vars(api), getattr(api, "metrics_port", None)
    ports = {flag_of(name): given[name] for name in ("port", "grpc_port") if given.get(name) is not None}

    async def serve() -> None:
        async with own_services(api, _place(api), for_workers=True) as servers:
            at = {role: server.address for role, server in servers.items()}
            options = [text for role, address in at.items() for text in ("--models-at", f"{role}={address}")]
            marks = at | {f"{role}_metrics": server.metrics for role, server in servers.items() if server.metrics}
            with TemporaryDirectory(prefix="crossdraft-metrics-") as folder:
                exporter = Exporter(registry_of_all(folder))
                gone, shared = partial(mark_process_dead, path=folder), {SHARED_FOLDER: folder}
                workers = Workers(api.workers, api.host, ports, api.grace_seconds, options, shared, gone, marks)
                if metrics_port is not None:
                    workers.marks["metrics"] = exporter.start(api.host, metrics_port)
                try:
                    await serve_until_signalled(workers)
                finally:
                    await exporter.stop()

    _run(serve, api, STARTS_PROCESSES)


def _run(server: Callable[[], Coroutine[Any, Any, None]], options: ServerOptions, run: Run = uvloop.run) -> None:
    """uvloop's streams cost a third less than asyncio's."""
    if options.until_stdin_ends:
        # A daemon, as nobody may ever write or close: it must not keep the process alive.
        Thread(target=end_with_stdin, daemon=True).start()
    with faults_of_models(), logged(options.log_format, options.log_level):
        run(server())


def check_ports(options: object, host: str) -> None:
    """Raises UsageError if two ports of a command are the same, CommandFailed if one cannot be had now."""
    flags: dict[int, str] = {}
    # The process that has started a worker has looked.
    for name, port in () if getattr(options, "worker_of", 0) else vars(options).items():
        if name.endswith("port") and port is not None:
            flag = flag_of(name)
            if port and flags.setdefault(port, flag) != flag:
                raise UsageError(f"{flags[port]} and {flag} are both {port}: give each a port of its own")
            with faults_of_models(), checked_options():
                Listening(host, port).check_free(flag if name != "port" else "")


@contextmanager
def faults_of_models() -> Iterator[None]:
    """What is wrong with a model, or with what it is given, as UsageError or CommandFailed."""
    try:
        yield
    except (AffinityMismatch, FrequenciesError, WrongOptionError, TlsError) as error:
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
            tls_files(service),
            part_of(SessionOptions, service),
            service.metrics_port,
        )


def _front(api: ApiOptions, port: int) -> Listening:
    certificate, shared = _files(FrontFiles, api, "ssl_certfile", "ssl_keyfile"), bool(api.worker_of)
    return Listening(api.host, port, grace_seconds=api.grace_seconds, tls=certificate, shared=shared)


def tls_files(options: TlsOptions) -> "TlsFiles | None":
    return _files(TlsFiles, options, "tls_ca", "tls_cert", "tls_key")


def _files(kind: type[Files], options: object, *names: str) -> Files | None:
    """All of these files, or None if none was given; raises UsageError if one is missing or cannot be used."""
    paths = [getattr(options, name) for name in names]
    if all(path is None for path in paths):
        return None
    if None in paths:
        *first, last = map(flag_of, names)
        raise UsageError(f"{', '.join(first)} and {last} go together: give all, or none")
    files = kind(*paths)
    with checked_options():
        files.load()
    return files


def _model_options(name: str, given: EngineOptions, sessions: SessionOptions) -> "ModelOptions":
    from crossdraft.engine.served_model import ModelOptions

    pace, noise = _emulated(given)
    with checked_options():
        model = ModelOptions.of(name, given, sessions.max_sessions)
        if pace is None and not noise:
            return model
        return replace(model, emulation=laboratory("emulation.steps", EMULATION).Emulation.parsed(pace, noise))


def _checked_model(options: ServedTarget | ServedDrafter) -> str:
    """The name of the model. What is wrong with it or what is named beside it is said before torch is imported."""
    check_ports(options, options.host)
    name = only_model(options.model)
    _check_template(options.chat_template)
    if any(_emulated(options)):
        with checked_options():
            check_laboratory(EMULATION)
    with faults_of_models():
        check_name(name)
    return name


def _check_template(path: Path | None) -> None:
    """Raises UsageError if it cannot be read, or is no template."""
    from jinja2 import TemplateSyntaxError

    from crossdraft.text.chat_template import MISTAKES, compiled

    try:
        if path is not None:
            compiled(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"cannot read --chat-template {path}: {why}") from error
    except (*MISTAKES, SyntaxError) as error:  # the latter where it is nested too deeply
        line = f", line {error.lineno}" if isinstance(error, TemplateSyntaxError) else ""
        raise UsageError(f"--chat-template {path}{line}: {error}") from error


def _emulated(given: EngineOptions) -> tuple[str | None, float]:
    """What --pace and --logit-noise say."""
    return getattr(given, "pace", None), getattr(given, "logit_noise", 0.0)


def _limits(api: ApiOptions) -> GenerationOptions:
    """What --api-keys, --rate, --burst and --stalled-seconds say, for one process; raises ValueError."""
    many = max(1, api.worker_of)
    rates = replace(part_of(RateOptions, api), rate=api.rate and api.rate / many, burst=ceil(api.burst / many))
    return GenerationOptions(Keys.given(api.api_keys, api.api_key or ()), rates)


def _local_options(api: ApiOptions) -> LocalOptions:
    """Of one process, by --max-outputs, --...-wait-seconds and --tls-...; raises ValueError."""
    patience = Patience(reply_seconds=api.reply_wait_seconds, target_seconds=api.target_wait_seconds)
    return LocalOptions(ceil(api.max_outputs / max(1, api.worker_of)), patience, tls_files(api))


def _local_model(api: ApiOptions, own: Mapping[str, str]) -> LocalModel:
    """What --model, --target, --drafter and --untrusted-drafter say together, and own models at addresses by role."""
    untrusted = frozenset(api.untrusted_drafter or ())
    if not (api.target or api.target_model):
        raise UsageError("give --target-model, a model to run here, or --target, where one runs")
    check_engine(api)
    here = (own["target"],) if api.target_model else ()
    targets = here + checked_addresses("--target", api.target)
    if api.drafter == [NO_DRAFTER] and api.drafter_model:
        raise UsageError(f"--drafter {NO_DRAFTER} is no drafter: leave it out, or --drafter-model")
    drafters = tuple(_named_drafter(one, untrusted) for one in api.drafter or () if api.drafter != [NO_DRAFTER])
    if api.drafter_model:
        drafters = NamedDrafter(api.drafter_model, (own["drafter"],)), *drafters
    unknown = untrusted - {drafter.name for drafter in drafters}
    if unknown:
        raise UsageError(f"--untrusted-drafter names {min(unknown)!r}, but no --drafter has that name")
    with checked_options():
        return LocalModel(model_name(api), targets, drafters, tuple(api.served_model_name or ()))


def check_engine(own: OwnModels) -> None:
    """Raises UsageError if there is an option for models that run here, and there are none."""
    given = replace(own.engine, cache_mib=None).arguments  # the environment may name that
    if given and not (own.target_model or own.drafter_model):
        raise UsageError(f"{given[0]} is for --target-model and --drafter-model: leave it out without them")


def model_name(api: ApiOptions) -> str:
    """Of the model; raises UsageError if there are several, or none."""
    named = api.model or [module.partition("=")[0] for module in api.lora_modules] or [api.target_model or ""]
    if not named[0]:
        raise UsageError("give --model, the name of the model in the API")
    return only_model(named)


def only_model(given: list[str]) -> str:
    """The value of --model; raises UsageError if it was given more than once."""
    if len(given) > 1:
        several = f"--model was given {len(given)} times ({', '.join(given)})"
        raise UsageError(f"{several}, and a server has one model: start one for each, on ports of their own")
    return given[0]


def _named_drafter(given: str, untrusted: frozenset[str]) -> NamedDrafter:
    name, equals, addresses = given.partition("=")
    if given == NO_DRAFTER:
        raise UsageError(f"--drafter {NO_DRAFTER} is no drafter: leave out the others, or it")
    if not (name and equals):
        raise UsageError(f"--drafter must be NAME=HOST:PORT, such as small=127.0.0.1:7002, got {given!r}")
    with checked_options():
        return NamedDrafter(name, checked_addresses("--drafter", addresses.split(",")), name not in untrusted)


@dataclass(eq=False)
class HttpAndGrpc(Serving):
    """An HTTP server, whose ready line has the address of a gRPC server beside it."""

    http: "HttpServer"
    grpc: GenerationServer

    def ready(self) -> dict[str, object]:
        return self.http.ready() | {"grpc": self.grpc.address}

    async def start(self) -> None:
        """Starts both; if one cannot listen, drains the other one."""
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self.grpc)
            await self.http.start()
            stack.pop_all()

    async def drain(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self.grpc.drain())
            group.create_task(self.http.drain())

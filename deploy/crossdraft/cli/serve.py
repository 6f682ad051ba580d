"""`crossdraft serve`: one gRPC service in this process. Only the services with a model import torch."""

from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

from crossdraft.cli.generate import check_address
from crossdraft.client.api import addresses_of
from crossdraft.console.processes import end_with_stdin
from crossdraft.console.running import CommandFailed, Misused, checked_options
from crossdraft.engine.names import NumberOutOfRangeError
from crossdraft.rpc.errors import CannotListen
from crossdraft.rpc.handlers import SessionLimits
from crossdraft.rpc.metrics import Exporter
from crossdraft.rpc.security import FrontFiles, TlsError, TlsFiles
from crossdraft.rpc.server import Listening, run
from crossdraft.rpc.server import serve as serve_until_signalled
from crossdraft.rpc.transport import MessageLimit
from crossdraft.serving.backend import LocalBackend, LocalModel, LocalOptions, NamedDrafter
from crossdraft.serving.grpc import REQUEST_LIMIT, GenerationOptions, serve_generation
from crossdraft.serving.http import HttpOptions, RateLimit, make_app
from crossdraft.serving.http.server import HttpServer
from crossdraft.serving.limits import Keys
from crossdraft.serving.limits import RateLimit as RateLimit_of_limits
from crossdraft.serving.logs import LogFormat, LogLevel, logged
from crossdraft.serving.metrics import MeasuredBackend, Metrics
from crossdraft.serving.servers import Together
from crossdraft.text.affinity import AffinityMismatch
from crossdraft.text.frequencies import RankingError

if TYPE_CHECKING:
    from crossdraft.engine.emulation import Emulation, Pace
    from crossdraft.engine.loader import Pruning
    from crossdraft.engine.served_model import ModelOptions


@dataclass(frozen=True)
class Log:
    """How the log looks."""

    form: LogFormat = LogFormat.PLAIN
    level: LogLevel = LogLevel.INFO


@dataclass(frozen=True)
class Where:
    """The options of the server itself, as they were typed."""

    host: str
    port: int
    max_message_mib: int
    grace_seconds: float
    until_stdin_ends: bool = False  # stop as on SIGTERM when standard input ends
    tls: TlsFiles | FrontFiles | None = None
    sessions: SessionLimits = field(default_factory=SessionLimits)
    metrics_port: int | None = None
    log: Log = field(default_factory=Log)

    @property
    def listening(self) -> Listening:
        """The same, checked; raises Misused."""
        with checked_options():
            limit = MessageLimit(self.max_message_mib)
            return Listening(
                self.host, self.port, limit, self.grace_seconds, self.tls, self.sessions, self.metrics_port
            )


def serve_the_target(model: "ModelOptions", where: Where) -> None:
    """Serves until SIGTERM or SIGINT; one line of JSON on stdout says when it is ready.

    Raises:
        Misused: a value is out of its range.
        CommandFailed: the model cannot be run, or the address cannot be had.
    """
    from crossdraft.target.service import ServeTarget, serve_target

    run_service(serve_target(ServeTarget(model, where.listening)), where)


def serve_a_drafter(model: "ModelOptions", affinity: Path | None, where: Where) -> None:
    """The same for a drafter; Misused also if its affinities or frequencies cannot be used for it."""
    from crossdraft.drafter.service import ServeDrafter, serve_drafter

    run_service(serve_drafter(ServeDrafter(model, where.listening, affinity)), where)


def serve_an_ngram_drafter(longest: int, shortest: int, pace: "Pace | None", where: Where) -> None:
    """The same for a drafter that copies; match lengths are in letters."""
    from crossdraft.drafter.ngram import Lengths, ServeNgram, serve_ngram

    with checked_options():
        lengths = Lengths(longest, shortest)
    run_service(serve_ngram(ServeNgram(lengths, where.listening, pace)), where)


def run_service(service: Coroutine[Any, Any, None], where: Where) -> None:
    """Runs a server's main coroutine to its end.

    Raises:
        Misused: an option cannot be used.
        CommandFailed: it cannot be served.
    """
    if where.until_stdin_ends:
        # A daemon, as nobody may ever write or close: it must not keep the process alive.
        Thread(target=end_with_stdin, daemon=True).start()
    try:
        with logged(where.log.form, where.log.level):
            run(service)
    except (AffinityMismatch, RankingError, NumberOutOfRangeError, TlsError) as error:
        raise Misused(str(error)) from error
    except (ValueError, CannotListen) as error:
        raise CommandFailed(str(error)) from error


def limits_of(sessions: int, per_peer: int | None, idle_seconds: float) -> SessionLimits:
    """What --max-sessions, --max-sessions-per-peer and --idle-seconds say together; raises Misused."""
    with checked_options():
        return SessionLimits(sessions, per_peer, idle_seconds)


def pace_of(text: str | None) -> "Pace | None":
    """What --pace says; raises Misused."""
    from crossdraft.engine.emulation import Pace

    with checked_options():
        return None if text is None else Pace.parsed(text)


def emulation_of(pace: str | None, logit_noise: float = 0.0) -> "Emulation":
    """What --pace and --logit-noise say together; raises Misused."""
    from crossdraft.engine.emulation import Emulation

    with checked_options():
        return Emulation(pace_of(pace), logit_noise)


def pruning_of(keep: int | None, frequencies: Path | None) -> "Pruning | None":
    """What --vocab-keep and --frequencies say together; raises Misused."""
    if keep is None and frequencies is None:
        return None
    if keep is None or frequencies is None:
        raise Misused("--vocab-keep N and --frequencies FILE are given together, or neither is")
    if keep < 1:
        raise Misused(f"--vocab-keep must be at least 1, got {keep}")
    from crossdraft.engine.loader import Pruning

    return Pruning(keep, frequencies)


# `crossdraft serve http`: the API over outputs that are made in this process.

MIB = 2**20


@dataclass(frozen=True)
class Limits:
    """The options that limit clients, as they were typed."""

    most_outputs: int
    most_choices: int
    body_mib: float
    rate: tuple[float, int] | None  # requests a minute, and at once
    stalled_seconds: float


# The options of `crossdraft serve http` and `serve grpc` that say what is served from where.


@dataclass(frozen=True)
class Services:
    """The options that say what is served from where, as they were typed."""

    model: str
    targets: tuple[str, ...]
    drafters: tuple[str, ...]  # NAME=HOST:PORT,...
    untrusted: frozenset[str]  # names of drafters
    tls: TlsFiles | None

    @property
    def local(self) -> LocalModel:
        """The same, checked; raises Misused."""
        targets = _addresses("--target", ",".join(self.targets))
        drafters = tuple(self._drafter(one) for one in self.drafters)
        unknown = self.untrusted - {one.name for one in drafters}
        if unknown:
            raise Misused(f"--untrusted-drafter names {sorted(unknown)[0]!r}, which no --drafter has")
        with checked_options():
            return LocalModel(self.model, targets, drafters)

    def _drafter(self, given: str) -> NamedDrafter:
        name, equals, addresses = given.partition("=")
        if not (name and equals):
            raise Misused(f"--drafter must be NAME=HOST:PORT, such as small=127.0.0.1:7002, got {given!r}")
        return NamedDrafter(name, _addresses("--drafter", addresses), name not in self.untrusted)


def serve_http(
    services: Services, api_keys: Path | None, limits: Limits, where: Where, grpc_port: int | None = None
) -> None:
    """Serves until SIGTERM or SIGINT, then drains; one line of JSON on stdout says when it is ready.

    Args:
        services: what is served.
        api_keys: file of the keys; None: everybody may ask.
        limits: of clients.
        where: over HTTP.
        grpc_port: of the same host, for gRPC beside it; None: nowhere.

    Raises:
        Misused: a value is out of its range, or the keys cannot be used.
        CommandFailed: the address cannot be had.
    """
    with checked_options():
        metrics = Metrics()
        local = LocalOptions(limits.most_outputs, tls=services.tls)
        options = HttpOptions(
            Keys() if api_keys is None else Keys.read(api_keys),
            None if limits.rate is None else RateLimit(*limits.rate),
            int(limits.body_mib * MIB),
            min(limits.most_choices, limits.most_outputs),
            limits.stalled_seconds,
            metrics.text,
        )
        grpc = None if grpc_port is None else replace(where.listening, port=grpc_port, limit=REQUEST_LIMIT)
    run_service(_serve_http(services.local, local, options, metrics, where.listening, grpc), where)


async def _serve_http(
    model: LocalModel,
    local: LocalOptions,
    options: HttpOptions,
    metrics: Metrics,
    listening: Listening,
    grpc: Listening | None,
) -> None:
    async with LocalBackend((model,), local) as outputs:
        measured = MeasuredBackend(outputs, metrics)
        http = HttpServer(make_app(measured, options), listening, {"model": model.name})
        others = {}
        if grpc is not None:
            limited = GenerationOptions(options.keys, options.rate, options.stalled_seconds)
            others["grpc"] = serve_generation(measured, grpc, limited)
        await serve_until_signalled(Together(http, others))


# `crossdraft serve grpc`: crossdraft.v1.Generation over outputs that are made in this process.


@dataclass(frozen=True)
class FrontGrpcLimits:
    """The options that limit clients, as they were typed."""

    most_outputs: int
    rate: tuple[float, int] | None  # requests a minute, and at once
    stalled_seconds: float


def serve_grpc(
    services: Services, api_keys: Path | None, limits: FrontGrpcLimits, where: Where, metrics_port: int | None = None
) -> None:
    """Serves until SIGTERM or SIGINT, then drains; one line of JSON on stdout says when it is ready.

    Args:
        services: what is served.
        api_keys: file of the keys; None: everybody may ask.
        limits: of clients.
        where: over gRPC.
        metrics_port: of the same host, for Prometheus; None: nowhere.

    Raises:
        Misused: a value is out of its range, or the keys cannot be used.
        CommandFailed: the address cannot be had.
    """
    with checked_options():
        keys = Keys() if api_keys is None else Keys.read(api_keys)
        rate = None if limits.rate is None else RateLimit_of_limits(*limits.rate)
        options = GenerationOptions(keys, rate, limits.stalled_seconds)
        local = LocalOptions(limits.most_outputs, tls=services.tls)
    run_service(_serve_grpc(services.local, local, options, where.listening, metrics_port), where)


async def _serve_grpc(
    model: LocalModel, local: LocalOptions, options: GenerationOptions, listening: Listening, metrics_port: int | None
) -> None:
    metrics = Metrics()
    exporter = Exporter(metrics.registry)
    async with LocalBackend((model,), local) as outputs:
        server = serve_generation(MeasuredBackend(outputs, metrics), listening, options)
        if metrics_port is not None:
            server.marks["metrics"] = exporter.start(listening.host, metrics_port)
        try:
            await serve_until_signalled(server)
        finally:
            await exporter.stop()


def _addresses(option: str, given: str) -> tuple[str, ...]:
    for one in given.split(","):
        check_address(option, one.strip())
    return addresses_of(given)

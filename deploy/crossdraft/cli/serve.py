"""`crossdraft serve`: one gRPC service in this process. Only the services with a model import torch."""

import os
import signal
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

from crossdraft.cli.failures import CommandFailed, Misused
from crossdraft.cli.running import checked_options
from crossdraft.models.names import NumberOutOfRangeError
from crossdraft.rpc.admission import SessionLimits
from crossdraft.rpc.errors import CannotListen
from crossdraft.rpc.security import FrontFiles, TlsError, TlsFiles
from crossdraft.rpc.server import Listening, run
from crossdraft.rpc.transport import MessageLimit
from crossdraft.serving.logs import LogFormat, LogLevel, logged
from crossdraft.text.affinity import AffinityMismatch
from crossdraft.text.ranking import RankingError

if TYPE_CHECKING:
    from crossdraft.models.pacing import Pace
    from crossdraft.models.pruning import Pruning
    from crossdraft.models.running import Emulation, ModelOptions

STDIN = 0  # its file descriptor


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
    from crossdraft.target.servicer import ServeTarget, serve_target

    run_service(serve_target(ServeTarget(model, where.listening)), where)


def serve_a_drafter(model: "ModelOptions", affinity: Path | None, where: Where) -> None:
    """The same for a drafter; Misused also if its affinities or frequencies cannot be used for it."""
    from crossdraft.drafter.servicer import ServeDrafter, serve_drafter

    run_service(serve_drafter(ServeDrafter(model, where.listening, affinity)), where)


def serve_an_ngram_drafter(longest: int, shortest: int, pace: "Pace | None", where: Where) -> None:
    """The same for a drafter that copies; match lengths are in letters."""
    from crossdraft.drafter.lookup import Lengths
    from crossdraft.drafter.ngram import ServeNgram, serve_ngram

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
    from crossdraft.models.pacing import Pace

    with checked_options():
        return None if text is None else Pace.parsed(text)


def emulation_of(pace: str | None, logit_noise: float = 0.0) -> "Emulation":
    """What --pace and --logit-noise say together; raises Misused."""
    from crossdraft.models.running import Emulation

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
    from crossdraft.models.pruning import Pruning

    return Pruning(keep, frequencies)


def end_with_stdin() -> None:
    """Ends this process as SIGTERM does when its standard input ends."""
    while os.read(STDIN, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)

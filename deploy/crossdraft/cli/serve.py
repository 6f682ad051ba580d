"""`crossdraft serve`: one model as a gRPC service."""

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

from crossdraft.cli.failures import CommandFailed, Misused
from crossdraft.cli.running import checked_options
from crossdraft.drafter.servicer import ServeDrafter, serve_drafter
from crossdraft.models.pruning import Pruning
from crossdraft.models.running import ModelOptions
from crossdraft.rpc.errors import CannotListen
from crossdraft.rpc.server import Listening, run
from crossdraft.rpc.transport import MessageLimit
from crossdraft.target.servicer import ServeTarget, serve_target

STDIN = 0  # its file descriptor


@dataclass(frozen=True)
class Where:
    """The options of the server itself, as they were typed."""

    host: str
    port: int
    max_message_mib: int
    grace_seconds: float
    until_stdin_ends: bool = False  # stop as on SIGTERM when standard input ends


def serve(role: str, model: ModelOptions, where: Where) -> None:
    """Serves until SIGTERM or SIGINT; one line of JSON on stdout says when it is ready.

    Raises:
        Misused: a value is out of its range.
        CommandFailed: the model cannot be run, or the address cannot be had.
    """
    with checked_options():
        limit = MessageLimit(where.max_message_mib)
        listening = Listening(where.host, where.port, limit, where.grace_seconds)
    if where.until_stdin_ends:
        # A daemon, as nobody may ever write or close: it must not keep the process alive.
        Thread(target=_end_with_stdin, daemon=True).start()
    try:
        if role == "target":
            run(serve_target(ServeTarget(model, listening)))
        else:
            run(serve_drafter(ServeDrafter(model, listening)))
    except (ValueError, CannotListen) as error:
        raise CommandFailed(str(error)) from error


def pruning_of(role: str, keep: int | None, frequencies: Path | None) -> Pruning | None:
    """What --vocab-keep and --frequencies say together; raises Misused."""
    if keep is None and frequencies is None:
        return None
    if role != "drafter":
        raise Misused("--vocab-keep and --frequencies are for drafters: a target needs its whole vocabulary")
    if keep is None or frequencies is None:
        raise Misused("--vocab-keep N and --frequencies FILE are given together, or neither is")
    if keep < 1:
        raise Misused(f"--vocab-keep must be at least 1, got {keep}")
    return Pruning(keep, frequencies)


def _end_with_stdin() -> None:
    while os.read(STDIN, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)

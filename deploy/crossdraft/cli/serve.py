"""`crossdraft serve`: one model as a gRPC service."""

import os
import signal
from dataclasses import dataclass
from threading import Thread

from crossdraft.cli.failures import CommandFailed
from crossdraft.cli.running import checked_options
from crossdraft.drafter.servicer import ServeDrafter, serve_drafter
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


def _end_with_stdin() -> None:
    while os.read(STDIN, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)

"""The drafter service: opens sessions on one model, and is served."""

import asyncio
import sys
from dataclasses import dataclass, field
from typing import TextIO

from crossdraft.drafter.session import DrafterSession
from crossdraft.models.running import ModelOptions, RunningModel, run_model
from crossdraft.rpc.handlers import DRAFTER
from crossdraft.rpc.server import Listening, Server, serve
from crossdraft.text.letters import Side
from crossdraft.verification.exchange import Description, Draft, Drafted, OpenDrafter, Score, Scored

DrafterServer = Server[OpenDrafter, Draft | Score, Drafted | Scored]


@dataclass(frozen=True)
class ServeDrafter:
    """A drafter service: which model, and where."""

    model: ModelOptions
    listening: Listening = field(default_factory=Listening)


@dataclass(frozen=True, eq=False)
class DrafterService:
    """Sessions on one running model."""

    running: RunningModel

    @property
    def description(self) -> Description:
        """What it says of its model."""
        return self.running.description

    async def open(self, request: OpenDrafter) -> DrafterSession:
        """A new session. Its prompt is tokenized in a thread: it may be long, and other sessions wait for this one."""
        return await asyncio.to_thread(DrafterSession, self.running, request)

    async def close(self) -> None:
        """Ends the model's thread."""
        await asyncio.to_thread(self.running.close)


async def drafter_server(options: ServeDrafter) -> DrafterServer:
    """Loads the model; the server does not listen yet.

    Raises:
        ValueError: the model cannot be run with these options.
    """
    running = await asyncio.to_thread(run_model, options.model, Side.DRAFTER)
    return Server(DRAFTER, DrafterService(running), options.listening)


async def serve_drafter(options: ServeDrafter, output: TextIO = sys.stdout) -> None:
    """Serves a drafter until SIGTERM or SIGINT; prints one line of JSON on `output` once it listens.

    Raises:
        ValueError: the model cannot be run with these options.
        CannotListen: the address cannot be had.
    """
    await serve(await drafter_server(options), output)

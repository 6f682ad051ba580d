"""The target service: opens sessions on one model, and is served."""

import asyncio
import sys
from dataclasses import dataclass, field
from typing import TextIO

from crossdraft.engine.served_model import ModelOptions, RunningModel, run_model
from crossdraft.rpc.handlers import TARGET
from crossdraft.rpc.server import Listening, Server, serve
from crossdraft.target.session import TargetSession
from crossdraft.text.letters import Side
from crossdraft.types.messages import Description, FetchRow, OpenTarget, Pass, PassDone, RowFetched, RunTo

TargetServer = Server[OpenTarget, Pass | FetchRow | RunTo, PassDone | RowFetched]


@dataclass(frozen=True)
class ServeTarget:
    """A target service: which model, and where."""

    model: ModelOptions
    listening: Listening = field(default_factory=Listening)


@dataclass(frozen=True, eq=False)
class TargetService:
    """Sessions on one running model."""

    running: RunningModel

    @property
    def description(self) -> Description:
        """What it says of its model."""
        return self.running.description

    async def open(self, request: OpenTarget) -> TargetSession:
        """A new session; raises ContextTooLong."""
        return TargetSession(self.running, request)

    async def close(self) -> None:
        """Ends the model's thread."""
        await asyncio.to_thread(self.running.close)


async def target_server(options: ServeTarget) -> TargetServer:
    """Loads the model; the server does not listen yet.

    Raises:
        ValueError: the model cannot be run with these options.
    """
    running = await asyncio.to_thread(run_model, options.model, Side.TARGET)
    return Server(TARGET, TargetService(running), options.listening, options.model.emulation.marks, running.use)


async def serve_target(options: ServeTarget, output: TextIO = sys.stdout) -> None:
    """Serves a target until SIGTERM or SIGINT; prints one line of JSON on `output` once it listens.

    Raises:
        ValueError: the model cannot be run with these options.
        CannotListen: the address cannot be had.
    """
    await serve(await target_server(options), output)

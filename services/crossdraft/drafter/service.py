"""The drafter service: opens sessions on one model, and is served."""

import asyncio
import sys
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TextIO

from crossdraft.drafter.sampling import Equipment
from crossdraft.drafter.session import DrafterSession, Reply, Request
from crossdraft.engine.served_model import ModelOptions, RunningModel, run_model
from crossdraft.rpc.errors import ProtocolBroken
from crossdraft.rpc.handlers import DRAFTER
from crossdraft.rpc.server import Listening, Server, serve
from crossdraft.text.affinity import Affinity, AffinityMismatch, load_affinity
from crossdraft.text.letters import Side
from crossdraft.types.messages import Description, OpenDrafter

ADVICE = "make one with: crossdraft affinity --target TARGET --drafter DRAFTER CORPUS -o FILE"
DrafterServer = Server[OpenDrafter, Request, Reply]


@dataclass(frozen=True)
class ServeDrafter:
    """A drafter service: which model, and where."""

    model: ModelOptions
    listening: Listening = field(default_factory=Listening)
    affinity: Path | None = None  # what `crossdraft affinity` wrote for this drafter and a target; `rdk` needs it


@dataclass(frozen=True, eq=False)
class DrafterService:
    """Sessions on one running model."""

    running: RunningModel
    affinity: Affinity | None = None

    @cached_property
    def description(self) -> Description:
        """What it says of its model."""
        return replace(self.running.description, affinity="" if self.affinity is None else self.affinity.target)

    @cached_property
    def _equipment(self) -> Equipment:
        return Equipment(self.running, self.affinity)

    async def open(self, request: OpenDrafter) -> DrafterSession:
        """A new session. Its prompt is tokenized in a thread: it may be long, and other sessions wait for this one.

        Raises:
            ProtocolBroken: it is to draw tokens of a target for which this drafter has no affinity matrix.
        """
        served = self.description.affinity
        if request.redistribute and not served:
            raise ProtocolBroken(
                "this drafter has no affinity matrix: make one with `crossdraft affinity` and serve it with --affinity"
            )
        if request.redistribute not in ("", served):
            raise ProtocolBroken(
                "this drafter's affinity matrix is for a target with another tokenizer: make one with "
                "`crossdraft affinity` and serve it with --affinity"
            )
        return await asyncio.to_thread(DrafterSession, self._equipment, request)

    async def close(self) -> None:
        """Ends the model's thread."""
        await asyncio.to_thread(self.running.close)


async def drafter_server(options: ServeDrafter) -> DrafterServer:
    """Loads the model; the server does not listen yet.

    Raises:
        ValueError: the model cannot be run with these options, or the affinity matrix is not one for it.
    """
    service = await asyncio.to_thread(_service, options)
    return Server(DRAFTER, service, options.listening, options.model.emulation.marks, service.running.use)


def _service(options: ServeDrafter) -> DrafterService:
    try:
        affinity = None if options.affinity is None else load_affinity(options.affinity)
    except OSError as error:
        raise AffinityMismatch(f"{options.affinity} cannot be read: {error.strerror}; {ADVICE}") from error
    running = run_model(options.model, Side.DRAFTER)
    if affinity is not None:
        try:
            affinity.check_drafter(running.description.tokenizer_json, running.description.vocabulary_size)
        except AffinityMismatch as error:
            running.close()
            raise AffinityMismatch(f"{options.affinity}: {error}") from error
    return DrafterService(running, affinity)


async def serve_drafter(options: ServeDrafter, output: TextIO = sys.stdout) -> None:
    """Serves a drafter until SIGTERM or SIGINT; prints one line of JSON on `output` once it listens.

    Raises:
        ValueError: as `drafter_server`.
        CannotListen: the address cannot be had.
    """
    await serve(await drafter_server(options), output)

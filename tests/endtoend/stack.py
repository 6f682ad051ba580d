"""The bundled models as gRPC services in this process, and generations through the Python API."""

import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from crossdraft.cli.corpus import NamedTokenizer
from crossdraft.client import Generation, GenerationRequest, Pipeline, Statistics, connect
from crossdraft.config.engine import NgramOptions
from crossdraft.drafter.ngram import ngram_server
from crossdraft.drafter.service import drafter_server
from crossdraft.engine.served_model import ModelOptions
from crossdraft.lab.emulation.steps import Emulation
from crossdraft.lab.harness import gathered
from crossdraft.target.service import target_server
from crossdraft.text.affinity import Affinity, Alignment, save_affinity
from crossdraft.text.letters import Side
from crossdraft.text.pairs import Pair
from tests.client.together import ended
from tests.prompts import PROMPTS
from tests.rpc.linked import AT_ONCE

TARGET = "target"
EAGLE = "drafter-eagle"  # reads the target's hidden states
DRAFTERS = ("drafter-a", "drafter-b", "drafter-c")
NGRAM = "ngram"
CONCURRENT = 64  # generations at once, which the engines batch: 16 take twice the processor time
ROUNDS = {"overlap": "off"}
AHEAD = {"overlap": "on", "max_draft_tokens": 8, "min_draft_tokens": 2, "branches": 3, "branch_width": 2, "paths": 4}
NEIGHBOURS = 8  # entries of an affinity matrix's row
BUDGET = 256  # MiB for keys and values of one model: more than CONCURRENT outputs take


@dataclass(frozen=True)
class Stack:
    """The running services, and a pipeline for each drafter that has been asked for."""

    target: str  # address
    drafters: Mapping[str, str]  # addresses by name; the target's model and one without a model may be there, too
    started: AsyncExitStack
    pipelines: dict[str | None, Pipeline] = field(default_factory=dict)

    async def pipeline(self, drafter: str | None) -> Pipeline:
        """With the drafter of this name, or without one."""
        if drafter not in self.pipelines:
            address = None if drafter is None else self.drafters[drafter]
            made = connect(self.target, address, needs_drafter=drafter is not None)
            self.pipelines[drafter] = await self.started.enter_async_context(made)
        return self.pipelines[drafter]

    async def run(self, drafter: str | None, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """The requests' generations, finished, in their order."""
        pipeline = await self.pipeline(drafter)
        return await gathered(lambda request: ended(pipeline.run(request)), requests, CONCURRENT)


@dataclass(frozen=True)
class Copying:
    """A drafter that copies, in a process of its own: it takes less time to start than one with a model."""

    more: tuple[str, ...] = ("--min-ngram", "1")
    role: str = "drafter"

    def command(self) -> list[str]:
        """As it would be typed."""
        options = ("--grace-seconds", "0", "--until-stdin-ends", *self.more)
        return [sys.executable, "-m", "crossdraft", "serve", "ngram", *options]


@asynccontextmanager
async def serving(names: Sequence[str], affine: Sequence[str]) -> AsyncIterator[Stack]:
    """The target and drafters with these names, some with an affinity matrix, for the time of the block."""
    async with AsyncExitStack() as started:
        folder = Path(started.enter_context(TemporaryDirectory()))
        target = await started.enter_async_context(await target_server(model(TARGET), AT_ONCE))
        servers = {NGRAM: ngram_server(NgramOptions(), AT_ONCE)} if NGRAM in names else {}
        for name in set(names) - {NGRAM}:
            affinity = affinities(name, folder) if name in affine else None
            servers[name] = await drafter_server(model(name, affinity=affinity), AT_ONCE)
        drafters = {name: (await started.enter_async_context(server)).address for name, server in servers.items()}
        yield Stack(target.address, drafters, started)


def affinities(drafter: str, folder: Path) -> Path:
    """The file of an affinity matrix from a drafter to the target, made of the prompts' text."""
    ours, theirs = (
        NamedTokenizer.load(f"bundled:{name}", side) for name, side in ((TARGET, Side.TARGET), (drafter, Side.DRAFTER))
    )
    pair = Pair(ours.tokenization.vocabulary, theirs.tokenization.vocabulary)
    seen = Alignment(pair, ours.tokenization, theirs.tokenization)
    for prompt in PROMPTS:
        seen.add(prompt)
    path = folder / f"{drafter}.npz"
    save_affinity(Affinity.of(pair, seen.matrix(NEIGHBOURS), ours.tokenizer_json, theirs.tokenizer_json), path)
    return path


def model(name: str, emulation: Emulation | None = None, affinity: Path | None = None) -> ModelOptions:
    return ModelOptions(f"bundled:{name}", cache_mib=BUDGET, threads=1, emulation=emulation, affinity=affinity)


def statistics(generation: Generation) -> Statistics:
    """The figures of a generation whose drafter was there to its end, if it had one."""
    assert generation.statistics.drafter_lost == ""
    return generation.statistics

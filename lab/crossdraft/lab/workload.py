"""What most benchmarks generate: prompts, the settings that are compared, and pairs of services that run for them."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, TypeVar

from crossdraft.cli.measuring import Columns, Setting, finished, total_of
from crossdraft.cli.processes import Wanted, patience, running, threads_each
from crossdraft.cli.prompts import Prompt, prompts_of
from crossdraft.cli.running import UsageError, checked_options
from crossdraft.client import GenerationRequest, Pipeline, SamplingOptions, connect
from crossdraft.config.engine import STARTED, EngineOptions
from crossdraft.config.request import Overlap
from crossdraft.engine.names import BUNDLED_PREFIX
from crossdraft.lab.commands import AcceptancePlan, PromptsPlan
from crossdraft.lab.emulation import EmulatedHost, network
from crossdraft.lab.emulation.steps import Emulation
from crossdraft.lab.harness import Benchmark, Result, Timed, on_core
from crossdraft.session.models import fault_of_pair
from crossdraft.speculation.choice import TREES
from crossdraft.verification.methods import method_named

# Of a target that is measured: its requests get what they ask for, and nothing of the model's own.
NO_DEFAULTS = ("--generation-config", "vllm")
REPLY_SECONDS = 600.0  # many generations wait for one model
Item = TypeVar("Item")
Made = TypeVar("Made")
PromptsPlanned = TypeVar("PromptsPlanned", bound=PromptsPlan)


WITHOUT_DRAFTER, AUTO = "no drafter", "auto"
CHOICES: dict[str, dict[str, Any]] = {  # the arms and some between them, and what a request says for each
    WITHOUT_DRAFTER: {},
    AUTO: {},
    **{f"lock-step, K = {k}": {"overlap": Overlap.OFF, "num_speculative_tokens": k} for k in (2, 3, 5, 8)},
    **{
        f"lock-step, trees of {nodes}": {"overlap": Overlap.OFF, "num_speculative_tokens": depth, "tree_nodes": nodes}
        for depth, nodes in TREES
    },
    **{
        f"overlapped, {most}, {wait}": {"overlap": Overlap.ON, "max_draft_tokens": most, "min_draft_tokens": wait}
        for most, wait in ((8, 0), (8, 2), (16, 4))
    },
}


def request_of(choice: str, number: int, method: str, temperature: float, max_tokens: int) -> GenerationRequest:
    """One output of a made-up prompt of this number, in chains if the method has no trees; raises ValueError."""
    settings = CHOICES[choice]
    if not method_named(method).samples:
        settings = {name: value for name, value in settings.items() if name != "tree_nodes"}
    return GenerationRequest(
        f"Prompt number {number}: ",
        method=method,
        max_tokens=max_tokens,
        options=SamplingOptions(temperature),
        seed=number if method_named(method).keyed else None,
        ignore_eos=True,
        **settings,
    )


async def sampled(pipeline: Pipeline, requests: Iterable[GenerationRequest]) -> Timed:
    """All outputs at once; their drafter may be lost on the way. Raises CommandFailed."""
    began = time.monotonic()
    total = total_of(await asyncio.gather(*(finished(pipeline.run(request), lost=True) for request in requests)))
    return Timed(total.tokens, time.monotonic() - began, total)


SETTING: Columns = {
    "method": lambda cell: cell.method,
    "drafter": lambda cell: cell.drafter.removeprefix(BUNDLED_PREFIX),
    "T": lambda cell: f"{cell.temperature:g}",
    "k": lambda cell: cell.k,
    "nodes": lambda cell: cell.nodes or "",
}


class Prompted(Benchmark[PromptsPlanned, Result]):
    """A benchmark that generates from the prompts of a file."""

    @cached_property
    def _read(self) -> tuple[Prompt, ...]:
        path = self.plan.prompts
        if path == PromptsPlan.prompts and not path.is_file():
            raise UsageError(f"there is no {path}: run this in a checkout of crossdraft, or give a file with --prompts")
        return prompts_of(path, self.plan.limit)

    @property
    def prompts(self) -> tuple[str, ...]:
        """Their texts; raises UsageError."""
        return tuple(str(prompt.content) for prompt in self._read)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Their categories."""
        return tuple(prompt.category for prompt in self._read)

    def check(self) -> None:
        if not self.prompts:
            raise UsageError("there are no prompts")


def settings_of(plan: AcceptancePlan) -> tuple[Setting, ...]:
    """Every combination, by drafter, so that each is started once.

    A method for one vocabulary has the target's own model as its drafter. Raises UsageError: there is no such method,
    or an affinity is not of a drafter."""
    affinities = _affinities(plan)
    with checked_options():
        own = [name for name in plan.methods if method_named(name).same_vocabulary]
    pairs = [(name, drafter) for drafter in plan.drafter for name in plan.methods if name not in own]
    pairs += [(name, plan.target) for name in own]
    return tuple(
        Setting(method, drafter, temperature, k, affinities.get(drafter, ()), nodes=nodes)
        for method, drafter in pairs
        for temperature in plan.temperatures
        for k in plan.k
        for nodes in plan.tree
        if not nodes or (nodes > k and not method_named(method).whole_draft)
    )


def _affinities(plan: AcceptancePlan) -> dict[str, tuple[str, ...]]:
    """Options of each drafter that has a matrix; raises UsageError."""
    found: dict[str, tuple[str, ...]] = {}
    for given in plan.affinity:
        name, equals, file = given.rpartition("=")
        if not (equals and name and file):
            raise UsageError(f"--affinity takes NAME=FILE, such as {plan.drafter[0]}=FILE, got {given!r}")
        if name not in plan.drafter:
            raise UsageError(f"--affinity names the drafter {name!r}, and the drafters are {', '.join(plan.drafter)}")
        found[name] = ("--affinity", file)
    return found


async def pipelines_of(
    target: str, settings: Iterable[Setting], engine: EngineOptions = STARTED
) -> AsyncGenerator[tuple[Pipeline, Setting, str], None]:
    """A pipeline for each setting, which runs for this step, and why the pair refuses it; empty: it does not.

    Close it with `contextlib.aclosing`, which ends the services. Raises CommandFailed: a service does not start."""
    threads, waiting = threads_each(2), patience(reply_seconds=REPLY_SECONDS)
    async with running([Wanted("target", target, threads, NO_DEFAULTS, engine=engine)]) as (verifying,):
        for (name, more), alike in groupby(settings, key=lambda setting: (setting.drafter, setting.options)):
            async with (
                running([Wanted("drafter", name, threads, more, engine=engine)]) as (drafting,),
                connect(verifying.address, drafting.address, waiting, needs_drafter=True) as pipeline,
            ):
                for setting in alike:
                    yield pipeline, setting, fault_of_pair(method_named(setting.method), pipeline.models)


async def gathered(make: Callable[[Item], Awaitable[Made]], items: Iterable[Item], concurrency: int) -> list[Made]:
    """What is made of each, in their order, with so many under way at once."""
    places = asyncio.Semaphore(concurrency)

    async def limited(item: Item) -> Made:
        async with places:
            return await make(item)

    return await asyncio.gather(*map(limited, items))


# Services that a benchmark starts: a core for each model, the drafter at a distance.


@dataclass(frozen=True)
class Served:
    """A model as a service, perhaps slower or worse than it is. Raises UsageError: the pace or the noise is out of its
    range."""

    model: str
    pace: str | None = None  # A,B in ms, as --pace has it; None: as fast as it is
    logit_noise: float = 0.0  # of a drafter
    engine: EngineOptions = STARTED

    def __post_init__(self) -> None:
        with checked_options():
            Emulation.parsed(self.pace, self.logit_noise)

    @property
    def options(self) -> tuple[str, ...]:
        """Of its command."""
        pace = () if self.pace is None else ("--pace", self.pace)
        noise = ("--logit-noise", str(self.logit_noise)) if self.logit_noise else ()
        return (*self.engine.arguments, *pace, *noise)


@dataclass(frozen=True)
class Distant:
    """A service at the far end of a link."""

    address: str
    link: EmulatedHost | None  # None: on loopback

    async def delay(self, milliseconds: float) -> None:
        """Sets the time of a message to it, and of one back."""
        if self.link is not None:
            await self.link.delay(milliseconds)


@asynccontextmanager
async def service(role: str, served: Served, core: int, distant: bool) -> AsyncIterator[Distant]:
    """A target or drafter on a core, on a host with a link of its own if it is distant; raises
    CommandFailed."""
    async with AsyncExitStack() as stack:
        link, prefix = None, on_core(core)
        options = (*(NO_DEFAULTS if role == "target" else ()), *served.options)
        if distant:
            link = (await stack.enter_async_context(network([role])))[role]
            prefix = (*link.place.prefix, *prefix)
            options = (*options, "--host", link.place.listen)
        (found,) = await stack.enter_async_context(running([Wanted(role, served.model, 1, options, prefix)]))
        address = found.address if link is None else await link.address_through(found.address)
        yield Distant(address, link)

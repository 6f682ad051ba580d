"""`crossdraft bench speculation`: two targets that work on one output, beside one.

The targets are paced: on a machine with few cores they sleep rather than compute. All texts are seeded, so that every
way must write the same ones.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from crossdraft.bench.harness import (
    SEED,
    Ratio,
    Timed,
    markdown,
    rotated,
    speed_of,
    speed_ratio,
    write_json,
    write_text,
)
from crossdraft.bench.overhead import Watch
from crossdraft.bench.overlap import Served, drafter_service
from crossdraft.client import Generation, GenerationRequest, Overlap, Statistics, connect
from crossdraft.console.processes import Wanted, running
from crossdraft.console.running import CommandFailed, Misused, check_output, checked_options, counted, run_to_end
from crossdraft.session.resolution import Models, resolve
from crossdraft.speculation.choice import Estimates
from crossdraft.speculation.shared import SharedEstimates

HEADINGS = (
    *("noise", "delay, ms", "accepted", "epochs run", "targets", "tokens/s", "× one target", "targets idle"),
    *("tokens/pass", "passes begun early", "texts equal"),
)


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    target: Served
    drafter: Served
    noises: tuple[float, ...]  # on the drafter's logits
    delays: tuple[float, ...]  # ms to the drafter, one way
    prompts: tuple[str, ...]
    tokens: int  # of each output
    window: int  # of epochs that are run in one way
    wait: int

    def request(self, way: "Way", number: int) -> GenerationRequest:
        """For the prompt of this number; raises ValueError."""
        return GenerationRequest(
            self.prompts[number],
            "seeded",
            max_tokens=self.tokens,
            seed=SEED,
            choice=number,
            ignore_eos=True,
            overlap=Overlap.AUTO if way.governed else Overlap.ON,
            window=None if way.governed else self.window,
            wait=None if way.governed else self.wait,
            speculation=way.speculation,
        )


@dataclass(frozen=True)
class Way:
    """How many targets, and how."""

    targets: int
    speculation: bool
    governed: bool  # else window and wait are fixed

    @property
    def label(self) -> str:
        """For a table."""
        return f"{self.targets}{', speculation' if self.speculation else ''}"


WAYS = tuple(Way(*kind, governed) for governed in (False, True) for kind in ((1, False), (2, False), (2, True)))


@dataclass(frozen=True)
class Run(Timed):
    """One output."""

    text: str
    figures: Statistics
    busy: tuple[float, ...]  # seconds that each target was at work


@dataclass(frozen=True)
class Measured:
    """One way under some conditions, over all prompts."""

    noise: float
    delay_ms: float
    way: Way
    acceptance: float  # of the draft tokens that were judged
    speed: float  # tokens a second
    ratio: Ratio  # of its speed to that with one target
    idle: tuple[float, ...]  # of each target: share of the time in which it had no pass
    tokens_per_pass: float
    speculated: int  # passes that began while another was in flight
    passes: int
    equal: int  # texts that are those with one target
    texts: int


def measure(plan: Plan, json_path: Path | None, markdown_path: Path | None) -> None:
    """Measures every cell; a table in Markdown on stdout, and files if paths are given.

    Raises:
        Misused: a value is out of its range.
        CommandFailed: a service does not start or fails.
    """
    for path in (json_path, markdown_path):
        if path is not None:
            check_output(path)
    if not plan.prompts:
        raise Misused("there are no prompts")
    for noise in plan.noises:
        replace(plan.drafter, logit_noise=noise)
    with checked_options():
        for way in WAYS:
            plan.request(way, 0)
    run_to_end(_measure(plan, json_path, markdown_path))


async def _measure(plan: Plan, json_path: Path | None, markdown_path: Path | None) -> None:
    found: list[Measured] = []
    total = len(plan.noises) * len(plan.delays) * len(plan.prompts) * len(WAYS)
    with counted(total, "generations") as advance:
        async with aclosing(_cells(plan, advance)) as cells:
            async for cell in cells:
                found += cell
                if json_path is not None:
                    shown = asdict(replace(plan, prompts=())) | {"prompts": len(plan.prompts)}
                    write_json(json_path, {"plan": shown, "ways": [asdict(one) for one in found]})
    report = markdown(HEADINGS, [_row(one) for one in found])
    if markdown_path is not None:
        write_text(markdown_path, report)
    print(report, end="")


async def _cells(plan: Plan, advance: Callable[[], None]) -> AsyncGenerator[list[Measured], None]:
    wanted = [Wanted("target", plan.target.model, 1, plan.target.options)] * 2
    async with running(wanted) as targets:
        addresses = [one.address for one in targets]
        for noise in plan.noises:
            async with drafter_service(replace(plan.drafter, logit_noise=noise), distant=any(plan.delays)) as drafter:
                for delay in plan.delays:
                    await drafter.delay(delay)
                    async with _bench(plan, addresses, drafter.address, advance) as bench:
                        runs = await bench.compare()
                    yield [measured(noise, delay, way, runs) for way in WAYS]


@dataclass(eq=False)
class Bench:
    """What generates."""

    plan: Plan
    models: Models
    targets: tuple[str, ...]  # addresses
    watches: dict[int, Watch]  # by the number of targets
    advance: Callable[[], None]

    def __post_init__(self) -> None:
        self._experience = {way: SharedEstimates() for way in WAYS}

    async def compare(self) -> dict[Way, list[Run]]:
        """Each way on each prompt, in turns. The first prompt comes once before: it warms up, and does not count."""
        found: dict[Way, list[Run]] = {way: [] for way in WAYS}
        for way in WAYS:
            await self._run(way, 0)
        for number in range(len(self.plan.prompts)):
            for place in rotated(len(WAYS), number):
                found[WAYS[place]].append(await self._run(WAYS[place], number))
                self.advance()
        return found

    async def _run(self, way: Way, number: int) -> Run:
        request, experience = self.plan.request(way, number), self._experience[way]
        before: Estimates | None = experience.of(request)
        assignment = resolve(request, self.models, targets=way.targets, before=before)
        experience.keep(request, assignment.controller)
        watch, targets = self.watches[way.targets], self.targets[: way.targets]
        watch.busy(targets)
        async with Generation(assignment, watch.services) as generation:
            async for _ in generation:
                pass
        figures = generation.statistics
        if figures is None:
            raise CommandFailed("a generation ended without its statistics")
        return Run(figures.tokens, figures.seconds, generation.text, figures, watch.busy(targets))


@asynccontextmanager
async def _bench(plan: Plan, targets: Sequence[str], drafter: str, advance: Callable[[], None]) -> AsyncIterator[Bench]:
    async with AsyncExitStack() as stack:
        async with connect(targets, drafter, needs_drafter=True) as pipeline:
            models = pipeline.models
        watches = {count: await Watch.of(targets[:count], [drafter], stack) for count in (1, 2)}
        yield Bench(plan, models, tuple(targets), watches, advance)


def measured(noise: float, delay: float, way: Way, runs: Mapping[Way, Sequence[Run]]) -> Measured:
    """Sums up one way; its speed and texts are compared with those of one target."""
    ours, alone = runs[way], runs[replace(way, targets=1, speculation=False)]
    figures = [run.figures for run in ours]
    judged, passes = sum(sum(one.judged_at) for one in figures), sum(one.passes for one in figures)
    seconds = sum(run.seconds for run in ours)
    return Measured(
        noise=noise,
        delay_ms=delay,
        way=way,
        acceptance=sum(sum(one.accepted_at) for one in figures) / max(1, judged),
        speed=speed_of(ours),
        ratio=speed_ratio(ours, alone),
        idle=tuple(1 - sum(busy) / seconds for busy in zip(*(run.busy for run in ours), strict=True)),
        tokens_per_pass=sum(one.tokens for one in figures) / max(1, passes),
        speculated=sum(one.speculated for one in figures),
        passes=passes,
        equal=sum(one.text == other.text for one, other in zip(ours, alone, strict=True)),
        texts=len(ours),
    )


def _row(one: Measured) -> tuple[str, ...]:
    return (
        *(f"{one.noise:g}", f"{one.delay_ms:g}", f"{one.acceptance:.1%}"),
        *("governed" if one.way.governed else "overlapped", one.way.label, f"{one.speed:.1f}"),
        "1" if one.way.targets == 1 else str(one.ratio),
        " and ".join(f"{share:.0%}" for share in one.idle),
        *(f"{one.tokens_per_pass:.2f}", f"{one.speculated} of {one.passes}", f"{one.equal} of {one.texts}"),
    )

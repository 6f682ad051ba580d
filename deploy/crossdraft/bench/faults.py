"""`crossdraft bench kills`: services that are killed and started again while streams run, and what becomes of these."""

import asyncio
import os
import random
import signal
import socket
import time
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from crossdraft.bench.emulation import Link, NotAllowed, hosts
from crossdraft.bench.harness import SEED, Ratio, markdown, median_ratio, rotated, speed_of, write_json, write_text
from crossdraft.bench.made_up_models import write_random
from crossdraft.bench.overhead import Watch
from crossdraft.bench.overlap import GOVERNED, LONGEST_DELAY, Served, Task, drafter_service, target_service
from crossdraft.bench.overlap import Outcome as Outcome_of_overlap
from crossdraft.client import Generation, GenerationRequest, Statistics, connect
from crossdraft.client.driver import Services
from crossdraft.console.processes import Running, Wanted, running
from crossdraft.console.running import (
    STARTS_PROCESSES,
    CommandFailed,
    Misused,
    check_output,
    checked_options,
    counted,
    run_to_end,
)
from crossdraft.engine.names import ModelLoadError
from crossdraft.rpc.errors import ServiceError
from crossdraft.session.resolution import Models, resolve

FIRST_PORT, LAST_PORT = 20_000, 30_000  # below those that outgoing connections get
HEADINGS = (
    *("killed", "times", "streams", "broken", "texts that differ", "sessions lost"),
    *("next token: median", "worst", "longest pause until it was back: median", "worst"),
)


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    target: Served
    drafter: Served
    prompts: tuple[str, ...]
    tokens: int  # of each stream
    times: int  # that the drafter is killed, and then one of the two targets
    quiet: tuple[float, float]  # seconds between a service's return and the next kill, drawn evenly
    seed: int  # of what is drawn: which target, and when


@dataclass(frozen=True)
class Mortal:
    """A service that can be killed, and comes back on its port."""

    wanted: Wanted
    address: str
    stack: AsyncExitStack
    running: Running

    @staticmethod
    async def born(wanted: Wanted, stack: AsyncExitStack) -> "Mortal":
        """Starts it; raises CommandFailed."""
        wanted = replace(wanted, more=(*wanted.more, "--port", str(_free_port())))
        (found,) = await stack.enter_async_context(running([wanted]))
        return Mortal(wanted, found.address, stack, found)

    def kill(self) -> float:
        """At once, without a word; returns when, in seconds of the monotonic clock."""
        os.kill(self.running.process_id, signal.SIGKILL)
        return time.monotonic()

    async def back(self) -> "Mortal":
        """The same, started again; raises CommandFailed."""
        (found,) = await self.stack.enter_async_context(running([self.wanted]))
        return replace(self, running=found)


@dataclass(frozen=True)
class Killed:
    """What a kill did to one stream that had a session there."""

    number: int  # of the stream's prompt
    next_token: float | None  # seconds from the kill to the next token; None: it had ended
    pause: float | None  # seconds of the longest pause that began until the service was back


# Seeded outputs that are generated over and over, all at once, while something happens to their services.


@dataclass(frozen=True)
class Verdict:
    """Whether streams came through."""

    streams: int
    broken: int  # that ended with an error
    differ: int  # that ended with another text than the undisturbed ones
    faults: tuple[str, ...]  # what was wrong with the first few


@dataclass(frozen=True)
class Outcome:
    """All kills of one role."""

    role: str
    kills: int
    verdict: Verdict
    killed: tuple[Killed, ...]

    def seconds(self, of: Callable[[Killed], float | None]) -> list[float]:
        """Where there are any."""
        return [seconds for one in self.killed if (seconds := of(one)) is not None]


def measure(plan: Plan, json_path: Path | None, markdown_path: Path | None) -> None:
    """Kills drafters, then targets; a table in Markdown on stdout, and files if paths are given.

    Raises:
        Misused: a value is out of its range.
        CommandFailed: a service does not start.
    """
    for path in (json_path, markdown_path):
        if path is not None:
            check_output(path)
    if not plan.prompts:
        raise Misused("there are no prompts")
    quiet = " ".join(f"{seconds:g}" for seconds in plan.quiet)
    if not 0 <= plan.quiet[0] <= plan.quiet[1]:
        raise Misused(f"--quiet takes two times of 0 or more, the shorter one first, got {quiet}")
    run_to_end(_measure(plan, json_path, markdown_path), STARTS_PROCESSES)


async def _measure(plan: Plan, json_path: Path | None, markdown_path: Path | None) -> None:
    async with _services(plan) as (mortals, streams, watch):
        undisturbed = await streams.undisturbed()
        pause = checked(undisturbed)
        outcomes = []
        with counted(2 * plan.times, "kills") as advance:
            for role in ("drafter", "target"):
                killing = Killing(plan, role, mortals, streams, watch, advance)
                outcomes.append(await killing.run(undisturbed))
    table = markdown(HEADINGS, [_row(outcome) for outcome in outcomes])
    if json_path is not None:
        shown = asdict(replace(plan, prompts=())) | {"prompts": len(plan.prompts)}
        found = {"median_gap_undisturbed": pause, "outcomes": [asdict(outcome) for outcome in outcomes]}
        write_json(json_path, {"plan": shown} | found)
    notes = [f"Undisturbed, {pause * 1000:.0f} ms between tokens (median). Times in seconds."]
    notes += [fault for outcome in outcomes for fault in outcome.verdict.faults]
    report = table + "".join(f"\n{note}\n" for note in notes)
    if markdown_path is not None:
        write_text(markdown_path, report)
    print(report, end="")


@dataclass(eq=False)
class Stream:
    """One output on its way."""

    number: int  # of its prompt
    moments: list[float] = field(default_factory=list)  # of its tokens, in seconds of the monotonic clock
    text: str = ""  # once it has ended
    error: str = ""  # why it broke; empty: it did not
    figures: Statistics | None = None

    def next_token(self, after: float) -> float | None:
        """Seconds from a moment to the next token; None if there is none."""
        place = bisect_right(self.moments, after)
        return self.moments[place] - after if place < len(self.moments) else None

    def pause(self, after: float, within: float) -> float | None:
        """Seconds of the longest time without a token, of those that begin in the `within` seconds after a moment (or
        before it: then they are counted from there); None if no token came since."""
        first = bisect_right(self.moments, after)
        tokens = [after, *self.moments[first:]]
        return max((end - begin for begin, end in pairwise(tokens) if begin <= after + within), default=None)


@dataclass(eq=False)
class Streams:
    """One place for each prompt; in each a stream follows the one before."""

    prompts: tuple[str, ...]
    max_tokens: int
    models: Models
    services: Services
    current: dict[int, Stream] = field(default_factory=dict)  # by number
    ended: list[Stream] = field(default_factory=list)

    async def undisturbed(self) -> list[Stream]:
        """Each once, all at the same time."""
        return list(await asyncio.gather(*(self._stream(number) for number in range(len(self.prompts)))))

    async def keep_on(self, until: asyncio.Event) -> None:
        """Each again and again, until the event is set and the streams under way then have ended."""
        await asyncio.gather(*(self._again(number, until) for number in range(len(self.prompts))))

    async def _again(self, number: int, until: asyncio.Event) -> None:
        while not until.is_set():
            self.ended.append(await self._stream(number))

    async def _stream(self, number: int) -> Stream:
        stream = self.current[number] = Stream(number)
        assignment = resolve(self._request(number), self.models, targets=len(self.services.targets))
        generation = Generation(assignment, self.services)
        try:
            async with generation:
                async for _ in generation:
                    stream.moments.append(time.monotonic())
        except ServiceError as error:
            stream.error = str(error)
            await asyncio.sleep(1)  # the next one would break as well
        stream.text, stream.figures = generation.text, generation.statistics
        return stream

    def _request(self, number: int) -> GenerationRequest:
        return GenerationRequest(
            self.prompts[number],
            "seeded",
            max_tokens=self.max_tokens,
            seed=SEED,
            choice=number,
            ignore_eos=True,
        )


@asynccontextmanager
async def _services(plan: Plan) -> AsyncIterator[tuple[dict[str, list[Mortal]], Streams, Watch]]:
    """Two targets and a drafter."""
    target = Wanted("target", plan.target.model, 1, plan.target.options)
    drafter = Wanted("drafter", plan.drafter.model, 1, plan.drafter.options)
    async with AsyncExitStack() as stack:
        born = await asyncio.gather(*(Mortal.born(one, stack) for one in (target, target, drafter)))
        mortals = {"target": list(born[:2]), "drafter": list(born[2:])}
        addresses = {role: [one.address for one in ones] for role, ones in mortals.items()}
        async with connect(addresses["target"], addresses["drafter"], needs_drafter=True) as pipeline:
            models = pipeline.models
        watch = await Watch.of(addresses["target"], addresses["drafter"], stack)
        yield mortals, Streams(plan.prompts, plan.tokens, models, watch.services), watch


@dataclass(eq=False)
class Killing:
    """Kills services of one role, one after the other."""

    plan: Plan
    role: str
    mortals: dict[str, list[Mortal]]
    streams: Streams
    watch: Watch
    advance: Callable[[], None]

    def __post_init__(self) -> None:
        self._rng = random.Random(f"{self.plan.seed} {self.role}")

    async def run(self, undisturbed: Sequence[Stream]) -> Outcome:
        """All kills of this role, and what came of the streams meanwhile."""
        self.streams.ended.clear()
        over = asyncio.Event()
        running = asyncio.create_task(self.streams.keep_on(over))
        try:
            hit = [await self._kill() for _ in range(self.plan.times)]
            over.set()
            await running
        finally:
            running.cancel()
        killed = [
            Killed(stream.number, stream.next_token(at), stream.pause(at, seconds))
            for at, seconds, streams in hit
            for stream in streams
        ]
        return Outcome(self.role, self.plan.times, verdict_of(self.streams.ended, undisturbed), tuple(killed))

    async def _kill(self) -> tuple[float, float, list[Stream]]:
        """One kill: when, seconds until the service was back, and the streams that had sessions there."""
        await asyncio.sleep(self._rng.uniform(*self.plan.quiet))
        ones = self.mortals[self.role]
        place = await self._victim(ones)
        streams = [self.streams.current[number] for number in set(self.watch.ports[ones[place].address].live)]
        at = ones[place].kill()
        ones[place] = await ones[place].back()
        self.advance()
        return at, time.monotonic() - at, streams

    async def _victim(self, ones: Sequence[Mortal]) -> int:
        """One that has sessions; there is one soon."""
        while True:
            used = [place for place, one in enumerate(ones) if self.watch.ports[one.address].live]
            if used:
                return self._rng.choice(used)
            await asyncio.sleep(0.01)


def _free_port() -> int:
    """One that nobody listens on, and that no outgoing connection takes while its service is away."""
    for port in random.sample(range(FIRST_PORT, LAST_PORT), 100):
        with socket.socket() as bound:
            try:
                bound.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise CommandFailed(f"all ports tried between {FIRST_PORT} and {LAST_PORT} are taken")


def _row(outcome: Outcome) -> tuple[str, ...]:
    verdict = outcome.verdict
    times = [outcome.seconds(lambda one: one.next_token), outcome.seconds(lambda one: one.pause)]
    shown = [f"{figure:.2f}" for seconds in times for figure in (median(seconds or [0.0]), max(seconds, default=0.0))]
    counts = (outcome.kills, verdict.streams, verdict.broken, verdict.differ, len(outcome.killed))
    return (outcome.role, *map(str, counts), *shown)


# `crossdraft bench cuts`: links that drop every packet for a while, and when streams go on.
#
# Nobody is told: no socket is closed. The services are on hosts of an emulated network, a link to each.

TARGETS, DRAFTER = ("target 1", "target 2"), "drafter"  # hosts
BOUND = 2.0  # seconds within which a stream should go on
CUTS_HEADINGS = (
    *("cut", "times", "streams", "broken", "texts that differ", "sessions cut off"),
    *("without a token since", "median, s", "worst, s", f"within {BOUND:g} s"),
)


@dataclass(frozen=True)
class CutsPlan:
    """What is measured."""

    target: Served
    drafter: Served
    delay_ms: float  # of each link, one way
    prompts: tuple[str, ...]
    tokens: int  # of each stream
    times: int  # that each link is cut
    seconds: tuple[float, float]  # that it stays cut, and that it is whole between two cuts
    seed: int  # of when it is cut: up to a second later, drawn evenly


@dataclass(frozen=True)
class Case:
    """Which link is cut, and from when on a stream has to go on."""

    name: str
    role: str
    targets: tuple[str, ...]  # hosts
    healed: bool  # it can go on only when the link is whole again


CASES = (
    Case("the drafter", "drafter", TARGETS[:1], healed=False),
    Case("one of two targets", "target", TARGETS, healed=False),
    Case("the only target", "target", TARGETS[:1], healed=True),
)


@dataclass(frozen=True)
class CutsOutcome:
    """All cuts of one case."""

    case: Case
    cuts: int
    verdict: Verdict
    seconds: tuple[float, ...]  # of each session that was cut off: the longest time without a token


def cuts_measure(plan: CutsPlan, json_path: Path | None, markdown_path: Path | None) -> None:
    """Cuts each link; a table in Markdown on stdout, and files if paths are given.

    Raises:
        Misused: a value is out of its range.
        CommandFailed: a service does not start, or there can be no emulated hosts here.
    """
    for path in (json_path, markdown_path):
        if path is not None:
            check_output(path)
    if not plan.prompts:
        raise Misused("there are no prompts")
    cut, whole = plan.seconds
    if not (cut > 0 and whole >= 0):
        raise Misused(f"--seconds takes a time above 0 and one of 0 or more, got {cut:g} {whole:g}")
    if not 0 <= plan.delay_ms <= LONGEST_DELAY:
        raise Misused(f"--delay-ms must be between 0 and {LONGEST_DELAY}, got {plan.delay_ms:g}")
    run_to_end(_cuts_measure(plan, json_path, markdown_path), STARTS_PROCESSES)


async def _cuts_measure(plan: CutsPlan, json_path: Path | None, markdown_path: Path | None) -> None:
    outcomes = []
    async with _distant(plan) as (links, addresses):
        with counted(plan.times * len(CASES), "cuts") as advance:
            for case in CASES:
                async with AsyncExitStack() as stack:
                    targets, drafters = [addresses[name] for name in case.targets], [addresses[DRAFTER]]
                    async with connect(targets, drafters, needs_drafter=True) as pipeline:
                        models = pipeline.models
                    watch = await Watch.of(targets, drafters, stack)
                    streams = Streams(plan.prompts, plan.tokens, models, watch.services)
                    outcomes.append(await Cutting(plan, case, links, addresses, streams, watch, advance).run())
    if json_path is not None:
        shown = asdict(replace(plan, prompts=())) | {"prompts": len(plan.prompts)}
        write_json(json_path, {"plan": shown, "outcomes": [asdict(outcome) for outcome in outcomes]})
    faults = [fault for outcome in outcomes for fault in outcome.verdict.faults]
    report = markdown(CUTS_HEADINGS, [_cuts_row(outcome) for outcome in outcomes]) + "".join(
        f"\n{fault}\n" for fault in faults
    )
    if markdown_path is not None:
        write_text(markdown_path, report)
    print(report, end="")


@asynccontextmanager
async def _distant(plan: CutsPlan) -> AsyncIterator[tuple[Mapping[str, Link], dict[str, str]]]:
    """Links and addresses of the services, each on its host."""
    async with AsyncExitStack() as stack:
        try:
            links = await stack.enter_async_context(hosts((*TARGETS, DRAFTER)))
        except NotAllowed as error:
            raise CommandFailed(f"there can be no emulated hosts here: {error}") from error
        wanted = []
        for name, link in links.items():
            await link.delay(plan.delay_ms)
            served, role = (plan.drafter, "drafter") if name == DRAFTER else (plan.target, "target")
            more = (*served.options, "--host", link.place.listen)
            wanted.append(Wanted(role, served.model, 1, more, link.place.prefix))
        found = await stack.enter_async_context(running(wanted))
        yield links, {name: one.address for name, one in zip(links, found, strict=True)}


@dataclass(eq=False)
class Cutting:
    """Cuts one link, again and again."""

    plan: CutsPlan
    case: Case
    links: Mapping[str, Link]
    addresses: Mapping[str, str]  # by host
    streams: Streams
    watch: Watch
    advance: Callable[[], None]

    async def run(self) -> CutsOutcome:
        """All cuts of the case, and what came of the streams meanwhile."""
        undisturbed = await self.streams.undisturbed()
        checked(undisturbed)
        rng = random.Random(f"{self.plan.seed} {self.case.name}")
        over = asyncio.Event()
        streaming = asyncio.create_task(self.streams.keep_on(over))
        try:
            found = [await self._cut(rng.random()) for _ in range(self.plan.times)]
            over.set()
            await streaming
        finally:
            streaming.cancel()
        pauses = [stream.pause(since, within) for since, within, streams in found for stream in streams]
        seconds = tuple(pause for pause in pauses if pause is not None)
        return CutsOutcome(self.case, self.plan.times, verdict_of(self.streams.ended, undisturbed), seconds)

    async def _cut(self, later: float) -> tuple[float, float, list[Stream]]:
        """One cut, healed: since when pauses count, how long they may begin after that, and the streams cut off."""
        hold, rest = self.plan.seconds
        await asyncio.sleep(rest + later)
        host = await self._used()
        live = set(self.watch.ports[self.addresses[host]].live)
        streams = [self.streams.current[number] for number in live]
        await self.links[host].cut()
        since = time.monotonic()
        await asyncio.sleep(hold)
        if self.case.healed:
            since = time.monotonic()
        await self.links[host].heal()
        self.advance()
        return since, 0.0 if self.case.healed else hold, streams

    async def _used(self) -> str:
        """The host to cut off: one that has sessions; there is one soon."""
        hosts = (DRAFTER,) if self.case.role == "drafter" else self.case.targets
        while True:
            for host in hosts:
                if self.watch.ports[self.addresses[host]].live:
                    return host
            await asyncio.sleep(0.01)


def _cuts_row(outcome: CutsOutcome) -> tuple[str, ...]:
    verdict, seconds = outcome.verdict, outcome.seconds or (0.0,)
    counts = (outcome.cuts, verdict.streams, verdict.broken, verdict.differ, len(outcome.seconds))
    soon = sum(second <= BOUND for second in outcome.seconds)
    return (
        outcome.case.name,
        *map(str, counts),
        "the healing" if outcome.case.healed else "the cut",
        *(f"{median(seconds):.2f}", f"{max(seconds):.2f}", f"{soon} of {len(outcome.seconds)}"),
    )


def checked(undisturbed: Sequence[Stream]) -> float:
    """Seconds between tokens, the median; raises CommandFailed if a stream broke though nothing happened."""
    for one in undisturbed:
        if one.error:
            raise CommandFailed(f"a stream broke before anything was done to the services: {one.error}")
    return median(end - begin for one in undisturbed for begin, end in pairwise(one.moments))


def verdict_of(ended: Sequence[Stream], undisturbed: Sequence[Stream]) -> Verdict:
    """Compares each with the undisturbed stream of its prompt."""
    broken = [one for one in ended if one.error]
    differ = [one for one in ended if not one.error and one.text != undisturbed[one.number].text]
    faults = [f"stream {one.number}: {one.error}" for one in broken]
    faults += [f"stream {one.number}: {_difference(one.text, undisturbed[one.number].text)}" for one in differ]
    return Verdict(len(ended), len(broken), len(differ), tuple(faults[:10]))


def _difference(text: str, wanted: str) -> str:
    same = next((place for place, (one, other) in enumerate(zip(text, wanted, strict=False)) if one != other), None)
    place = min(len(text), len(wanted)) if same is None else same
    return f"at character {place} {text[place : place + 20]!r} instead of {wanted[place : place + 20]!r}"


# `crossdraft bench never-slower`: drafters that are of no use, and what they cost.
#
# Each prompt is continued without a drafter and with a bad one, in turns, with a new connection each time. What counts
# is the speed with the drafter as a share of the speed without.

SLOW_MS = 500.0  # of a step of the drafter that is slow
KILLED_AFTER = 0.25  # of the output, when the drafter dies
NEVER_SLOWER_HEADINGS = ("drafter", "T", "runs", "tokens/s without", "with", "ratio, median [95 %]", "accepted", "lost")


@dataclass(frozen=True)
class NeverSlowerPlan:
    """What is measured."""

    target: Served
    drafter: Served  # what the bad ones are made of
    temperatures: tuple[float, ...]
    method: str | None
    prompts: tuple[str, ...]
    tokens: int

    def request(self, temperature: float, number: int) -> GenerationRequest:
        """As it is asked for by default, and always this long. Raises ValueError."""
        task = Task(self.prompts, self.method, temperature, self.tokens)
        return replace(task.request(GOVERNED, number), ignore_eos=True)


@dataclass(frozen=True)
class Bad:
    """A bad drafter for the time of one generation."""

    address: str
    mortal: int | None = None  # a process to kill in mid-stream; None: it is left alone


Kind = Callable[[NeverSlowerPlan], AbstractAsyncContextManager[Bad]]


@asynccontextmanager
async def running_badly(served: Served) -> AsyncIterator[Bad]:
    """One that is there until the end."""
    async with drafter_service(served, distant=False) as drafter:
        yield Bad(drafter.address)


def slow(plan: NeverSlowerPlan) -> AbstractAsyncContextManager[Bad]:
    """One that knows as much as a good one, and takes half a second for each answer."""
    return running_badly(replace(plan.drafter, pace=f"{SLOW_MS:g},0"))


@asynccontextmanager
async def dead(plan: NeverSlowerPlan) -> AsyncIterator[Bad]:
    """An address where nobody listens: the port is bound, so that nobody else takes it."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield Bad(f"127.0.0.1:{bound.getsockname()[1]}")


@asynccontextmanager
async def dying(plan: NeverSlowerPlan) -> AsyncIterator[Bad]:
    """A good one that is killed in mid-stream."""
    async with drafter_service(plan.drafter, distant=False) as drafter:
        yield Bad(drafter.address, drafter.process_id)


@dataclass(frozen=True)
class NeverSlowerVerdict:
    """What one kind of bad drafter costs."""

    drafter: str
    temperature: float
    without: float  # tokens a second
    with_it: float  # likewise
    ratio: Ratio  # of the speeds, the median over prompts
    ratios: tuple[float, ...]  # of each prompt
    accepted: int  # tokens that agreed with its drafts
    lost: int  # times that it was lost or given up


def never_slower_measure(plan: NeverSlowerPlan, json_path: Path | None) -> None:
    """Measures all kinds; a table in Markdown on stdout, and JSON if a path is given.

    Raises:
        Misused: a value is out of its range.
        CommandFailed: the target does not start or fails.
    """
    if json_path is not None:
        check_output(json_path)
    if not plan.prompts:
        raise Misused("there are no prompts")
    with checked_options():
        for temperature in plan.temperatures:
            plan.request(temperature, 0)
    run_to_end(_never_slower_measure(plan, json_path))


async def _never_slower_measure(plan: NeverSlowerPlan, json_path: Path | None) -> None:
    verdicts = []
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    with TemporaryDirectory() as folder, Progress(*columns, console=Console(stderr=True)) as progress:
        kinds = _kinds(plan, Path(folder))
        task = progress.add_task("", total=len(kinds) * len(plan.temperatures) * len(plan.prompts))
        async with target_service(plan.target) as target:
            for temperature in plan.temperatures:
                for name, kind in kinds.items():
                    progress.update(task, description=name)
                    comparison = Comparison(plan, temperature, target.address, kind, lambda: progress.advance(task))
                    verdicts.append(_verdict(name, temperature, *await comparison.run()))
    if json_path is not None:
        shown = asdict(replace(plan, prompts=())) | {"prompts": len(plan.prompts)}
        write_json(json_path, {"plan": shown, "verdicts": [asdict(verdict) for verdict in verdicts]})
    print(markdown(NEVER_SLOWER_HEADINGS, [_never_slower_row(verdict) for verdict in verdicts]), end="")


def _kinds(plan: NeverSlowerPlan, folder: Path) -> dict[str, Kind]:
    """By name; raises CommandFailed if a drafter that has learnt nothing cannot be made."""
    try:
        write_random(plan.drafter.model, folder)
    except (ModelLoadError, OSError) as error:
        raise CommandFailed(f"a drafter with random weights cannot be made: {error}") from error
    random = replace(plan.drafter, model=str(folder))
    return {
        "random weights": lambda plan: running_badly(random),
        f"{SLOW_MS:g} ms an answer": slow,
        "dead from the start": dead,
        "killed in mid-stream": dying,
    }


@dataclass(frozen=True, eq=False)
class Comparison:
    """One kind of bad drafter beside none."""

    plan: NeverSlowerPlan
    temperature: float
    target: str
    kind: Kind
    advance: Callable[[], None]

    async def run(self) -> tuple[list[Outcome_of_overlap], list[Outcome_of_overlap]]:
        """Without it, and with it; one of each for each prompt. The first one warms up, and does not count."""
        found: tuple[list[Outcome_of_overlap], list[Outcome_of_overlap]] = ([], [])
        await self._generate(0, None)
        for number in range(len(self.plan.prompts)):
            async with self.kind(self.plan) as bad:
                for place in rotated(2, number):
                    found[place].append(await self._generate(number, bad if place else None))
            self.advance()
        return found

    async def _generate(self, number: int, bad: Bad | None) -> Outcome_of_overlap:
        request = self.plan.request(self.temperature, number)
        kill_at = round(KILLED_AFTER * request.max_tokens)
        tokens = 0
        async with (
            connect(self.target, None if bad is None else bad.address) as pipeline,
            pipeline.run(request) as generation,
        ):
            async for _ in generation:
                tokens += 1
                if tokens == kill_at and bad is not None and bad.mortal is not None:
                    os.kill(bad.mortal, signal.SIGKILL)
            figures = generation.statistics
        if figures is None:
            raise CommandFailed("a generation ended without its statistics")
        return Outcome_of_overlap(figures.tokens, figures.seconds, figures)


def _verdict(
    name: str, temperature: float, without: Sequence[Outcome_of_overlap], with_it: Sequence[Outcome_of_overlap]
) -> NeverSlowerVerdict:
    figures = [run.figures for run in with_it if run.figures is not None]
    return NeverSlowerVerdict(
        name,
        temperature,
        speed_of(without),
        speed_of(with_it),
        median_ratio(with_it, without),
        tuple(one.speed / other.speed for one, other in zip(with_it, without, strict=True)),
        sum(one.accepted for one in figures),
        sum(one.drafters_lost for one in figures),
    )


def _never_slower_row(verdict: NeverSlowerVerdict) -> tuple[str, ...]:
    ratio = verdict.ratio
    return (
        verdict.drafter,
        f"{verdict.temperature:g}",
        str(len(verdict.ratios)),
        f"{verdict.without:.1f}",
        f"{verdict.with_it:.1f}",
        f"{ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]",
        str(verdict.accepted),
        str(verdict.lost),
    )

"""What becomes of outputs when services are killed (`crossdraft bench kills`), or links drop every packet (`cuts`).

Seeded outputs are generated over and over, all at once, and compared with undisturbed ones.
"""

import asyncio
import random
import time
from bisect import bisect_right
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from statistics import median
from typing import ClassVar, TypeVar

from crossdraft.cli.measuring import SEED, Columns, Table
from crossdraft.cli.processes import Wanted, running
from crossdraft.cli.running import STARTS_PROCESSES, CommandFailed, ProgressCounter, Run, UsageError
from crossdraft.client import Generation, GenerationRequest, Pipeline, connect
from crossdraft.lab.commands import CutsPlan, FaultsPlan, KillsPlan
from crossdraft.lab.emulation import EmulatedHost, NoEmulationError, hosts
from crossdraft.lab.services import NO_DEFAULTS, Killable, Served
from crossdraft.lab.workload import Prompted
from crossdraft.rpc.errors import ServiceError
from crossdraft.text.letters import common_length

FaultsPlanned = TypeVar("FaultsPlanned", bound=FaultsPlan)

# Seeded outputs that are generated over and over, all at once.


@dataclass(eq=False)
class OutputStream:
    """One output on its way."""

    number: int  # of its prompt
    moments: list[float] = field(default_factory=list)  # of its tokens, in seconds of the monotonic clock
    text: str = ""  # once it has ended
    error: str = ""  # why it broke; empty: it did not
    generation: Generation | None = None  # once it has begun

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


@dataclass(frozen=True, eq=False)
class Hit:
    """A fault, and the streams that had sessions at the service which it struck."""

    at: float  # in seconds of the monotonic clock
    within: float  # seconds in which pauses that count begin
    streams: Sequence[OutputStream]


@dataclass(eq=False)
class Streams:
    """One place for each prompt; in each a stream follows the one before."""

    prompts: tuple[str, ...]
    max_tokens: int
    pipeline: Pipeline
    current: dict[int, OutputStream] = field(default_factory=dict)  # by number
    ended: list[OutputStream] = field(default_factory=list)

    async def undisturbed(self) -> list[OutputStream]:
        """Each once, all at the same time."""
        return list(await asyncio.gather(*(self._stream(number) for number in range(len(self.prompts)))))

    async def disturbed(self, times: int, strike: Callable[[], Awaitable[Hit]], advance: ProgressCounter) -> list[Hit]:
        """Each again and again while faults happen, one after the other; `ended` then has the streams."""
        self.ended.clear()
        over = asyncio.Event()
        generating = asyncio.gather(*(self._again(number, over) for number in range(len(self.prompts))))
        try:
            hits = []
            for _ in range(times):
                hits.append(await strike())
                advance()
            over.set()
            await generating
        finally:
            generating.cancel()
        return hits

    def at(self, address: str) -> list[OutputStream]:
        """Those that have an open session at an address."""
        return [one for one in self.current.values() if one.generation and address in one.generation.addresses]

    async def in_use(self, addresses: Iterable[str]) -> list[str]:
        """Those of the addresses where streams have sessions; there is one soon."""
        while True:
            used = [address for address in addresses if self.at(address)]
            if used:
                return used
            await asyncio.sleep(0.01)

    async def _again(self, number: int, over: asyncio.Event) -> None:
        while not over.is_set():
            self.ended.append(await self._stream(number))

    async def _stream(self, number: int) -> OutputStream:
        stream = self.current[number] = OutputStream(number)
        generation = stream.generation = self.pipeline.run(self._request(number))
        try:
            async with generation:
                async for _ in generation:
                    stream.moments.append(time.monotonic())
        except ServiceError as error:
            stream.error = str(error)
            await asyncio.sleep(1)  # the next one would break as well
        stream.text = generation.text
        return stream

    def _request(self, number: int) -> GenerationRequest:
        return GenerationRequest(
            self.prompts[number], method="seeded", max_tokens=self.max_tokens, seed=SEED, choice=number, ignore_eos=True
        )


def check_undisturbed(undisturbed: Sequence[OutputStream]) -> float:
    """Seconds between tokens, the median; raises CommandFailed if a stream broke though nothing happened."""
    for one in undisturbed:
        if one.error:
            raise CommandFailed(f"a stream broke before anything was done to the services: {one.error}")
    return median(end - begin for one in undisturbed for begin, end in pairwise(one.moments))


def verdict_of(ended: Sequence[OutputStream], undisturbed: Sequence[OutputStream]) -> tuple[int, int, tuple[str, ...]]:
    """Compares each with the undisturbed stream of its prompt: `broken`, `differ` and `faults` of Outcomes."""
    broken = [one for one in ended if one.error]
    differ = [one for one in ended if not one.error and one.text != undisturbed[one.number].text]
    faults = [f"stream {one.number}: {one.error}" for one in broken]
    faults += [f"stream {one.number}: {_difference(one.text, undisturbed[one.number].text)}" for one in differ]
    return len(broken), len(differ), tuple(faults[:10])


def _difference(text: str, wanted: str) -> str:
    place = common_length(text, wanted)
    return f"at character {place} {text[place : place + 20]!r} instead of {wanted[place : place + 20]!r}"


# Kills and cuts.


@dataclass(frozen=True)
class Struck:
    """What a fault did to one stream that had a session there."""

    number: int  # of the stream's prompt
    next_token: float | None  # seconds from the fault to the next token; None: it had ended
    pause: float | None  # seconds of the longest pause that counts; None: no token came since


@dataclass(frozen=True)
class Outcomes:
    """All faults of one kind."""

    name: str  # what was struck
    times: int
    streams: int
    broken: int  # streams that ended with an error
    differ: int  # streams that ended with another text than the undisturbed ones
    faults: tuple[str, ...]  # what was wrong with the first few
    gap: float  # seconds between the tokens of undisturbed streams, the median
    struck: tuple[Struck, ...]
    healed: bool = False  # pauses count from the healing of a link: a stream could not go on before

    @property
    def next_tokens(self) -> list[float]:
        """Seconds, where a token came."""
        return [one.next_token for one in self.struck if one.next_token is not None]

    @property
    def pauses(self) -> list[float]:
        """Seconds, where a token came."""
        return [one.pause for one in self.struck if one.pause is not None]


class Disturbance(Prompted[FaultsPlanned, Outcomes]):
    """Faults while seeded streams run."""

    runner: ClassVar[Run] = staticmethod(STARTS_PROCESSES)

    def __init__(self, plan: FaultsPlanned) -> None:
        super().__init__(plan)
        self.target = Served(plan.target, plan.pace_target, engine=plan.engine)
        self.drafter = Served(plan.drafter, plan.pace_drafter, engine=plan.engine)

    async def streams(self, targets: Sequence[str], drafter: str, stack: AsyncExitStack) -> Streams:
        """Streams with these addresses."""
        pipeline = await stack.enter_async_context(connect(targets, [drafter], needs_drafter=True))
        return Streams(self.prompts, self.plan.tokens, pipeline)

    async def outcomes(
        self,
        name: str,
        streams: Streams,
        undisturbed: Sequence[OutputStream],
        strike: Callable[[], Awaitable[Hit]],
        advance: ProgressCounter,
        healed: bool = False,
    ) -> Outcomes:
        """Of faults of one kind, one after the other; raises CommandFailed if a stream broke before."""
        gap = check_undisturbed(undisturbed)
        hits = await streams.disturbed(self.plan.times, strike, advance)
        struck = tuple(
            Struck(stream.number, stream.next_token(hit.at), stream.pause(hit.at, hit.within))
            for hit in hits
            for stream in hit.streams
        )
        verdict = verdict_of(streams.ended, undisturbed)
        return Outcomes(name, self.plan.times, len(streams.ended), *verdict, gap, struck, healed)

    def report(self, results: Sequence[Outcomes]) -> Iterator[Table | str]:
        yield from super().report(results)
        yield f"Undisturbed, {results[0].gap * 1000:.0f} ms between tokens (median). Times in seconds."
        yield from (fault for one in results for fault in one.faults)


def _median(seconds: Sequence[float]) -> str:
    return f"{median(seconds or (0.0,)):.2f}"


def _worst(seconds: Sequence[float]) -> str:
    return f"{max(seconds, default=0.0):.2f}"


VERDICT: Columns = {
    "times": lambda one: one.times,
    "streams": lambda one: one.streams,
    "broken": lambda one: one.broken,
    "texts that differ": lambda one: one.differ,
}


class Kills(Disturbance[KillsPlan]):
    """`crossdraft bench kills`: the drafter, then one of two targets, each comes back on its port."""

    unit: ClassVar[str] = "kills"
    columns: ClassVar[Columns] = {
        "killed": lambda one: one.name,
        **VERDICT,
        "sessions lost": lambda one: len(one.struck),
        "next token: median": lambda one: _median(one.next_tokens),
        "worst": lambda one: _worst(one.next_tokens),
        "longest pause until it was back: median": lambda one: _median(one.pauses),
        "worst pause": lambda one: _worst(one.pauses),
    }

    @property
    def total(self) -> int:
        return 2 * self.plan.times

    def check(self) -> None:
        super().check()
        if not 0 <= self.plan.quiet[0] <= self.plan.quiet[1]:
            quiet = " ".join(f"{seconds:g}" for seconds in self.plan.quiet)
            raise UsageError(f"--quiet takes two times of 0 or more, the shorter one first, got {quiet}")

    async def measure(self, advance: ProgressCounter) -> AsyncGenerator[Outcomes, None]:
        target = Wanted("target", self.target.model, 1, (*NO_DEFAULTS, *self.target.options))
        drafter = Wanted("drafter", self.drafter.model, 1, self.drafter.options)
        async with AsyncExitStack() as stack:
            started = await asyncio.gather(*(Killable.started(one, stack) for one in (target, target, drafter)))
            services = {one.address: one for one in started}
            *targets, drafter_address = services
            streams = await self.streams(targets, drafter_address, stack)
            undisturbed = await streams.undisturbed()
            for role, addresses in (("drafter", [drafter_address]), ("target", targets)):
                rng = random.Random(f"{self.plan.seed} {role}")
                kill = partial(self._kill, [services[address] for address in addresses], streams, rng)
                yield await self.outcomes(role, streams, undisturbed, kill, advance)

    async def _kill(self, services: list[Killable], streams: Streams, rng: random.Random) -> Hit:
        """Kills one that has sessions, and starts it again."""
        await asyncio.sleep(rng.uniform(*self.plan.quiet))
        by_address = {one.address: one for one in services}
        victim = by_address[rng.choice(await streams.in_use(by_address))]
        struck = streams.at(victim.address)
        at = victim.kill()
        services[services.index(victim)] = await victim.restarted()
        return Hit(at, time.monotonic() - at, struck)


TARGETS, DRAFTER = ("target 1", "target 2"), "drafter"  # hosts
BOUND = 2.0  # seconds within which a stream should go on


@dataclass(frozen=True)
class CutLink:
    """Which link is cut, and from when on a stream has to go on."""

    name: str
    targets: tuple[str, ...]  # hosts
    cut: tuple[str, ...]  # hosts, of which one is cut off
    healed: bool  # a stream can go on only when the link is whole again


CASES = (
    CutLink("the drafter", TARGETS[:1], (DRAFTER,), healed=False),
    CutLink("one of two targets", TARGETS, TARGETS, healed=False),
    CutLink("the only target", TARGETS[:1], TARGETS[:1], healed=True),
)


def _soon(one: Outcomes) -> str:
    return f"{sum(second <= BOUND for second in one.pauses)} of {len(one.pauses)}"


class Cuts(Disturbance[CutsPlan]):
    """`crossdraft bench cuts`: links that drop every packet for a while.

    No socket is closed, so that nobody is told. The services are on hosts of an emulated network, a link to each.
    """

    unit: ClassVar[str] = "cuts"
    columns: ClassVar[Columns] = {
        "cut": lambda one: one.name,
        **VERDICT,
        "sessions cut off": lambda one: len(one.pauses),
        "without a token since": lambda one: "the healing" if one.healed else "the cut",
        "median, s": lambda one: _median(one.pauses),
        "worst, s": lambda one: _worst(one.pauses),
        f"within {BOUND:g} s": _soon,
    }

    @property
    def total(self) -> int:
        return self.plan.times * len(CASES)

    def check(self) -> None:
        super().check()
        cut, whole = self.plan.seconds
        if not (cut > 0 and whole >= 0):
            raise UsageError(f"--seconds takes a time above 0 and one of 0 or more, got {cut:g} {whole:g}")

    async def measure(self, advance: ProgressCounter) -> AsyncGenerator[Outcomes, None]:
        async with self._services() as (links, addresses):
            for case in CASES:
                async with AsyncExitStack() as stack:
                    targets = [addresses[host] for host in case.targets]
                    streams = await self.streams(targets, addresses[DRAFTER], stack)
                    undisturbed = await streams.undisturbed()
                    by_address = {addresses[host]: links[host] for host in case.cut}
                    rng = random.Random(f"{self.plan.seed} {case.name}")
                    cut = partial(self._cut, case, streams, by_address, rng)
                    yield await self.outcomes(case.name, streams, undisturbed, cut, advance, case.healed)

    async def _cut(
        self, case: CutLink, streams: Streams, by_address: Mapping[str, EmulatedHost], rng: random.Random
    ) -> Hit:
        """One cut, healed again; pauses count from the cut, or from the healing where only that ends them."""
        hold, rest = self.plan.seconds
        await asyncio.sleep(rest + rng.random())
        address = (await streams.in_use(by_address))[0]
        struck = streams.at(address)
        await by_address[address].cut()
        at = time.monotonic()
        await asyncio.sleep(hold)
        if case.healed:
            at = time.monotonic()
        await by_address[address].heal()
        return Hit(at, 0.0 if case.healed else hold, struck)

    @asynccontextmanager
    async def _services(self) -> AsyncIterator[tuple[Mapping[str, EmulatedHost], dict[str, str]]]:
        """Links and addresses of the services, by host."""
        async with AsyncExitStack() as stack:
            try:
                links = await stack.enter_async_context(hosts((*TARGETS, DRAFTER)))
            except NoEmulationError as error:
                raise CommandFailed(f"there can be no emulated hosts here: {error}") from error
            wanted = []
            for name, link in links.items():
                await link.delay(self.plan.delay_ms)
                served, role = (self.drafter, "drafter") if name == DRAFTER else (self.target, "target")
                own = () if role == "drafter" else NO_DEFAULTS
                more = (*own, *served.options, "--host", link.place.listen)
                wanted.append(Wanted(role, served.model, 1, more, link.place.prefix))
            found = await stack.enter_async_context(running(wanted))
            yield links, {name: one.address for name, one in zip(links, found, strict=True)}

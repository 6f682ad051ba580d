"""`crossdraft bench cuts`: links that drop every packet for a while, and when streams go on.

Nobody is told: no socket is closed. The services are on hosts of an emulated network, a link to each.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

from crossdraft.cli.benching import write_json, write_text
from crossdraft.cli.failures import CommandFailed, Misused
from crossdraft.cli.outputs import check_output
from crossdraft.cli.overlap_report import markdown
from crossdraft.cli.overlap_stage import LONGEST_DELAY, Served
from crossdraft.cli.processes import Wanted, running
from crossdraft.cli.progress import counted
from crossdraft.cli.running import STARTS_PROCESSES, run_to_end
from crossdraft.cli.streams import Stream, Streams, Verdict, checked, verdict_of
from crossdraft.cli.watched import Watch
from crossdraft.emulation import Link, NotAllowed, hosts
from crossdraft.pipeline import connect

TARGETS, DRAFTER = ("target 1", "target 2"), "drafter"  # hosts
BOUND = 2.0  # seconds within which a stream should go on
HEADINGS = (
    *("cut", "times", "streams", "broken", "texts that differ", "sessions cut off"),
    *("without a token since", "median, s", "worst, s", f"within {BOUND:g} s"),
)


@dataclass(frozen=True)
class Plan:
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
class Outcome:
    """All cuts of one case."""

    case: Case
    cuts: int
    verdict: Verdict
    seconds: tuple[float, ...]  # of each session that was cut off: the longest time without a token


def measure(plan: Plan, json_path: Path | None, markdown_path: Path | None) -> None:
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
    run_to_end(_measure(plan, json_path, markdown_path), STARTS_PROCESSES)


async def _measure(plan: Plan, json_path: Path | None, markdown_path: Path | None) -> None:
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
    report = markdown(HEADINGS, [_row(outcome) for outcome in outcomes]) + "".join(f"\n{fault}\n" for fault in faults)
    if markdown_path is not None:
        write_text(markdown_path, report)
    print(report, end="")


@asynccontextmanager
async def _distant(plan: Plan) -> AsyncIterator[tuple[Mapping[str, Link], dict[str, str]]]:
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

    plan: Plan
    case: Case
    links: Mapping[str, Link]
    addresses: Mapping[str, str]  # by host
    streams: Streams
    watch: Watch
    advance: Callable[[], None]

    async def run(self) -> Outcome:
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
        return Outcome(self.case, self.plan.times, verdict_of(self.streams.ended, undisturbed), seconds)

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


def _row(outcome: Outcome) -> tuple[str, ...]:
    verdict, seconds = outcome.verdict, outcome.seconds or (0.0,)
    counts = (outcome.cuts, verdict.streams, verdict.broken, verdict.differ, len(outcome.seconds))
    soon = sum(second <= BOUND for second in outcome.seconds)
    return (
        outcome.case.name,
        *map(str, counts),
        "the healing" if outcome.case.healed else "the cut",
        *(f"{median(seconds):.2f}", f"{max(seconds):.2f}", f"{soon} of {len(outcome.seconds)}"),
    )

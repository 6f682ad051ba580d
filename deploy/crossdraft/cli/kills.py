"""`crossdraft bench kills`: services that are killed and started again while streams run, and what becomes of these."""

import asyncio
import os
import random
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

from crossdraft.cli.benching import write_json, write_text
from crossdraft.cli.failures import CommandFailed, Misused
from crossdraft.cli.outputs import check_output
from crossdraft.cli.overlap_report import markdown
from crossdraft.cli.overlap_stage import Served
from crossdraft.cli.processes import Running, Wanted, running
from crossdraft.cli.progress import counted
from crossdraft.cli.running import STARTS_PROCESSES, run_to_end
from crossdraft.cli.streams import Stream, Streams, Verdict, checked, verdict_of
from crossdraft.cli.watched import Watch
from crossdraft.pipeline import connect

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

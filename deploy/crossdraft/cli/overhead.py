"""`crossdraft bench overhead`: what the orchestrator itself costs in a round, and how much it says for a token.

The services are processes of their own that answer from a made-up language over vocabularies of real size; sessions,
messages and gRPC are real. All CPU time of this process counts, gRPC's threads included.
"""

import cProfile
import pstats
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import asdict, dataclass
from pathlib import Path

from crossdraft.cli.benching import SEED, write_json
from crossdraft.cli.failures import Misused
from crossdraft.cli.imagined import Imagined
from crossdraft.cli.outputs import check_output
from crossdraft.cli.overlap_report import markdown
from crossdraft.cli.processes import running
from crossdraft.cli.progress import counted
from crossdraft.cli.running import checked_options, run_to_end
from crossdraft.pipeline import GenerationRequest, Overlap, Pipeline, Statistics, connect
from crossdraft.rpc.clients import Patience
from crossdraft.verification.methods import Method, method_named

MILLISECONDS = 1000.0
PATIENCE = Patience(describe_seconds=120.0)  # two large vocabularies are read meanwhile
PROMPT = "of all "
WARM_UP = 32  # tokens
SHOWN = 25  # functions of a profile
HEADINGS = (
    *("method", "epochs run", "CPU, ms a pass", "in the event loop", "in the session", "CPU, ms a token"),
    *("bytes a token", "target's", "drafter's", "events a pass", "accepted", "tokens/pass", "branches hit"),
)


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    size: int  # ids of each vocabulary
    tokens: int  # of each output
    outputs: int  # of each method, in each way
    pass_ms: float  # that a pass takes
    proposal_ms: float  # that a proposal takes
    k: int  # proposals that a pass waits for
    branches: int  # proposals of each prepared continuation


@dataclass(frozen=True)
class Way:
    """How epochs are run."""

    overlap: bool
    branches: int = 0

    @property
    def label(self) -> str:
        """For a table."""
        branches = f", branches {self.branches}" if self.branches else ""
        return f"{'overlapped' if self.overlap else 'lock-step'}{branches}"

    def request(self, method: Method, plan: Plan, number: int) -> GenerationRequest:
        """One output; raises ValueError."""
        return GenerationRequest(
            PROMPT,
            method.name,
            k=plan.k,
            max_tokens=plan.tokens,
            seed=SEED if method.seedable else None,
            choice=number,
            ignore_eos=True,
            overlap=Overlap.ON if self.overlap else Overlap.OFF,
            branches=self.branches if self.overlap else None,
        )


@dataclass(frozen=True)
class Cost:
    """Of one method in one way."""

    method: str
    way: Way
    cpu_ms: float  # of this process, for a pass
    loop_ms: float  # ... of it in the event loop's thread; the rest is gRPC's own threads
    session_ms: float  # ... in the state machine
    cpu_ms_token: float  # of this process, for an emitted token
    bytes_per_token: float  # serialized, both ways
    target_bytes: float  # ... of them to and from the target
    drafter_bytes: float
    events: float  # that the state machine handled, for a pass
    acceptance: float  # of the proposals that were judged
    tokens_per_pass: float
    branches_hit: float


def measure(names: Sequence[str], plan: Plan, json_path: Path | None, profile: Path | None) -> None:
    """Measures every method in every way; a table on stdout, and files if paths are given.

    A profile is of all generations together, and makes them slower: its figures are not to be compared with others.

    Raises:
        Misused: there is no such method, or it needs a drafter's model, or a value is out of its range.
        CommandFailed: a service does not start or fails.
    """
    for path in (json_path, profile):
        if path is not None:
            check_output(path)
    ways = (Way(False), Way(True), Way(True, plan.branches))
    with checked_options():
        methods = [method_named(name) for name in names]
        for method in methods:
            if method.scores or method.redistributed:
                raise Misused(f"{method.name} needs a drafter's model, and here is none; leave it out")
            for way in ways:
                way.request(method, plan, 0)
    profiler = None if profile is None else cProfile.Profile()
    run_to_end(_measure(methods, ways, plan, json_path, profiler))
    if profiler is not None and profile is not None:
        with profile.open("w", encoding="utf-8") as file:
            pstats.Stats(profiler, stream=file).sort_stats("tottime").print_stats(SHOWN)


async def _measure(
    methods: Sequence[Method],
    ways: Sequence[Way],
    plan: Plan,
    json_path: Path | None,
    profiler: cProfile.Profile | None,
) -> None:
    costs: list[Cost] = []
    with counted(len(methods) * len(ways), "methods and ways") as advance:
        async with aclosing(_costs(methods, ways, plan, profiler)) as found:
            async for cost in found:
                costs.append(cost)
                advance()
    print(markdown(HEADINGS, [_row(cost) for cost in costs]), end="")
    if json_path is not None:
        write_json(json_path, {"plan": asdict(plan), "costs": [asdict(cost) for cost in costs]})


async def _costs(
    methods: Sequence[Method], ways: Sequence[Way], plan: Plan, profiler: cProfile.Profile | None
) -> AsyncGenerator[Cost, None]:
    for method in methods:
        wanted = [
            Imagined(role, "", 1, method=method.name, size=plan.size, milliseconds=milliseconds)
            for role, milliseconds in (("target", plan.pass_ms), ("drafter", plan.proposal_ms))
        ]
        async with AsyncExitStack() as stack:
            target, drafter = await stack.enter_async_context(running(wanted))
            pipeline = await stack.enter_async_context(
                connect(target.address, drafter.address, PATIENCE, needs_drafter=True)
            )
            for way in ways:
                yield await _cost(pipeline, method, way, plan, profiler)


async def _cost(pipeline: Pipeline, method: Method, way: Way, plan: Plan, profiler: cProfile.Profile | None) -> Cost:
    async def generated(number: int, stop: int | None = None) -> Statistics | None:
        count = 0
        async with pipeline.run(way.request(method, plan, number)) as generation:
            async for _ in generation:
                count += 1
                if count == stop:
                    break
        return generation.statistics

    await generated(plan.outputs, WARM_UP)
    if profiler is not None:
        profiler.enable()
    began, loop_began = time.process_time(), time.thread_time()
    found = [await generated(number) for number in range(plan.outputs)]
    seconds, loop = time.process_time() - began, time.thread_time() - loop_began
    if profiler is not None:
        profiler.disable()
    return _cost_of(method, way, seconds, loop, [one for one in found if one is not None])


def _cost_of(method: Method, way: Way, seconds: float, loop: float, figures: Sequence[Statistics]) -> Cost:
    def total(of: Callable[[Statistics], float]) -> float:
        return sum(map(of, figures))

    passes, tokens = total(lambda one: one.passes), total(lambda one: one.tokens)
    return Cost(
        method=method.name,
        way=way,
        cpu_ms=MILLISECONDS * seconds / passes,
        loop_ms=MILLISECONDS * loop / passes,
        session_ms=MILLISECONDS * total(lambda one: one.verification_seconds) / passes,
        cpu_ms_token=MILLISECONDS * seconds / tokens,
        bytes_per_token=total(lambda one: one.bytes_sent + one.bytes_received) / tokens,
        target_bytes=total(lambda one: one.target_bytes) / tokens,
        drafter_bytes=total(lambda one: one.drafter_bytes) / tokens,
        events=total(lambda one: one.events) / passes,
        acceptance=total(lambda one: sum(one.accepted_at)) / max(1.0, total(lambda one: sum(one.judged_at))),
        tokens_per_pass=tokens / passes,
        branches_hit=total(lambda one: one.branches_hit) / max(1.0, total(lambda one: one.branches_tried)),
    )


def _row(cost: Cost) -> tuple[str, ...]:
    return (
        *(cost.method, cost.way.label),
        *(f"{ms:.2f}" for ms in (cost.cpu_ms, cost.loop_ms, cost.session_ms, cost.cpu_ms_token)),
        *(f"{cost.bytes_per_token:,.0f}", f"{cost.target_bytes:,.0f}", f"{cost.drafter_bytes:,.0f}"),
        *(f"{cost.events:.1f}", f"{cost.acceptance:.2f}", f"{cost.tokens_per_pass:.2f}"),
        f"{cost.branches_hit:.0%}" if cost.way.branches else "",
    )

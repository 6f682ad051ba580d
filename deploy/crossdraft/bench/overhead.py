"""What our own code costs beside the models: `crossdraft bench overhead`, `round` and `verification`."""

import cProfile
import pstats
import sys
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import Any, ClassVar

import numpy as np

from crossdraft.bench.harness import SEED, Advance, Benchmark, Columns, finished
from crossdraft.bench.made_up import DISAGREEMENT, InMemory, Language, MadeUp, Noises, tokenization
from crossdraft.bench.services import WatchedPort
from crossdraft.bench.workload import SETTING, Setting, Workload
from crossdraft.client import Generation, GenerationRequest, Overlap, Pipeline, Statistics, connect
from crossdraft.client.driver import Services
from crossdraft.console.processes import running
from crossdraft.console.running import UsageError, check_output, checked_options
from crossdraft.rpc import drafter_codec, target_codec
from crossdraft.rpc.clients import DrafterClient, Patience, TargetClient
from crossdraft.rpc.handlers import DRAFTER, TARGET, Role
from crossdraft.session.assignment import Assignment
from crossdraft.session.events import Event, Replied, Reply, Send
from crossdraft.session.resolution import NODES_BESIDE_THE_DRAFT, Models, requested_method, resolve
from crossdraft.session.session import Session
from crossdraft.speculation.choice import lock_step
from crossdraft.text.letters import NOTHING, Side
from crossdraft.text.pairs import Pair
from crossdraft.text.tokenization import Tokenization
from crossdraft.text.vocabulary import Vocabulary
from crossdraft.types.messages import (
    Draft,
    Drafted,
    NoiseKey,
    OpenDrafter,
    OpenTarget,
    PassDone,
    RowFetched,
    SamplingOptions,
)
from crossdraft.types.rows import Row
from crossdraft.types.statistics import Counts, Kind
from crossdraft.verification.chooser import RandomChooser
from crossdraft.verification.methods import METHODS, Method, method_named

MILLISECONDS = 1000.0


# The orchestrator's CPU time for a pass, and bytes for a token. The services are processes of their own that answer
# from a made-up language over vocabularies of real size; sessions, messages and gRPC are real. All CPU time of this
# process counts, gRPC's threads included.

PATIENCE = Patience(describe_seconds=120.0)  # two large vocabularies are read meanwhile
PROMPT = "of all "
WARM_UP_TOKENS = 32
SHOWN = 25  # functions of a profile


@dataclass(frozen=True)
class Epochs:
    """How epochs are run."""

    overlap: bool
    branches: int = 0  # draft tokens of each prepared continuation

    @property
    def label(self) -> str:
        """For a table."""
        branches = f", branches {self.branches}" if self.branches else ""
        return f"{'overlapped' if self.overlap else 'lock-step'}{branches}"


@dataclass(frozen=True)
class Cost:
    """Of one method with epochs run in one way."""

    method: str
    epochs: Epochs
    cpu_ms: float  # of this process, for a pass
    loop_ms: float  # ... of it in the event loop's thread; the rest is gRPC's own threads
    session_ms: float  # ... in the state machine
    cpu_ms_token: float  # of this process, for an emitted token
    bytes_per_token: float  # serialized, both ways
    target_bytes: float  # ... of them to and from the target
    drafter_bytes: float
    events: float  # that the state machine handled, for a pass
    acceptance: float  # of the draft tokens that were judged
    tokens_per_pass: float
    branches_hit: float


@dataclass(frozen=True)
class Overhead(Benchmark[Cost]):
    """`crossdraft bench overhead`: every method, in lock-step, overlapped, and with branches.

    A profile is of all generations together, and makes them slower: its figures are not to be compared with others.
    """

    methods: tuple[str, ...]
    size: int  # ids of each vocabulary
    tokens: int  # of each output
    outputs: int  # of each method with each kind of epochs
    pass_ms: float  # that a pass takes
    draft_token_ms: float  # that a draft token takes
    k: int  # draft tokens that a pass waits for
    branches: int  # draft tokens of each prepared continuation
    profile: Path | None = None  # where a profile is written

    columns: ClassVar[Columns] = {
        "method": lambda one: one.method,
        "epochs run": lambda one: one.epochs.label,
        "CPU, ms a pass": lambda one: f"{one.cpu_ms:.2f}",
        "in the event loop": lambda one: f"{one.loop_ms:.2f}",
        "in the session": lambda one: f"{one.session_ms:.2f}",
        "CPU, ms a token": lambda one: f"{one.cpu_ms_token:.2f}",
        "bytes a token": lambda one: f"{one.bytes_per_token:,.0f}",
        "target's": lambda one: f"{one.target_bytes:,.0f}",
        "drafter's": lambda one: f"{one.drafter_bytes:,.0f}",
        "events a pass": lambda one: f"{one.events:.1f}",
        "accepted": lambda one: f"{one.acceptance:.2f}",
        "tokens/pass": lambda one: f"{one.tokens_per_pass:.2f}",
        "branches hit": lambda one: f"{one.branches_hit:.0%}" if one.epochs.branches else "",
    }

    @property
    def kinds(self) -> tuple[Epochs, ...]:
        """How epochs are run."""
        return (Epochs(False), Epochs(True), Epochs(True, self.branches))

    @property
    def total(self) -> int:
        return len(self.methods) * len(self.kinds)

    def request(self, method: Method, epochs: Epochs, number: int) -> GenerationRequest:
        """One output; raises ValueError."""
        return GenerationRequest(
            PROMPT,
            method.name,
            num_speculative_tokens=self.k,
            max_tokens=self.tokens,
            seed=SEED if method.seedable else None,
            choice=number,
            ignore_eos=True,
            overlap=Overlap.ON if epochs.overlap else Overlap.OFF,
            branches=epochs.branches if epochs.overlap else None,
        )

    def check(self) -> None:
        if self.profile is not None:
            check_output(self.profile)
        with checked_options():
            for method in map(method_named, self.methods):
                if method.scores or method.redistributed:
                    raise UsageError(f"{method.name} needs a drafter's model, and here is none; leave it out")
                for epochs in self.kinds:
                    requested_method(self.request(method, epochs, 0))

    async def measure(self, advance: Advance) -> AsyncGenerator[Cost, None]:
        profiler = cProfile.Profile()
        for method in map(method_named, self.methods):
            wanted = [
                MadeUp(role, "", 1, method=method.name, size=self.size, milliseconds=milliseconds)
                for role, milliseconds in (("target", self.pass_ms), ("drafter", self.draft_token_ms))
            ]
            async with AsyncExitStack() as stack:
                target, drafter = await stack.enter_async_context(running(wanted))
                pipeline = await stack.enter_async_context(
                    connect(target.address, drafter.address, PATIENCE, needs_drafter=True)
                )
                for epochs in self.kinds:
                    yield await self._cost(pipeline, method, epochs, profiler)
                    advance()
        if self.profile is not None:
            with self.profile.open("w", encoding="utf-8") as file:
                pstats.Stats(profiler, stream=file).sort_stats("tottime").print_stats(SHOWN)

    async def _cost(self, pipeline: Pipeline, method: Method, epochs: Epochs, profiler: cProfile.Profile) -> Cost:
        async with pipeline.run(replace(self.request(method, epochs, self.outputs), max_tokens=WARM_UP_TOKENS)) as warm:
            async for _ in warm:
                pass
        if self.profile is not None:
            profiler.enable()
        began, loop_began = time.process_time(), time.thread_time()
        requests = [self.request(method, epochs, number) for number in range(self.outputs)]
        figures = [await finished(pipeline.run(request), lost=True) for request in requests]
        seconds, loop = time.process_time() - began, time.thread_time() - loop_began
        profiler.disable()
        return _cost_of(method, epochs, seconds, loop, figures)


def _cost_of(method: Method, epochs: Epochs, seconds: float, loop: float, figures: Sequence[Statistics]) -> Cost:
    def total(of: Callable[[Statistics], float]) -> float:
        return sum(map(of, figures))

    passes, tokens = total(lambda one: one.passes), total(lambda one: one.tokens)
    return Cost(
        method=method.name,
        epochs=epochs,
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


# What a round costs outside the two models, on loopback, one generation at a time.

REPEATS = 5  # of the codecs; the fastest counts


@dataclass(frozen=True, kw_only=True)
class Round(Setting):
    """A round of one setting. Times are medians over generations, of each one's mean."""

    generations: int
    rounds: int
    drafter_ms: float  # in its model, draws included
    target_ms: float  # in its model
    verification_ms: float  # in the session's state machine: planning, walks, bookkeeping
    codec_ms: float  # encoding and decoding on both sides, measured apart on the same messages
    transport_ms: float  # the rest of the waiting: gRPC, queues, the target's rows and draws from its logits
    outside_ms: float  # verification, codec and transport
    bytes_per_token: float  # serialized, both services and directions


@dataclass(frozen=True)
class Recording:
    """One generation: its figures, and the seconds of its codecs."""

    figures: Statistics
    codec_seconds: float


@dataclass(frozen=True, kw_only=True)
class Rounds(Workload, Benchmark[Round]):
    """`crossdraft bench round`: every setting over all prompts; the first prompt comes once before, to warm up."""

    unit: ClassVar[str] = "settings"
    title: ClassVar[str] = "Milliseconds in a round"
    columns: ClassVar[Columns] = {
        **SETTING,
        "drafter's model": lambda one: f"{one.drafter_ms:.2f}",
        "target's model": lambda one: f"{one.target_ms:.2f}",
        "verification": lambda one: f"{one.verification_ms:.2f}",
        "codec": lambda one: f"{one.codec_ms:.2f}",
        "transport": lambda one: f"{one.transport_ms:.2f}",
        "outside": lambda one: f"{one.outside_ms:.2f}",
        "bytes/token": lambda one: f"{one.bytes_per_token:,.0f}",
    }

    @property
    def total(self) -> int:
        return len(self.settings)

    async def measure(self, advance: Advance) -> AsyncGenerator[Round, None]:
        async with aclosing(self.pairs()) as pairs:
            async for target, drafter, settings in pairs:
                async with (
                    connect(target, drafter, needs_drafter=True) as pipeline,
                    TargetClient(target) as verify,
                    DrafterClient(drafter) as draft,
                ):
                    record = partial(_record, models=pipeline.models, target=verify, drafter=draft)
                    for setting in settings:
                        requests = setting.requests(self.prompts, self.max_tokens)
                        await record(requests[0])
                        yield round_of(setting, [await record(request) for request in requests])
                        advance()


async def _record(
    request: GenerationRequest, models: Models, target: TargetClient, drafter: DrafterClient
) -> Recording:
    """Runs one generation to its end, then its messages through the codecs."""
    verified, drafted = WatchedPort(target, keeps_messages=True), WatchedPort(drafter, keeps_messages=True)
    figures = await finished(
        Generation(resolve(request, models), Services.of(verified, drafted), request.num_speculative_tokens)
    )
    sizes = [(await client.described()).vocabulary_size for client in (target, drafter)]
    seconds = codec_seconds(TARGET, target_codec, verified, sizes[0])
    return Recording(figures, seconds + codec_seconds(DRAFTER, drafter_codec, drafted, sizes[1]))


def codec_seconds(role: Role[Any, Any, Any], codec: Any, port: WatchedPort, vocabulary_size: int) -> float:
    """To encode and decode all messages of a port once: what is written on one side is read on the other."""
    seconds = []
    for _ in range(REPEATS):
        began = perf_counter()
        for request in port.requests:
            role.read(codec.encode_request(request).SerializeToString(), vocabulary_size)
        for reply in port.replies:
            message = role.write(reply)
            codec.decode_reply(type(message).FromString(message.SerializeToString()), vocabulary_size)
        seconds.append(perf_counter() - began)
    return min(seconds)


def round_of(setting: Setting, recordings: Sequence[Recording]) -> Round:
    """The medians."""
    figures = [recording.figures for recording in recordings]

    def median_ms(seconds: Callable[[Recording], float]) -> float:
        return median(MILLISECONDS * seconds(recording) / recording.figures.epochs for recording in recordings)

    return Round(
        **asdict(setting),
        generations=len(figures),
        rounds=sum(figure.epochs for figure in figures),
        drafter_ms=median_ms(lambda one: one.figures.drafter_seconds),
        target_ms=median_ms(lambda one: one.figures.target_seconds),
        verification_ms=median_ms(lambda one: one.figures.verification_seconds),
        codec_ms=median_ms(lambda one: one.codec_seconds),
        transport_ms=median_ms(lambda one: one.figures.wire_seconds - one.codec_seconds),
        outside_ms=median_ms(lambda one: one.figures.wire_seconds + one.figures.verification_seconds),
        bytes_per_token=sum(figure.bytes_sent + figure.bytes_received for figure in figures)
        / sum(figure.tokens for figure in figures),
    )


# What state machine, planner and walk cost in a round, without services: sessions are recorded with made-up answers,
# and replayed with all answers at hand.

WARM_UP_ROUNDS = 20  # that do not count
REPLAYS = 5  # of each session; the fastest one counts, round by round
TOKENS = 200  # of a session
NOW = 0.0  # seconds: rounds in lock-step do not depend on the time


@dataclass(frozen=True)
class VerificationCost:
    """What the rounds of one method took."""

    method: str
    k: int  # draft tokens in a round
    width: int  # ids of a row, on both sides
    rounds: int
    median_ms: float
    p90_ms: float
    acceptance: float  # share of the judged tokens that agreed with the draft
    tokens_per_pass: float
    row_misses: float  # in a round


@dataclass(frozen=True)
class Verification(Benchmark[VerificationCost]):
    """`crossdraft bench verification`: every method."""

    methods: tuple[str, ...]
    k: int  # draft tokens in a round
    width: int  # ids of a row, on both sides
    rounds: int
    size: int  # ids of each vocabulary

    unit: ClassVar[str] = "methods"
    title: ClassVar[str] = "Verification in a round, without services"
    columns: ClassVar[Columns] = {
        "method": lambda one: one.method,
        "k": lambda one: one.k,
        "row": lambda one: one.width,
        "median ms": lambda one: f"{one.median_ms:.3f}",
        "p90 ms": lambda one: f"{one.p90_ms:.3f}",
        "acceptance": lambda one: f"{one.acceptance:.2f}",
        "tokens/pass": lambda one: f"{one.tokens_per_pass:.2f}",
        "misses/round": lambda one: f"{one.row_misses:.2f}",
    }

    @property
    def total(self) -> int:
        return len(self.methods)

    def check(self) -> None:
        with checked_options():
            scored = [name for name in self.methods if method_named(name).scores]
        if scored:
            raise UsageError(
                f"{scored[0]} asks the drafter's model how probable strings are, and here is none; leave it out"
            )
        left_out = [name for name in METHODS if name not in self.methods]
        if left_out:
            print(
                f"left out: {', '.join(left_out)} (slrs cannot be measured without a drafter's model)", file=sys.stderr
            )

    def measure(self, advance: Advance) -> Iterator[VerificationCost]:
        target, drafter = (tokenization(self.size, side) for side in Side)
        for name in self.methods:
            yield self._cost(method_named(name), target, drafter.vocabulary)
            advance()

    def _cost(self, method: Method, target: Tokenization, drafter: Vocabulary) -> VerificationCost:
        """Runs sessions until there are enough rounds."""
        pair = Pair(target.vocabulary, target.vocabulary if method.same_vocabulary else drafter)
        language, noises = Language(pair, DISAGREEMENT), Noises.of(pair)
        seconds: list[float] = []
        counts: list[Counts] = []
        while len(seconds) < WARM_UP_ROUNDS + self.rounds:
            given = partial(self._assignment, method, pair, target, len(counts))
            services = InMemory(language, noises, method, self.width, seed=len(counts))
            events, count = recorded(Session(given()), services)
            # What disturbs a measurement can only add to it.
            seconds += map(min, zip(*(replayed(Session(given()), events) for _ in range(REPLAYS)), strict=True))
            counts.append(count)
        return self._summed_up(method, seconds[WARM_UP_ROUNDS:], counts)

    def _assignment(self, method: Method, pair: Pair, target: Tokenization, seed: int) -> Assignment:
        """What a request for TOKENS tokens is resolved to."""
        options, noise = SamplingOptions(), NoiseKey(seed)
        return Assignment(
            pair=pair,
            method=method,
            chooser=RandomChooser(np.random.default_rng(seed)),
            encode=target.encode_continuation,
            open_target=OpenTarget((0,), options, noise, self.width),
            open_drafter=OpenDrafter(NOTHING, options, noise if method.keyed else None, self.width),
            controller=lock_step(self.k),
            max_tokens=TOKENS,
            context=10 * TOKENS,
            tree_budget=2 * self.k + NODES_BESIDE_THE_DRAFT,
        )

    def _summed_up(self, method: Method, seconds: Sequence[float], counts: Sequence[Counts]) -> VerificationCost:
        """The figures of all sessions of a method."""
        accepted, corrected = (sum(one.kinds[kind] for one in counts) for kind in (Kind.ACCEPTED, Kind.CORRECTED))
        return VerificationCost(
            method=method.name,
            k=self.k,
            width=self.width,
            rounds=len(seconds),
            median_ms=MILLISECONDS * median(seconds),
            p90_ms=MILLISECONDS * quantiles(seconds, n=10)[-1],
            acceptance=accepted / max(1, accepted + corrected),
            tokens_per_pass=sum(one.tokens for one in counts) / sum(one.passes for one in counts),
            row_misses=sum(one.row_misses for one in counts) / sum(one.epochs for one in counts),
        )


def recorded(session: Session, services: InMemory) -> tuple[list[Event], Counts]:
    """The events of a session from its start to its end."""
    events: list[Event] = []
    waiting = deque(session.start(NOW))
    while waiting:
        event = services.answer(waiting.popleft())
        if event is not None:
            events.append(event)
            waiting.extend(session.handle(event, NOW))
    return events, session.counts


def replayed(session: Session, events: Sequence[Event]) -> list[float]:
    """Seconds of each whole round, from a draft's arrival to the request for the next, when all answers are at hand."""
    rounds: list[float] = []
    spent = 0.0
    session.start(NOW)
    for event in map(unread, events):
        began = perf_counter()
        commands = session.handle(event, NOW)
        spent += perf_counter() - began
        if any(isinstance(command, Send) and isinstance(command.request, Draft) for command in commands):
            rounds.append(spent)
            spent = 0.0
    return rounds[1:]  # the first is the opening


def unread(event: Event) -> Event:
    """The same with fresh rows: a row builds its index on the first look-up."""
    return replace(event, reply=_unread(event.reply)) if isinstance(event, Replied) else event


def _unread(reply: Reply) -> Reply:
    if isinstance(reply, PassDone):
        nodes = tuple(replace(node) if isinstance(node, Row) else node for node in reply.nodes)
        return replace(reply, nodes=nodes)
    if isinstance(reply, Drafted):
        draft_tokens = (replace(one, row=one.row and replace(one.row)) for one in reply.draft_tokens)
        return replace(reply, draft_tokens=tuple(draft_tokens))
    return replace(reply, row=replace(reply.row)) if isinstance(reply, RowFetched) else reply

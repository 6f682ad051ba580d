"""`crossdraft bench overhead`: what the orchestrator itself costs in a round, and how much it says for a token.

The services are processes of their own that answer from a made-up language over vocabularies of real size; sessions,
messages and gRPC are real. All CPU time of this process counts, gRPC's threads included.
"""

import cProfile
import pstats
import sys
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from crossdraft.bench.harness import SEED, finished, markdown, print_table, write_json
from crossdraft.bench.made_up import DISAGREEMENT, Imagined, InMemory, Language, Noises, tokenization
from crossdraft.bench.workload import Setting, Workload, running_pairs
from crossdraft.client import Generation, GenerationRequest, Overlap, Pipeline, Statistics, connect
from crossdraft.client.driver import Roster, Services, StreamPort
from crossdraft.client.measurements import TrafficCount
from crossdraft.console.processes import running
from crossdraft.console.running import Misused, check_output, checked_options, counted, run_to_end
from crossdraft.rpc import drafter_codec, target_codec
from crossdraft.rpc.clients import DrafterClient, Patience, TargetClient
from crossdraft.rpc.handlers import DRAFTER, TARGET, Role
from crossdraft.session.assignment import Assignment
from crossdraft.session.events import Event, Replied, Send
from crossdraft.session.events import Reply as Reply_of_events
from crossdraft.session.resolution import NODES_BESIDE_THE_DRAFT, Models, resolve
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
    Pass,
    PassDone,
    RowFetched,
    SamplingOptions,
)
from crossdraft.types.rows import Row
from crossdraft.types.statistics import Counts, Kind
from crossdraft.verification.chooser import RandomChooser
from crossdraft.verification.methods import METHODS, Method, method_named

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
    draft_token_ms: float  # that a draft token takes
    k: int  # draft tokens that a pass waits for
    branches: int  # draft tokens of each prepared continuation


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
    acceptance: float  # of the draft tokens that were judged
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
            for role, milliseconds in (("target", plan.pass_ms), ("drafter", plan.draft_token_ms))
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


# `crossdraft bench round`: what a round costs outside the two models, on loopback, one generation at a time.

COLUMNS = (
    *("method", "drafter", "T", "k", "drafter", "target", "verification", "codec", "transport", "outside"),
    "bytes/token",
)


@dataclass(frozen=True)
class Round:
    """A round of one setting. Times are medians over generations, of each one's mean."""

    method: str
    drafter: str  # a model's name
    temperature: float
    k: int  # draft tokens in a round
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


def rounds_measure(workload: Workload, json_path: Path | None) -> None:
    """Measures every setting; a table on stdout, and JSON if a path is given.

    Raises:
        Misused: a value is out of its range, or the pair cannot do what is asked.
        CommandFailed: a service does not start or fails.
    """
    workload.check()
    run_to_end(_rounds_measure(workload, json_path))


async def _rounds_measure(workload: Workload, json_path: Path | None) -> None:
    rounds = []
    async with aclosing(running_pairs(workload)) as pairs:
        async for target, drafter, settings in pairs:
            async with (
                connect(target, drafter, needs_drafter=True) as pipeline,
                TargetClient(target) as verify,
                DrafterClient(drafter) as draft,
            ):
                for setting in settings:
                    requests = setting.requests(workload.prompts, workload.max_tokens)
                    await _record(requests[0], pipeline.models, verify, draft)  # the first one warms up
                    recordings = [await _record(request, pipeline.models, verify, draft) for request in requests]
                    rounds.append(round_of(setting, recordings))
    print_table("Milliseconds in a round", COLUMNS, [shown(one) for one in rounds])
    if json_path is not None:
        record = {"target": workload.target, "max_tokens": workload.max_tokens}
        write_json(json_path, record | {"rounds": [asdict(one) for one in rounds]})


async def _record(
    request: GenerationRequest, models: Models, target: TargetClient, drafter: DrafterClient
) -> Recording:
    """Runs one generation to its end, then its messages through the codecs."""
    verified, drafted = Recorder(target), Recorder(drafter)
    figures = await finished(Generation(resolve(request, models), Services.of(verified, drafted), request.k))
    sizes = [(await client.described()).vocabulary_size for client in (target, drafter)]
    seconds = TARGET_CODECS.seconds(verified, sizes[0]) + DRAFTER_CODECS.seconds(drafted, sizes[1])
    return Recording(figures, seconds)


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


def shown(one: Round) -> tuple[str, ...]:
    """A row of the table."""
    times = (one.drafter_ms, one.target_ms, one.verification_ms, one.codec_ms, one.transport_ms, one.outside_ms)
    figures = (f"{one.temperature:g}", str(one.k), *(f"{time:.2f}" for time in times), f"{one.bytes_per_token:,.0f}")
    return (one.method, one.drafter, *figures)


# The messages of a generation, kept on their way, and what their codecs cost.

REPEATS = 5  # the fastest counts
Opening = TypeVar("Opening")
OpeningIn = TypeVar("OpeningIn", contravariant=True)
Request = TypeVar("Request")
RequestIn = TypeVar("RequestIn", contravariant=True)
Reply = TypeVar("Reply")
ReplyOut = TypeVar("ReplyOut", covariant=True)


class Port(Protocol[OpeningIn, RequestIn, ReplyOut]):
    """A client of either service."""

    async def open(self, request: OpeningIn, /) -> StreamPort[RequestIn, ReplyOut]:
        """Begin a session."""
        ...


@dataclass(frozen=True, eq=False)
class Recorder(Generic[Opening, Request, Reply]):
    """A port that keeps what passes through its streams, the opening and its answer left out."""

    port: Port[Opening, Request, Reply]
    requests: list[Request] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)

    async def open(self, request: Opening) -> "RecordedStream[Request, Reply]":
        """Begin a session."""
        return RecordedStream(await self.port.open(request), self.requests, self.replies)


@dataclass(frozen=True, eq=False)
class RecordedStream(Generic[Request, Reply]):
    """An open session of a recorder."""

    stream: StreamPort[Request, Reply]
    requests: list[Request]
    replies: list[Reply]

    @property
    def traffic(self) -> TrafficCount:
        """What was sent and received so far."""
        return self.stream.traffic

    async def send(self, request: Request, /) -> None:
        """As the stream's own."""
        self.requests.append(request)
        await self.stream.send(request)

    async def receive(self) -> Reply:
        """As the stream's own."""
        reply = await self.stream.receive()
        self.replies.append(reply)
        return reply

    async def close(self) -> None:
        """As the stream's own."""
        await self.stream.close()


@dataclass(frozen=True)
class Codecs:
    """Both halves of one service's conversions: what is written on one side is read on the other."""

    role: Role[Any, Any, Any]
    write_request: Callable[[Any], Any]
    read_reply: Callable[[Any, int], object]

    def seconds(self, recorder: Recorder[Any, Any, Any], vocabulary_size: int) -> float:
        """To encode and decode all recorded messages once."""
        return min(self._once(recorder, vocabulary_size) for _ in range(REPEATS))

    def _once(self, recorder: Recorder[Any, Any, Any], vocabulary_size: int) -> float:
        began = time.perf_counter()
        for request in recorder.requests:
            self.role.read(self.write_request(request).SerializeToString(), vocabulary_size)
        for reply in recorder.replies:
            message = self.role.write(reply)
            self.read_reply(type(message).FromString(message.SerializeToString()), vocabulary_size)
        return time.perf_counter() - began


TARGET_CODECS = Codecs(TARGET, target_codec.encode_request, target_codec.decode_reply)
DRAFTER_CODECS = Codecs(DRAFTER, drafter_codec.encode_request, drafter_codec.decode_reply)


# `crossdraft bench verification`: what state machine, planner and walk cost in a round, without services.

VERIFICATION_WARM_UP = 20  # rounds that do not count
REPLAYS = 5  # of each session; the fastest one counts, round by round
TOKENS = 200  # of a session
NOW = 0.0  # seconds: rounds in lock-step do not depend on the time
VERIFICATION_COLUMNS = ("method", "k", "row", "median ms", "p90 ms", "acceptance", "tokens/pass", "misses/round")


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
class Shape:
    """What is measured."""

    k: int  # draft tokens in a round
    width: int  # ids of a row, on both sides
    rounds: int
    size: int  # ids of each vocabulary


def verification_measure(names: Sequence[str], shape: Shape, json_path: Path | None) -> None:
    """Measures every method; a table on stdout, and JSON if a path is given.

    Raises:
        Misused: there is no such method, or it needs a drafter's model.
    """
    with checked_options():
        methods = [method_named(name) for name in names]
    scored = [method.name for method in methods if method.scores]
    if scored:
        raise Misused(f"{scored[0]} asks the drafter's model how probable strings are, and here is none; leave it out")
    left_out = [name for name in METHODS if name not in names]
    if left_out:
        print(f"left out: {', '.join(left_out)} (slrs cannot be measured without a drafter's model)", file=sys.stderr)
    target, drafter = (tokenization(shape.size, side) for side in Side)
    costs = [cost_of(method, shape, target, drafter.vocabulary) for method in methods]
    print_table(
        "Verification in a round, without services", VERIFICATION_COLUMNS, [verification_shown(cost) for cost in costs]
    )
    if json_path is not None:
        write_json(json_path, {"size": shape.size, "costs": [asdict(cost) for cost in costs]})


def cost_of(method: Method, shape: Shape, target: Tokenization, drafter: Vocabulary) -> VerificationCost:
    """Runs sessions until there are enough rounds."""
    pair = Pair(target.vocabulary, target.vocabulary if method.same_vocabulary else drafter)
    language, noises = Language(pair, DISAGREEMENT), Noises.of(pair)
    seconds: list[float] = []
    counts: list[Counts] = []
    while len(seconds) < VERIFICATION_WARM_UP + shape.rounds:
        given = partial(assignment, method, pair, target, shape, len(counts))
        services = InMemory(language, noises, method, shape.width, seed=len(counts))
        events, count = recorded(Session(given()), services)
        # What disturbs a measurement can only add to it.
        seconds += map(min, zip(*(replayed(Session(given()), events) for _ in range(REPLAYS)), strict=True))
        counts.append(count)
    return summed_up(method, shape, seconds[VERIFICATION_WARM_UP:], counts)


def assignment(method: Method, pair: Pair, target: Tokenization, shape: Shape, seed: int) -> Assignment:
    """What a request for TOKENS tokens is resolved to."""
    options, noise = SamplingOptions(), NoiseKey(seed)
    return Assignment(
        pair=pair,
        method=method,
        chooser=RandomChooser(np.random.default_rng(seed)),
        encode=target.encode_continuation,
        open_target=OpenTarget((0,), options, noise, shape.width),
        open_drafter=OpenDrafter(NOTHING, options, noise if method.keyed else None, shape.width),
        controller=lock_step(shape.k),
        max_tokens=TOKENS,
        context=10 * TOKENS,
        tree_budget=2 * shape.k + NODES_BESIDE_THE_DRAFT,
    )


def recorded(session: Session, services: InMemory) -> tuple[list[Event], Counts]:
    """What a session is told until its end."""
    events: list[Event] = []
    waiting = deque(session.start(NOW))
    while waiting:
        event = services.answer(waiting.popleft())
        if event is not None:
            events.append(event)
            waiting.extend(session.handle(event, NOW))
    return events, session.counts


def replayed(session: Session, events: Sequence[Event]) -> list[float]:
    """Seconds of each whole round, from a draft's arrival to the wish for the next, when all answers are at hand."""
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
    """The same with rows that nobody has looked anything up in."""
    return replace(event, reply=_unread(event.reply)) if isinstance(event, Replied) else event


def _unread(reply: Reply_of_events) -> Reply_of_events:
    if isinstance(reply, PassDone):
        nodes = tuple(replace(node) if isinstance(node, Row) else node for node in reply.nodes)
        return replace(reply, nodes=nodes)
    if isinstance(reply, Drafted):
        draft_tokens = (replace(one, row=one.row and replace(one.row)) for one in reply.draft_tokens)
        return replace(reply, draft_tokens=tuple(draft_tokens))
    return replace(reply, row=replace(reply.row)) if isinstance(reply, RowFetched) else reply


def summed_up(method: Method, shape: Shape, seconds: Sequence[float], counts: Sequence[Counts]) -> VerificationCost:
    """The figures of all sessions of a method."""
    accepted, corrected = (sum(one.kinds[kind] for one in counts) for kind in (Kind.ACCEPTED, Kind.CORRECTED))
    return VerificationCost(
        method=method.name,
        k=shape.k,
        width=shape.width,
        rounds=len(seconds),
        median_ms=MILLISECONDS * median(seconds),
        p90_ms=MILLISECONDS * quantiles(seconds, n=10)[-1],
        acceptance=accepted / max(1, accepted + corrected),
        tokens_per_pass=sum(one.tokens for one in counts) / sum(one.passes for one in counts),
        row_misses=sum(one.row_misses for one in counts) / sum(one.epochs for one in counts),
    )


def verification_shown(cost: VerificationCost) -> tuple[str, ...]:
    """A row of the table."""
    return (
        cost.method,
        *(str(cost.k), str(cost.width), f"{cost.median_ms:.3f}", f"{cost.p90_ms:.3f}"),
        *(f"{cost.acceptance:.2f}", f"{cost.tokens_per_pass:.2f}", f"{cost.row_misses:.2f}"),
    )


# Services seen by a benchmark: which generations have sessions with them now, and what they were given to do.


@dataclass(eq=False)
class Watched(Generic[Opening, Request, Reply]):
    """A port that is watched."""

    port: Port[Opening, Request, Reply]
    live: list[int] = field(default_factory=list)  # `NoiseKey.choice` of each open session; 0 without keyed noise
    nodes: int = 0  # of the trees of all passes
    busy: float = 0.0  # seconds from passes that were sent to their return, of all sessions

    async def open(self, request: Opening) -> "WatchedStream[Request, Reply]":
        """Begin a session."""
        stream = await self.port.open(request)
        assert isinstance(request, OpenTarget | OpenDrafter)
        choice = 0 if request.noise is None else request.noise.choice
        self.live.append(choice)
        return WatchedStream(stream, self, choice)


@dataclass(eq=False)
class WatchedStream(Generic[Request, Reply]):
    """An open session of a watched port."""

    stream: StreamPort[Request, Reply]
    port: Watched[Any, Request, Reply]
    choice: int
    sent_at: float = 0.0  # when the latest pass left, in seconds

    @property
    def traffic(self) -> TrafficCount:
        """What was sent and received so far."""
        return self.stream.traffic

    async def send(self, request: Request, /) -> None:
        """As the stream's own."""
        if isinstance(request, Pass):
            self.sent_at = time.monotonic()
            self.port.nodes += len(request.tree)
        await self.stream.send(request)

    async def receive(self) -> Reply:
        """As the stream's own."""
        reply = await self.stream.receive()
        if isinstance(reply, PassDone):  # of a run, since the answer before
            now = time.monotonic()
            self.port.busy, self.sent_at = self.port.busy + now - self.sent_at, now
        return reply

    async def close(self) -> None:
        """As the stream's own."""
        self.port.live.remove(self.choice)
        await self.stream.close()


AnyWatched = Watched[Any, Any, Any]


@dataclass(frozen=True, eq=False)
class Watch:
    """All services of a benchmark."""

    services: Services
    ports: dict[str, AnyWatched]  # by address

    @staticmethod
    async def of(targets: Sequence[str], drafters: Sequence[str], stack: AsyncExitStack) -> "Watch":
        """Clients of these addresses, which are closed with the stack."""
        services, ports = Services(Roster("target"), Roster("drafter")), dict[str, AnyWatched]()
        for address in targets:
            ports[address] = Watched(await stack.enter_async_context(TargetClient(address)))
            services.targets.add(address, ports[address])
        for address in drafters:
            ports[address] = Watched(await stack.enter_async_context(DrafterClient(address)))
            services.drafters.add(address, ports[address])
        return Watch(services, ports)

    def busy(self, addresses: Sequence[str]) -> tuple[float, ...]:
        """Seconds that each was at work since this was last asked."""
        found = tuple(self.ports[address].busy for address in addresses)
        for address in addresses:
            self.ports[address].busy = 0.0
        return found

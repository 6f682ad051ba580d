"""`crossdraft bench verification`: what state machine, planner and walk cost in a round, without services."""

import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter

import numpy as np

from crossdraft.cli.benching import print_table, write_json
from crossdraft.cli.failures import Misused
from crossdraft.cli.in_memory import InMemory, Noises
from crossdraft.cli.invented import DISAGREEMENT, Language, tokenization
from crossdraft.cli.running import checked_options
from crossdraft.pipeline.assignment import Assignment
from crossdraft.pipeline.events import Counts, Event, Replied, Reply, Send
from crossdraft.pipeline.governing import lock_step
from crossdraft.pipeline.resolution import NODES_BESIDE_THE_DRAFT
from crossdraft.pipeline.session import Session
from crossdraft.text.letters import NOTHING, Side
from crossdraft.text.pairing import Pair
from crossdraft.text.tokenization import Tokenization
from crossdraft.text.vocabulary import Vocabulary
from crossdraft.verification.chooser import RandomChooser
from crossdraft.verification.exchange import (
    Draft,
    Drafted,
    NoiseKey,
    OpenDrafter,
    OpenTarget,
    PassDone,
    RowFetched,
    SamplingOptions,
)
from crossdraft.verification.methods import METHODS, Method, method_named
from crossdraft.verification.rows import Row
from crossdraft.verification.walk import Kind

MILLISECONDS = 1000.0
WARM_UP = 20  # rounds that do not count
REPLAYS = 5  # of each session; the fastest one counts, round by round
TOKENS = 200  # of a session
NOW = 0.0  # seconds: rounds in lock-step do not depend on the time
COLUMNS = ("method", "k", "row", "median ms", "p90 ms", "acceptance", "tokens/pass", "misses/round")


@dataclass(frozen=True)
class Cost:
    """What the rounds of one method took."""

    method: str
    k: int  # proposals in a round
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

    k: int  # proposals in a round
    width: int  # ids of a row, on both sides
    rounds: int
    size: int  # ids of each vocabulary


def measure(names: Sequence[str], shape: Shape, json_path: Path | None) -> None:
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
    print_table("Verification in a round, without services", COLUMNS, [shown(cost) for cost in costs])
    if json_path is not None:
        write_json(json_path, {"size": shape.size, "costs": [asdict(cost) for cost in costs]})


def cost_of(method: Method, shape: Shape, target: Tokenization, drafter: Vocabulary) -> Cost:
    """Runs sessions until there are enough rounds."""
    pair = Pair(target.vocabulary, target.vocabulary if method.same_vocabulary else drafter)
    language, noises = Language(pair, DISAGREEMENT), Noises.of(pair)
    seconds: list[float] = []
    counts: list[Counts] = []
    while len(seconds) < WARM_UP + shape.rounds:
        given = partial(assignment, method, pair, target, shape, len(counts))
        services = InMemory(language, noises, method, shape.width, seed=len(counts))
        events, count = recorded(Session(given()), services)
        # What disturbs a measurement can only add to it.
        seconds += map(min, zip(*(replayed(Session(given()), events) for _ in range(REPLAYS)), strict=True))
        counts.append(count)
    return summed_up(method, shape, seconds[WARM_UP:], counts)


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
        governor=lock_step(shape.k),
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


def _unread(reply: Reply) -> Reply:
    if isinstance(reply, PassDone):
        nodes = tuple(replace(node) if isinstance(node, Row) else node for node in reply.nodes)
        return replace(reply, nodes=nodes)
    if isinstance(reply, Drafted):
        proposals = (replace(one, row=one.row and replace(one.row)) for one in reply.proposals)
        return replace(reply, proposals=tuple(proposals))
    return replace(reply, row=replace(reply.row)) if isinstance(reply, RowFetched) else reply


def summed_up(method: Method, shape: Shape, seconds: Sequence[float], counts: Sequence[Counts]) -> Cost:
    """The figures of all sessions of a method."""
    accepted, corrected = (sum(one.kinds[kind] for one in counts) for kind in (Kind.ACCEPTED, Kind.CORRECTED))
    return Cost(
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


def shown(cost: Cost) -> tuple[str, ...]:
    """A row of the table."""
    return (
        cost.method,
        *(str(cost.k), str(cost.width), f"{cost.median_ms:.3f}", f"{cost.p90_ms:.3f}"),
        *(f"{cost.acceptance:.2f}", f"{cost.tokens_per_pass:.2f}", f"{cost.row_misses:.2f}"),
    )

"""A session's dealings with its targets: lanes, passes in flight, what each was told."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from crossdraft.session.assignment import Assignment
from crossdraft.session.events import Command, IllegalEventError, Lane, Open, Send, SetTimer, Timer
from crossdraft.types.messages import FetchRow, Pass, PassDone, RowFetched, RunTo, Sample
from crossdraft.types.rows import Ids, Row
from crossdraft.types.trees import Path
from crossdraft.verification.planning import Plan
from crossdraft.verification.walk import NeedRow, NeedSample

LONGEST_BACKOFF = 1.0  # seconds


# The rows and samples that passes have brought, by the ids that lead to them.


@dataclass(frozen=True, eq=False)
class Flight:
    """A pass that was sent. Of a run, `paths` is the one that it is at, and times count from its latest answer."""

    lane: Lane
    sent: Pass
    root: int  # tokens of output that were committed when it left
    paths: tuple[Path, ...]  # of what it answers, or answers next, from the root on
    tokens: int  # that it feeds: those committed since the lane's pass before, and the tree's
    left_at: float  # seconds
    idle: float  # seconds that the lane had stood idle
    draft_tokens: int = 0  # known beyond the root
    drawn: int = 0  # tokens that its run has brought before
    ending: bool = False  # its run was told to end
    half: int = 0  # tokens of its run, of which half of what was asked for last has been drawn


@dataclass
class TargetLane:
    """One open session with a target."""

    number: Lane
    ready: bool = False
    answered: bool = False  # it has brought a pass
    told: int = 0  # tokens of output that it knows
    passes: int = 0
    flight: Flight | None = None  # the pass under way
    latest: Flight | None = None  # the pass under way, or the one before
    owed: dict[int, Ids | None] = field(default_factory=dict)  # rows of the latest pass that were asked for
    free_since: float = 0.0  # seconds


class Targets:
    """One lane, or several that work on one output."""

    def __init__(self, assignment: Assignment, lanes: Iterator[Lane]) -> None:
        self.lanes: dict[Lane, TargetLane] = {}
        self._given = assignment
        self._lanes = lanes
        self._wanted = assignment.targets  # lanes
        self._failures = 0  # lanes lost since one brought its first pass
        self._failing_since = 0.0  # seconds: when the first of them was lost
        self._timer = 0  # number of the latest

    def open(self) -> list[Command]:
        """As many lanes as are wanted."""
        commands: list[Command] = []
        while len(self.lanes) < self._wanted:
            lane = TargetLane(next(self._lanes))
            self.lanes[lane.number] = lane
            commands.append(Open(lane.number, self._given.open_target, self._backoff()))
        return commands

    def _backoff(self) -> float:
        """Seconds before a lane is opened: the first one is replaced at once."""
        doublings = min(self._failures, 10)
        return 0.0 if doublings <= 1 else min(LONGEST_BACKOFF, 0.025 * 2.0**doublings)

    def opened(self, lane: Lane, now: float) -> None:
        """It has the prompt."""
        self.lanes[lane].ready = True
        self.lanes[lane].free_since = now

    @property
    def ready(self) -> bool:
        """Whether any lane can take a pass or has one."""
        return any(lane.ready for lane in self.lanes.values())

    def lost(self, lane: Lane, now: float) -> list[Command] | None:
        """What was in flight there will not come; another lane is opened.

        None: for too long no lane has brought anything, though some may have opened.
        """
        was_ready = self.lanes.pop(lane).ready
        if not self._failures:
            self._failing_since = now
        self._failures += 1
        if now - self._failing_since >= self._given.target_seconds and not any(
            other.answered for other in self.lanes.values()
        ):
            return None
        without = was_ready and not self.ready
        commands = self.open()
        return [*commands, *self.set_timer()] if without else commands

    def drop(self, lane: Lane) -> list[Command] | None:
        """The lane is not opened again. None: no other is open or being opened."""
        del self.lanes[lane]
        self._wanted -= 1
        if not self.lanes:
            return None
        return [] if self.ready else self.set_timer()

    def set_timer(self) -> list[Command]:
        """From now on there is no target."""
        self._timer += 1
        return [SetTimer(Timer.TARGET, self._timer, self._given.target_seconds)]

    def expired(self, number: int) -> bool:
        """Whether there is still none."""
        return number == self._timer and not self.ready

    @property
    def free(self) -> TargetLane | None:
        """A lane without a pass in flight, if possible one that owes no row either."""
        free = (lane for lane in self.lanes.values() if lane.ready and lane.flight is None)
        return min(free, key=lambda lane: bool(lane.owed), default=None)

    @property
    def flights(self) -> list[Flight]:
        """The passes under way."""
        return [lane.flight for lane in self.lanes.values() if lane.flight is not None]

    @property
    def running(self) -> bool:
        """Whether a run is under way."""
        return any(flight.sent.run > 1 for flight in self.flights)

    def end_runs(self) -> list[Command]:
        """Runs that are under way are to end with the token that is being drawn."""
        commands: list[Command] = []
        for lane in self.lanes.values():
            flight = lane.flight
            if flight is not None and flight.sent.run > 1 and not flight.ending:
                lane.flight = replace(flight, ending=True)
                commands.append(Send(lane.number, RunTo(flight.sent.number, 0)))
        return commands

    @property
    def halfway(self) -> Flight | None:
        """A run of which half of what was asked for last has been drawn, and that nobody has ended."""
        found = (one for one in self.flights if one.sent.run > 1 and one.drawn >= one.half and not one.ending)
        return next(found, None)

    def extend(self, flight: Flight, tokens: int) -> Send:
        """Its run goes on for so many tokens beyond those that were asked for."""
        more = flight.sent.run + tokens
        sent = replace(flight.sent, run=more)
        self.lanes[flight.lane].flight = replace(flight, sent=sent, half=more - tokens // 2)
        return Send(flight.lane, RunTo(sent.number, more))

    def due(self, path: Path, ids: list[int]) -> bool:
        """Whether a pass under way brings what follows this path from the frontier on; `ids` are the output's."""
        return any((*ids[flight.root :], *path) in flight.paths for flight in self.flights)

    def send(
        self,
        lane: TargetLane,
        plan: Plan,
        wanted: tuple[int, ...] | None,
        ids: list[int],
        draft_tokens: int,
        draws: bool,
        now: float,
        run: int = 1,
    ) -> Send:
        """A pass over a tree at the frontier, for so many draft tokens beyond it, answered by draws or by rows; or a
        run of so many tokens."""
        lane.passes += 1
        listed = () if draws else plan.listed
        if wanted is not None and listed:
            listed = tuple(listed[node] for node in wanted)
        sent = Pass(lane.passes, tuple(ids[lane.told :]), plan.tree, listed, wanted, draws, run)
        paths = tuple(plan.tree.paths())
        answered = paths if wanted is None else tuple(paths[node] for node in wanted)
        tokens = len(sent.committed) + len(plan.tree)
        idle = now - lane.free_since
        lane.flight = Flight(
            lane.number, sent, len(ids), answered, tokens, now, idle, draft_tokens, half=run - run // 2
        )
        lane.latest = lane.flight
        lane.told = len(ids)
        lane.owed.clear()
        return Send(lane.number, sent)

    def expects(self, lane: Lane, reply: PassDone | RowFetched) -> bool:
        """Whether it is the answer to what was asked there."""
        known = self.lanes[lane]
        if isinstance(reply, RowFetched):
            same = known.flight is None and known.latest is not None and reply.number == known.latest.sent.number
            if not same or reply.node not in known.owed:
                return False
            listed = known.owed[reply.node]
            return reply.row.whole if listed is None else reply.row.lists(listed)
        flight = known.flight
        if flight is None or reply.number != flight.sent.number or reply.first != flight.drawn:
            return False
        due = len(flight.paths)
        if flight.sent.run > 1:  # it may end early, and says when it ends
            due = max(1, min(len(reply.nodes), flight.sent.run - flight.drawn - reply.more))
        kind = Sample if flight.sent.draws else Row
        more = reply.more and flight.sent.run == 1
        return len(reply.nodes) == due and not more and all(isinstance(node, kind) for node in reply.nodes)

    def returned(self, lane: Lane, done: PassDone, now: float) -> Flight:
        """The lane's pass is back, or some tokens of its run; the flight, with the paths of these answers."""
        known = self.lanes[lane]
        flight, known.flight = known.flight, None
        assert flight is not None
        if not known.answered:
            known.answered, self._failures = True, 0
        if done.more:
            known.flight = _further(flight, done, now)
        else:
            known.free_since = now
        return flight if flight.sent.run == 1 else replace(flight, paths=_drawn(flight, done)[:-1])

    def fetch(self, lane: Lane, number: int, node: int, listed: Ids | None) -> list[Command] | None:
        """Asks for more of a row, once; None: its pass is not the lane's latest any more."""
        known = self.lanes.get(lane)
        if known is None or known.latest is None or known.latest.sent.number != number:
            return None
        if node in known.owed:
            return []
        known.owed[node] = listed
        return [Send(lane, FetchRow(number, node, listed))]

    def fetched(self, lane: Lane, node: int) -> Flight:
        """A row that was asked for is there; returns its pass."""
        known = self.lanes[lane]
        del known.owed[node]
        assert known.latest is not None
        return known.latest


def _drawn(flight: Flight, done: PassDone) -> tuple[Path, ...]:
    """The path that a run was at, and those that its tokens made of it."""
    paths = [flight.paths[0]]
    for node in done.nodes:
        assert isinstance(node, Sample)
        paths.append((*paths[-1], node.token))
    return tuple(paths)


def _further(flight: Flight, done: PassDone, now: float) -> Flight:
    """The same run after an answer."""
    at = _drawn(flight, done)[-1:]
    return replace(flight, paths=at, drawn=flight.drawn + len(done.nodes), tokens=1, left_at=now, idle=0.0)


SAME_DISTRIBUTION = 1e-3  # by which a head and its whole row may differ in sum; rows sum to one within a tenth of that


@dataclass(frozen=True, eq=False)
class Held:
    """What is known after one path."""

    answer: Row | Sample
    lane: Lane  # whose pass it came from
    number: int  # of that pass
    node: int  # of that pass's tree
    extra: Ids | None = None  # ids that were asked for besides the head, if it is known that these were all


class Fetched:
    """Rows and samples at and after the frontier."""

    def __init__(self, ids: list[int], head: int) -> None:
        self._ids = ids  # of the output; grows elsewhere
        self._head = head  # ids of a row that come unasked
        self._base = 0  # tokens of output before the paths below
        self._held: dict[Path, Held] = {}

    @property
    def held(self) -> Held | None:
        """What is known at the frontier."""
        return self._held.get(tuple(self._ids[self._base :]))

    def knows(self, path: Path) -> bool:
        """Whether anything is known after this path from the frontier on."""
        return (*self._ids[self._base :], *path) in self._held

    def answer(self, need: NeedRow | NeedSample) -> Row | Sample | None:
        """What the walk needs at the frontier, if it is at hand: a row is no draw, and a draw no row.

        Of a row only the ids that may be used: its head, and those that the need lists. What else was listed depends
        on draft tokens that are not revealed.
        """
        held = self.held
        if held is None:
            return None
        row = held.answer
        if isinstance(row, Sample) or isinstance(need, NeedSample):
            return row if isinstance(row, Sample) and isinstance(need, NeedSample) else None
        if need.whole:
            return row if row.whole else None
        if not row.lists(need.listed):
            return None
        whole = held.extra is not None and np.array_equal(held.extra, need.listed)
        return row if whole else self._cut(row, need.listed)

    @property
    def row(self) -> Row | None:
        """The target's row at the frontier, if a pass brought one."""
        found = self.held.answer if self.held is not None else None
        return found if isinstance(found, Row) else None

    @property
    def log_probabilities(self) -> tuple[float | None, tuple[tuple[int, float], ...]]:
        """Of the target's draw at the frontier, in nats, and of the likeliest ids there; None if it made no draw."""
        found = self.held.answer if self.held is not None else None
        return (found.log_probability, found.likely) if isinstance(found, Sample) else (None, ())

    def add(self, flight: Flight, nodes: Sequence[Row | Sample]) -> None:
        """A pass has returned: what lies before its root is forgotten, if it is the farthest so far."""
        if flight.root > self._base:
            self._rebase(flight.root)
        passed = tuple(self._ids[flight.root : self._base])
        listed = flight.sent.listed or (None,) * len(nodes)
        answered = flight.sent.answered if flight.sent.run == 1 else (0,) * len(nodes)
        for path, node, answer, extra in zip(flight.paths, answered, nodes, listed, strict=True):
            if path[: len(passed)] == passed:
                held = Held(answer, flight.lane, flight.sent.number, node, extra)
                self._held[path[len(passed) :]] = held

    def complete(self, flight: Flight, node: int, row: Row) -> None:
        """A row that was asked for takes the place of what was known.

        Raises:
            IllegalEventError: they are not the same distribution; nothing has changed.
        """
        path = flight.paths[flight.sent.answered.index(node)]
        passed = tuple(self._ids[flight.root : self._base])
        place = path[len(passed) :]
        if path[: len(passed)] != passed or place not in self._held:
            return  # the output has taken another way
        before = self._held[place].answer
        if isinstance(before, Row) and _difference(before, row) > SAME_DISTRIBUTION:
            raise IllegalEventError(f"the row of node {node} is not that of the head sent before")
        self._held[place] = Held(row, flight.lane, flight.sent.number, node)

    def forget(self) -> None:
        """What is known at the frontier is not enough, and its pass is over: another pass must bring it."""
        self._held.pop(tuple(self._ids[self._base :]), None)

    def _rebase(self, base: int) -> None:
        passed = tuple(self._ids[self._base : base])
        kept = {path[len(passed) :]: held for path, held in self._held.items() if path[: len(passed)] == passed}
        self._held, self._base = kept, base

    def _cut(self, row: Row, listed: Ids) -> Row:
        """The head and the listed ids; the rest joins the tail."""
        if len(row.ids) <= self._head:
            return row
        kept = np.zeros(len(row.ids), dtype=np.bool_)
        # Of equal probabilities the first, as in every row: which ids are used must not depend on what else is listed.
        kept[np.argsort(-row.probabilities, kind="stable")[: self._head]] = True
        places = row.places(listed)
        kept[places[places >= 0]] = True
        if kept.all():
            return row
        return Row(row.ids[kept], row.probabilities[kept], row.tail + float(row.probabilities[~kept].sum()))


def _difference(head: Row, other: Row) -> float:
    """The sum of the differences in probability, of each id that the first lists, and of the rest."""
    places = other.places(head.ids)
    known = places >= 0
    listed = np.abs(other.probabilities[places[known]] - head.probabilities[known]).sum()
    rest = other.probabilities[head.places(other.ids) < 0].sum() + other.tail
    return float(listed + abs(rest - head.tail - head.probabilities[~known].sum()))

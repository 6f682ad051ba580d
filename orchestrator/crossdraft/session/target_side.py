"""The target side of a session: its lanes, the passes under way, and the rows and samples that they brought."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from crossdraft.session.assignment import Assignment
from crossdraft.session.drafts import Branches
from crossdraft.session.epoch import Epoch
from crossdraft.session.events import Command, Lane, Open, Send, SetTimer, Timer
from crossdraft.session.output import Output
from crossdraft.speculation.choice import PassSeen
from crossdraft.types.messages import FetchRow, Pass, PassDone, PromptScored, RowFetched, RunTo, Sample, ScorePrompt
from crossdraft.types.rows import Ids, Row
from crossdraft.types.statistics import Counts
from crossdraft.types.trees import Path, TokenTree
from crossdraft.verification.planning import Plan, Planner
from crossdraft.verification.walk import NeedRow, NeedSample, WalkStep

LONGEST_BACKOFF = 1.0  # seconds
NOTHING_GUESSED = Plan(TokenTree(), ())
SAME_DISTRIBUTION = 1e-3  # total difference allowed between a head and its whole row; rows sum to one within 1e-4


@dataclass(frozen=True, eq=False)
class Flight:
    """A pass that was sent. Of a run, `paths` is the one that it is at, and times count from its latest answer."""

    lane: Lane
    sent: Pass
    root: int  # tokens of output that were committed when it left
    paths: tuple[Path, ...]  # of what it answers, or answers next, from the root on
    tokens: int  # that it feeds: those committed since the lane's previous pass, and the tree's
    left_at: float  # seconds
    idle: float  # seconds that the lane had stood idle
    own: Path = ()  # of `paths`, that of the draft's own tokens
    drawn: int = 0  # tokens that its run has brought before
    ending: bool = False  # its run was told to end
    half: int = 0  # tokens of its run at which half of the latest request is drawn

    def seen(self, done: PassDone, now: float) -> PassSeen:
        """What the controller is told of an answer."""
        fed = done.fed or done.shared + len(self.sent.tree)
        waited = now - self.left_at
        return PassSeen(waited, done.seconds, done.queued, done.forwards, not self.drawn, done.shared, fed)

    def after(self, done: PassDone, now: float) -> "Flight":
        """The same run after an answer that does not end it."""
        at = self.drawn_paths(done)[-1:]
        return replace(self, paths=at, drawn=self.drawn + len(done.nodes), tokens=1, left_at=now, idle=0.0)

    def drawn_paths(self, done: PassDone) -> tuple[Path, ...]:
        """The path that a run was at, and that path extended by each of its new tokens."""
        paths = [self.paths[0]]
        for node in done.nodes:
            assert isinstance(node, Sample)
            paths.append((*paths[-1], node.token))
        return tuple(paths)


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
    scores: bool = False  # it was asked to score what is missing of the prompt
    free_since: float = 0.0  # seconds


class Held(NamedTuple):
    """What is known after one path."""

    answer: Row | Sample
    lane: Lane  # whose pass it came from
    number: int  # of that pass
    node: int  # of that pass's tree
    extra: Ids | None = None  # ids that were asked for besides the head, if it is known that these were all


class Answers:
    """Rows and samples that passes have brought, by the ids from the frontier on that lead to them.

    Args:
        ids: of the output; the caller appends to it.
        head: ids of a row that the target sends unasked.
    """

    def __init__(self, ids: list[int], head: int) -> None:
        self._ids = ids
        self._head = head
        self._own: tuple[int, Path] = 0, ()  # tokens of output before a pass, and the own tokens that it covered
        self._base = 0  # tokens of output before the paths below
        self._held: dict[Path, Held] = {}
        self._frontier: tuple[int, Held | None] = -1, None  # tokens of output, and what is known after them

    @property
    def held(self) -> Held | None:
        """What is known at the frontier."""
        if self._frontier[0] != len(self._ids):
            self._frontier = len(self._ids), self._held.get(tuple(self._ids[self._base :]))
        return self._frontier[1]

    def after(self, path: Path) -> Held | None:
        """What is known after this path from the frontier on."""
        return self._held.get((*self._ids[self._base :], *path)) if path else self.held

    def covers(self, path: Path) -> bool:
        """Whether a pass has covered this path from the frontier on as the draft's own tokens.

        It depends on how many draft tokens were known when the pass left, and on the tokens of the path and before; not
        on any token after them, as the other paths of a tree would, and the text that they are made of.
        """
        root, own = self._own
        ids = (*self._ids[root:], *path)
        return own[: len(ids)] == ids

    def answer(self, need: NeedRow | NeedSample) -> Row | Sample | None:
        """What the walk needs, if it is known. A row is no draw, and a draw no row.

        Of a row only the head and the ids that the need lists: which other ids were listed depends on draft tokens
        that the walk has not revealed.
        """
        held = self.after(path_of(need))
        if held is None:
            return None
        row = held.answer
        if isinstance(row, Sample) or isinstance(need, NeedSample):
            return row if isinstance(row, Sample) and isinstance(need, NeedSample) else None
        if need.whole:
            return row if row.whole else None
        if not row.lists(need.listed):
            return None
        complete = held.extra is not None and np.array_equal(held.extra, need.listed)
        return row if complete else self._cut(row, need.listed)

    @property
    def row(self) -> Row | None:
        """The target's row at the frontier, if a pass brought one."""
        found = self.held
        return found.answer if found is not None and isinstance(found.answer, Row) else None

    @property
    def sample(self) -> Sample | None:
        """The target's own draw at the frontier, if a pass brought one."""
        found = self.held
        return found.answer if found is not None and isinstance(found.answer, Sample) else None

    def log_probabilities(self, token: int) -> tuple[float | None, tuple[tuple[int, float], ...]]:
        """Of a token at the frontier, in nats, and of the likeliest ids there; None if they did not come with it."""
        found = self.held
        match None if found is None else found.answer:
            case Sample() as sample:
                return sample.log_probability, sample.likely
            case Row(log_probabilities=values) as row if values is not None:
                return float(values[row.ids == token][0]), row.likely
        return None, ()

    def add(self, flight: Flight, nodes: Sequence[Row | Sample]) -> None:
        """Keep what a pass brought; if it left later than all before, drop what precedes its root."""
        if flight.root > self._base:
            self._rebase(flight.root)
        root, own = self._own
        if not self.covers(()) or flight.root + len(flight.own) > root + len(own):
            self._own = flight.root, flight.own
        listed = flight.sent.listed or (None,) * len(nodes)
        answered = flight.sent.answered if flight.sent.run == 1 else (0,) * len(nodes)
        passed, lane, number = tuple(self._ids[flight.root : self._base]), flight.lane, flight.sent.number
        size = len(passed)
        for path, node, answer, extra in zip(flight.paths, answered, nodes, listed, strict=True):
            if path[:size] == passed:  # else the output went another way
                self._held[path[size:]] = Held(answer, lane, number, node, extra)
        self._frontier = -1, None

    def replaced_by(self, flight: Flight, node: int) -> tuple[Path, Row | Sample] | None:
        """Where a row fetched for this node belongs, and what is held there; None: the output went another way."""
        place = self._place(flight, flight.paths[flight.sent.answered.index(node)])
        return None if place is None or place not in self._held else (place, self._held[place].answer)

    def complete(self, flight: Flight, node: int, row: Row) -> None:
        """A row that was fetched replaces the head that was held."""
        replaced = self.replaced_by(flight, node)
        if replaced is not None:
            row = replace(row, likely=replaced[1].likely)  # a whole row comes without
            self._held[replaced[0]] = Held(row, flight.lane, flight.sent.number, node)
            self._frontier = -1, None

    def forget(self, path: Path) -> None:
        """What is known after this path is not enough, and its pass is over: another pass must bring it."""
        self._held.pop((*self._ids[self._base :], *path), None)
        self._frontier = -1, None

    def _place(self, flight: Flight, path: Path) -> Path | None:
        """The path from `_base` on; None if it is not a continuation of the output up to there."""
        passed = tuple(self._ids[flight.root : self._base])
        return path[len(passed) :] if path[: len(passed)] == passed else None

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


class TargetSide:
    """One lane, or several that work on one output: plans passes, sends them, and keeps what they bring."""

    def __init__(
        self, assignment: Assignment, lanes: Iterator[Lane], output: Output, branches: Branches, counts: Counts
    ) -> None:
        given = assignment
        self.lanes: dict[Lane, TargetLane] = {}
        self.answers = Answers(output.ids, given.open_target.head)
        self._given = given
        self._numbers = lanes
        self._output = output
        self._branches = branches
        self._counts = counts
        self._planner = Planner(given.pair, given.method, given.encode, given.tree_budget, given.paths)
        self._wanted = given.targets  # lanes
        self._scored = 1  # tokens of the prompt that need no score, or have one
        self._failures = 0  # lanes lost since one brought its first pass
        self._failing_since = 0.0  # seconds: when the first of them was lost
        self._timer = 0  # number of the latest

    # Lanes: opening, losing, replacing.

    def open(self) -> list[Command]:
        """Open as many lanes as are missing."""
        commands: list[Command] = []
        while len(self.lanes) < self._wanted:
            lane = TargetLane(next(self._numbers))
            self.lanes[lane.number] = lane
            commands.append(Open(lane.number, self._given.open_target, self._backoff()))
        return commands

    def _backoff(self) -> float:
        """Seconds before a lane is opened; the first lost one is replaced at once."""
        doublings = min(self._failures, 10)
        return 0.0 if doublings <= 1 else min(LONGEST_BACKOFF, 0.025 * 2.0**doublings)

    def opened(self, lane: Lane, now: float) -> list[Command]:
        """The lane is open: the target has the prompt, and scores it if that is missing."""
        self.lanes[lane].ready = True
        self.lanes[lane].free_since = now
        return self._score()

    def _score(self) -> list[Command]:
        """Let a lane score what is missing of the prompt, unless one does, or none is open."""
        lanes, likely = self.lanes.values(), self._given.prompt_logprobs
        lane = next((lane for lane in lanes if lane.ready), None)
        if likely is None or lane is None or not self.unscored or any(other.scores for other in lanes):
            return []
        lane.scores = True
        return [Send(lane.number, ScorePrompt(self._scored, likely))]

    @property
    def unscored(self) -> int:
        """Tokens of the prompt whose log-probabilities are missing."""
        return 0 if self._given.prompt_logprobs is None else len(self._given.open_target.prompt) - self._scored

    def scored(self, lane: Lane, reply: PromptScored) -> None:
        """Some more tokens of the prompt are scored."""
        self._scored += len(reply.tokens)
        self.lanes[lane].scores, self.lanes[lane].answered = reply.more, True

    @property
    def ready(self) -> bool:
        """Whether any lane can take a pass or has one."""
        return any(lane.ready for lane in self.lanes.values())

    def lost(self, lane: Lane, now: float) -> list[Command] | None:
        """Give up what was under way there and open another lane.

        None: no lane has brought anything for `target_seconds`, though some may have opened.
        """
        was_ready = self.lanes.pop(lane).ready
        if not self._failures:
            self._failing_since = now
        self._failures += 1
        overdue = now - self._failing_since >= self._given.target_seconds
        if overdue and not any(other.answered for other in self.lanes.values()):
            return None
        without = was_ready and not self.ready
        commands = [*self.open(), *self._score()]
        return [*commands, *self.set_timer()] if without else commands

    def drop(self, lane: Lane) -> list[Command] | None:
        """Give up a lane for good. None: no other is open or being opened."""
        del self.lanes[lane]
        self._wanted -= 1
        if not self.lanes:
            return None
        return self._score() if self.ready else self.set_timer()

    def set_timer(self) -> list[Command]:
        """There is no target from now on: start its deadline."""
        self._timer += 1
        return [SetTimer(Timer.TARGET, self._timer, self._given.target_seconds)]

    def expired(self, number: int) -> bool:
        """Whether there is still no target at its deadline."""
        return number == self._timer and not self.ready

    @property
    def free(self) -> TargetLane | None:
        """A lane without a pass under way, preferably one that owes no row either."""
        free = [lane for lane in self.lanes.values() if lane.ready and lane.flight is None]
        return min(free, key=lambda lane: bool(lane.owed)) if len(free) > 1 else free[0] if free else None

    @property
    def flights(self) -> list[Flight]:
        """The passes under way."""
        return [lane.flight for lane in self.lanes.values() if lane.flight is not None]

    def due(self, path: Path) -> bool:
        """Whether a pass under way brings what follows this path from the frontier on."""
        lanes, ids = self.lanes.values(), self._output.ids
        return any(one.flight and (*ids[one.flight.root :], *path) in one.flight.paths for one in lanes)

    # Replies.

    def expects(self, lane: Lane, reply: PassDone | RowFetched | PromptScored) -> bool:
        """Whether it answers what was asked there."""
        known = self.lanes[lane]
        if isinstance(reply, PromptScored):
            ids, last = tuple(one.token for one in reply.tokens), reply.first + len(reply.tokens)
            prompt = self._given.open_target.prompt
            next_ = known.scores and reply.first == self._scored and reply.more == (last < len(prompt))
            return next_ and bool(ids) and ids == prompt[reply.first : last]
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
        if flight.sent.run > 1:  # a run may end early, and says when it ends
            due = max(1, min(len(reply.nodes), flight.sent.run - flight.drawn - reply.more))
        kind = Sample if flight.sent.draws else Row
        more = reply.more and flight.sent.run == 1
        return len(reply.nodes) == due and not more and all(isinstance(node, kind) for node in reply.nodes)

    def same_distribution(self, lane: Lane, reply: RowFetched) -> bool:
        """Whether a row that was asked for is that of the head sent before, up to SAME_DISTRIBUTION."""
        latest = self.lanes[lane].latest
        assert latest is not None
        replaced = self.answers.replaced_by(latest, reply.node)
        head = None if replaced is None else replaced[1]
        return not isinstance(head, Row) or _difference(head, reply.row) <= SAME_DISTRIBUTION

    def returned(self, lane: Lane, done: PassDone, now: float) -> Flight:
        """A pass, or some tokens of a run, came back and are kept; returns its flight as it was before."""
        known = self.lanes[lane]
        flight, known.flight = known.flight, None
        assert flight is not None
        if not known.answered:
            known.answered, self._failures = True, 0
        if done.more:
            known.flight = flight.after(done, now)
        else:
            known.free_since = now
        drawn = flight if flight.sent.run == 1 else replace(flight, paths=flight.drawn_paths(done)[:-1])
        self.answers.add(drawn, done.nodes)
        return flight

    def fetched(self, lane: Lane, reply: RowFetched) -> None:
        """A row that was asked for came."""
        known = self.lanes[lane]
        assert known.latest is not None
        self.answers.complete(known.latest, reply.node, reply.row)
        del known.owed[reply.node]

    # Runs: tokens that the target draws by itself in one pass.

    @property
    def running(self) -> bool:
        """Whether a run is under way."""
        return any(lane.flight is not None and lane.flight.sent.run > 1 for lane in self.lanes.values())

    @property
    def left_of_runs(self) -> int:
        """Tokens that the longest run under way has still to bring."""
        return max((one.sent.run - one.drawn for one in self.flights if one.sent.run > 1), default=0)

    @property
    def halfway(self) -> Flight | None:
        """A run of which half of the latest request has been drawn, and that nobody has ended."""
        for one in self.flights:
            if one.sent.run > 1 and one.drawn >= one.half and not one.ending:
                return one
        return None

    def end_runs(self) -> list[Command]:
        """Tell runs under way to end with the token that is being drawn."""
        commands: list[Command] = []
        for lane in self.lanes.values():
            flight = lane.flight
            if flight is not None and flight.sent.run > 1 and not flight.ending:
                lane.flight = replace(flight, ending=True)
                commands.append(Send(lane.number, RunTo(flight.sent.number, 0)))
        return commands

    def extend_run(self, flight: Flight, tokens: int) -> Send:
        """Let a run go on for so many tokens beyond those asked for, at most to the end of the output."""
        tokens = min(tokens, self._output.left - (flight.sent.run - flight.drawn))
        more = flight.sent.run + tokens
        sent = replace(flight.sent, run=more)
        self.lanes[flight.lane].flight = replace(flight, sent=sent, half=more - tokens // 2)
        return Send(flight.lane, RunTo(sent.number, more))

    # Passes: what each covers, and rows that are asked for afterwards.

    def send_pass(self, lane: TargetLane, epoch: Epoch, now: float) -> Send:
        """A pass at the frontier; in an epoch without a draft a run."""
        frontier, counts = len(self._output.text), self._counts
        counts.passes += 1
        if epoch.alone:
            epoch.reach = max(epoch.reach, frontier)
            run = min(epoch.choice.run, self._output.left)
            counts.runs += run > 1
            return self._send(lane, NOTHING_GUESSED, None, True, now, run)
        plan = self._plan(epoch)
        counts.row_misses += frontier < epoch.reach
        epoch.reach = max(epoch.reach, frontier + self._length(plan.tree))
        return self._send(lane, plan, None, epoch.draws, now)

    def send_ahead(self, lane: TargetLane, epoch: Epoch, now: float) -> list[Command]:
        """A pass over later draft tokens, on a target that is free while others work on earlier ones, if it pays."""
        if not epoch.choice.speculate or not self.flights:
            return []
        if lane.owed:
            return []  # another pass would take away the row that the walk waits for
        if epoch.beyond(epoch.reach) < max(1, epoch.choice.min_draft_tokens):
            return []  # a pass sent with fewer draft tokens would not include the next ones
        plan = self._plan(epoch)
        paths = enumerate(plan.tree.paths())
        wanted = tuple(node for node, path in paths if self.answers.after(path) is None and not self.due(path))
        if not wanted:
            return []
        frontier = len(self._output.text)
        self._counts.passes += 1
        self._counts.speculated += 1
        epoch.reach = max(epoch.reach, frontier + self._length(plan.tree))
        return [self._send(lane, plan, wanted, epoch.draws, now)]

    def _send(
        self, lane: TargetLane, plan: Plan, wanted: tuple[int, ...] | None, draws: bool, now: float, run: int = 1
    ) -> Send:
        """Send a pass, answered by draws or by rows; or a run of so many tokens."""
        ids = self._output.ids
        lane.passes += 1
        listed = () if draws else plan.listed
        if wanted is not None and listed:
            listed = tuple(listed[node] for node in wanted)
        sent = Pass(lane.passes, tuple(ids[lane.told :]), plan.tree, listed, wanted, draws, run)
        paths = tuple(plan.tree.paths())
        answered = paths if wanted is None else tuple(paths[node] for node in wanted)
        tokens = len(sent.committed) + len(plan.tree)
        idle, half = now - lane.free_since, run - run // 2
        lane.flight = Flight(lane.number, sent, len(ids), answered, tokens, now, idle, plan.own, half=half)
        lane.latest = lane.flight
        lane.told = len(ids)
        lane.owed.clear()
        return Send(lane.number, sent)

    def fetch_late(self, epoch: Epoch, first: int) -> list[Command]:
        """Draft tokens from place `first` on arrived after passes had left that do not list their ids: fetch them."""
        method, options = self._given.method, self._given.open_target.options
        if method.samples or method.whole_draft or options.temperature == 0:
            return []
        commands: list[Command] = []
        skip = len(self._output.text) - epoch.start - epoch.letters_before(first)
        for flight in self.flights:
            if flight.root != len(self._output.ids):
                continue
            listed = self._planner.listed(flight.sent.tree, epoch.guessed(first), skip)
            for node in flight.sent.answered:
                if len(listed[node]):
                    fetch = self._fetch(flight.lane, flight.sent.number, node, listed[node]) or []
                    self._counts.rows_completed += len(fetch)
                    commands += fetch
        return commands

    def fetch_needed(self, need: NeedRow | NeedSample) -> list[Command]:
        """The row that is held lacks what the walk needs: fetch it, or let another pass bring it."""
        held = self.answers.after(path_of(need))
        if held is None or isinstance(need, NeedSample):
            return []  # a pass will bring it
        fetch = self._fetch(held.lane, held.number, held.node, None if need.whole else need.listed)
        if fetch is None:
            self.answers.forget(path_of(need))
            return []
        self._counts.rows_fetched += need.whole and bool(fetch)
        self._counts.rows_completed += not need.whole and bool(fetch)
        return fetch

    def _fetch(self, lane: Lane, number: int, node: int, listed: Ids | None) -> list[Command] | None:
        """Ask once for more of a row; None: its pass is not the lane's latest any more, or has drawn."""
        known = self.lanes.get(lane)
        if known is None or known.latest is None or known.latest.sent.number != number or known.latest.sent.draws:
            return None
        if node in known.owed:
            return []
        known.owed[node] = listed
        return [Send(lane, FetchRow(number, node, listed))]

    def _plan(self, epoch: Epoch) -> Plan:
        given, frontier = self._given, len(self._output.text)
        nodes = epoch.choice.tree_nodes
        others = self._branches.texts(epoch, frontier) if nodes or given.paths > len(given.method.guesses) else ()
        first = epoch.passed(frontier)
        skip = frontier - epoch.start - epoch.letters_before(first)
        return self._planner.plan(epoch.guessed(first), skip, self._output.room, others, nodes)

    def _length(self, tree: TokenTree) -> int:
        """Letters of the longest path."""
        letters = self._given.pair.target.letters
        ends = [0]
        for token, parent in zip(tree.tokens, tree.parents, strict=True):
            ends.append(ends[1 + parent] + len(letters[token]))
        return max(ends)


def path_of(step: WalkStep) -> Path:
    """Where the walk needs a row, from the frontier on."""
    return step.path if isinstance(step, NeedRow) else ()


def _difference(head: Row, other: Row) -> float:
    """The sum of the differences in probability of each id that the first lists, and of all others together."""
    places = other.places(head.ids)
    known = places >= 0
    listed = np.abs(other.probabilities[places[known]] - head.probabilities[known]).sum()
    rest = other.probabilities[head.places(other.ids) < 0].sum() + other.tail
    return float(listed + abs(rest - head.tail - head.probabilities[~known].sum()))

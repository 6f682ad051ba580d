"""The target side of a session: its lanes, the passes under way, and the rows and samples that they brought."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, repeat
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from crossdraft.session.assignment import Assignment
from crossdraft.session.epoch import Epoch
from crossdraft.session.events import Command, IllegalEventError, Lane, Open, Reply, Send, SetTimer, Timer
from crossdraft.session.rules import TargetState
from crossdraft.speculation.choice import PassSeen
from crossdraft.types import messages, quick_dataclass
from crossdraft.types.rows import Ids, Row
from crossdraft.types.statistics import Counts
from crossdraft.types.trees import Path, TokenTree
from crossdraft.verification.planning import Plan, Planner
from crossdraft.verification.walk import NeedRow

if TYPE_CHECKING:
    from crossdraft.session.drafter_side import Branches
    from crossdraft.session.output import Output

MAX_BACKOFF = 1.0  # seconds
MAX_STATES = 64  # hidden states that a drafter is told at once: the newest
NOTHING_GUESSED = Plan(TokenTree(), ())
SAME_DISTRIBUTION = 1e-3  # total difference allowed between a head and its whole row; rows sum to one within 1e-4


@quick_dataclass(frozen=True, eq=False)
class Flight:
    """A pass that was sent. Of a run, `root` and `paths` are where it is now."""

    lane: Lane
    sent: messages.Pass
    root: int  # tokens of output that were committed when it left, and those that its run has brought
    paths: tuple[Path, ...]  # of what it answers, or answers next, from the root on
    own: Path = ()  # of `paths`, that of the draft's own tokens
    drawn: int = 0  # tokens that its run has brought before
    ending: bool = False  # its run was told to end
    half: int = 0  # tokens of its run at which half of the latest request is drawn

    @property
    def left(self) -> int:
        """Tokens that it has still to bring, if it is a run; else 1."""
        return self.sent.run - self.drawn

    def expects(self, done: messages.PassDone) -> bool:
        """Whether this is its next answer."""
        if done.number != self.sent.number or done.first != self.drawn:
            return False
        count, kind = len(done.nodes), messages.Sample if self.sent.draws else Row
        if self.sent.run > 1:  # it may end early, and says when it ends
            whole = 1 <= count <= max(1, self.left - done.more)
        else:
            whole = count == len(self.paths) and not done.more
        return whole and all(map(isinstance, done.nodes, repeat(kind)))

    def seen(self, done: messages.PassDone) -> PassSeen:
        """What the controller is told of an answer."""
        fed = done.fed or done.shared + len(self.sent.tree)
        return PassSeen(done.seconds, done.forwards, done.shared, fed)

    def after(self, done: messages.PassDone) -> "Flight":
        """The same run after an answer that does not end it."""
        root, drawn = self.root + len(done.nodes), self.drawn + len(done.nodes)
        return Flight(self.lane, self.sent, root, self.paths, self.own, drawn, self.ending, self.half)

    def answered(self, nodes: Sequence[Row | messages.Sample]) -> Sequence[Path]:
        """The paths from the root on that an answer is about; of a run, all but its last token lead to the others."""
        if self.sent.run == 1:
            return self.paths
        return list(accumulate([(node.token,) for node in nodes[:-1] if isinstance(node, messages.Sample)], initial=()))


class Held(NamedTuple):
    """What is known after one path."""

    answer: Row | messages.Sample
    lane: Lane  # whose pass it came from
    number: int  # of that pass
    node: int  # of that pass's tree
    extra: Ids | None = None  # ids that were asked for besides the head, if it is known that these were all

    @property
    def possible(self) -> bool:
        """Whether anything can be drawn there: else all of a row is tail."""
        answer = self.answer
        return answer.tail < 1.0 if isinstance(answer, Row) else answer.log_probability != messages.IMPOSSIBLE


class Answers:
    """Rows and samples that passes have brought, by the ids from the frontier on that lead to them.

    `ids`: of the output; the caller appends to it. `head`: ids of a row that the target sends unasked.
    """

    def __init__(self, ids: list[int], head: int) -> None:
        self._ids = ids
        self._head = head
        self._own: tuple[int, Path] = 0, ()  # tokens of output before a pass, and the own tokens that it covered
        self._base = 0  # tokens of output before the paths below
        self._held: dict[Path, Held] = {}
        self._frontier = -1  # tokens of output
        self._known: Held | None = None  # after them

    @property
    def held(self) -> Held | None:
        """What is known at the frontier."""
        ids = self._ids
        if self._frontier != len(ids):
            self._frontier, self._known = len(ids), self._possible(tuple(ids[self._base :]))
        return self._known

    def _possible(self, place: Path) -> Held | None:
        """What is known after a path from the base on; nothing where a draft has led to where nothing can be drawn:
        should the output go there, its next pass is refused."""
        found = self._held.get(place)
        return found if found is None or found.possible else None

    def after(self, path: Path) -> Held | None:
        """What is known after this path from the frontier on."""
        return self._possible((*self._ids[self._base :], *path)) if path else self.held

    def covers(self, path: Path) -> bool:
        """Whether a pass has covered this path from the frontier on as the draft's own tokens, and more can follow.

        It depends on how many draft tokens were known when the pass left, and on the tokens of the path and before; not
        on any token after them, as the other paths of a tree would, and the text that they are made of.
        """
        root, own = self._own
        ids, found = (*self._ids[root:], *path), self._held.get((*self._ids[self._base :], *path))
        return own[: len(ids)] == ids and (found is None or found.possible)

    def answer(self, need: NeedRow) -> Row | None:
        """The row that the walk needs, if it is known; a draw is none.

        Only the head and the ids that the need lists: which other ids were listed depends on draft tokens that the walk
        has not revealed.
        """
        held = self.after(need.path)
        if held is None or isinstance(held.answer, messages.Sample):
            return None
        row = held.answer
        if need.whole:
            return row if row.whole else None
        if not row.lists(need.listed):
            return None
        complete = held.extra is not None and np.array_equal(held.extra, need.listed)
        return row if complete else self._cut(row, need.listed)

    @property
    def sample(self) -> messages.Sample | None:
        """The target's own draw at the frontier, if a pass brought one."""
        found = self.held
        return found.answer if found is not None and isinstance(found.answer, messages.Sample) else None

    def log_probabilities(self, token: int) -> tuple[float | None, tuple[tuple[int, float], ...]]:
        """Of a token at the frontier, in nats, and of the likeliest ids there; None if they did not come with it."""
        found = self.held
        answer = None if found is None else found.answer
        if isinstance(answer, messages.Sample):
            return answer.log_probability, answer.likely
        if answer is None or answer.log_probabilities is None:
            return None, ()
        return float(answer.log_probabilities[answer.ids == token][0]), answer.likely

    def add(self, flight: Flight, nodes: Sequence[Row | messages.Sample]) -> None:
        """Keep what a pass brought; if it left later than all before, drop what precedes its root."""
        if flight.root > self._base:
            gone, size = tuple(self._ids[self._base : flight.root]), flight.root - self._base
            self._held = {path[size:]: held for path, held in self._held.items() if path[:size] == gone}
            self._base = flight.root
        root, own = self._own
        if flight.root + len(flight.own) > root + len(own) or not self.covers(()):
            self._own = flight.root, flight.own
        sent, passed = flight.sent, tuple(self._ids[flight.root : self._base])
        answered = sent.answered if sent.run == 1 else (0,) * len(nodes)
        known = zip(
            nodes, repeat(flight.lane), repeat(sent.number), answered, sent.listed or repeat(None), strict=False
        )
        found: Iterator[tuple[Path, Held]] = zip(
            flight.answered(nodes), map(partial(tuple.__new__, Held), known), strict=True
        )
        if size := len(passed):  # else the output may have gone another way
            found = ((path[size:], held) for path, held in found if path[:size] == passed)
        self._held.update(found)
        self._frontier = -1

    def replaced_by(self, flight: Flight, node: int) -> tuple[Path, Row | messages.Sample] | None:
        """Where a row fetched for this node belongs, and what is held there; None: the output went another way."""
        path = flight.paths[flight.sent.answered.index(node)]
        passed = tuple(self._ids[flight.root : self._base])
        place = path[len(passed) :]
        held = self._possible(place) if path[: len(passed)] == passed else None
        return None if held is None else (place, held.answer)

    def complete(self, flight: Flight, node: int, row: Row) -> None:
        """A row that was fetched replaces the head that was held."""
        replaced = self.replaced_by(flight, node)
        if replaced is not None:
            row = replace(row, likely=replaced[1].likely)  # a whole row comes without
            self._held[replaced[0]] = Held(row, flight.lane, flight.sent.number, node)
            self._frontier = -1

    def forget(self, path: Path) -> None:
        """What is known after this path is not enough, and its pass is over: another pass must bring it."""
        self._held.pop((*self._ids[self._base :], *path), None)
        self._frontier = -1

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


class TargetLane:
    """One open session with a target: what it was asked, and what it owes."""

    def __init__(self, number: Lane, prompt: Path, answers: Answers) -> None:
        self.number = number
        self.ready = False
        self.answered = False  # it has brought something
        self.flight: Flight | None = None  # the pass under way
        self.latest: Flight | None = None  # the pass under way, or the one before
        self.owed: dict[int, Ids | None] = {}  # by node, rows of the latest pass that were asked for
        self.scoring: int | None = None  # place of the prompt's token whose score it owes first
        self._prompt = prompt
        self._answers = answers

    @property
    def state(self) -> TargetState:
        """As in `rules`."""
        if not self.ready:
            return TargetState.OPENING
        if self.flight is not None:
            return TargetState.PASSING
        return TargetState.IDLE if self.scoring is None else TargetState.SCORING

    def outdated(self, reply: Reply) -> bool:
        """Whether it is a row of a pass that another has followed."""
        latest = self.latest
        return isinstance(reply, messages.RowFetched) and latest is not None and reply.number < latest.sent.number

    def expects(self, reply: messages.PassDone | messages.RowFetched | messages.PromptScored) -> bool:
        """Whether it answers what was asked.

        Raises IllegalEventError: it is the row that was asked for, and contradicts the head sent before.
        """
        match reply:
            case messages.PassDone():
                return self.flight is not None and self.flight.expects(reply)
            case messages.PromptScored():
                ids, last = tuple(one.token for one in reply.tokens), reply.first + len(reply.tokens)
                due = reply.first == self.scoring and reply.more == (last < len(self._prompt))
                return due and bool(ids) and ids == self._prompt[reply.first : last]
        latest, node = self.latest, reply.node
        if latest is None or reply.number != latest.sent.number or node not in self.owed:
            return False
        listed = self.owed[node]
        if not (reply.row.whole if listed is None else reply.row.lists(listed)):
            return False
        head = self._answers.replaced_by(latest, node)
        if head is not None and isinstance(head[1], Row) and _difference(head[1], reply.row) > SAME_DISTRIBUTION:
            raise IllegalEventError(f"the row of node {node} is not that of the head sent before")
        return True

    def opened(self) -> None:
        self.ready = True

    def score(self, first: int, likely: int) -> Send:
        """Have the prompt's tokens from a place on scored."""
        self.scoring = first
        return Send(self.number, messages.ScorePrompt(first, likely))

    def scored(self, reply: messages.PromptScored) -> None:
        self.scoring, self.answered = reply.first + len(reply.tokens) if reply.more else None, True

    def send(self, flight: Flight) -> Send:
        """Send a pass, which tells the output up to its root."""
        self.flight = self.latest = flight
        self.owed.clear()
        return Send(self.number, flight.sent)

    def returned(self, done: messages.PassDone) -> Flight:
        """A pass, or some tokens of a run, came back and are kept; returns its flight as it was before."""
        flight = self.flight
        assert flight is not None
        self.answered, self.flight = True, flight.after(done) if done.more else None
        self._answers.add(flight, done.nodes)
        return flight

    def fetch(self, number: int, node: int, listed: Ids | None) -> list[Command] | None:
        """Ask once for more of a row; None: its pass is not the latest any more, or has drawn."""
        if self.latest is None or self.latest.sent.number != number or self.latest.sent.draws:
            return None
        if node in self.owed:
            return []
        self.owed[node] = listed
        return [Send(self.number, messages.FetchRow(number, node, listed))]

    def fetched(self, reply: messages.RowFetched) -> None:
        """A row that was asked for came."""
        assert self.latest is not None
        self._answers.complete(self.latest, reply.node, reply.row)
        del self.owed[reply.node]

    def run_to(self, run: Flight, tokens: int) -> Send:
        """The run under way is to have so many tokens in all; 0: it is to end with the one that is being drawn."""
        self.flight = run
        return Send(self.number, messages.RunTo(run.sent.number, tokens))


class TargetSide:
    """One lane, or several that work on one output: plans passes, sends them, and keeps what they bring."""

    def __init__(
        self, assignment: Assignment, lanes: Iterator[Lane], output: "Output", branches: "Branches", counts: Counts
    ) -> None:
        given = assignment
        self.lanes: dict[Lane, TargetLane] = {}
        self.answers = Answers(output.ids, given.open_target.head)
        self._given = given
        self._numbers = lanes
        self._output = output
        self._branches = branches
        self._counts = counts
        self._planner = Planner(given.pair, given.method, given.encode, given.tree_budget, given.request.paths)
        self._wanted = given.targets  # lanes
        self._scored = 1  # tokens of the prompt that need no score, or have one
        self._failing = 0, 0.0  # lanes lost since one brought its first pass, and the second when the first of them was
        self._timer = 0  # number of the latest
        # Hidden states that passes have brought since the drafter was told some: tokens of output before each pass, the
        # path from there, the state after it.
        self._hidden: deque[tuple[int, Path, bytes]] = deque(maxlen=MAX_STATES)

    # Lanes: opening, losing, replacing.

    def open(self) -> list[Command]:
        """Open as many lanes as are missing; the first lost one is replaced at once."""
        given, failures = self._given, min(self._failing[0], 10)
        pause = 0.0 if failures <= 1 else min(MAX_BACKOFF, 0.025 * 2.0**failures)
        commands: list[Command] = []
        while len(self.lanes) < self._wanted:
            lane = TargetLane(next(self._numbers), given.open_target.prompt, self.answers)
            self.lanes[lane.number] = lane
            commands.append(Open(lane.number, given.open_target, pause))
        return commands

    def opened(self, lane: Lane) -> list[Command]:
        """The lane is open: the target has the prompt, and scores it if that is missing."""
        self.lanes[lane].opened()
        return self._score()

    def _score(self) -> list[Command]:
        """Let a lane score what is missing of the prompt, unless one does, or none is open."""
        lanes, likely = self.lanes.values(), self._given.request.prompt_logprobs
        if likely is None or not self.unscored or any(one.scoring is not None for one in lanes):
            return []
        lane = next((one for one in lanes if one.ready), None)
        return [] if lane is None else [lane.score(self._scored, likely)]

    @property
    def unscored(self) -> int:
        """Tokens of the prompt whose log-probabilities are missing."""
        return 0 if self._given.request.prompt_logprobs is None else len(self._given.open_target.prompt) - self._scored

    def scored(self, lane: Lane, reply: messages.PromptScored) -> None:
        """Some more tokens of the prompt are scored."""
        self._scored += len(reply.tokens)
        self.lanes[lane].scored(reply)

    @property
    def ready(self) -> bool:
        """Whether any lane can take a pass or has one."""
        return any(lane.ready for lane in self.lanes.values())

    def lost(self, lane: Lane, now: float) -> list[Command] | None:
        """Give up what was under way there and open another lane.

        None: no lane has brought anything for `target_seconds`, though some may have opened.
        """
        was_ready = self.lanes.pop(lane).ready
        failures, since = self._failing
        since = since if failures else now
        self._failing = failures + 1, since
        if now - since >= self._given.target_seconds and not any(one.answered for one in self.lanes.values()):
            return None
        commands = [*self.open(), *self._score()]
        return [*commands, *self.set_timer()] if was_ready and not self.ready else commands

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
        found: TargetLane | None = None
        for lane in self.lanes.values():
            if lane.flight is None and lane.ready and (found is None or (found.owed and not lane.owed)):
                found = lane
        return found

    @property
    def flights(self) -> list[Flight]:
        """The passes under way."""
        return [lane.flight for lane in self.lanes.values() if lane.flight is not None]

    @property
    def runs(self) -> list[Flight]:
        """Those of them in which the target draws several tokens by itself."""
        lanes = self.lanes.values()
        return [lane.flight for lane in lanes if lane.flight is not None and lane.flight.sent.run > 1]

    def due(self, path: Path) -> bool:
        """Whether a pass under way brings what follows this path from the frontier on."""
        ids, flights = self._output.ids, self.flights
        return bool(flights) and any((*ids[one.root :], *path) in one.paths for one in flights)

    def returned(self, lane: Lane, done: messages.PassDone) -> Flight:
        """A pass, or some tokens of a run, came back and are kept; returns its flight as it was before."""
        known = self.lanes[lane]
        if not known.answered:
            self._failing = 0, 0.0
        flight = known.returned(done)
        if done.hidden.places:
            run, by_place, paths = flight.sent.run > 1, done.hidden.by_place(), flight.answered(done.nodes)
            nodes = range(done.first, done.first + len(paths)) if run else flight.sent.answered
            self._hidden += [
                (flight.root, path, by_place[node]) for node, path in zip(nodes, paths, strict=True) if node in by_place
            ]
        return flight

    def hidden(self) -> messages.HiddenStates:
        """What the drafter is told of hidden states: by letters of output, those on its path."""
        if not self._hidden:
            return messages.HiddenStates()
        ids, size = self._output.ids, len(self._output.text)
        found: dict[int, bytes] = {}
        for root, path, state in self._hidden:
            end = root + len(path)
            if end <= len(ids) and tuple(ids[root:end]) == path:
                found[size - len(self._given.pair.target.letters_of(ids[end:]))] = state
        self._hidden.clear()
        return messages.HiddenStates(tuple(sorted(found)), b"".join(found[place] for place in sorted(found)))

    def end_runs(self) -> list[Command]:
        """Tell runs under way to end with the token that is being drawn."""
        return [self.lanes[run.lane].run_to(replace(run, ending=True), 0) for run in self.runs if not run.ending]

    def extend_run(self, run: Flight, tokens: int) -> Send:
        """Let a run go on for so many tokens beyond those asked for, at most to the end of the output."""
        tokens = min(tokens, self._output.left - run.left)
        more = run.sent.run + tokens
        run = replace(run, sent=replace(run.sent, run=more), half=more - tokens // 2)
        return self.lanes[run.lane].run_to(run, more)

    # Passes: what each covers, and rows that are asked for afterwards.

    def send_pass(self, lane: TargetLane, epoch: Epoch) -> Send:
        """A pass at the frontier; in an epoch without a draft a run."""
        if epoch.draws and not (epoch.choice.drafts or epoch.draft_tokens):  # there is nothing to compare with
            run = min(epoch.choice.run, self._output.left)
            self._counts.add(passes=1, runs=run > 1)
            return self._send(lane, epoch, NOTHING_GUESSED, None, run)
        self._counts.add(passes=1, row_misses=len(self._output.text) < epoch.reach)
        return self._send(lane, epoch, self._plan(epoch), None)

    def send_ahead(self, lane: TargetLane, epoch: Epoch) -> list[Command]:
        """A pass over later draft tokens, on a target that is free while others work on earlier ones, if it pays."""
        if not epoch.choice.speculate or not self.flights or lane.owed:
            return []  # where a row is owed another pass would take it away
        if epoch.beyond(epoch.reach) < max(1, epoch.choice.min_draft_tokens):
            return []  # a pass sent with fewer draft tokens would not include the next ones
        plan = self._plan(epoch)
        paths = enumerate(plan.tree.paths())
        wanted = tuple(node for node, path in paths if self.answers.after(path) is None and not self.due(path))
        if not wanted:
            return []
        self._counts.add(passes=1, speculated=1)
        return [self._send(lane, epoch, plan, wanted)]

    def _send(self, lane: TargetLane, epoch: Epoch, plan: Plan, wanted: tuple[int, ...] | None, run: int = 1) -> Send:
        """Send a pass, answered by draws or by rows; or a run of so many tokens."""
        ids = self._output.ids
        epoch.cover(len(self._output.text) + max(plan.tree.ends(self._given.pair.target.letters)))
        listed = () if epoch.draws else plan.listed
        if wanted is not None and listed:
            listed = tuple(listed[node] for node in wanted)
        number, told = (1, 0) if lane.latest is None else (lane.latest.sent.number + 1, lane.latest.root)
        sent = messages.Pass(number, tuple(ids[told:]), plan.tree, listed, wanted, epoch.draws, run)
        paths = plan.tree.paths()
        answered = tuple(paths if wanted is None else [paths[node] for node in wanted])
        return lane.send(Flight(lane.number, sent, len(ids), answered, plan.own, half=run - run // 2))

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
                    commands += self.lanes[flight.lane].fetch(flight.sent.number, node, listed[node]) or []
        self._counts.add(rows_completed=len(commands))
        return commands

    def fetch_needed(self, need: NeedRow) -> list[Command]:
        """The row that is held lacks what the walk needs: fetch it, or let another pass bring it."""
        held = self.answers.after(need.path)
        if held is None:
            return []  # a pass will bring it
        lane = self.lanes.get(held.lane)
        fetch = None if lane is None else lane.fetch(held.number, held.node, None if need.whole else need.listed)
        if fetch is None:
            self.answers.forget(need.path)
            return []
        self._counts.add(rows_fetched=need.whole and len(fetch), rows_completed=not need.whole and len(fetch))
        return fetch

    def _plan(self, epoch: Epoch) -> Plan:
        given, frontier = self._given, len(self._output.text)
        nodes = epoch.choice.tree_nodes
        more = given.request.paths > len(given.method.guesses)
        others = self._branches.texts(epoch, frontier) if nodes or more else ()
        first = epoch.passed(frontier)
        skip = frontier - epoch.start - epoch.letters_before(first)
        return self._planner.plan(epoch.guessed(first), skip, self._output.room, others, nodes)


def _difference(head: Row, other: Row) -> float:
    """The sum of the differences in probability of each id that the first lists, and of all others together."""
    places = other.places(head.ids)
    known = places >= 0
    listed = np.abs(other.probabilities[places[known]] - head.probabilities[known]).sum()
    rest = other.probabilities[head.places(other.ids) < 0].sum() + other.tail
    return float(listed + abs(rest - head.tail - head.probabilities[~known].sum()))

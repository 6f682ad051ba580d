"""A session on a virtual clock: among table-driven services that answer when a test says so (`Stage`) or at once
(`run_session`), or among services that take time (`Run`).
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from crossdraft.session.assignment import Assignment
from crossdraft.session.events import (
    Close,
    Command,
    Emitted,
    Event,
    Expired,
    Finished,
    Lane,
    Lost,
    Open,
    Ready,
    Replied,
    Reply,
    Request,
    Send,
    SetTimer,
    Timer,
)
from crossdraft.session.session import Session
from crossdraft.speculation.choice import Controller
from crossdraft.text.letters import NOTHING, Letters
from crossdraft.types.messages import (
    Advance,
    Branch,
    Draft,
    Drafted,
    FetchRow,
    NoiseKey,
    OpenTarget,
    Pass,
    PassDone,
    RowFetched,
    Sample,
    SamplingOptions,
    Score,
)
from crossdraft.types.rows import DraftToken, Row
from crossdraft.types.statistics import Counts
from crossdraft.verification.chooser import RandomChooser
from crossdraft.verification.methods import STANDARD
from tests.tables import DrafterLane, TargetLane, ToyDrafter, ToyTarget, open_drafter
from tests.vocabularies import greedy_tokens, pair_of

GONE = OSError("gone")


class Stage:
    """Carries out a session's commands, and brings it what its services have to say, one thing at a time."""

    def __init__(
        self,
        session: Session,
        target: ToyTarget,
        drafter: Callable[[], ToyDrafter],
        rows: bool,
        committed: tuple[tuple[int, ...], Letters] = ((), NOTHING),  # in an earlier session
    ) -> None:
        self.session = session
        self.now = 0.0  # seconds
        self.out: list[Emitted | Finished] = []
        self.opening: dict[Lane, bool] = {}  # whether it is a target's
        self.targets: dict[Lane, TargetLane] = {}
        self.drafters: dict[Lane, DrafterLane] = {}
        self.timers: dict[Timer, SetTimer] = {}
        self.requests: list[Request] = []  # that were sent
        self._target, self._drafter, self._rows = target, drafter, rows
        self._committed = committed

    def replace_toys(self, target: ToyTarget, drafter: Callable[[], ToyDrafter]) -> None:
        """Other services, before the start."""
        self._target, self._drafter = target, drafter

    def start(self) -> None:
        self.carry_out(self.session.start(self.now))

    def tell(self, event: Event, after: float = 1.0) -> list[Command]:
        """An event happens, so many seconds later."""
        self.now += after
        commands = self.session.handle(event, self.now)
        self.carry_out(commands)
        return commands

    @property
    def finished(self) -> Finished | None:
        return self.out[-1] if self.out and isinstance(self.out[-1], Finished) else None

    @property
    def emitted(self) -> list[Emitted]:
        return [one for one in self.out if isinstance(one, Emitted)]

    @property
    def text(self) -> Letters:
        """The output so far, with what was committed before."""
        return Letters(self._committed[1] + "".join(one.letters for one in self.emitted))

    def carry_out(self, commands: list[Command]) -> None:
        for command in commands:
            assert self.finished is None, "a command after the end"
            match command:
                case Open(lane, request):
                    self.opening[lane] = isinstance(request, OpenTarget)
                case Send(lane, request):
                    self.requests.append(request)
                    (self.targets.get(lane) or self.drafters[lane]).take(request)
                    if isinstance(request, Draft):
                        assert self.text.startswith(self.drafters[lane].begin), "it is told of another output"
                    if isinstance(request, Pass):
                        assert self.targets[lane].told == (*self._committed[0], *(one.token for one in self.emitted))
                case Close(lane):
                    self.opening.pop(lane, None)
                    del self.drafters[lane]
                case SetTimer(timer):
                    self.timers[timer] = command
                case Emitted() | Finished():
                    assert isinstance(command, Finished) or command.offset == len(self.text)
                    self.out.append(command)

    def open(self, lane: Lane) -> None:
        if self.opening.pop(lane):
            self.targets[lane] = TargetLane(self._target.reopened())
        else:
            self.drafters[lane] = DrafterLane(self._drafter(), self._rows)
        self.tell(Ready(lane))

    def reply(self, lane: Lane) -> list[Command]:
        """The next thing that a lane owes."""
        return self.tell(Replied(lane, (self.targets.get(lane) or self.drafters[lane]).reply()))

    def lose(self, lane: Lane, elsewhere: bool = True) -> None:
        for known in (self.opening, self.targets, self.drafters):
            known.pop(lane, None)
        self.tell(Lost(lane, GONE, elsewhere))

    def expire(self, timer: Timer) -> None:
        known = self.timers.pop(timer)
        self.tell(Expired(timer, known.number), known.seconds)

    @property
    def owing(self) -> list[Lane]:
        """Lanes that have something to say, in the order of their opening."""
        return [lane for lane, known in {**self.targets, **self.drafters}.items() if known.owes]


def run_session(session: Session, target: ToyTarget, drafter: ToyDrafter | None) -> list[Command]:
    """Carry out a session's commands with toys until it is finished; returns what it emitted and its end."""
    out: list[Command] = []
    waiting = session.start(0.0)
    while waiting:
        command = waiting.pop(0)
        match command:
            case Open(lane):
                waiting += session.handle(Ready(lane), 0.0)
            case Send(lane, request):
                for reply in answers(request, target, drafter):
                    waiting += session.handle(Replied(lane, reply), 0.0)
            case Emitted() | Finished():
                out.append(command)
    return out


def answers(request: object, target: ToyTarget, drafter: ToyDrafter | None) -> list[Reply]:
    """What the toys say to a request, all of it."""
    match request:
        case Pass():
            return [target.run(request)]
        case FetchRow():
            return [target.fetch(request)]
    assert drafter is not None
    match request:
        case Draft():
            return [drafter.draft(request)]
        case Advance():
            return [drafter.more(request)]
        case Score():
            return [drafter.score(request)]
    raise AssertionError(request)


SAID = "abcdefgh"  # what the target says
UNSAID = "ijklmnop"  # what only the drafter says
FAVOURITE = np.array([0.72, 0.16, 0.07, 0.03, 0.005, 0.005, 0.005, 0.005])


def distribution_at(place: int) -> np.ndarray:
    """The target's distribution over SAID after so many letters."""
    return np.roll(FAVOURITE, (place * 5 + place // 3) % len(SAID))


@dataclass(frozen=True)
class World:
    """How long things take, in seconds, and how good the drafter is."""

    acceptance: float
    token: float  # a drafter's step
    slope: float = 0.0  # ... more for each further token in the step, as a share
    base: float = 1.0  # a pass
    node: float = 0.03  # ... more for each node
    round_trip: float = 0.0  # to the drafter
    tokens: int = 2000
    seed: int = 0
    targets: int = 1


@dataclass
class VirtualDrafter:
    """Drafts one token a step, with branches in the same step; told of another epoch, it drops the old one."""

    world: World
    rng: np.random.Generator
    text: int = 0  # letters
    epoch: int = 0
    asked: int = 0
    made: int = 0
    draft: Draft | None = None
    numbers: "count[int]" = field(default_factory=lambda: count(1))
    growing: list[tuple[Branch, list[tuple[int, Row]], int]] = field(default_factory=list)
    kept: dict[int, tuple[int, list[tuple[int, Row]]]] = field(default_factory=dict)  # number -> end, draft tokens
    busy: bool = False
    held: list[DraftToken] = field(default_factory=list)  # that no reply has brought yet
    ripe: list[Branch] = field(default_factory=list)  # finished, likewise
    worked: float = 0.0  # seconds since the reply before

    def row(self, place: int) -> Row:
        said = distribution_at(place) * self.world.acceptance
        rest = np.full(len(UNSAID), (1 - self.world.acceptance) / len(UNSAID))
        values = np.concatenate([said, rest])
        return Row(np.flatnonzero(values), values[values > 0])

    def drawn(self, place: int) -> tuple[int, Row]:
        row = self.row(place)
        return int(self.rng.choice(row.ids, p=row.probabilities)), row

    def told(self, request: Draft | Advance) -> list[Drafted]:
        if isinstance(request, Advance):
            self.asked = request.count if request.epoch == self.epoch else self.asked
            return []
        self.draft, self.epoch, self.asked, self.made = request, request.epoch, request.count, 0
        self.text = request.offset + len(request.letters)
        kept = self.kept.get(request.adopt)
        self.growing, self.kept, self.held, self.ripe, self.worked = [], {}, [], [], 0.0
        if kept is None:
            return []
        self.text, self.made = kept[0], len(kept[1])
        return [Drafted(self.epoch, tuple(DraftToken(*one) for one in kept[1]), 0.0)]

    @property
    def works(self) -> bool:
        return self.made < self.asked or bool(self.growing)

    def cost(self) -> float:
        return self.world.token * (1 + self.world.slope * (len(self.growing)))

    def step(self) -> list[Drafted]:
        """One forward."""
        assert self.draft is not None
        self.worked += self.cost()
        growing = []
        for branch, made, end in self.growing:
            made.append(self.drawn(end))
            if len(made) == self.draft.branch_depth:
                done = Branch(branch.number, branch.offset, branch.letters, tuple(token for token, _ in made))
                self.kept[branch.number] = (end + 1, made)
                self.ripe.append(done)
            else:
                growing.append((branch, made, end + 1))
        self.growing = growing
        if self.made < self.asked:
            token, row = self.drawn(self.text)
            self.held.append(DraftToken(token, row))
            self._branch_off(token, row)
            self.text += 1
            self.made += 1
        return self._due(self.draft)

    def _due(self, draft: Draft) -> list[Drafted]:
        """A reply is due when it is full, or has all that is wanted."""
        sent = self.made - len(self.held)
        size = draft.first - sent if sent < draft.first else draft.chunk
        if len(self.held) < size and (self.made < self.asked or not (self.held or self.ripe)):
            return []
        reply = Drafted(self.epoch, tuple(self.held), self.worked, first=sent, branches=tuple(self.ripe))
        self.held, self.ripe, self.worked = [], [], 0.0
        return [reply]

    def _branch_off(self, token: int, row: Row) -> None:
        assert self.draft is not None
        if not self.draft.branch_depth:
            return
        others = [int(one) for one in row.ids[np.argsort(-row.probabilities)] if one != token]
        for other in others[: self.draft.branch_width]:
            letters = Letters((SAID + UNSAID)[other])
            self.growing.append((Branch(next(self.numbers), self.text, letters, ()), [], self.text + 1))


@dataclass
class VirtualTarget:
    """Answers passes in order."""

    world: World
    committed: int = 0
    places: tuple[int, ...] = ()

    def row(self, place: int) -> Row:
        return Row(np.arange(len(SAID)), distribution_at(place))

    def run(self, sent: Pass) -> tuple[PassDone, float]:
        self.committed += len(sent.committed)
        self.places = tuple(self.committed + len(path) for path in sent.tree.paths())
        seconds = self.world.base + self.world.node * len(sent.tree)
        answer = self.sample if sent.draws else self.row
        return PassDone(sent.number, tuple(answer(self.places[node]) for node in sent.answered), seconds), seconds

    def sample(self, place: int) -> Sample:
        row = self.row(place)
        rng = np.random.default_rng((self.world.seed, place))
        return Sample(int(rng.choice(row.ids, p=row.probabilities)), 0.0)


@dataclass(frozen=True)
class Outcome:
    """A finished run."""

    seconds: float
    idle: float  # share of the time that the first target had no pass
    counts: Counts

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return self.counts.tokens / self.seconds


class Run:
    """One session, from its first command to its last."""

    def __init__(self, world: World, controller: Controller) -> None:
        self.world = world
        self.controller = controller
        self.rng = np.random.default_rng(world.seed)
        self.now = 0.0
        self.finished: Finished | None = None
        self.emitted = self.replies = self.advances = 0
        self._session = Session(self._assignment())
        self._drafter = VirtualDrafter(world, self.rng)
        self._targets: dict[Lane, VirtualTarget] = {}
        self._free_at: dict[Lane, float] = {}
        self._worked = 0.0
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def _assignment(self) -> Assignment:
        vocabulary = tuple(SAID + UNSAID)
        pair = pair_of(vocabulary, vocabulary)
        return Assignment(
            pair=pair,
            method=STANDARD,
            chooser=RandomChooser(np.random.default_rng(self.world.seed + 1)),
            encode=greedy_tokens(pair.target),
            open_target=OpenTarget((0,), SamplingOptions(), NoiseKey(0)),
            open_drafter=open_drafter(NOTHING, None),
            controller=self.controller,
            max_tokens=self.world.tokens,
            context=10**9,
            targets=self.world.targets,
            tree_budget=64,
        )

    def run(self) -> Outcome:
        self._carry_out(self._session.start(0.0))
        while self.finished is None:
            self.now, _, action = heapq.heappop(self._later)
            action()
        return Outcome(self.now, 1 - self._worked / self.now / max(1, self.world.targets), self.finished.counts)

    def _at(self, time: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._later, (time, next(self._order), action))

    def _event(self, event: Event, time: float) -> None:
        self._at(time, lambda: self._carry_out(self._session.handle(event, self.now)))

    def _carry_out(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Open(lane, request):
                    if isinstance(request, OpenTarget):
                        self._targets[lane] = VirtualTarget(self.world)
                    else:
                        self._lane = lane
                    self._event(Ready(lane), self.now)
                case Send(lane, Pass() as sent):
                    done, seconds = self._targets[lane].run(sent)
                    self._worked += seconds
                    self._free_at[lane] = self.now + seconds
                    self._event(Replied(lane, done), self.now + seconds)
                case Send(lane, FetchRow(number, node)):
                    target = self._targets[lane]
                    row = RowFetched(number, node, target.row(target.places[node]))
                    self._event(Replied(lane, row), max(self.now, self._free_at[lane]))
                case Send(lane, Draft() | Advance() as request):
                    self._at(self.now + self.world.round_trip / 2, lambda request=request: self._tell(request))
                case SetTimer(timer, number, seconds) if timer is not Timer.DRAFTER:
                    self._event(Expired(timer, number), self.now + seconds)
                case Emitted():
                    self.emitted += 1
                case Finished():
                    self.finished = command

    def _tell(self, request: Draft | Advance) -> None:
        self.advances += isinstance(request, Advance)
        self._send(self._drafter.told(request))
        self._work()

    def _work(self) -> None:
        if not self._drafter.busy and self._drafter.works:
            self._drafter.busy = True
            epoch = self._drafter.epoch
            self._at(self.now + self._drafter.cost(), lambda: self._stepped(epoch))

    def _stepped(self, epoch: int) -> None:
        self._drafter.busy = False
        if epoch == self._drafter.epoch:
            self._send(self._drafter.step())
        self._work()

    def _send(self, replies: list[Drafted]) -> None:
        self.replies += len(replies)
        for reply in replies:
            self._event(Replied(self._lane, reply), self.now + self.world.round_trip / 2)

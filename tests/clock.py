"""A session on a virtual clock: among table-driven services that answer when a test says so (`Stage`) or at once
(`run_session`), or among services that take time (`Run`).
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

import numpy as np

from crossdraft.engine.sampling.distributions import NothingLeftError
from crossdraft.session import events
from crossdraft.session.session import Session
from crossdraft.speculation.choice import Controller
from crossdraft.text.letters import NOTHING, Letters
from crossdraft.types.messages import Advance, Draft, OpenTarget, Pass, Sample
from crossdraft.types.rows import Row
from crossdraft.types.statistics import Counts
from crossdraft.verification.chooser import RandomChooser
from crossdraft.verification.methods import STANDARD
from tests.ports import assignment
from tests.tables import DrafterLane, TargetLane, ToyDrafter, ToyTarget, pair_of

GONE = OSError("gone")


class Stage:
    """Carries out a session's commands, and brings it what its services have to say, one thing at a time."""

    pause = 1.0  # seconds between events

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
        self.out: list[events.Emitted | events.Finished] = []
        self.opening: dict[events.Lane, bool] = {}  # whether it is a target's
        self.targets: dict[events.Lane, TargetLane] = {}
        self.drafters: dict[events.Lane, DrafterLane] = {}
        self.timers: dict[events.Timer, events.SetTimer] = {}
        self.requests: list[events.Request] = []  # that were sent
        self._target, self._drafter, self._rows = target, drafter, rows
        self._committed = committed

    def replace_toys(self, target: ToyTarget, drafter: Callable[[], ToyDrafter]) -> None:
        """Other services, before the start."""
        self._target, self._drafter = target, drafter

    def start(self) -> None:
        self.carry_out(self.session.start(self.now))

    def tell(self, event: events.Event, after: float | None = None) -> list[events.Command]:
        """An event happens, so many seconds later."""
        self.now += self.pause if after is None else after
        commands = self.session.handle(event, self.now)
        self.carry_out(commands)
        return commands

    @property
    def finished(self) -> events.Finished | None:
        return self.out[-1] if self.out and isinstance(self.out[-1], events.Finished) else None

    @property
    def emitted(self) -> list[events.Emitted]:
        return [one for one in self.out if isinstance(one, events.Emitted)]

    @property
    def text(self) -> Letters:
        """The output so far, with what was committed before."""
        return Letters(self._committed[1] + "".join(one.letters for one in self.emitted))

    def carry_out(self, commands: list[events.Command]) -> None:
        for command in commands:
            assert self.finished is None, "a command after the end"
            match command:
                case events.Open(lane, request):
                    self.opening[lane] = isinstance(request, OpenTarget)
                case events.Send(lane, request):
                    self.send(lane, request)
                case events.Close(lane):
                    self.opening.pop(lane, None)
                    del self.drafters[lane]
                case events.SetTimer(timer):
                    self.timers[timer] = command
                case events.Emitted() | events.Finished():
                    assert isinstance(command, events.Finished) or command.offset == len(self.text)
                    self.out.append(command)

    def send(self, lane: events.Lane, request: events.Request) -> None:
        self.requests.append(request)
        (self.targets.get(lane) or self.drafters[lane]).take(request)
        if isinstance(request, Draft):
            assert self.text.startswith(self.drafters[lane].begin), "it is told of another output"
        if isinstance(request, Pass):
            assert self.targets[lane].told == (*self._committed[0], *(one.token for one in self.emitted))

    def open(self, lane: events.Lane) -> None:
        if self.opening.pop(lane):
            self.targets[lane] = TargetLane(self._target.reopened())
        else:
            self.drafters[lane] = DrafterLane(self._drafter(), self._rows)
        self.tell(events.Ready(lane))

    def reply(self, lane: events.Lane, seconds: float = 0.0) -> list[events.Command]:
        """The next thing that a lane owes, which took its model so long."""
        try:
            reply = (self.targets.get(lane) or self.drafters[lane]).reply()
        except NothingLeftError:
            self.lose(lane, elsewhere=False)
            return []
        return self.tell(events.Replied(lane, replace(reply, seconds=seconds) if seconds else reply))

    def lose(self, lane: events.Lane, elsewhere: bool = True) -> None:
        for known in (self.opening, self.targets, self.drafters):
            known.pop(lane, None)
        self.tell(events.Lost(lane, GONE, elsewhere))

    def expire(self, timer: events.Timer) -> None:
        known = self.timers.pop(timer)
        self.tell(events.Expired(timer, known.number), known.seconds)

    @property
    def owing(self) -> list[events.Lane]:
        """Lanes that have something to say, in the order of their opening."""
        return [lane for lane, known in {**self.targets, **self.drafters}.items() if known.owes]


def run_session(session: Session, target: ToyTarget, drafter: ToyDrafter | None) -> Stage:
    """A session among services that answer at once, played to its end."""
    stage = Stage(session, target, lambda: drafter, rows=True)
    stage.pause = 0.0
    stage.start()
    while stage.finished is None:
        if stage.opening:
            stage.open(next(iter(stage.opening)))
        else:
            stage.reply(stage.owing[0])
    return stage


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
    base: float = 1.0  # a pass
    node: float = 0.03  # ... more for each node
    round_trip: float = 0.0  # to the drafter
    tokens: int = 2000
    seed: int = 0
    targets: int = 1


@dataclass
class WorldTarget(ToyTarget):
    """Says letters by how many there are before them."""

    def distribution(self, path: tuple[int, ...]) -> np.ndarray:
        return np.concatenate([distribution_at(len(path)), np.zeros(len(UNSAID))])

    def _sample(self, path: tuple[int, ...]) -> Sample:
        return Sample(super()._sample(path).token, 0.0)  # drawn at once, so that it can be recorded


@dataclass
class WorldDrafter(ToyDrafter):
    """Says what the target does with some probability, else what the target never says."""

    acceptance: float = 1.0

    def distribution(self, text: Letters) -> Row:
        rest = np.full(len(UNSAID), (1 - self.acceptance) / len(UNSAID))
        values = np.concatenate([distribution_at(len(text)) * self.acceptance, rest])
        return Row(np.flatnonzero(values), values[values > 0])


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


class Run(Stage):
    """One session among services that take time, from its first command to its last."""

    pause = 0.0

    def __init__(self, world: World, controller: Controller) -> None:
        vocabulary = tuple(SAID + UNSAID)
        pair = pair_of(vocabulary, vocabulary)
        chooser = RandomChooser(np.random.default_rng(world.seed))
        given = assignment(
            STANDARD,
            pair=pair,
            chooser=RandomChooser(np.random.default_rng(world.seed + 1)),
            controller=controller,
            max_tokens=world.tokens,
            context=10**9,
            targets=world.targets,
            tree_budget=64,
        )
        target = WorldTarget(len(vocabulary), len(vocabulary), chooser)
        drafter = WorldDrafter(pair.drafter.letters, chooser, acceptance=world.acceptance)
        super().__init__(Session(given), target, lambda: drafter, rows=True)
        self.world = world
        self.replies = self.advances = 0
        self._drafts = False  # the drafter is at a step
        self._busy: set[events.Lane] = set()  # targets that are at work
        self._worked = 0.0  # seconds, of all targets
        self._later: list[tuple[float, int, Callable[[], object]]] = []
        self._order = count()

    def run(self) -> Outcome:
        self.start()
        while self.finished is None:
            self.now, _, action = heapq.heappop(self._later)
            action()
        return Outcome(self.now, 1 - self._worked / self.now / max(1, self.world.targets), self.finished.counts)

    def _after(self, seconds: float, action: Callable[[], object]) -> None:
        heapq.heappush(self._later, (self.now + seconds, next(self._order), action))

    def carry_out(self, commands: list[events.Command]) -> None:
        super().carry_out(commands)
        for command in commands:
            match command:
                case events.Open(lane):
                    self._after(0.0, partial(self.open, lane))
                case events.SetTimer(timer, number, seconds) if timer is not events.Timer.DRAFTER:
                    self._after(seconds, partial(self.tell, events.Expired(timer, number)))

    def send(self, lane: events.Lane, request: events.Request) -> None:
        if lane not in self.targets:
            self._after(self.world.round_trip / 2, partial(self._told, lane, request))
            return
        super().send(lane, request)
        if lane not in self._busy:
            self._serve(lane)

    def _serve(self, lane: events.Lane) -> None:
        """The target works on what it was asked first."""
        if not self.targets[lane].owes:
            self._busy.discard(lane)
            return
        self._busy.add(lane)
        request, seconds = self.targets[lane].asked[0], 0.0
        if isinstance(request, Pass):
            seconds = self.world.base + self.world.node * len(request.tree)
        self._worked += seconds
        self._after(seconds, partial(self._served, lane, seconds))

    def _served(self, lane: events.Lane, seconds: float) -> None:
        self.reply(lane, seconds)
        self._serve(lane)

    def _told(self, lane: events.Lane, request: events.Request) -> None:
        """A request reaches the drafter, which drops what it was drafting if the epoch is another."""
        super().send(lane, request)
        self.advances += isinstance(request, Advance)
        if isinstance(request, Draft) or not self._drafts:
            self._draft(lane, 0)

    def _draft(self, lane: events.Lane, made: int, epoch: int = 0) -> None:
        """A step of the drafter is over; a reply leaves when all of it is drafted."""
        known = self.drafters[lane]
        assert known.draft is not None
        if epoch not in (0, known.draft.epoch):
            return  # of an epoch that is over
        if known.owes and made >= known.size - len(known.again):
            reply = replace(known.reply(), seconds=made * self.world.token)
            self.replies, made = self.replies + 1, 0
            self._after(self.world.round_trip / 2, partial(self.tell, events.Replied(lane, reply)))
        self._drafts = known.owes
        if self._drafts:
            self._after(self.world.token, partial(self._draft, lane, made + 1, known.draft.epoch))

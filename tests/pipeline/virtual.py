"""A session among services that take time, on a clock that nobody waits for."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import numpy as np

from crossdraft.session.assignment import Assignment
from crossdraft.session.events import (
    Command,
    Emitted,
    Event,
    Expired,
    Finished,
    Lane,
    Open,
    Ready,
    Replied,
    Send,
    SetTimer,
    Timer,
)
from crossdraft.session.session import Session
from crossdraft.speculation.choice import Controller
from crossdraft.text.letters import NOTHING
from crossdraft.types.messages import (
    Advance,
    Draft,
    Drafted,
    FetchRow,
    NoiseKey,
    OpenTarget,
    Pass,
    RowFetched,
    SamplingOptions,
)
from crossdraft.types.statistics import Counts
from crossdraft.verification.chooser import RandomChooser
from crossdraft.verification.methods import STANDARD
from tests.fakes import open_drafter
from tests.pipeline.virtual_services import SAID, UNSAID, VirtualDrafter, VirtualTarget, World
from tests.vocabularies import greedy_tokens, pair_of


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

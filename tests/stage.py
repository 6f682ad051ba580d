"""A session among toys that answer when they are told to: whoever holds the strings decides what happens next."""

from collections.abc import Callable

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
    Request,
    Send,
    SetTimer,
    Timer,
)
from crossdraft.session.session import Session
from crossdraft.text.letters import NOTHING, Letters
from crossdraft.types.messages import Draft, OpenTarget, Pass
from tests.fakes import ToyDrafter, ToyTarget
from tests.lanes import DrafterLane, TargetLane

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

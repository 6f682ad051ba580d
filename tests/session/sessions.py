"""Sessions over toys, brought to each of the states in which they wait."""

from collections.abc import Iterable
from typing import Any, TypeVar

import numpy as np

from crossdraft.session import events
from crossdraft.session.assignment import Assignment
from crossdraft.session.rules import TRANSITIONS, DrafterState, LaneState, admits
from crossdraft.session.session import Session
from crossdraft.speculation.choice import Choice
from crossdraft.types.messages import Draft, Drafted, Pass, PassDone, Sample, Score
from crossdraft.types.rows import DraftToken, Row
from crossdraft.verification.methods import SLEM, SLRS, TLI, Method
from tests.ports import assignment, toys
from tests.tables import DrafterLane, ToyTarget
from tests.verification.toys import Turns

T = TypeVar("T")
Begun = tuple[Session, Turns, list[events.Command]]
TARGET, DRAFTER = 1, 2  # lanes, as they are opened first
WHOLE = Row(np.array([0, 1, 2]), np.array([0.2, 0.5, 0.3]))


def begun(*choices: Choice, method: Method = SLEM, waits: bool = False, **changes: Any) -> Begun:
    """A session that has begun and makes these choices in turn, its controller, and its first commands."""
    told = {name: changes.pop(name) for name in ("unwanted", "interrupts") if name in changes}
    controller = Turns(choices, waits, **told)
    session = Session(assignment(method, controller=controller, **changes))
    return session, controller, session.start(0.0)


def started() -> Session:
    """A session that waits for its services."""
    session = Session(assignment())
    session.start(0.0)
    return session


def under_way(*choices: Choice, method: Method = SLEM, **changes: object) -> Begun:
    """The same as `begun` where both services are there, with what follows the second."""
    session, controller, _ = begun(*choices, method=method, waits=True, **changes)
    assert session.handle(events.Ready(TARGET), 0.0) == []
    return session, controller, session.handle(events.Ready(DRAFTER), 0.0)


def opened(session: Session) -> list[events.Command]:
    """Both services are there; returns what follows the second."""
    session.start(0.0)
    assert session.handle(events.Ready(TARGET), 0.0) == []
    return session.handle(events.Ready(DRAFTER), 0.0)


def drafting() -> tuple[Session, Draft]:
    """A session that waits for draft tokens."""
    session = Session(assignment())
    return session, only(Draft, opened(session))


def passing() -> tuple[Session, Pass]:
    """A session that waits for a pass."""
    session, draft = drafting()
    reply = DrafterLane(toys()[1], rows=True).answer(draft)
    return session, only(Pass, session.handle(events.Replied(DRAFTER, reply), 1.0))


def fetching() -> Session:
    """A session that waits for a whole row: the head that came lacks an id that the walk needs."""
    session = Session(assignment(TLI))
    opened(session)
    three = tuple(DraftToken(0, Row.certain(0)) for _ in range(3))
    sent = only(Pass, session.handle(events.Replied(DRAFTER, Drafted(1, three, 0.0)), 0.0))
    short = Row(np.array([1]), np.array([0.5]), 0.5)
    session.handle(events.Replied(TARGET, PassDone(1, (short,) * (1 + len(sent.tree)), 0.0)), 0.0)
    return session


def scoring() -> tuple[Session, Score]:
    """A session that waits for scores: "b" is the first piece of its draft, and nothing longer begins with it."""
    session = Session(assignment(SLRS))
    opened(session)
    two = (DraftToken(1, Row.certain(1)), DraftToken(0, Row.certain(0)))
    drafted = Drafted(1, two, 0.0, "it stands aside")
    sent = only(Pass, session.handle(events.Replied(DRAFTER, drafted), 0.0))
    done = PassDone(1, (WHOLE,) * (1 + len(sent.tree)), 0.0)
    return session, only(Score, session.handle(events.Replied(TARGET, done), 0.0))


def requests(out: Iterable[object]) -> list[events.Request]:
    return [command.request for command in out if isinstance(command, events.Send)]


def only(kind: type[T], out: Iterable[object]) -> T:
    """The one request that was sent, which is of this kind."""
    (sent,) = requests(out)
    assert isinstance(sent, kind)
    return sent


def timers(out: Iterable[object]) -> list[events.Timer]:
    return [command.timer for command in out if isinstance(command, events.SetTimer)]


def timer_of(out: Iterable[object], timer: events.Timer) -> events.SetTimer:
    """The one command that sets this timer."""
    (found,) = (command for command in out if isinstance(command, events.SetTimer) and command.timer is timer)
    return found


def emitted(out: Iterable[object]) -> list[events.Emitted]:
    return [command for command in out if isinstance(command, events.Emitted)]


def end(out: list[events.Command]) -> events.Finished:
    assert isinstance(out[-1], events.Finished)
    return out[-1]


def played(session: Session, out: list[events.Command], target: ToyTarget) -> list[events.Command]:
    """All that follows where only the target is left, the commands before first."""
    found, waiting = list(out), list(requests(out))
    while waiting:
        more = session.handle(events.Replied(TARGET, target.run(waiting.pop(0))), 32.0)
        waiting += requests(more)
        found += more
    return found


def snapshot(session: Session) -> str:
    return repr(spelled(session, 0))


def spelled(value: object, depth: int) -> object:
    if depth > 6 or isinstance(value, np.random.Generator):
        return ""
    if isinstance(value, list | tuple | set):
        return [spelled(one, depth + 1) for one in value]
    if isinstance(value, dict):
        return [(repr(key), spelled(one, depth + 1)) for key, one in value.items()]
    if type(value).__module__.startswith(("crossdraft.session", "crossdraft.types.statistics")):
        return {name: spelled(one, depth + 1) for name, one in vars(value).items() if name != "_given"}
    return repr(value) if isinstance(value, str | int | float | bool | np.ndarray | None) else type(value).__name__


def told(*tokens: int, first: int = 0, number: int = 1, more: bool = True, lane: int = TARGET) -> events.Replied:
    samples = tuple(Sample(token, -0.5) for token in tokens)
    return events.Replied(lane, PassDone(number, samples, 0.01, more=more, forwards=len(tokens), first=first))


def alone(method: Method = TLI, **changes: object) -> tuple[Session, Pass]:
    """A session without any drafter, and its first pass."""
    session = Session(assignment(method, drafts=False, **changes))
    session.start(0.0)
    return session, only(Pass, session.handle(events.Ready(TARGET), 0.0))


def tokens_of(out: list[events.Command]) -> list[int]:
    return [one.token for one in emitted(out)]


class Followed(Session):
    """Checks that a lane's messages lead it through its states as `rules.TRANSITIONS` says, and notes which did."""

    def __init__(self, assignment: Assignment) -> None:
        super().__init__(assignment)
        self.used: set[tuple[LaneState, type]] = set()

    def states(self) -> dict[events.Lane, LaneState]:
        own = {} if self.drafter.lane is None else {self.drafter.lane: self.drafter.state}
        return {lane: known.state for lane, known in self.target.lanes.items()} | own

    def handle(self, event: events.Event, now: float) -> list[events.Command]:
        taken, before = admits(event, self.state, self._lane_of(event)), self.states()
        commands = super().handle(event, now)
        came = event.reply if isinstance(event, events.Replied) else event
        for lane, after in self.states().items():
            messages = [came] if taken and lane == getattr(event, "lane", None) else []
            messages += [one.request for one in commands if isinstance(one, events.Send) and one.lane == lane]
            assert after in self._led(before.get(lane, after), messages)
        return commands

    def _led(self, state: LaneState, messages: Iterable[object]) -> set[LaneState]:
        states = {state}
        for message in [*messages, None]:
            if DrafterState.DRAFTING in states:
                states.add(DrafterState.IDLE)  # the epoch may have ended without a word
            if message is not None:
                known = {one for one in states if type(message) in TRANSITIONS[one]}
                self.used |= {(one, type(message)) for one in known}
                states = {later for one in known for later in TRANSITIONS[one][type(message)]}
        return states

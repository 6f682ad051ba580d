"""What goes into the session's state machine and what comes out of it.

A *lane* is one opened session with one service; each opening has a number of its own, so that what a lost one
still says is known to be old. Requests and replies are the values of `verification.exchange`.
"""

from dataclasses import dataclass
from enum import Enum

from crossdraft.speculation.choice import Told
from crossdraft.text.letters import Letters
from crossdraft.types.messages import (
    Advance,
    Draft,
    Drafted,
    FetchRow,
    OpenDrafter,
    OpenTarget,
    Pass,
    PassDone,
    RowFetched,
    RunTo,
    Score,
    Scored,
)
from crossdraft.types.statistics import Counts, Kind


class IllegalEventError(Exception):
    """An event that the session's state does not allow. The session is unchanged."""


Lane = int  # counts the openings of one generation from 1, of targets and drafters together
Reply = Drafted | Scored | PassDone | RowFetched
Request = Draft | Advance | Score | Pass | FetchRow | RunTo


@dataclass(frozen=True)
class Ready:
    """The session on this lane is open."""

    lane: Lane


@dataclass(frozen=True)
class Replied:
    """The service on this lane answered."""

    lane: Lane
    reply: Reply


@dataclass(frozen=True)
class Lost:
    """The service on this lane failed, or could not be reached."""

    lane: Lane
    error: BaseException
    elsewhere: bool = True  # another service may do it, or the same one later; else what was asked is at fault


class Timer(Enum):
    """What a timer is for."""

    STALL = "the target stands idle for draft tokens"
    DRAFTER = "the drafter owes an answer"
    TARGET = "there is no target"


@dataclass(frozen=True)
class Expired:
    """A timer ran out."""

    timer: Timer
    number: int


@dataclass(frozen=True)
class Cancelled:
    """Nobody wants the rest."""


@dataclass(frozen=True)
class Open:
    """Asks for a session with a service that no other lane uses, and that failed longest ago: Ready or Lost."""

    lane: Lane
    request: OpenTarget | OpenDrafter
    after: float = 0.0  # seconds to wait before


@dataclass(frozen=True)
class Send:
    """Asks for a request to be sent; Lost if it cannot."""

    lane: Lane
    request: Request


@dataclass(frozen=True)
class Close:
    """Asks for a lane's end; nothing that it says counts any more. `blame`: why its service is not to be used again."""

    lane: Lane
    blame: str = ""


@dataclass(frozen=True)
class SetTimer:
    """Asks for Expired(timer, number) after this time; a newer number replaces it."""

    timer: Timer
    number: int
    seconds: float


@dataclass(frozen=True)
class Emitted:
    """A committed token."""

    token: int  # target id
    letters: Letters
    kind: Kind
    offset: int  # letters since the start of the output
    epoch: int
    log_probability: float | None  # nats, of the model itself; None if it was drawn from a row
    kept: int | None  # set with the last token: letters of the output that count (a stop string does not)
    likely: tuple[tuple[int, float], ...] = ()  # the most probable ids there and their log-probabilities, if asked for


class Reason(Enum):
    """Why a session ended; the first two are OpenAI's finish reasons."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(frozen=True)
class Finished:
    """The end of the session."""

    reason: Reason
    counts: Counts
    error: BaseException | None = None


Event = Ready | Replied | Lost | Expired | Told | Cancelled
Command = Open | Send | Close | SetTimer | Emitted | Finished

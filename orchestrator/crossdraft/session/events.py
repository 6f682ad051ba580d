"""Inputs (events) and outputs (commands) of the session's state machine.

A *lane* is one opened session with one service. Every opening has its own number, so that replies of a lost lane are
recognized as outdated. Requests and replies are the messages of `crossdraft.types.messages`.
"""

from enum import Enum

from crossdraft.text.letters import Letters
from crossdraft.types import quick_dataclass
from crossdraft.types.messages import OpenDrafter, OpenTarget, PromptScored
from crossdraft.types.messages import Reply as Reply
from crossdraft.types.messages import Request as Request
from crossdraft.types.statistics import Counts, Kind


class IllegalEventError(Exception):
    """An event that the session's state does not allow. The session is unchanged."""


Lane = int  # counts the openings of one generation from 1, targets and drafters together


@quick_dataclass(frozen=True)
class Ready:
    """The lane is open."""

    lane: Lane


@quick_dataclass(frozen=True)
class Replied:
    """The service on this lane answered."""

    lane: Lane
    reply: Reply


@quick_dataclass(frozen=True)
class Lost:
    """The service on this lane failed, or could not be reached."""

    lane: Lane
    error: BaseException
    elsewhere: bool = True  # worth another attempt, there or at another service; False: the request itself is at fault


class Timer(Enum):
    """What a timer is for."""

    STALL = "the target stands idle for draft tokens"
    DRAFTER = "the drafter owes an answer"
    TARGET = "there is no target"


@quick_dataclass(frozen=True)
class Expired:
    """A timer ran out."""

    timer: Timer
    number: int


@quick_dataclass(frozen=True)
class Cancelled:
    """The client does not want the rest of the output."""


@quick_dataclass(frozen=True)
class Open:
    """Open a session with a service that no other lane uses, preferring one that is there and has not failed lately.

    Answered by Ready or Lost.
    """

    lane: Lane
    request: OpenTarget | OpenDrafter
    after: float = 0.0  # seconds to wait before


@quick_dataclass(frozen=True)
class Send:
    """Send a request. Answered by Lost if that is impossible."""

    lane: Lane
    request: Request


@quick_dataclass(frozen=True)
class Close:
    """End a lane; its later replies are ignored."""

    lane: Lane
    blame: str = ""  # why this generation must not use the service again; empty: it may


@quick_dataclass(frozen=True)
class SetTimer:
    """Deliver Expired(timer, number) after this time. A newer number of the same timer replaces it."""

    timer: Timer
    number: int
    seconds: float


@quick_dataclass(frozen=True)
class Emitted:
    """A committed token."""

    token: int  # target id
    letters: Letters
    kind: Kind
    offset: int  # letters since the start of the output
    epoch: int
    log_probability: float | None  # nats, of the model itself; None: its row came without
    kept: int | None  # set with the last token: letters of the output that count (a stop string does not)
    likely: tuple[tuple[int, float], ...] = ()  # the most probable ids there and their log-probabilities, if asked for


class Reason(Enum):
    """Why a session ended; the first two are OpenAI's finish reasons."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    FAILED = "failed"


@quick_dataclass(frozen=True)
class Finished:
    """The end of the session."""

    reason: Reason
    counts: Counts
    error: BaseException | None = None


Event = Ready | Replied | Lost | Expired | Cancelled
# PromptScored: the next tokens of the prompt, all of which come before the first of the output.
Command = Open | Send | Close | SetTimer | PromptScored | Emitted | Finished

"""What goes into the session's state machine and what comes out of it.

A *lane* is one opened session with one service; each opening has a number of its own, so that what a lost one
still says is known to be old. Requests and replies are the values of `verification.exchange`.
"""

from dataclasses import dataclass, field
from enum import Enum

from crossdraft.pipeline.governing import Told
from crossdraft.text.letters import Letters
from crossdraft.verification.exchange import (
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
from crossdraft.verification.walk import Kind


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

    STALL = "the target stands idle for proposals"
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


@dataclass
class Counts:
    """What a session has done so far."""

    tokens: int = 0  # emitted
    passes: int = 0  # forwards of the target, row misses included, and each token of a run
    runs: int = 0  # passes that asked for several tokens
    row_misses: int = 0  # passes for a row that a pass over the same draft had not fetched
    rows_fetched: int = 0  # whole rows, because a head was not enough
    rows_completed: int = 0  # rows that were asked for more ids, because a proposal came after its pass had left
    epochs: int = 0
    proposals: int = 0
    scores: int = 0  # prefixes whose probability the drafter was asked for
    kinds: dict[Kind, int] = field(default_factory=lambda: dict.fromkeys(Kind, 0))
    drafter_seconds: float = 0.0  # in the model
    target_seconds: float = 0.0  # in the model
    stood_aside: int = 0  # rounds in which the drafter proposed fewer than asked for
    drafter_lost: str = ""  # why a drafter was given up the last time, or none was there; else empty
    drafters_lost: int = 0  # times that a drafter that was open failed or was given up
    targets_lost: int = 0  # times that a target failed
    rewinds: int = 0  # epochs that the drafter was told of
    branches: int = 0  # prepared continuations that came
    branch_tokens: int = 0  # proposals in them
    branches_tried: int = 0  # refusals that met any
    branches_hit: int = 0  # ... and were continued by one
    stalls: int = 0  # times that the target stood idle for proposals until patience ended
    speculated: int = 0  # passes that began while another was in flight
    audited: int = 0  # draws of the drafter that were recomputed from their rows and found right
    proposed_at: list[int] = field(default_factory=list)  # by place in a round, from 0: rounds with a proposal there
    judged_at: list[int] = field(default_factory=list)  # ... rounds in which it was accepted or refused
    accepted_at: list[int] = field(default_factory=list)  # ... rounds in which it was accepted

    def round(self, proposed: int, accepted: int, refused: bool) -> None:
        """A round is over.

        Args:
            proposed: proposals that it had.
            accepted: how many of them, from the first on, are wholly in the output.
            refused: whether the next one was refused; if not, nothing is known of it.
        """
        judged = min(proposed, accepted + refused)
        for counted, reached in ((self.proposed_at, proposed), (self.judged_at, judged), (self.accepted_at, accepted)):
            counted += [0] * (proposed - len(counted))
            for place in range(reached):
                counted[place] += 1


@dataclass(frozen=True)
class Finished:
    """The end of the session."""

    reason: Reason
    counts: Counts
    error: BaseException | None = None


Event = Ready | Replied | Lost | Expired | Told | Cancelled
Command = Open | Send | Close | SetTimer | Emitted | Finished

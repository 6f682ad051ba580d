"""What goes into the session's state machine and what comes out of it.

The values of `verification.exchange` are used as they are: OpenTarget, OpenDrafter, Draft, Score,
Pass and FetchRow are commands; Drafted, Scored, PassDone and RowFetched are events. Here are the others.
"""

from dataclasses import dataclass, field
from enum import Enum

from crossdraft.text.letters import Letters
from crossdraft.verification.exchange import (
    Draft,
    Drafted,
    FetchRow,
    OpenDrafter,
    OpenTarget,
    Pass,
    PassDone,
    RowFetched,
    Score,
    Scored,
)
from crossdraft.verification.walk import Kind


@dataclass(frozen=True)
class TargetOpened:
    """The target has read the prompt."""


@dataclass(frozen=True)
class DrafterOpened:
    """The drafter has the prompt."""


@dataclass(frozen=True)
class DrafterLost:
    """The drafter failed; the session goes on without it."""

    reason: str


@dataclass(frozen=True)
class TargetLost:
    """The target failed; the session ends with this error."""

    error: BaseException


@dataclass(frozen=True)
class Expired:
    """The timer of this number ran out."""

    timer: int


@dataclass(frozen=True)
class Cancelled:
    """Nobody wants the rest."""


@dataclass(frozen=True)
class SetTimer:
    """Asks for Expired(timer) after this time; a newer timer replaces it."""

    timer: int
    seconds: float


@dataclass(frozen=True)
class Emitted:
    """A committed token."""

    token: int  # target id
    letters: Letters
    kind: Kind
    offset: int  # letters since the start of the output
    epoch: int
    log_probability: float | None  # nats, of the model itself; None when the method draws from rows
    kept: int | None  # set with the last token: letters of the output that count (a stop string does not)


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
    passes: int = 0  # of the target, row misses included
    row_misses: int = 0  # passes for a row that the epoch's first pass had not fetched
    rows_fetched: int = 0  # whole rows, because a head was not enough
    epochs: int = 0
    proposals: int = 0
    scores: int = 0  # prefixes whose probability the drafter was asked for
    kinds: dict[Kind, int] = field(default_factory=lambda: dict.fromkeys(Kind, 0))
    drafter_seconds: float = 0.0  # in the model
    target_seconds: float = 0.0  # in the model
    stood_aside: int = 0  # rounds in which the drafter proposed fewer than asked for
    drafter_lost: str = ""  # why the drafter was given up; empty if it was not
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


Reply = Drafted | Scored | PassDone | RowFetched
Event = TargetOpened | DrafterOpened | Reply | DrafterLost | TargetLost | Expired | Cancelled
Command = OpenTarget | OpenDrafter | Draft | Score | Pass | FetchRow | SetTimer | Emitted | Finished

"""What a recorded session looked like over time. All times are seconds since the session was started."""

from dataclasses import dataclass
from enum import Enum

from crossdraft.text.letters import Letters
from crossdraft.verification.walk import Kind


class Role(Enum):
    """What a service is for."""

    DRAFTER = "drafter"
    TARGET = "target"


@dataclass(frozen=True)
class Row:
    """One of several services of a role that were used side by side; a lost one's successor takes its row."""

    role: Role
    place: int = 0  # among those of the role


class Task(Enum):
    """What a model worked on."""

    DRAFT = "draft"
    BRANCHES = "draft with branches"
    SCORE = "scores"
    PASS = "pass"
    MISS = "pass for a row miss"


@dataclass(frozen=True)
class Work:
    """A model's forwards for one reply.

    When they were is not recorded, only how long they took: wire and queue are halved around a pass, and
    before and after a draft the way is taken to be half of the session's quickest answer.
    """

    row: Row
    begin: float
    end: float
    task: Task
    epoch: int
    size: int  # proposals drafted, strings scored, or nodes of the pass
    branches: int = 0  # prepared continuations that came with the reply
    tokens: int = 0  # of a pass: emitted after it, before the next one returned
    late: bool = False  # its epoch was over when the reply came, so that it was dropped


@dataclass(frozen=True)
class Message:
    """On its way between the session and a service."""

    row: Row
    begin: float
    end: float
    outward: bool  # to the service
    name: str
    epoch: int


@dataclass(frozen=True)
class Token:
    """A committed token."""

    letters: Letters
    kind: Kind


@dataclass(frozen=True)
class Handled:
    """The session at work on one event: verification, planning, bookkeeping."""

    begin: float
    end: float
    event: str
    epoch: int
    tokens: tuple[Token, ...]  # emitted


class Happening(Enum):
    """What deserves a mark."""

    REFUSED = "a proposal was refused"
    HIT = "a prepared continuation was adopted"
    STALLED = "patience with the drafter ended"
    LOST = "a service was lost"
    OPENED = "a service was opened"


@dataclass(frozen=True)
class Mark:
    """Something at one moment."""

    at: float
    what: Happening
    text: str
    row: Row | None = None  # None: the session itself


@dataclass(frozen=True)
class Wait:
    """The target stood idle for proposals."""

    begin: float
    end: float


@dataclass(frozen=True)
class Era:
    """The time of an epoch."""

    epoch: int
    begin: float
    end: float


@dataclass(frozen=True)
class Figures:
    """The whole in numbers."""

    seconds: float  # from the first pass to the last token
    tokens: int
    passes: int
    row_misses: int
    refused: int
    hits: int
    stalls: int
    model_share: float  # of that time, in which a target's model worked; the mean over targets
    idle_share: float  # of that time, in which a target had no pass in flight; the mean over targets
    drafter_share: float  # of that time, in which a drafter's model worked
    verification_seconds: float
    bytes: int  # of messages, both ways; 0: not recorded

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_pass(self) -> float:
        return self.tokens / self.passes if self.passes else 0.0


@dataclass(frozen=True)
class Timeline:
    """All of it; each sequence in the order of its beginnings, and `rows` drafters first."""

    rows: tuple[Row, ...]
    works: tuple[Work, ...]
    messages: tuple[Message, ...]
    handled: tuple[Handled, ...]
    marks: tuple[Mark, ...]
    waits: tuple[Wait, ...]
    eras: tuple[Era, ...]
    passes: tuple[float, ...]  # when each was sent: the beginnings of rounds
    end: float
    figures: Figures

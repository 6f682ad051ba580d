"""How an epoch is run, who decides it, and what the decision may be based on."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from crossdraft.verification.exchange import MOST_PROPOSALS, MOST_RUN

if TYPE_CHECKING:
    from crossdraft.pipeline.estimates import Estimates


@dataclass(frozen=True)
class Choice:
    """How an epoch is run.

    Lock-step with K proposals is window = wait = K without overlap; plain decoding is window 0.

    Raises:
        ValueError: a value is out of its range.
    """

    window: int  # proposals asked for beyond those revealed; 0: none, the target decodes by itself
    wait: int = 0  # unrevealed proposals that a pass waits for while more are due
    overlap: bool = True  # the drafter drafts on while a pass is in flight; else an epoch is one round
    patience: float = 30.0  # seconds that the target stands idle for proposals at most, then it goes on without
    branch_depth: int = 0  # proposals of each prepared continuation; 0: none
    branch_width: int = 1  # prepared continuations for each proposal
    chunk: int = 1  # proposals in one reply of the drafter, from its second one on, while epochs overlap
    speculate: bool = False  # a target that is free begins a pass over later proposals before the first returns
    run: int = 1  # without a drafter: tokens that the target draws in one pass; it goes on if the next choice is alike
    reason: str = ""  # for people

    def __post_init__(self) -> None:
        if not (0 <= self.window <= MOST_PROPOSALS and 0 <= self.wait <= self.window and self.patience >= 0):
            got = f"window {self.window}, wait {self.wait}, patience {self.patience:g}"
            raise ValueError(f"0 <= wait <= window <= {MOST_PROPOSALS} and patience >= 0 must hold, got {got}")
        if not (0 <= self.branch_depth <= MOST_PROPOSALS and 1 <= self.branch_width <= MOST_PROPOSALS):
            raise ValueError(
                f"0 <= branch_depth <= {MOST_PROPOSALS} and 1 <= branch_width <= {MOST_PROPOSALS} must hold, "
                f"got depth {self.branch_depth}, width {self.branch_width}"
            )
        if not 1 <= self.chunk <= MOST_PROPOSALS:
            raise ValueError(f"chunk must be between 1 and {MOST_PROPOSALS}, got {self.chunk}")
        if not 1 <= self.run <= MOST_RUN:
            raise ValueError(f"run must be between 1 and {MOST_RUN}, got {self.run}")

    @property
    def drafts(self) -> bool:
        """Whether the drafter is asked at all."""
        return self.window > 0

    @property
    def first(self) -> int:
        """Proposals in the drafter's first reply: a whole round, or what a pass waits for."""
        return (self.wait or self.chunk) if self.overlap else self.window

    def reply(self, sent: int) -> int:
        """Proposals in the drafter's next reply, once it has sent so many of the epoch and while more are wanted."""
        return self.first - sent if sent < self.first else self.chunk


LONG_RUN = 32  # tokens: half of them cover a round trip, and a draft that is to follow waits for as many at most
PLAIN = Choice(window=0, run=LONG_RUN, reason="plain decoding")


@dataclass(frozen=True)
class DraftSeen:
    """A reply of the drafter arrived."""

    proposals: int
    first: int  # place of the first in its epoch
    waited: float | None  # seconds since the drafter was asked, for an epoch's first reply; else None
    gap: float | None  # seconds since the epoch's reply before; None for the first
    seconds: float  # in the model
    branch_tokens: int  # in the branches that came with it


@dataclass(frozen=True)
class PassSeen:
    """A pass returned, or some tokens of a run."""

    tokens: int  # that it fed: those committed since the pass before, and the tree's nodes
    waited: float  # seconds since it was sent, or since the answer before
    seconds: float  # in the model
    idle: float  # seconds that its target had stood idle before it was sent
    proposals: int | None = None  # that its tree covers; None: not known
    queued: float = 0.0  # seconds in the target, waiting for the model
    forwards: int = 1  # tokens of a run that came
    asked: bool = True  # there was a round trip; not for the later answers of a run
    sessions: int = 1  # that shared the latest forward, this one included
    others: int = 0  # tokens that it fed for the others


@dataclass(frozen=True)
class Judged:
    """The walk went on: what became of proposals since the last time."""

    first: int  # place in the epoch of the first proposal judged now
    accepted: int  # of them, wholly in the output
    refused: bool  # the next one was refused
    tokens: int  # emitted meanwhile
    settled: int  # ... of them without a proposal: the target's own
    caught_up: bool = False  # they were compared with tokens that had been settled already


@dataclass(frozen=True)
class BranchSeen:
    """A refusal met the prepared continuations."""

    hit: bool


@dataclass(frozen=True)
class StallSeen:
    """The target stood idle for proposals until patience ended."""

    seconds: float


@dataclass(frozen=True)
class DrafterSeen:
    """A drafter came or went."""

    there: bool


@dataclass(frozen=True)
class Told:
    """What another output has learnt, the one of all with the same services that tries what is not known."""

    estimates: "Estimates"
    leads: bool = False  # it is over: this one is to try from now on


Observation = DraftSeen | PassSeen | Judged | BranchSeen | StallSeen | DrafterSeen | Told


class Governor(Protocol):
    """Decides how each epoch is run. What it learns is revealed already, or times: never a hidden proposal."""

    def observe(self, seen: Observation, now: float) -> None:
        """Takes in what happened; `now` in seconds of the session's clock."""
        ...

    def choose(self, now: float) -> Choice:
        """How the next epoch is run."""
        ...

    @property
    def waits_for_drafter(self) -> bool:
        """Whether the session stands still until a drafter has opened (lock-step for comparison)."""
        ...


@dataclass(frozen=True)
class Fixed:
    """The same choice always."""

    choice: Choice

    @property
    def waits_for_drafter(self) -> bool:
        return not self.choice.overlap and self.choice.drafts

    def observe(self, seen: Observation, now: float) -> None:
        """Learns nothing."""

    def choose(self, now: float) -> Choice:
        return self.choice


def lock_step(k: int) -> Fixed:
    """The classic round: K proposals, one pass, a walk."""
    return Fixed(Choice(window=k, wait=k, overlap=False, reason=f"lock-step, K = {k}"))

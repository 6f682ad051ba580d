"""The vocabulary of controllers: how an epoch is run, among which arms is chosen, and what a controller is told."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import lru_cache
from typing import Protocol

from crossdraft.types import quick_dataclass
from crossdraft.types.messages import MAX_RUN, MOST_DRAFT_TOKENS
from crossdraft.types.trees import MOST_NODES, tree_width


@dataclass(frozen=True)
class Choice:
    """How an epoch is run.

    Lock-step with K draft tokens is max_draft_tokens = min_draft_tokens = K without overlap; plain decoding is
    max_draft_tokens = 0.

    Raises:
        ValueError: a value is out of its range.
    """

    max_draft_tokens: int  # asked for beyond those revealed; 0: none, the target decodes by itself
    min_draft_tokens: int = 0  # unrevealed ones that a pass waits for while more are due
    overlap: bool = True  # the drafter drafts on while a pass is under way; else an epoch is one round
    patience: float = 30.0  # seconds that the target stands idle for draft tokens at most, then it goes on without
    branch_depth: int = 0  # draft tokens of each prepared continuation; 0: none
    branch_width: int = 1  # prepared continuations for each draft token
    tree_nodes: int = 0  # of a draft tree in each round, of paths of at most max_draft_tokens; 0: a chain
    least_likely: float = 0.0  # probability, as the drafter estimates it, with which a tree is still grown by a step
    chunk: int = 1  # draft tokens in one reply of the drafter, from its second one on, while epochs overlap
    speculate: bool = False  # a free target begins a pass over later draft tokens before the first returns
    run: int = 1  # without a drafter: tokens that the target draws in one pass; extended unless drafts are wanted
    review_after: int = 0  # tokens of an overlapped epoch after which the controller decides how it goes on; 0: never
    reason: str = ""  # shown to users
    drafts: bool = field(init=False, repr=False, compare=False)  # the drafter is asked at all

    def __post_init__(self) -> None:
        object.__setattr__(self, "drafts", self.max_draft_tokens > 0)
        nodes = self.tree_nodes
        valid = (
            0 <= self.min_draft_tokens <= self.max_draft_tokens <= MOST_DRAFT_TOKENS
            and 0 <= self.branch_depth <= MOST_DRAFT_TOKENS
            and 1 <= self.branch_width <= MOST_DRAFT_TOKENS
            and (not nodes or (not self.overlap and self.max_draft_tokens < nodes <= MOST_NODES))
            and 0 <= self.least_likely <= 1
            and 1 <= self.chunk <= MOST_DRAFT_TOKENS
            and 1 <= self.run <= MAX_RUN
            and min(self.patience, self.review_after) >= 0
        )
        if not valid:
            raise ValueError(f"a value is out of its range: {self}")

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Choice) and vars(self) == vars(other))

    def __hash__(self) -> int:
        return hash((self.max_draft_tokens, self.tree_nodes, self.min_draft_tokens))  # arms are looked up in each round

    @property
    def width(self) -> int:
        """Nodes that a step of the drafter expands."""
        return tree_width(self.tree_nodes, self.max_draft_tokens) if self.tree_nodes else 1

    @property
    def first(self) -> int:
        """Draft tokens in the drafter's first reply: a whole round, or what a pass waits for."""
        return (self.min_draft_tokens or self.chunk) if self.overlap else self.max_draft_tokens

    @property
    def settings(self) -> str:
        """For people."""
        if not self.drafts:
            return "no drafter"
        branches = f", {self.branch_width} x {self.branch_depth} prepared" if self.branch_depth else ""
        if not self.overlap:
            tree = f", trees of {self.tree_nodes}" if self.tree_nodes else ""
            return f"lock-step (rounds of {self.max_draft_tokens}{tree}{branches})"
        waits = f"waits for {self.min_draft_tokens}" if self.patience else "never waits"
        return f"overlapped (at most {self.max_draft_tokens} ahead, {waits}{branches})"


LONG_RUN = 32  # tokens: half of them cover a round trip, and a run ends with the next token once drafts are wanted
ASIDE = "the drafter cannot go on with this text: {}"  # the reason of epochs without a draft token, in every mode
PLAIN = Choice(max_draft_tokens=0, overlap=False, run=LONG_RUN, reason="plain decoding")

# Draft tokens of lock-step rounds: where others are the best they are so by at most a twentieth, simulated.
ROUNDS = (3, 8)
TREES = ((5, 16), (8, 32))  # depth and nodes of draft trees
OVERLAPPED = ((8, 0), (16, 4))  # draft tokens ahead at most, and that a pass waits for; 0: it never waits
MOST_AHEAD = 2 * OVERLAPPED[-1][0]  # draft tokens of any arm, unless a request says otherwise or they are copies


@lru_cache(1024)
def arms_for(
    most: int = MOST_AHEAD,
    least: int | None = None,
    trees: Sequence[int] = (),
    rounds_only: bool = False,
    copies: bool = False,
    branches: tuple[int, int] = (0, 1),
    targets: int = 1,
) -> Sequence[Choice]:
    """All that may be chosen for an output, no drafter first.

    Args:
        most: draft tokens beyond those revealed.
        least: draft tokens that overlapped passes wait for; None: the controller decides.
        trees: nodes of draft trees that may be used, for methods whose target draws by itself.
        rounds_only: lock-step, for methods that must know the number of draft tokens beforehand.
        copies: the drafter copies bytes.
        branches: depth and width of prepared continuations in overlapped epochs.
        targets: with several, passes may overlap.

    Raises:
        ValueError: a number is out of its range.
    """
    sizes = [MOST_DRAFT_TOKENS >> halved for halved in (3, 2, 1, 0)] if copies else ROUNDS  # four bytes make a token
    deep = {nodes: depth for depth, nodes in TREES}
    depths = [*(size for size in sizes if size < most), min(most, sizes[-1])]
    found = [PLAIN, *(Choice(depth, depth, False) for depth in depths)]
    for nodes in trees:
        if nodes > 1:
            depth = min(most, deep.get(nodes, max(1, nodes // 4)))
            found.append(Choice(depth, depth, False, tree_nodes=nodes))
    for ahead, wait in () if rounds_only else OVERLAPPED if least is None else [(most, least)]:
        ahead, wait = min(most, ahead), min(most, wait)
        found.append(Choice(ahead, wait, True, PLAIN.patience if wait else 0.0, *branches, speculate=targets > 1))
    return tuple(dict.fromkeys(found))


@quick_dataclass(frozen=True)
class DraftSeen:
    """A reply of the drafter arrived."""

    draft_tokens: int  # drafted for it; those of an adopted continuation were there
    waited: float | None  # seconds since the drafter was asked, for an epoch's first reply; else None
    seconds: float  # from its first step on, or since the reply before
    queued: float = 0.0  # until its first step
    aside: str = ""  # set: why the drafter cannot go on with this text


@quick_dataclass(frozen=True)
class PassSeen:
    """A pass returned, or some tokens of a run."""

    seconds: float  # of its steps, sampling included
    forwards: int = 1  # tokens of a run that came
    sessions: int = 1  # that shared the latest forward, this one included
    fed: int = 1  # tokens that it computed, of all sessions


@quick_dataclass(frozen=True)
class Judged:
    """The walk went on: what became of draft tokens since the last observation."""

    accepted: int  # draft tokens, wholly in the output
    refused: bool  # the next one was refused
    tokens: int  # emitted meanwhile
    settled: int  # ... of them drawn by the target without a draft token, while it drafts


class Lifecycle(Enum):
    """What happens to an output."""

    STARTED = auto()  # it opens its services: its first pass is to come
    ENDED = auto()
    DRAFTER_CAME = auto()
    DRAFTER_WENT = auto()


Observation = DraftSeen | PassSeen | Judged | Lifecycle


class Controller(Protocol):
    """Decides how each epoch of an output is run. It sees only times and revealed draft tokens, never hidden ones."""

    waits_for_drafter: bool  # the session waits until a drafter has opened (lock-step for comparison)

    def wants_drafter(self, now: float) -> bool:
        """Whether drafts may be next: a drafter is opened then, and a run of the target by itself ended."""
        ...

    def observe(self, seen: Observation, now: float) -> None:
        """Learn from an observation; `now` in seconds of the session's clock."""
        return

    def choose(self, now: float) -> Choice:
        """How the next epoch is run."""
        ...

    def review(self, now: float) -> Choice:
        """How the running epoch, which is long, goes on; unless the choice is an overlapped one, the epoch ends."""
        return self.choose(now)


class Fixed(Controller):
    """The same choice always; it learns nothing."""

    def __init__(self, choice: Choice) -> None:
        self.choice = choice

    @property
    def waits_for_drafter(self) -> bool:  # type: ignore[override]
        return self.choice.drafts and not self.choice.overlap

    def wants_drafter(self, now: float) -> bool:
        return self.choice.drafts

    def choose(self, now: float) -> Choice:
        return self.choice


def lock_step(num_speculative_tokens: int, tree_nodes: int = 0) -> Fixed:
    """The classic round: K draft tokens or a tree of that depth, one pass, a walk."""
    depth, reason = num_speculative_tokens, f"lock-step, K = {num_speculative_tokens}"
    return Fixed(Choice(depth, depth, False, tree_nodes=tree_nodes, reason=reason))


@dataclass(frozen=True)
class Decision:
    """Consecutive epochs that were run alike, to explain an output."""

    seconds: float  # from the output's first epoch to the first of these
    epochs: int
    choice: Choice

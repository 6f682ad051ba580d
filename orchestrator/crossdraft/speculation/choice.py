"""The vocabulary of controllers: how an epoch is run, what a controller is told, and what it estimates."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from crossdraft.types.messages import MOST_DRAFT_TOKENS, MOST_RUN


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
    chunk: int = 1  # draft tokens in one reply of the drafter, from its second one on, while epochs overlap
    speculate: bool = False  # a free target begins a pass over later draft tokens before the first returns
    run: int = 1  # without a drafter: tokens that the target draws in one pass; extended if the next choice is plain
    reason: str = ""  # shown to users

    def __post_init__(self) -> None:
        if not (0 <= self.min_draft_tokens <= self.max_draft_tokens <= MOST_DRAFT_TOKENS and self.patience >= 0):
            raise ValueError(
                f"0 <= min_draft_tokens <= max_draft_tokens <= {MOST_DRAFT_TOKENS} and patience >= 0 must hold, "
                f"got min_draft_tokens {self.min_draft_tokens}, max_draft_tokens {self.max_draft_tokens}, "
                f"patience {self.patience:g}"
            )
        if not (0 <= self.branch_depth <= MOST_DRAFT_TOKENS and 1 <= self.branch_width <= MOST_DRAFT_TOKENS):
            raise ValueError(
                f"0 <= branch_depth <= {MOST_DRAFT_TOKENS} and 1 <= branch_width <= {MOST_DRAFT_TOKENS} must hold, "
                f"got depth {self.branch_depth}, width {self.branch_width}"
            )
        if not 1 <= self.chunk <= MOST_DRAFT_TOKENS:
            raise ValueError(f"chunk must be between 1 and {MOST_DRAFT_TOKENS}, got {self.chunk}")
        if not 1 <= self.run <= MOST_RUN:
            raise ValueError(f"run must be between 1 and {MOST_RUN}, got {self.run}")

    @property
    def drafts(self) -> bool:
        """Whether the drafter is asked at all."""
        return self.max_draft_tokens > 0

    @property
    def first(self) -> int:
        """Draft tokens in the drafter's first reply: a whole round, or what a pass waits for."""
        return (self.min_draft_tokens or self.chunk) if self.overlap else self.max_draft_tokens

    def reply(self, sent: int) -> int:
        """Draft tokens in the drafter's next reply, once it has sent so many of the epoch and while more are wanted."""
        return self.first - sent if sent < self.first else self.chunk


LONG_RUN = 32  # tokens: half of them cover a round trip, and a draft that follows waits for at most half
PLAIN = Choice(max_draft_tokens=0, run=LONG_RUN, reason="plain decoding")


@dataclass(frozen=True)
class DraftSeen:
    """A reply of the drafter arrived."""

    draft_tokens: int
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
    draft_tokens: int | None = None  # that its tree covers; None: not known
    queued: float = 0.0  # seconds in the target, waiting for the model
    forwards: int = 1  # tokens of a run that came
    asked: bool = True  # there was a round trip; not for the later answers of a run
    sessions: int = 1  # that shared the latest forward, this one included
    others: int = 0  # tokens that it fed for the others


@dataclass(frozen=True)
class Judged:
    """The walk went on: what became of draft tokens since the last observation."""

    first: int  # place in the epoch of the first draft token judged now
    accepted: int  # of them, wholly in the output
    refused: bool  # the next one was refused
    tokens: int  # emitted meanwhile
    settled: int  # ... of them drawn by the target without a draft token
    caught_up: bool = False  # the draft tokens were compared with tokens that had been settled before


@dataclass(frozen=True)
class BranchSeen:
    """A draft token was refused while prepared continuations were at hand."""

    hit: bool


@dataclass(frozen=True)
class StallSeen:
    """The target stood idle for draft tokens until patience ended."""

    seconds: float


@dataclass(frozen=True)
class DrafterSeen:
    """A drafter came or went."""

    there: bool


@dataclass(frozen=True)
class Told:
    """Estimates shared by another output: the one that explores the services for all (`shared`)."""

    estimates: "Estimates"
    leads: bool = False  # the other one is over: this one explores from now on


Observation = DraftSeen | PassSeen | Judged | BranchSeen | StallSeen | DrafterSeen | Told


class Controller(Protocol):
    """Decides how each epoch is run. It sees only times and revealed draft tokens, never hidden ones."""

    def observe(self, seen: Observation, now: float) -> None:
        """Learn from an observation; `now` in seconds of the session's clock."""
        ...

    def choose(self, now: float) -> Choice:
        """How the next epoch is run."""
        ...

    @property
    def waits_for_drafter(self) -> bool:
        """Whether the session waits until a drafter has opened (lock-step for comparison)."""
        ...


@dataclass(frozen=True)
class Fixed:
    """The same choice always."""

    choice: Choice

    @property
    def waits_for_drafter(self) -> bool:
        return not self.choice.overlap and self.choice.drafts

    def observe(self, seen: Observation, now: float) -> None:
        """A fixed choice learns nothing."""

    def choose(self, now: float) -> Choice:
        return self.choice


def lock_step(num_speculative_tokens: int) -> Fixed:
    """The classic round: K draft tokens, one pass, a walk."""
    drafted = num_speculative_tokens
    return Fixed(Choice(drafted, drafted, overlap=False, reason=f"lock-step, K = {drafted}"))


# What a controller estimates, and what the cost model needs of it.

FIRST_TRY = 4.0  # plain passes that exploring a new drafter may lose
PLACES = (0, 1, 2, 3, 4, 6, 9, 14)  # begins of the ranges of places in an epoch that share one acceptance rate
BRANCH_COST = 0.17  # of a further token in a drafter's forward, as a share: a batch of 8 measured 2.1 to 2.6 times one
FURTHER = 0.75  # of the refusals that a branch missed, the share that one more branch misses too


@dataclass(frozen=True)
class Workload:
    """Costs and acceptance of one pair of services for one kind of text: the input of forecast and simulator.

    Raises:
        ValueError: a probability is not between 0 and 1, or a cost is below 0.
    """

    acceptance: tuple[float, ...]  # by place in the epoch, given that all before held; the last: all later places
    match: float  # probability that a token which the target drew by itself agrees with the draft
    token: float  # seconds of a drafter's forward for one draft token; infinite: it never answers
    pass_base: float  # seconds of a plain pass in the target (A)
    pass_node: float = 0.0  # ... more for each node of its tree (B)
    slope: float = 0.0  # what a further token in a drafter's forward costs, as a share of `token`
    drafter_trip: float = 0.0  # seconds of a round trip
    target_trip: float = 0.0
    branch_hit: float = 0.0  # probability that the one likeliest branch is what replaces a refused draft token
    tokens_per_draft_token: float = 1.0  # target tokens that an accepted draft token is worth
    nodes_per_draft_token: float = 1.0  # of a pass's tree
    samples: bool = False  # the target draws by itself, and what it drew is compared (`slem`, `seeded`)
    targets: int = 1
    plain: float = 0.0  # seconds of a token in plain decoding, all included; 0: as a pass over no draft tokens
    contention: float = 1.0  # how many times as long a pass takes while the drafter runs forwards

    def __post_init__(self) -> None:
        shares = (*self.acceptance, self.match, self.branch_hit)
        if not self.acceptance or not all(0 <= share <= 1 for share in shares):
            raise ValueError(f"acceptance, match and branch_hit must be between 0 and 1, got {shares}")
        costs = (self.token, self.pass_node, self.slope, self.drafter_trip, self.target_trip)
        if min(costs) < 0 or self.pass_base <= 0 or self.tokens_per_draft_token <= 0 or self.targets < 1:
            raise ValueError(f"costs must be 0 or more, and a pass must cost something, got {self}")
        if self.plain < 0 or self.contention < 1:
            raise ValueError(f"plain must be 0 or more and contention 1 or more, got {self.plain}, {self.contention}")

    def accepted(self, place: int) -> float:
        """Probability that the draft token at this place of its epoch holds, given that all before it did."""
        return self.acceptance[place] if place < len(self.acceptance) else self.acceptance[-1]

    def forward(self, choice: Choice) -> float:
        """Seconds of a drafter's forward, the branches that it draws along included."""
        branches = choice.branch_width * choice.branch_depth if choice.overlap else 0
        return self.token * (1 + self.slope * branches)

    def pass_seconds(self, draft_tokens: float) -> float:
        """From sending a pass over so many draft tokens to its answer."""
        return self.target_trip + self.pass_base + self.pass_node * self.nodes_per_draft_token * draft_tokens

    @property
    def plain_seconds(self) -> float:
        """From sending a pass of plain decoding to its answer."""
        return self.plain or self.pass_seconds(0)

    @property
    def slowed(self) -> float:
        """Share of a pass's time that is lost to the drafter while it runs forwards."""
        return 1 - 1 / self.contention

    def hit(self, width: int) -> float:
        """Probability that one of the `width` likeliest branches is what replaces a refused draft token."""
        return 1 - (1 - self.branch_hit) * FURTHER ** (width - 1) if self.branch_hit else 0.0

    @property
    def draft_tokens_per_token(self) -> int:
        """Draft tokens that must arrive until the draft has caught up with a token that the target drew by itself."""
        return max(1, round(1 / self.tokens_per_draft_token))


@dataclass(frozen=True)
class Estimates:
    """What a controller estimates, and on how many observations that rests."""

    acceptance: tuple[float, ...] = (0.6,) * len(PLACES)  # for the ranges of `PLACES`
    match: float = 0.45  # probability that a token which the target drew by itself agrees with the draft
    token: float = 0.0  # seconds of a drafter's forward
    slope: float = BRANCH_COST
    drafter_trip: float = 0.0  # seconds
    pass_base: float = 0.0  # seconds in the target, its queue included
    pass_node: float = 0.0  # ... more for each draft token that it and the passes batched with it cover
    target_trip: float = 0.0  # seconds
    branch_hit: float = 0.5
    tokens_per_draft_token: float = 1.0
    judged: float = 0.0  # draft tokens, exponentially discounted
    compared: float = 0.0  # ... compared with tokens that the target had drawn by itself
    replies: int = 0  # of the drafter
    passes: int = 0
    tried: float = 0.0  # refusals with branches at hand, exponentially discounted
    plain: float = 0.0  # seconds of a token in plain decoding, whose runs go on without a round trip
    plain_passes: int = 0  # ... observed; 0: `plain` is inferred from other passes
    slowed: float = 0.0  # seconds that a pass loses per second of the drafter's work beside it
    allowance: float = FIRST_TRY  # exploration budget: plain passes that trying a drafter may still lose
    sessions: float = 1.0  # that share the target, this one included
    queue: float = 0.0  # seconds of a pass's queue
    trial_at: float = 0.0  # seconds of the session's clock: when a drafter that was given up is tried next
    interval: float = 0.0  # seconds between its trials now

    @property
    def known(self) -> bool:
        """Whether both services have been observed."""
        return self.replies > 0 and self.passes > 0

    def workload(self, samples: bool = False, targets: int = 1) -> Workload:
        """The input of forecasts. Raises ValueError before both services have been observed."""
        ends = (*PLACES[1:], PLACES[-1] + 1)
        by_place = tuple(
            share for begin, end, share in zip(PLACES, ends, self.acceptance, strict=True) for _ in range(end - begin)
        )
        return Workload(
            by_place,
            self.match,
            self.token,
            self.pass_base,
            self.pass_node,
            self.slope,
            self.drafter_trip,
            self.target_trip,
            self.branch_hit,
            self.tokens_per_draft_token,
            samples=samples,
            targets=targets,
            plain=self.plain,
            contention=1 / (1 - self.slowed),
        )


MOST_KEPT = 10_000  # decisions that are kept for an explanation


@dataclass(frozen=True)
class Decision:
    """A choice and when it was made, to explain a generation."""

    seconds: float  # since the first one
    epochs: int  # consecutive ones with this choice; epochs that needed no choice do not count
    choice: Choice


@runtime_checkable
class Learning(Protocol):
    """A controller that can explain its estimates."""

    def explain(self) -> Sequence[str]:
        """Estimates and decision, as lines of text."""
        ...


class Explained:
    """Wraps a controller and keeps its decisions."""

    def __init__(self, controller: Controller) -> None:
        self.controller = controller
        self.decisions: list[Decision] = []
        self._began: float | None = None

    @property
    def waits_for_drafter(self) -> bool:
        return self.controller.waits_for_drafter

    @property
    def estimates(self) -> Sequence[str]:
        """The controller's estimates as lines of text; none if it learns nothing."""
        return self.controller.explain() if isinstance(self.controller, Learning) else ()

    def observe(self, seen: Observation, now: float) -> None:
        self.controller.observe(seen, now)

    def choose(self, now: float) -> Choice:
        choice = self.controller.choose(now)
        self._began = now if self._began is None else self._began
        if self.decisions and self.decisions[-1].choice == choice:
            latest = self.decisions.pop()
            self.decisions.append(Decision(latest.seconds, latest.epochs + 1, choice))
        elif len(self.decisions) < MOST_KEPT:
            self.decisions.append(Decision(now - self._began, 1, choice))
        return choice

"""What a controller decides for outputs of one kind: the choices that are compared, the best of each mode, and why."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import product
from math import inf

from crossdraft.speculation.choice import Choice
from crossdraft.speculation.forecast import Conditions, Forecast, forecast
from crossdraft.types.messages import MOST_DRAFT_TOKENS
from crossdraft.types.trees import MOST_NODES

SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)  # numbers of draft tokens that are compared: 20 % apart
TREES = (8, 16, 32, MOST_NODES)  # nodes of draft trees that are compared
DEPTHS = (1, 2, 3, 4, 5, 6, 8, 10)  # draft tokens on their paths
MOST_EXPECTED_WAITS = 3.0  # times the expected wait for draft tokens that the target stands idle at most
REVIEWED = 16  # tokens of an overlapped epoch after which it is decided again: a mode that is slow is left soon
CHUNKS = 3  # replies of a drafter in a pass at least, so that few of its draft tokens miss the next one
CHUNK = 4  # ... with so many draft tokens at most: a quarter of the messages, at 0.2 ms of the event loop each


class Mode(Enum):
    """How draft tokens and passes alternate."""

    PLAIN = "plain decoding"
    LOCK_STEP = "lock-step"
    TREES = "lock-step with trees"
    OVERLAPPED = "overlapped"
    HURRIED = "overlapped, never waiting"

    @staticmethod
    def of(choice: Choice) -> "Mode":
        """Of a choice."""
        if not choice.drafts:
            return Mode.PLAIN
        if not choice.overlap:
            return Mode.TREES if choice.tree_nodes else Mode.LOCK_STEP
        return Mode.OVERLAPPED if choice.patience else Mode.HURRIED


@dataclass(frozen=True)
class Limits:
    """What may be chosen for an output.

    Raises:
        ValueError: a number is out of its range.
    """

    rounds_only: bool = False  # lock-step, for methods that must know the number of draft tokens beforehand
    samples: bool = False  # the method's target draws by itself
    max_draft_tokens: int = 32  # most draft tokens beyond those revealed
    min_draft_tokens: int | None = None  # fixed; None: the controller decides
    branch_depth: int = 0
    branch_width: int = 1
    tree_nodes: tuple[int, ...] = ()  # of draft trees that are compared, for methods whose target draws by itself
    targets: int = 1  # with several, passes may overlap
    copies: bool = False  # the drafter copies bytes: it may find nothing now, and something soon

    def __post_init__(self) -> None:
        least = self.min_draft_tokens or 0
        if not (1 <= self.max_draft_tokens <= MOST_DRAFT_TOKENS and least <= self.max_draft_tokens):
            raise ValueError(f"max_draft_tokens must be between {max(1, least)} and {MOST_DRAFT_TOKENS}: got {self}")

    @property
    def sizes(self) -> Sequence[int]:
        """Numbers of draft tokens that are compared."""
        return [*(size for size in SIZES if size < self.max_draft_tokens), self.max_draft_tokens]


@dataclass(frozen=True)
class Rated:
    """A choice and what it is expected to bring."""

    choice: Choice
    forecast: Forecast
    speed: float  # tokens a second of each output, corrected by what its mode has brought


@dataclass(eq=False)
class Trial:
    """All outputs use a mode that does not seem to pay, to see what it really brings."""

    mode: Mode
    load: int  # binary logarithm of the outputs that there were, with which it ends
    left: float  # tokens of all outputs that are to be emitted in it
    until: float  # tokens of all outputs, since the controller began, at which it ends in any case


@dataclass(frozen=True)
class Policy:
    """What is chosen for outputs of one kind whose draft tokens fare alike, and what from."""

    best: Rated
    rated: Mapping[Mode, Rated]  # the best of each mode
    conditions: Conditions
    usual: Sequence[float]  # of each place, as in `conditions` but of all texts: that its draft token is accepted
    seen: int  # observations that it rests on
    until: float  # tokens of all outputs until which its mode is kept, unless another one is far better
    trial: Trial | None = None  # that was under way
    due: float = inf  # tokens of all outputs at which it is decided again, for a trial or for what its mode has brought

    @property
    def gain(self) -> float:
        """The expected speed, relative to plain decoding."""
        return self.best.speed / self.rated[Mode.PLAIN].speed

    @property
    def reason(self) -> str:
        """Why, in words."""
        if self.trial is not None:
            return f"trying {self.trial.mode.value}, to see what it brings"
        if self.best.choice.drafts:
            return f"{self.gain:.2f} times plain decoding expected"
        return "plain decoding: no draft token raises the speed"


def rounds(given: Conditions, limits: Limits) -> Iterable[Choice]:
    """Lock-step choices."""
    for size in limits.sizes:
        yield Choice(size, size, overlap=False, patience=patience(given, size))


def trees(given: Conditions, limits: Limits) -> Iterable[Choice]:
    """Lock-step choices with draft trees."""
    for nodes, depth in product(limits.tree_nodes, DEPTHS):
        if depth <= limits.max_draft_tokens and depth < nodes:
            yield Choice(depth, depth, overlap=False, patience=patience(given, depth), tree_nodes=nodes)


def patience(given: Conditions, wait: int, chunk: int = 1) -> float:
    """Seconds that a pass waits at most for the reply with so many draft tokens."""
    return MOST_EXPECTED_WAITS * given.draft_arrives(wait + chunk)


def overlapped(
    given: Conditions, limits: Limits, windows: Iterable[int], waits: Iterable[int | None]
) -> Iterable[Choice]:
    """Overlapped choices; those without a number of draft tokens to wait for never wait."""
    chunk = max(1, min(CHUNK, int(given.pass_seconds(0) / CHUNKS / given.draft_seconds)))  # a reply is work for all
    fixed = limits.min_draft_tokens
    for window, number in product(windows, waits):
        wait = 0 if number is None else number if fixed is None else fixed
        if wait <= window:
            yield Choice(
                window,
                wait,
                patience=0.0 if number is None else patience(given, wait, chunk),
                branch_depth=limits.branch_depth,
                branch_width=limits.branch_width,
                chunk=chunk,
                speculate=limits.targets > 1,
                review_after=REVIEWED,
            )


def explanation(given: Conditions, policy: Policy | None) -> Sequence[str]:
    """Costs, the marginal table of lock-step rounds, and the best choice of each mode, as lines of text."""
    target, drafter = given.target, given.drafter
    lines = [
        f"target: {_ms(target.base)} a pass, {_ms(target.session)} more for each output, {_ms(target.token)} for each "
        f"draft token, round trip {_ms(given.target_trip)}; {given.outputs:.1f} outputs share it",
        f"drafter: {_ms(drafter.base)} a draft token, {_ms(drafter.session)} more for each output, round trip "
        f"{_ms(given.drafter_trip)}; an accepted draft token is worth {given.worth:.2f} tokens",
    ]
    if given.rounds is not None:
        lines.append(
            f"... in lock-step rounds: {_ms(given.rounds.base)} a draft token, {_ms(given.rounds.session)} more for "
            "each output"
        )
    if policy is None:
        return [*lines, "nothing decided: too little has been seen of target or drafter"]
    given = policy.conditions
    lines.append("draft tokens  accepted so far  tokens a round  ms a round  tokens/s of all outputs")
    for size in (0, *SIZES):
        if size <= max(8, policy.best.choice.max_draft_tokens):
            choice = Choice(size, size, overlap=False)
            expected = forecast(given, choice)
            total = expected.speed * given.outputs
            lines.append(
                f"{size:12}  {given.alive[size]:15.3f}  {expected.tokens:14.2f}  {1e3 * expected.seconds:10.2f}  "
                f"{total:23.1f}"
            )
    for mode, rated in policy.rated.items():
        settings = rated.choice.settings if rated.choice.drafts else mode.value
        lines.append(
            f"{settings}: {rated.forecast.speed * given.outputs:.1f} tokens/s forecast, "
            f"{rated.speed * given.outputs:.1f} corrected by measured speed"
        )
    if policy.trial is not None:
        return [*lines, f"decided: {policy.reason}"]
    return [*lines, f"decided: {Mode.of(policy.best.choice).value}, {policy.gain:.2f} times plain decoding"]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"

"""Arms: the ways of drafting that a controller compares, and what a small model of costs expects of each.

The model only orders the arms and says what a trial may cost: what an arm brings is measured (`contest`).
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import log2
from operator import mul
from statistics import median

from crossdraft.types.messages import MOST_DRAFT_TOKENS
from crossdraft.types.trees import tree_width

ROUNDS = (2, 3, 5, 8)  # draft tokens of lock-step rounds: neighbours differ by a tenth where the best is between them
COPIED = (8, 16, 32, MOST_DRAFT_TOKENS)  # ... where a drafter copies bytes, four of which make a token
TREES = ((5, 16), (8, 32))  # depth and nodes of draft trees
OVERLAPPED = ((8, 0), (8, 2), (16, 4))  # draft tokens ahead at most, and that a pass waits for; 0: it never waits
LATEST = 9  # durations of which the median counts: four that are nobody's, such as captures, do not show
SLOPE = 1 / 400  # of a pass, that a further token costs until it is known: accelerators are limited by memory
UNKNOWN_STEP = 0.2  # of a pass, that a draft token takes until it is known: drafters are made to be small
CROWDED = 0.2  # exponent: outputs that overlap get out of step, and passes have fewer of them
BRANCHED = 0.2  # exponent: with n times the nodes of a chain, a tree misses n^-0.2 times as often, measured


@dataclass(frozen=True)
class Arm:
    """A way of drafting, the same for all outputs that use it."""

    depth: int = 0  # draft tokens of a round, or ahead at most; 0: no drafter
    nodes: int = 0  # of a draft tree in each round; 0: a chain
    overlap: bool = False  # the drafter goes on while a pass is under way
    wait: int = 0  # draft tokens that an overlapped pass waits for; 0: it never waits
    drafter: str = ""  # its name, where there are several

    @property
    def width(self) -> int:
        """Nodes that a step of the drafter expands."""
        return tree_width(self.nodes, self.depth) if self.nodes else 1

    def __str__(self) -> str:
        if not self.depth:
            return "no drafter"
        if self.overlap:
            kind = f"overlapped, {self.depth} ahead" + (f", waits for {self.wait}" if self.wait else ", never waits")
        else:
            kind = f"trees of {self.nodes}, {self.depth} deep" if self.nodes else f"rounds of {self.depth}"
        return f"{kind}, drafter {self.drafter}" if self.drafter else kind


NO_DRAFTER = Arm()


@dataclass(frozen=True)
class Limits:
    """What may be chosen for an output.

    Raises:
        ValueError: a number is out of its range.
    """

    rounds_only: bool = False  # lock-step, for methods that must know the number of draft tokens beforehand
    samples: bool = False  # the method's target draws by itself
    max_draft_tokens: int = 32  # most draft tokens beyond those revealed
    min_draft_tokens: int | None = None  # of overlapped passes, fixed; None: the controller decides
    branch_depth: int = 0
    branch_width: int = 1
    tree_nodes: tuple[int, ...] = ()  # of draft trees that may be used, for methods whose target draws by itself
    targets: int = 1  # with several, passes may overlap
    copies: bool = False  # the drafter copies bytes: it may find nothing now, and something soon

    def __post_init__(self) -> None:
        least = self.min_draft_tokens or 0
        if not (1 <= self.max_draft_tokens <= MOST_DRAFT_TOKENS and least <= self.max_draft_tokens):
            raise ValueError(f"max_draft_tokens must be between {max(1, least)} and {MOST_DRAFT_TOKENS}: got {self}")

    @cached_property
    def arms(self) -> Sequence[Arm]:
        """All that these limits allow, no drafter first."""
        most, sizes = self.max_draft_tokens, COPIED if self.copies else ROUNDS
        depths = [*(size for size in sizes if size < most), min(most, sizes[-1])]
        found = [NO_DRAFTER, *map(Arm, depths)]
        known = {nodes: depth for depth, nodes in TREES}
        found += [Arm(min(most, known.get(nodes, max(1, nodes // 4))), nodes) for nodes in self.tree_nodes if nodes > 1]
        if not self.rounds_only:
            waits = OVERLAPPED if self.min_draft_tokens is None else [(most, self.min_draft_tokens)]
            found += [Arm(min(most, depth), 0, True, min(most, wait)) for depth, wait in waits]
        return tuple(dict.fromkeys(found))


class Times:
    """What steps take, by their size: the median of the latest of each octave, and straight lines between these."""

    def __init__(self) -> None:
        self._seen: dict[int, deque[tuple[float, float]]] = {}
        self._points: list[tuple[float, float]] = []  # sizes and seconds, ascending; as long as nothing is added

    def add(self, seconds: float, size: float = 1.0) -> None:
        self._seen.setdefault(round(log2(max(1.0, size))), deque(maxlen=LATEST)).append((size, max(0.0, seconds)))
        self._points = []

    @property
    def known(self) -> bool:
        return bool(self._seen)

    def seconds(self, size: float = 1.0) -> float:
        """Of a step of this size; 0 if none was seen."""
        if not self._seen:
            return 0.0
        if not self._points:  # of an octave that was seen once nothing is known: it may have been a stall
            seen = [one for one in self._seen.values() if len(one) > 1] or self._seen.values()
            self._points = sorted(map(_usual, seen))
        points = self._points
        (x, y), place = points[0], bisect_right(points, (size,))
        if place == 0:
            return y
        if place < len(points):
            (x, y), (x1, y1) = points[place - 1 : place + 1]
            return max(0.0, y + (y1 - y) * (size - x) / (x1 - x))  # rounding may give less
        x1, y1 = points[-1]
        slope = max(0.0, (y1 - y) / (x1 - x)) if x1 > x else SLOPE * y
        return y1 + slope * (size - x1)


def _usual(seen: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The usual size and seconds; of two durations one may be a stall."""
    sizes, seconds = zip(*seen, strict=True)
    return median(sizes), median(seconds) if len(seconds) > 2 else min(seconds)


@dataclass(frozen=True)
class Round:
    """What is expected of an arm, of each output."""

    tokens: float
    seconds: float

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return self.tokens / max(self.seconds, 1e-9)

    @staticmethod
    def mean(rounds: "Sequence[Round]") -> "Round":
        """Of these."""
        number = len(rounds)
        return Round(sum(one.tokens for one in rounds) / number, sum(one.seconds for one in rounds) / number)


class Costs:
    """What the steps of a target and its drafters cost."""

    def __init__(self) -> None:
        self.target = Times()  # by tokens of all sessions in a pass
        self.handling = Times()  # of a pass, outside of the target, by outputs
        # Of a draft token by nodes of all outputs, and of round trips by outputs; overlapped or not.
        self.steps, self.trips = ({False: Times(), True: Times()} for _ in range(2))

    def step(self, arm: Arm, drafting: float) -> float:
        """Seconds of a draft token if so many outputs draft."""
        own, other = self.steps[arm.overlap], self.steps[not arm.overlap]
        if not own.known and not other.known:
            return UNKNOWN_STEP * self.target.seconds(drafting)
        return (own if own.known else other).seconds(drafting * arm.width)

    def arrival(self, arm: Arm, drafting: float, tokens: int) -> float:
        """Seconds from asking for so many draft tokens to their arrival."""
        own, other = self.trips[arm.overlap], self.trips[not arm.overlap]
        return (own if own.known else other).seconds(drafting) + tokens * self.step(arm, drafting)

    def round(self, arm: Arm, outputs: float, drafting: float, chances: Sequence[float], worth: float) -> Round:
        """What is expected of a pass and what is drafted for it.

        Args:
            outputs: that share a pass.
            drafting: ... share the drafter.
            chances: of each place that its draft token is accepted, if all before it were.
            worth: target tokens of an accepted draft token.
        """
        if not arm.depth:
            return Round(1.0, self.target.seconds(outputs) + self.handling.seconds(drafting))
        missed = (arm.depth / arm.nodes) ** BRANCHED if arm.nodes else 1.0
        alive = list(accumulate((1 - missed * (1 - chance) for chance in chances[: arm.depth]), mul, initial=1.0))

        def passed(drafted: int, nodes: float) -> Round:
            seconds = self.handling.seconds(drafting) + self.target.seconds(outputs * (1 + nodes))
            return Round(1 + worth * sum(alive[1 : drafted + 1]), seconds)

        if not arm.overlap:
            found = passed(arm.depth, arm.nodes or arm.depth * worth)
            return Round(found.tokens, found.seconds + self.arrival(arm, drafting, arm.depth))
        # The first pass after a refusal has as many draft tokens as it waits for, others what was drafted meanwhile.
        step, first = self.step(arm, drafting), passed(arm.wait, arm.wait * worth)
        ahead = max(1, arm.wait, min(arm.depth, int(first.seconds / max(step, 1e-6))))
        full, again = passed(ahead, ahead * worth), self.arrival(arm, drafting, max(1, arm.wait))
        begun = (1 - alive[ahead]) / (1 - alive[ahead] + alive[arm.wait])  # of all passes
        alone = 1.0 if arm.wait else max(1.0, again / max(first.seconds, 1e-9))  # first passes of an epoch
        waited = again if arm.wait else 0.0
        seconds = begun * (alone * first.seconds + waited) + (1 - begun) * max(full.seconds, arm.wait * step)
        passes = begun * alone + 1 - begun
        tokens = begun * alone * first.tokens + (1 - begun) * full.tokens
        return Round(tokens / passes, seconds / passes * outputs**CROWDED)

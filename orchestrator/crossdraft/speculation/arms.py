"""Arms: the choices that a controller compares, and what a small model of costs expects of each.

The model only orders the arms and says what a trial may cost: what an arm brings is measured (`contest`).
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from crossdraft.speculation.choice import PLAIN, Choice
from crossdraft.speculation.estimates import Times
from crossdraft.types.messages import MOST_DRAFT_TOKENS

ROUNDS = (2, 3, 5, 8)  # draft tokens of lock-step rounds: neighbours differ by a tenth where the best is between them
TREES = ((5, 16), (8, 32))  # depth and nodes of draft trees
OVERLAPPED = ((8, 0), (8, 2), (16, 4))  # draft tokens ahead at most, and that a pass waits for; 0: it never waits
MOST_AHEAD = 2 * OVERLAPPED[-1][0]  # draft tokens of any arm, unless a request says otherwise or they are copies
UNKNOWN_STEP = 0.2  # of a pass, that a draft token takes until it is known: drafters are made to be small
CROWDED = 0.2  # exponent: outputs that overlap get out of step, and passes have fewer of them
BRANCHED = 0.2  # exponent: with n times the nodes of a chain, a tree misses n^-0.2 times as often, measured


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


class Round(NamedTuple):
    """What is expected of a pass and what is drafted for it, of each output."""

    tokens: float
    seconds: float


class Costs:
    """What the steps of a target and its drafters cost, in seconds."""

    def __init__(self) -> None:
        self.target = Times()  # by tokens of all sessions in a pass
        self.steps = Times()  # of a draft token, by nodes of all outputs
        self.trips = Times()  # from asking to the first reply, without its steps, by outputs

    def step(self, arm: Choice, drafting: float) -> float:
        """Of a draft token if so many outputs draft."""
        known = self.steps.known
        return self.steps.seconds(drafting * arm.width) if known else UNKNOWN_STEP * self.target.seconds(drafting)

    def arrival(self, arm: Choice, drafting: float, tokens: int) -> float:
        """From asking for so many draft tokens to their arrival."""
        return self.trips.seconds(drafting) + tokens * self.step(arm, drafting)

    def round(self, arm: Choice, outputs: float, drafting: float, chance: float, worth: float = 1.0) -> Round:
        """What is expected of an arm.

        Args:
            outputs: that share a pass.
            drafting: ... share the drafter.
            chance: that a draft token of a chain is accepted if all before it were.
            worth: target tokens of an accepted draft token.
        """
        depth, wait, nodes = arm.max_draft_tokens, arm.min_draft_tokens, arm.tree_nodes
        chance = min(1 - 1e-9, 1 - (1 - chance) * (depth / nodes) ** BRANCHED if nodes else chance)

        def passed(drafted: float) -> Round:
            accepted = chance * (1 - chance**drafted) / (1 - chance)
            return Round(1 + worth * accepted, self.target.seconds(outputs * (1 + (nodes or drafted * worth))))

        first = passed(wait if arm.overlap else depth)
        if not arm.drafts:
            return first
        again = self.arrival(arm, drafting, max(1, wait if arm.overlap else depth))
        if not arm.overlap:
            return Round(first.tokens, first.seconds + again)
        # A pass without a refusal before it has what was drafted meanwhile. Of those that may be ahead some are in a
        # pass, others drafted during it, and others on their way.
        step, life = self.step(arm, drafting), 2 * first.seconds + self.trips.seconds(drafting)
        ahead = max(wait, min(first.seconds / max(step, 1e-9), depth * first.seconds / max(life, 1e-9)))
        full, refused = passed(ahead), 1 - chance**ahead
        alone = 1.0 if wait else max(1.0, again / max(first.seconds, 1e-9))  # passes until there is a draft
        begun = refused / (refused + chance ** (wait or alone))  # passes before a draft, or behind which one must come
        passes = begun * alone + 1 - begun
        tokens = begun * alone * first.tokens + (1 - begun) * full.tokens
        seconds = begun * (alone * first.seconds + (again if wait else 0.0)) + (1 - begun) * max(
            full.seconds, wait * step, wait * life / depth
        )
        return Round(tokens / passes, seconds / passes * outputs**CROWDED)

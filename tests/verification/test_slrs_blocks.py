"""String-level rejection sampling with the chooser of production: residuals by blocks of candidates."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import chisquare

from crossdraft.text.letters import Letters
from crossdraft.types.messages import Score
from crossdraft.types.rows import DraftToken, Row
from crossdraft.types.statistics import Kind
from crossdraft.verification import prefixes
from crossdraft.verification.chooser import RandomChooser
from crossdraft.verification.walk import Emit, Ground, NeedDraftToken, NeedPrefix, NeedRow, Step
from tests.tables import ToyDrafter
from tests.verification.enumerating import EnumeratingChooser, distribution_of
from tests.verification.toys import Toy, as_ids
from tests.vocabularies import pair_of

WORDS = [first + second + third for first in "abc" for second in ("", *"abc") for third in ("", *"abc")]
WIDE = Toy("all strings of three letters", tuple(sorted(set(WORDS))), ("a", "b", "c", "ab"))


class Table:
    """Answers the needs of walks over one draft of the wide toy's."""

    def __init__(self, draft_tokens: int) -> None:
        self.pair = pair_of(WIDE.target, WIDE.drafter)
        self.draft_tokens = draft_tokens
        self.asked: list[NeedPrefix] = []  # by the latest walk
        self.p = np.random.default_rng(3).dirichlet(np.ones(len(WIDE.target)))
        self._scores: dict[str, float] = {}

    def first(self, chooser: RandomChooser | EnumeratingChooser) -> Emit:
        """The first token that a walk emits."""
        drafter = ToyDrafter(self.pair.drafter.letters, chooser)
        hidden = [drafter.propose() for _ in range(self.draft_tokens)]
        walk = prefixes.walk(Ground(self.pair, chooser, drafted=self.draft_tokens))
        self.asked = []
        step = next(walk)
        while not isinstance(step, Emit):
            step = walk.send(self._answer(step, hidden))
        return step

    def _answer(self, step: Step, hidden: list[DraftToken]) -> DraftToken | Row | np.ndarray | None:
        match step:
            case NeedDraftToken():
                return hidden.pop(0) if hidden else None
            case NeedRow():
                return Row(as_ids(*range(len(self.p))), self.p)
            case NeedPrefix(strings, tokens):
                self.asked.append(step)
                return self._score(strings, tokens)
        raise AssertionError(step)

    def _score(self, strings: tuple[Letters, ...], tokens: int) -> np.ndarray:
        drafter = ToyDrafter(self.pair.drafter.letters, EnumeratingChooser([]))
        missing = tuple(string for string in strings if string not in self._scores)
        found = drafter.score(Score(1, 0, missing, tokens)).probabilities.tolist()
        self._scores.update(zip(missing, found, strict=True))
        return np.array([self._scores[string] for string in strings])


class Choosy(RandomChooser):
    """Keeps no candidate at first."""

    def __init__(self, refusals: int) -> None:
        super().__init__(np.random.default_rng(5))
        self.refusals = refusals
        self.counts: list[int] = []

    def bernoulli(self, probability: float) -> bool:
        return False

    def candidates(self, weights: ArrayLike, count: int) -> tuple[int, ...]:
        self.counts.append(count)
        return super().candidates(weights, count)

    def kept(self, candidates: Sequence[int], weights: ArrayLike, keep: ArrayLike) -> int | None:
        self.refusals -= 1
        return None if self.refusals >= 0 else super().kept(candidates, weights, keep)


def test_blocks_of_candidates_have_the_distribution_of_the_residual() -> None:
    """The chooser of production against p, and against the enumerated share of accepted tokens."""
    table, chooser = Table(3), RandomChooser(np.random.default_rng(11))
    runs = [table.first(chooser) for _ in range(2500)]
    counts = np.bincount([run.token for run in runs], minlength=len(table.p))
    rare = table.p * len(runs) < 5
    observed = [*counts[~rare], counts[rare].sum()]
    expected = [*table.p[~rare] * len(runs), table.p[rare].sum() * len(runs)]
    assert chisquare(observed, expected).pvalue > 1e-4
    kinds = distribution_of(lambda enumerating: table.first(enumerating).kind)
    accepted = sum(run.kind is Kind.ACCEPTED for run in runs)
    share = kinds[Kind.ACCEPTED]
    assert abs(accepted - share * len(runs)) < 4 * (share * (1 - share) * len(runs)) ** 0.5


def test_blocks_grow_until_every_token_is_asked_for() -> None:
    table, chooser = Table(3), Choosy(10)
    emitted = table.first(chooser)
    assert emitted.kind is Kind.CORRECTED
    assert chooser.counts == [8, 32]
    asked = {string for need in table.asked for string in need.strings}
    assert asked == set(WIDE.target)  # their longer tokens are tokens too
    assert len(table.asked) <= 4


def test_nothing_is_asked_for_twice_nor_beyond_what_a_draft_can_reach() -> None:
    table, chooser = Table(1), Choosy(10)
    table.first(chooser)
    asked = [string for need in table.asked for string in need.strings]
    assert len(asked) == len(set(asked))
    assert all(len(string) <= 2 for string in asked)  # one draft token, "ab" is the longest
    assert all(need.tokens == 1 for need in table.asked)


def test_large_questions_are_split() -> None:
    """A question that the drafter could not answer in one message or in time would fail by what was drawn."""
    letters = [chr(place) for place in range(50)]
    pair = pair_of([*letters, *(one + other for one in letters for other in letters)], letters)
    questions = prefixes.PieceDistribution(pair, 2).of([Letters(one) for one in letters])
    step, sizes = next(questions), []
    while True:
        assert isinstance(step, NeedPrefix)
        sizes.append(len(step.strings))
        try:
            step = questions.send(np.full(len(step.strings), 0.01))
        except StopIteration:
            break
    assert sum(sizes) == 50 + 50 * 50
    assert max(sizes) == prefixes.LARGEST_QUESTION

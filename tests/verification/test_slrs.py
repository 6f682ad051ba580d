"""String-level rejection sampling: the law of whole sessions by enumeration, the law of pieces, residuals in blocks."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import ArrayLike
from scipy.stats import chisquare

from crossdraft.text.letters import Letters
from crossdraft.verification import prefixes
from crossdraft.verification.chooser import RandomChooser
from crossdraft.verification.exchange import Score
from crossdraft.verification.methods import SLRS
from crossdraft.verification.prefixes import PieceLaw
from crossdraft.verification.rejection import undrafted
from crossdraft.verification.rows import Proposal, Row
from crossdraft.verification.walk import (
    Emit,
    Ground,
    Kind,
    NeedPrefix,
    NeedProposal,
    NeedRow,
    Step,
    Walk,
)
from tests.fakes import ToyDrafter, ToyTarget, autoregressive_law, greedy_tokens, pair_of
from tests.verification.enumerating import EnumeratingChooser, distance, law_of, total_variation
from tests.verification.toys import TOYS, Setup, Toy, as_ids

EXACT = 1e-12
NESTED = next(toy for toy in TOYS if toy.name == "nested prefixes")
LATE = Toy("excluded by a piece before the last", ("a", "b", "aba"), ("a", "b"))


def wanted(setup: Setup) -> dict[tuple[int, ...], float]:
    return autoregressive_law(setup.target(None), setup.stops, setup.length)


def cells() -> list[Setup]:
    """K = 1 to 3, with as many tokens as time allows: three in a round of three where a side has two letters."""
    out = []
    for toy in (*TOYS, LATE):
        longest = 3 if min(len(toy.target), len(toy.drafter)) == 2 else 2
        out += [Setup(toy, SLRS, proposals, length) for proposals, length in ((1, 3), (2, 3), (3, longest))]
    return out


@pytest.mark.parametrize("setup", cells(), ids=lambda setup: f"{setup.toy.name}-K{setup.proposals}")
def test_output_law_is_the_targets(setup: Setup) -> None:
    assert distance(law_of(setup.run), wanted(setup)) < EXACT


@pytest.mark.parametrize("head", [1, 2])
def test_truncated_rows_have_the_same_law(head: int) -> None:
    for toy in (*TOYS, LATE):
        setup = Setup(toy, SLRS, 2, 2, head=head)
        assert distance(law_of(setup.run), wanted(setup)) < EXACT, toy.name


@pytest.mark.parametrize(("proposals", "length"), [(1, 3), (2, 3), (3, 2)])
def test_ignoring_the_end_symbol(proposals: int, length: int) -> None:
    toy = next(toy for toy in TOYS if toy.name == "end symbol")
    setup = Setup(toy, SLRS, proposals, length, ignore_end=True)
    assert distance(law_of(setup.run), wanted(setup)) < EXACT


def test_temperature_zero_is_the_greedy_text() -> None:
    for toy in (*TOYS, LATE):
        setup = Setup(toy, SLRS, 3, 6, temperature=0)
        law = law_of(setup.run)
        assert law == wanted(setup), toy.name
        assert len(law) == 1


class Unconditional(PieceLaw):
    """ψ of what follows the accepted pieces whatever else could have followed: G(t1 x) / G(t1)."""

    def accept(self, piece: Letters) -> None:
        super().accept(piece)
        self._mass, self._excluded = self._known[self._accepted], ()


def test_the_unconditional_law_of_a_later_piece_is_biased(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = next(toy for toy in TOYS if toy.name == "one inside the other")
    setup = Setup(toy, SLRS, 3, 3)
    monkeypatch.setattr(prefixes, "PieceLaw", Unconditional)
    assert total_variation(law_of(setup.run), wanted(setup)) > 0.005


def test_drawing_from_p_where_the_text_has_no_piece_is_biased() -> None:
    setup = Setup(NESTED, replace(SLRS, walk=plain_at_the_end), 2, 2)
    assert total_variation(law_of(setup.run), wanted(setup)) > 0.01


def plain_at_the_end(ground: Ground) -> Walk:
    """`slrs` that takes the end of the draft's text for no event."""
    walk = prefixes.walk(ground)
    step = next(walk)
    while True:
        answer = yield step
        step = walk.send(answer)
        if answer is None and isinstance(step, NeedRow) and step.whole:  # no piece was refused
            yield from undrafted(ground)


@pytest.mark.parametrize("toy", [*TOYS, LATE], ids=lambda toy: toy.name)
@pytest.mark.parametrize("proposals", [1, 3])
def test_the_first_piece_is_accepted_with_the_sum_of_min(toy: Toy, proposals: int) -> None:
    """arXiv 2502.05202, Table 2, with ψ from every draft there is, each cut by a tokenizer."""
    pair = pair_of(toy.target, toy.drafter)
    encode = greedy_tokens(pair.target)

    def first_piece(chooser: EnumeratingChooser) -> Letters:
        drafter = ToyDrafter(pair.drafter.letters, chooser)
        for _ in range(proposals):
            drafter.propose()
        return pair.target.letters_of(encode(drafter.text)[:1])

    psi = law_of(first_piece)
    p: dict[Letters, float] = {}
    for token, chance in enumerate(ToyTarget(len(toy.target), 99).law(())):
        p[pair.target.letters[token]] = p.get(pair.target.letters[token], 0.0) + float(chance)
    setup = Setup(toy, SLRS, proposals, 2)
    kinds = law_of(lambda chooser: setup.emitted(chooser)[0].kind)
    expected = sum(min(p[letters], psi.get(letters, 0.0)) for letters in p)
    assert kinds.get(Kind.ACCEPTED, 0.0) == pytest.approx(expected, abs=EXACT)


WORDS = [first + second + third for first in "abc" for second in ("", *"abc") for third in ("", *"abc")]
WIDE = Toy("all strings of three letters", tuple(sorted(set(WORDS))), ("a", "b", "c", "ab"))


class Table:
    """Answers the needs of walks over one draft of the wide toy's."""

    def __init__(self, proposals: int) -> None:
        self.pair = pair_of(WIDE.target, WIDE.drafter)
        self.proposals = proposals
        self.asked: list[NeedPrefix] = []  # by the latest walk
        self.p = np.random.default_rng(3).dirichlet(np.ones(len(WIDE.target)))
        self._scores: dict[str, float] = {}

    def first(self, chooser: RandomChooser | EnumeratingChooser) -> Emit:
        """The first token that a walk emits."""
        drafter = ToyDrafter(self.pair.drafter.letters, chooser)
        hidden = [drafter.propose() for _ in range(self.proposals)]
        walk = prefixes.walk(Ground(self.pair, chooser, drafted=self.proposals))
        self.asked = []
        step = next(walk)
        while not isinstance(step, Emit):
            step = walk.send(self._answer(step, hidden))
        return step

    def _answer(self, step: Step, hidden: list[Proposal]) -> Proposal | Row | np.ndarray | None:
        match step:
            case NeedProposal():
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


def test_blocks_of_candidates_have_the_law_of_the_residual() -> None:
    """The chooser of production against p, and against the enumerated share of accepted tokens."""
    table, chooser = Table(3), RandomChooser(np.random.default_rng(11))
    runs = [table.first(chooser) for _ in range(4000)]
    counts = np.bincount([run.token for run in runs], minlength=len(table.p))
    rare = table.p * len(runs) < 5
    observed = [*counts[~rare], counts[rare].sum()]
    expected = [*table.p[~rare] * len(runs), table.p[rare].sum() * len(runs)]
    assert chisquare(observed, expected).pvalue > 1e-4
    kinds = law_of(lambda enumerating: table.first(enumerating).kind)
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
    assert all(len(string) <= 2 for string in asked)  # one proposal, "ab" is the longest
    assert all(need.tokens == 1 for need in table.asked)


def test_equal_laws_but_for_rounding_draw_from_p() -> None:
    """A refusal that rounding alone can cause still emits a token."""
    toy = Toy("one letter", ("a",), ("a",))
    setup = Setup(toy, SLRS, 1, 1)

    class Refusing(EnumeratingChooser):
        def bernoulli(self, probability: float) -> bool:
            return False

    assert setup.run(Refusing([])) == (0,)


@pytest.mark.parametrize(("text", "revealed"), [("ba", 1), ("aa", 2), ("ab", 2)])
def test_proposals_are_revealed_until_the_piece_is_certain(text: str, revealed: int) -> None:
    """The stopping rule: "b" begins no longer token, so the second proposal is not asked for."""
    pair = pair_of(("a", "b", "ab"), ("a", "b"))
    walk = prefixes.walk(Ground(pair, EnumeratingChooser([]), drafted=2))
    step, asked = next(walk), 0
    while isinstance(step, NeedProposal):
        step, asked = walk.send(Proposal("ab".index(text[asked]))), asked + 1
    assert isinstance(step, NeedRow)
    assert step.judging
    assert asked == revealed

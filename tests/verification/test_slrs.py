"""String-level rejection sampling: the distribution of whole sessions by enumeration, the distribution of pieces,
residuals in blocks.
"""

from dataclasses import replace

import pytest

from crossdraft.text.letters import Letters
from crossdraft.types.rows import DraftToken
from crossdraft.types.statistics import Kind
from crossdraft.verification import prefixes
from crossdraft.verification.methods import SLRS
from crossdraft.verification.prefixes import PieceDistribution
from crossdraft.verification.walk import Ground, NeedDraftToken, NeedRow, Walk, undrafted
from tests.tables import ToyDrafter, ToyTarget
from tests.verification.enumerating import EnumeratingChooser, distribution_of, few_or_full
from tests.verification.toys import ENDING, EXACT, NAMED, NESTED, TOYS, Setup, Toy, bias, error, wanted
from tests.vocabularies import greedy_tokens, pair_of

LATE = Toy("excluded by a piece before the last", ("a", "b", "aba"), ("a", "b"))
TWICE = Toy("excluded twice", ("a", "b", "ba", "aba"), ("a", "b"))
PAIRS = (*TOYS, LATE, TWICE)


def cells() -> list[Setup]:
    """K = 1 to 3, with as many tokens as time allows: three in a round of three where a side has two letters."""
    out = []
    for toy in PAIRS:
        longest = 3 if min(len(toy.target), len(toy.drafter)) == 2 else 2
        out += [Setup(toy, SLRS, draft_tokens, length) for draft_tokens, length in ((1, 3), (2, 3), (3, longest))]
    return few_or_full(out, lambda setup: setup.draft_tokens == 2 or setup.toy in (NESTED, LATE, TWICE))


@pytest.mark.parametrize("setup", cells(), ids=lambda setup: f"{setup.toy.name}-K{setup.draft_tokens}")
def test_output_distribution_is_the_targets(setup: Setup) -> None:
    assert error(setup) < EXACT


@pytest.mark.parametrize("head", [1, 2])
def test_truncated_rows_have_the_same_distribution(head: int) -> None:
    for toy in PAIRS:
        assert error(Setup(toy, SLRS, 2, 2, head=head)) < EXACT, toy.name


@pytest.mark.parametrize(("draft_tokens", "length"), [(1, 3), (2, 3), (3, 2)])
def test_ignoring_the_end_symbol(draft_tokens: int, length: int) -> None:
    setup = Setup(ENDING, SLRS, draft_tokens, length, ignore_end=True)
    assert error(setup) < EXACT


def test_temperature_zero_is_the_greedy_text() -> None:
    for toy in PAIRS:
        setup = Setup(toy, SLRS, 3, 6, temperature=0)
        distribution = distribution_of(setup.run)
        assert distribution == wanted(setup), toy.name
        assert len(distribution) == 1


class Unconditional(PieceDistribution):
    """ψ of what follows the accepted pieces whatever else could have followed: G(t1 x) / G(t1)."""

    def accept(self, piece: Letters) -> None:
        super().accept(piece)
        self._mass, self._excluded = self._known[self._accepted], ()


def test_the_unconditional_distribution_of_a_later_piece_is_biased(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "PieceDistribution", Unconditional)
    assert bias(Setup(NAMED["one inside the other"], SLRS, 3, 3)) > 0.005


def test_drawing_from_p_where_the_text_has_no_piece_is_biased() -> None:
    assert bias(Setup(NESTED, replace(SLRS, walk=plain_at_the_end), 2, 2)) > 0.01


def plain_at_the_end(ground: Ground) -> Walk:
    """`slrs` that takes the end of the draft's text for no event."""
    walk = prefixes.walk(ground)
    step = next(walk)
    while True:
        answer = yield step
        step = walk.send(answer)
        if answer is None and isinstance(step, NeedRow) and step.whole:  # no piece was refused
            yield from undrafted(ground)


@pytest.mark.parametrize("toy", PAIRS, ids=lambda toy: toy.name)
@pytest.mark.parametrize("draft_tokens", [1, 3])
def test_the_first_piece_is_accepted_with_the_sum_of_min(toy: Toy, draft_tokens: int) -> None:
    """arXiv 2502.05202, Table 2, with ψ from every draft there is, each cut by a tokenizer."""
    pair = pair_of(toy.target, toy.drafter)
    encode = greedy_tokens(pair.target)

    def first_piece(chooser: EnumeratingChooser) -> Letters:
        drafter = ToyDrafter(pair.drafter.letters, chooser)
        for _ in range(draft_tokens):
            drafter.propose()
        return pair.target.letters_of(encode(drafter.text)[:1])

    psi = distribution_of(first_piece)
    p: dict[Letters, float] = {}
    for token, chance in enumerate(ToyTarget(len(toy.target), 99).distribution(())):
        p[pair.target.letters[token]] = p.get(pair.target.letters[token], 0.0) + float(chance)
    setup = Setup(toy, SLRS, draft_tokens, 2)
    kinds = distribution_of(lambda chooser: setup.emitted(chooser)[0].kind)
    expected = sum(min(p[letters], psi.get(letters, 0.0)) for letters in p)
    assert kinds.get(Kind.ACCEPTED, 0.0) == pytest.approx(expected, abs=EXACT)


def test_equal_distributions_but_for_rounding_draw_from_p() -> None:
    """A refusal that rounding alone can cause still emits a token."""
    setup = Setup(Toy("one letter", ("a",), ("a",)), SLRS, 1, 2)

    class Refusing(EnumeratingChooser):
        def bernoulli(self, probability: float) -> bool:
            return False

    assert [(one.token, one.kind) for one in setup.emitted(Refusing([]))] == [(0, Kind.CORRECTED), (0, Kind.BONUS)]


@pytest.mark.parametrize(("text", "revealed"), [("ba", 1), ("aa", 2), ("ab", 2)])
def test_draft_tokens_are_revealed_until_the_piece_is_certain(text: str, revealed: int) -> None:
    """The stopping rule: "b" begins no longer token, so the second draft token is not asked for."""
    pair = pair_of(("a", "b", "ab"), ("a", "b"))
    walk = prefixes.walk(Ground(pair, EnumeratingChooser([]), drafted=2))
    step, asked = next(walk), 0
    while isinstance(step, NeedDraftToken):
        step, asked = walk.send(DraftToken("ab".index(text[asked]))), asked + 1
    assert isinstance(step, NeedRow)
    assert step.judging
    assert asked == revealed

"""Expected acceptance of the first token against the walks themselves, enumerated, and against simulation."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossdraft.bench.expected import (
    EXPECTATIONS,
    DraftDistribution,
    Race,
    common_noise,
    coupled,
    matching,
    overlap,
    string_rejection,
    weights_of,
)
from crossdraft.types.rows import Ids, Row, Whose
from crossdraft.types.statistics import Kind
from crossdraft.verification.methods import METHODS, Method
from tests.tables import ToyDrafter, ToyTarget
from tests.verification.enumerating import EnumeratingChooser, distribution_of
from tests.verification.test_seeded_distribution import Runs
from tests.verification.toys import EXACT, TEXTS, TOYS, Setup, Toy, drafter_of
from tests.vocabularies import pair_of

SEEDS = 1500


def distributions_of(setup: Setup) -> tuple[Row, DraftDistribution]:
    """What the expectation is computed from: the distributions of the setup's own toys."""
    pair = pair_of(setup.toy.target, setup.toy.drafter, setup.toy.stops)
    drafter = drafter_of(setup.method, pair, EnumeratingChooser([]), setup.temperature)
    target = row(setup.target(None).distribution(()))
    if setup.method.redistributed:
        drawn_from = drafter.propose().row
        assert drawn_from is not None
        return target, DraftDistribution(pair, lambda ids: drawn_from, setup.draft_tokens, whose=Whose.TARGET)
    return target, DraftDistribution(
        pair, lambda ids: drafter.distribution(pair.drafter.letters_of(ids)), setup.draft_tokens
    )


def accepted(setup: Setup) -> float:
    """Probability that the first token of a session is accepted, over all its random choices."""
    distribution = distribution_of(lambda chooser: setup.emitted(chooser)[0].kind)
    return distribution.get(Kind.ACCEPTED, 0.0)


def toys_of(method: Method) -> list[Toy]:
    """Those that the method takes, and where something can be proposed."""
    if method.same_vocabulary:
        return [toy.with_itself() for toy in TOYS]
    proposing = [toy for toy in (*TOYS, *TEXTS) if set(toy.target) & set(toy.drafter)]
    return proposing if method.shared_only else [*TOYS, *TEXTS]


@pytest.mark.parametrize("name", [name for name in EXPECTATIONS if name in METHODS and not METHODS[name].keyed])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_it_is_what_the_walk_does(name: str, temperature: float) -> None:
    method = METHODS[name]
    for toy in toys_of(method):
        for draft_tokens in (1, 2) if toy in TEXTS else (1, 2, 3):
            setup = Setup(toy, method, draft_tokens, 2, temperature=temperature)  # 1 token would not be drafted
            target, drafting = distributions_of(setup)
            found = EXPECTATIONS[name](target, drafting)
            assert found.acceptance == pytest.approx(accepted(setup), abs=EXACT), (toy.name, draft_tokens)
            assert found.pruned == 0


def seeded_acceptance(toy: Toy, draft_tokens: int) -> tuple[float, float]:
    """Share of seeds whose first token is accepted, by the walk with keyed draws, and its standard error."""
    runs = Runs(toy)
    kinds = [runs.emitted(seed, draft_tokens)[0].kind for seed in range(SEEDS)]
    share = kinds.count(Kind.ACCEPTED) / SEEDS
    return share, float(np.sqrt(max(share * (1 - share), 1 / SEEDS) / SEEDS))


SOME = [
    pytest.param(toy, marks=() if place % 3 == 1 else pytest.mark.full, id=toy.name) for place, toy in enumerate(TOYS)
]


@pytest.mark.parametrize("toy", SOME)
def test_common_noise_is_what_the_walk_does_over_seeds(toy: Toy) -> None:
    target, drafting = distributions_of(Setup(toy, METHODS["seeded"], 2, 2))
    expected = common_noise(target, drafting).acceptance
    share, error = seeded_acceptance(toy, 2)
    assert abs(share - expected) < 4 * error, (expected, share)


@pytest.mark.parametrize("toy", TOYS, ids=lambda toy: toy.name)
def test_a_race_has_both_distributions_as_its_margins(toy: Toy) -> None:
    target, drafting = distributions_of(Setup(toy, METHODS["seeded"], 1, 2))
    pair, drafted = drafting.pair, drafting.row_after(())
    race = Race(pair, target, drafted)
    ours = [(letters, pair.target.rank(token)) for token, letters in enumerate(pair.target.letters)]
    theirs = [(letters, pair.drafter.rank(token)) for token, letters in enumerate(pair.drafter.letters)]
    joint = np.array([[race.joint(one, other) for other in theirs] for one in ours])
    np.testing.assert_allclose(joint.sum(1), target.probabilities, atol=EXACT)
    np.testing.assert_allclose(joint.sum(0), drafted.probabilities, atol=EXACT)


def test_a_race_over_one_vocabulary_is_the_papers_sum() -> None:
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.1, 0.3, 0.6])
    pair = pair_of("abc", "abc")
    race = Race(pair, row(p), row(q))
    # Σ 1 / Σ max(p_j/p_i, q_j/q_i): maximal coupling of two Gumbel races.
    by_hand = sum(1 / np.maximum(p / p[i], q / q[i]).sum() for i in range(3))
    assert race.reached == pytest.approx(by_hand, abs=EXACT)


def test_races_of_certain_distributions_are_comparisons() -> None:
    tokens = ("a", "ab", "b")
    pair = pair_of(tokens, tokens)
    for one, ours in enumerate(tokens):
        for other, theirs in enumerate(tokens):
            assert Race(pair, Row.certain(one), Row.certain(other)).reached == float(theirs.startswith(ours))


SALTS = st.tuples(st.integers(0, 10**6), st.integers(0, 10**6))


def random_distributions(
    toy: Toy, salts: tuple[int, int], draft_tokens: int, allowed: Ids | None = None
) -> tuple[Row, DraftDistribution]:
    """Distributions of a toy that are drawn anew for every salt."""
    pair = pair_of(toy.target, toy.drafter)
    distribution = ToyTarget(len(toy.target), 99, salt=str(salts[0])).distribution(())
    drafter = ToyDrafter(pair.drafter.letters, EnumeratingChooser([]), allowed, salt=str(salts[1]))
    return row(distribution), DraftDistribution(
        pair, lambda ids: drafter.distribution(pair.drafter.letters_of(ids)), draft_tokens
    )


def row(distribution: Sequence[float] | np.ndarray) -> Row:
    return Row(np.arange(len(distribution)), np.asarray(distribution, dtype=np.float64))


@given(st.sampled_from(TOYS), SALTS, st.integers(1, 3))
@settings(deadline=None)
def test_inequalities_that_hold_for_all_distributions(toy: Toy, salts: tuple[int, int], draft_tokens: int) -> None:
    target, own = random_distributions(toy, salts, draft_tokens)
    allowed = own.pair.shared_drafter_ids
    if len(allowed):
        _, shared = random_distributions(toy, salts, draft_tokens, allowed)
        tli = overlap(target, shared).acceptance
        assert tli >= overlap(target, own).acceptance - EXACT  # Theorem 4.1
        assert coupled(target, shared).acceptance >= tli - EXACT
    assert coupled(target, own).acceptance >= overlap(target, own).acceptance - EXACT
    for expectation in (coupled, matching, common_noise, string_rejection):
        assert -EXACT <= expectation(target, own).acceptance <= 1 + EXACT


@given(st.sampled_from(TOYS), SALTS, st.integers(1, 2))
@settings(deadline=None)
def test_more_draft_tokens_never_hurt_and_pruning_says_how_much_it_left_out(
    toy: Toy, salts: tuple[int, int], draft_tokens: int
) -> None:
    target, fewer = random_distributions(toy, salts, draft_tokens)
    _, more = random_distributions(toy, salts, draft_tokens + 1)
    pruned = DraftDistribution(more.pair, more.row_after, more.draft_tokens, least=0.2)
    for expectation in (matching, coupled, common_noise, string_rejection):
        exact = expectation(target, more).acceptance
        rough = expectation(target, pruned)
        assert rough.acceptance - EXACT <= exact <= rough.acceptance + rough.pruned + EXACT
        if expectation is not string_rejection:  # a longer text may hide the token that a shorter one is
            assert exact >= expectation(target, fewer).acceptance - EXACT


def test_rows_are_asked_for_only_where_both_may_still_agree() -> None:
    target, own = random_distributions(TOYS[1], (1, 2), 3)
    asked: list[tuple[int, ...]] = []

    def row_after(tokens: tuple[int, ...]) -> Row:
        asked.append(tokens)
        return own.row_after(tokens)

    coupled(target, DraftDistribution(own.pair, row_after, 3))
    assert set(asked) == {(), (0,)}  # of the drafter's `a`, `ba` and `b` only `a` begins a longer target token, `ab`
    asked.clear()
    coupled(target, DraftDistribution(own.pair, row_after, 3, least=1.0))
    assert asked == [()]


def test_a_tail_is_refused() -> None:
    with pytest.raises(ValueError, match="whole rows"):
        weights_of(Row(np.array([0]), np.array([0.5]), 0.5))


def test_coupling_accepts_less_than_matching_in_this_case() -> None:
    """Accepting `a` as `a` leaves `ac` of the draft to `ab` of the target."""
    pair = pair_of(("a", "ab"), ("a", "ac", "b"))
    rows = {(): row([0.5, 0.5, 0.0]), (0,): row([0.0, 0.0, 1.0])}
    drafting = DraftDistribution(pair, rows.__getitem__, 2)
    target = row([0.5, 0.5])
    assert coupled(target, drafting).acceptance == pytest.approx(0.5)
    assert matching(target, drafting).acceptance == pytest.approx(0.75)


def test_string_rejection_accepts_less_than_matching_in_this_case() -> None:
    """The longest token hides its prefixes: the target says `a`, the draft `aa`."""
    drafting = DraftDistribution(pair_of(("a", "aa"), ("aa",)), lambda tokens: row([1.0]), 1)
    assert string_rejection(row([1.0, 0.0]), drafting).acceptance == 0
    assert matching(row([1.0, 0.0]), drafting).acceptance == 1


def test_string_rejection_over_one_vocabulary_without_prefixes_is_at_least_matching() -> None:
    """Theorem 3.1 of arXiv 2502.05202, where one token decides and none begins another."""
    for salt in range(200):
        target, drafting = random_distributions(TOYS[0], (salt, salt + 1000), 1)
        assert string_rejection(target, drafting).acceptance >= matching(target, drafting).acceptance - EXACT

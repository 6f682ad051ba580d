"""Kernels: row-stochastic, and Mᵀq′ as a dense product has it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from crossdraft.text.affinity import FirstOrder, Ids, Matrix, Probabilities, first_order, runs
from crossdraft.text.letters import Letters
from crossdraft.text.pairs import Pair
from crossdraft.text.vocabulary import Vocabulary

# Draft tokens 0, 2 and 3 are shared; 2 and 3 are the same target token.
PAIR = Pair(
    Vocabulary(tuple(map(Letters, ("a", "ab", "b", "bb", "abb", "b")))),
    Vocabulary(tuple(map(Letters, ("b", "ba", "a", "a", "aaa")))),
)
SHARED = [0, 2, 3]
OWN = {0: 2, 2: 0, 3: 0}
weights = st.dictionaries(
    st.tuples(st.sampled_from(SHARED), st.integers(0, 5)), st.floats(0, 100, allow_subnormal=False), max_size=18
)
distributions = st.lists(st.floats(1e-6, 1), min_size=3, max_size=3).map(lambda found: np.array(found) / sum(found))


def matrix(entries: dict[tuple[int, int], float], neighbours: int = 6) -> Matrix:
    drafted = np.array([drafted for drafted, _ in entries], dtype=np.int64)
    targets = np.array([target for _, target in entries], dtype=np.int64)
    return Matrix.strongest(PAIR, drafted, targets, np.array(list(entries.values()), dtype=np.float64), neighbours)


def dense(found: Matrix) -> NDArray[np.float64]:
    """Shape (drafter.size, |T|); rows of tokens that are not shared are zero."""
    whole = np.zeros((PAIR.drafter.size, PAIR.target.size))
    for drafted in found.drafter_ids:
        targets, row = found.row(int(drafted))
        assert len(set(targets.tolist())) == len(targets)
        whole[drafted, targets] = row
    return whole


def expected_row(entries: dict[tuple[int, int], float], drafted: int, neighbours: int) -> Probabilities:
    row = np.array([entries.get((drafted, target), 0.0) for target in range(PAIR.target.size)])
    if not row.any():
        row[OWN[drafted]] = 1.0
    row[sorted(range(len(row)), key=lambda target: (-row[target], target))[neighbours:]] = 0.0
    return np.asarray(row / row.sum())


@given(weights, st.integers(1, 6))
def test_rows_are_the_heaviest_entries_normalized(entries: dict[tuple[int, int], float], neighbours: int) -> None:
    found = matrix(entries, neighbours)
    found.check(PAIR.target.size)
    assert found.drafter_ids.tolist() == SHARED
    for drafted in SHARED:
        assert dense(found)[drafted] == pytest.approx(expected_row(entries, drafted, neighbours), abs=1e-6)
        assert found.row(drafted)[1].sum() == pytest.approx(1.0, abs=1e-5)


@given(weights, distributions)
def test_redistribute_is_the_dense_product_and_sums_to_one(
    entries: dict[tuple[int, int], float], distribution: Probabilities
) -> None:
    found = matrix(entries)
    ids, probabilities = found.redistribute(np.array(SHARED), distribution)
    spread = np.zeros(PAIR.target.size)
    spread[ids] = probabilities
    assert ids.dtype == np.int64
    assert (np.diff(ids) > 0).all()
    assert (probabilities > 0).all()
    assert abs(probabilities.sum() - 1.0) < 1e-12
    assert spread == pytest.approx(distribution @ dense(found)[SHARED], abs=1e-5)


def test_part_of_the_rows_is_enough_in_any_order() -> None:
    found = matrix({(0, 1): 1.0, (0, 2): 3.0, (2, 5): 1.0})
    ids, probabilities = found.redistribute(np.array([2, 0]), np.array([0.2, 0.8]))
    assert dict(zip(ids.tolist(), probabilities.tolist(), strict=True)) == pytest.approx({1: 0.2, 2: 0.6, 5: 0.2})


@given(distributions)
def test_the_identity_is_the_distribution_of_tli(distribution: Probabilities) -> None:
    ids, probabilities = Matrix.identity(PAIR).redistribute(np.array(SHARED), distribution)
    assert ids.tolist() == [0, 2]
    assert probabilities == pytest.approx([distribution[1] + distribution[2], distribution[0]], abs=1e-15)


@given(weights, st.floats(0, 1))
def test_keeping_mixes_with_the_identity(entries: dict[tuple[int, int], float], share: float) -> None:
    found = matrix(entries)
    wanted = (1 - share) * dense(found) + share * dense(Matrix.identity(PAIR))
    assert dense(found.keeping(PAIR, share)) == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("kernel", [Matrix.identity(PAIR), FirstOrder.of(PAIR, np.ones(6))])
@pytest.mark.parametrize("drafted", [1, 4, 5, -1])
def test_tokens_that_are_not_shared_have_no_row(kernel: Matrix | FirstOrder, drafted: int) -> None:
    with pytest.raises(ValueError, match=f"draft token {drafted} is not a token of the target"):
        kernel.redistribute(np.array([0, drafted]), np.array([0.5, 0.5]))


@given(distributions, st.lists(st.floats(0, 1), min_size=6, max_size=6).filter(any))
def test_the_first_order_form_is_the_formula(distribution: Probabilities, prior: list[float]) -> None:
    p = np.array(prior) / sum(prior)
    proposed = np.array([distribution[1] + distribution[2], 0, distribution[0], 0, 0, 0])
    theta = sum(p * proposed)
    wanted = [(6 * q + theta * one) / (6 + one) for q, one in zip(proposed, p, strict=True)]
    ids, probabilities = FirstOrder.of(PAIR, np.array(prior)).redistribute(np.array(SHARED), distribution)
    spread = np.zeros(6)
    spread[ids] = probabilities
    assert spread == pytest.approx(np.array(wanted) / sum(wanted), abs=1e-12)
    assert abs(probabilities.sum() - 1.0) < 1e-12
    assert (probabilities > 0).all()


@given(st.integers(2, 500), st.integers(0, 2**32), st.floats(0.1, 8), st.floats(0.01, 1))
def test_the_first_order_form_is_tli_within_three_theta_over_n(size: int, seed: int, scale: float, kept: float) -> None:
    """|Eq. 3 − q′|₁ ≤ 3θ/N for every p and q′: docs/rdk.md has the proof."""
    random = np.random.default_rng(seed)
    p = np.exp(scale * random.standard_normal(size))
    q = np.exp(scale * random.standard_normal(size)) * (random.random(size) < kept)
    q[0] += 1e-9
    p, q = p / p.sum(), q / q.sum()
    assert np.abs(first_order(q, p) - q).sum() <= 3 * (p @ q) / size + 1e-12


def ids(*values: int) -> Ids:
    return np.array(values, dtype=np.int64)


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        (Matrix(ids(0, 2), ids(0, 1, 2), np.array([2, 6], np.int32), np.ones(2, np.float32)), "target id"),
        (Matrix(ids(0, 2), ids(0, 1, 2), np.array([2, -1], np.int32), np.ones(2, np.float32)), "target id"),
        (Matrix(ids(2, 0), ids(0, 1, 2), np.array([2, 0], np.int32), np.ones(2, np.float32)), "ascending"),
        (Matrix(ids(-1, 0), ids(0, 1, 2), np.array([2, 0], np.int32), np.ones(2, np.float32)), "ascending"),
        (Matrix(ids(0, 2), ids(0, 2, 2), np.array([2, 0], np.int32), np.ones(2, np.float32)), "no entries"),
        (Matrix(ids(0, 2), ids(0, 2), np.array([2, 0], np.int32), np.ones(2, np.float32)), "no entries"),
        (Matrix(ids(0, 2), ids(0, 1, 3), np.array([2, 0], np.int32), np.ones(2, np.float32)), "number of entries"),
        (Matrix(ids(0, 2), ids(0, 1, 2), np.array([2, 0], np.int32), np.array([1, 0], np.float32)), "above 0"),
        (Matrix(ids(0, 2), ids(0, 1, 2), np.array([2, 0], np.int32), np.array([1, np.nan], np.float32)), "above 0"),
        (Matrix(ids(0, 2), ids(0, 1, 2), np.array([2, 0], np.int32), np.array([1, 0.9], np.float32)), "sum to one"),
        (FirstOrder(ids(0), np.array([2], np.int32), np.ones(6)), "not a distribution"),
        (FirstOrder(ids(0), np.array([2], np.int32), np.ones(5) / 5), "not a distribution"),
        (FirstOrder(ids(0), np.array([2, 1], np.int32), np.ones(6) / 6), "number of entries"),
        (FirstOrder(ids(0), np.array([6], np.int32), np.ones(6) / 6), "target id"),
    ],
)
def test_what_is_no_map_into_the_target_is_refused(broken: Matrix | FirstOrder, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        broken.check(6)


def test_nothing_shared_is_an_empty_map() -> None:
    pair = Pair(Vocabulary((Letters("a"),)), Vocabulary((Letters("b"),)))
    empty = Matrix.identity(pair)
    empty.check(1)
    assert [part.tolist() for part in empty.redistribute(ids(), np.empty(0))] == [[], []]


def test_runs() -> None:
    assert runs(ids(5, 0, 7), ids(2, 0, 3)).tolist() == [5, 6, 7, 8, 9]
    assert runs(ids(), ids()).tolist() == []

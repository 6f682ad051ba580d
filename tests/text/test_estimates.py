"""Affinity matrices from a corpus, against counts made the slow way."""

from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossdraft.text.affinity import Alignment, Matrix, PairCounts, Probabilities, Windows, co_occurrence
from crossdraft.text.letters import Side, from_bytes
from crossdraft.text.pairs import Pair
from crossdraft.text.tokenization import Tokenization
from crossdraft.text.vocabulary import Vocabulary
from tests.text.kinds import CORPUS, affinity_row, kind

PAIRS = [("qwen", "llama2"), ("llama2", "gpt2"), ("gpt2", "qwen")]
Rows = dict[int, dict[int, float]]  # by draft token: target tokens and weights


def sides(target: str, drafter: str) -> tuple[Pair, Tokenization, Tokenization]:
    ours, theirs = kind(target).tokenization(), kind(drafter).tokenization(Side.DRAFTER)
    return Pair(ours.vocabulary, theirs.vocabulary), ours, theirs


def starts(tokenization: Tokenization, text: str) -> dict[int, int]:
    """The token that begins at each offset, in letters."""
    found, offset = {}, 0
    for token in tokenization.encode_continuation(from_bytes(text.encode())):
        found[offset] = token
        offset += len(tokenization.vocabulary.letters[token])
    return found


def check(matrix: Matrix, pair: Pair, wanted: Rows) -> None:
    """Each row is that of `wanted`, normalized; without one it is the token itself."""
    matrix.check(pair.target.size)
    assert matrix.drafter_ids.tolist() == pair.shared_drafter_ids.tolist()
    for drafted in pair.shared_drafter_ids.tolist():
        row = wanted.get(drafted) or {int(pair.to_target_ids(np.array([drafted]))[0]): 1.0}
        targets, weights = affinity_row(matrix, drafted)
        total = sum(row.values())
        assert dict(zip(targets.tolist(), weights.tolist(), strict=True)) == pytest.approx(
            {token: weight / total for token, weight in row.items() if weight}, abs=1e-6
        )


@pytest.mark.parametrize("names", PAIRS)
def test_aligned_rows_are_what_begins_where_a_draft_token_does(names: tuple[str, str]) -> None:
    pair, target, drafter = sides(*names)
    alignment = Alignment(pair, target, drafter)
    counts: Rows = defaultdict(Counter)
    for text in CORPUS:
        alignment.add(text)
        ours = starts(target, text)
        for offset, drafted in starts(drafter, text).items():
            if offset in ours and pair.target_id(drafted) is not None:
                counts[drafted][ours[offset]] += 1
    assert any(len(row) > 1 for row in counts.values())
    assert alignment.left_out == 0
    check(alignment.matrix(pair.target.size), pair, counts)
    strongest = {
        drafted: dict(sorted(row.items(), key=lambda entry: (-entry[1], entry[0]))[:1])
        for drafted, row in counts.items()
    }
    check(alignment.matrix(1), pair, strongest)
    check(Alignment(pair, target, drafter).matrix(8), pair, {})  # nothing was seen: the identity


def test_lines_that_a_lossy_tokenizer_changes_are_left_out() -> None:
    pair, target, drafter = sides("gpt2", "lowercase")
    alignment, plain = Alignment(pair, target, drafter), Alignment(pair, target, drafter)
    alignment.add("over the lazy dog\nThe quick\nbrown fox\n")
    assert alignment.left_out == len("The quick\n")
    plain.add("over the lazy dog\n")
    plain.add("brown fox\n")
    check(alignment.matrix(8), pair, {drafted: _row(plain.matrix(8), drafted) for drafted in pair.shared_drafter_ids})


def _row(matrix: Matrix, drafted: int) -> dict[int, float]:
    targets, weights = affinity_row(matrix, drafted)
    return dict(zip(targets.tolist(), weights.tolist(), strict=True))


def dense_covariance(target: Tokenization, length: int) -> Probabilities:
    windows = []
    for text in CORPUS:
        ids = target.encode_continuation(from_bytes(text.encode()))
        for first in range(0, len(ids), length):
            row = np.zeros(target.vocabulary.size)
            row[list(ids[first : first + length])] = 1
            windows.append(row)
    return np.asarray(np.cov(np.array(windows).T, bias=True))


@pytest.mark.parametrize(("length", "neighbours"), [(2, 1), (2, 10**6), (5, 4)])
@pytest.mark.parametrize("names", PAIRS[:2])
def test_co_occurrence_is_equation_two(names: tuple[str, str], length: int, neighbours: int) -> None:
    pair, target, _ = sides(*names)
    windows = Windows(target, length)
    for text in CORPUS:
        windows.add(text)
    omega, tau = dense_covariance(target, length), 0.01
    rows: Rows = {}
    for drafted in pair.shared_drafter_ids.tolist():
        own = int(pair.to_target_ids(np.array([drafted]))[0])
        near = [token for token in range(pair.target.size) if omega[own, token] > 1e-12 or token == own]
        weights = {token: float(np.exp((omega[own, token] - omega[own].max()) / tau)) for token in near}
        order = sorted(near, key=lambda token: (-round(weights[token], 9), token))
        rows[drafted] = {token: weights[token] for token in order[:neighbours]}
    matrix = co_occurrence(pair, windows, tau, neighbours)
    assert windows.forgotten == 0
    if neighbours == 1:  # of equal covariances either may be the one
        assert np.diff(matrix.starts).tolist() == [1] * len(rows)
        assert matrix.weights.tolist() == [1.0] * len(rows)
    else:
        _check_but_for_ties(matrix, pair, rows, neighbours)


def _check_but_for_ties(matrix: Matrix, pair: Pair, wanted: Rows, neighbours: int) -> None:
    """Rounding orders equal covariances: then the weights are compared, not the ids."""
    matrix.check(pair.target.size)
    for drafted, row in wanted.items():
        found = sorted(affinity_row(matrix, drafted)[1].tolist(), reverse=True)
        total = sum(row.values())
        assert found == pytest.approx(sorted((weight / total for weight in row.values()), reverse=True), abs=1e-6)
        if neighbours > pair.target.size:
            assert set(affinity_row(matrix, drafted)[0].tolist()) == set(row)


def test_a_corpus_without_tokens_has_no_covariances() -> None:
    windows = Windows(kind("gpt2").tokenization(), 3)
    windows.add("")
    with pytest.raises(ValueError, match="no tokens"):
        windows.covariances()


def test_two_draft_tokens_of_one_target_token_have_its_row() -> None:
    target = kind("gpt2").tokenization()
    letters = target.vocabulary.letters
    pair = Pair(target.vocabulary, Vocabulary((*letters[300:302], letters[300])))
    windows = Windows(target, 4)
    for text in CORPUS:
        windows.add(text)
    matrix = co_occurrence(pair, windows, 0.01, 8)
    assert _row(matrix, 0) == _row(matrix, 2)
    assert len(_row(matrix, 0)) > 1


@settings(max_examples=50)
@given(st.lists(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6)), max_size=20), max_size=6), st.integers(1, 9))
def test_pair_counts(batches: list[list[tuple[int, int]]], buffered: int) -> None:
    counts = PairCounts(7, buffered=buffered)
    for batch in batches:
        found = np.array(batch, dtype=np.int64).reshape(-1, 2)
        counts.add(found[:, 0], found[:, 1])
    wanted = sorted(Counter(pair for batch in batches for pair in batch).items())
    left, right, seen = (part.tolist() for part in counts.entries())
    assert list(zip(zip(left, right, strict=True), seen, strict=True)) == wanted
    assert counts.forgotten == 0


def test_rare_pairs_are_forgotten_and_counted() -> None:
    counts = PairCounts(100, most=4, buffered=1)
    ids = np.array([1, 1, 1, 2, 2, 2, 3, 4, 5])
    counts.add(ids, ids)
    left, _, seen = (part.tolist() for part in counts.entries())
    assert dict(zip(left, seen, strict=True)) == {1: 3, 2: 3}
    assert counts.forgotten == 3

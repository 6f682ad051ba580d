"""Affinity matrices: files, redistribution, and estimates from a corpus, against counts made the slow way; and
frequencies of ids: counting, choosing, and files that do not fit."""

import json
from collections import Counter, defaultdict
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save

from crossdraft.text import affinity as affinity_module
from crossdraft.text.affinity import AffinityMismatch, Alignment, Matrix, Probabilities, Windows, load_affinity, runs
from crossdraft.text.frequencies import FrequenciesError, TokenFrequencies, count_frequencies, read_frequencies
from crossdraft.text.letters import Side, from_bytes
from crossdraft.text.pairs import Pair
from crossdraft.text.tokenization import Tokenization
from crossdraft.text.vocabulary import Vocabulary, tokenizer_digest
from tests.tables import pair_of
from tests.text.kinds import CORPUS, affinity_row, identity, kind

# Draft tokens 0, 2 and 3 are shared; 2 and 3 are the same target token.
TOYS = pair_of(("a", "ab", "b", "bb", "abb", "b"), ("b", "ba", "a", "a", "aaa"))
SHARED = [0, 2, 3]
OWN = {0: 2, 2: 0, 3: 0}
weights = st.dictionaries(
    st.tuples(st.sampled_from(SHARED), st.integers(0, 5)), st.floats(0, 100, allow_subnormal=False), max_size=18
)
distributions = st.lists(st.floats(1e-6, 1), min_size=3, max_size=3).map(lambda found: np.array(found) / sum(found))
TARGET, DRAFTER = kind("llama2"), kind("gpt2")  # llama2 has ids with the same letters
PAIR = Pair(TARGET.vocabulary(), DRAFTER.vocabulary(Side.DRAFTER))
LETTERS = list(PAIR.target.letters)
PAIRS = [("qwen", "llama2"), ("llama2", "gpt2"), ("gpt2", "qwen")]
Rows = dict[int, dict[int, float]]  # by draft token: target tokens and weights
TEXTS = ("def größer(x):\n    return x\n", "    the end\n", "")
RANKING = TokenFrequencies("abc", np.array([5, 0, 7, 5, 0, 1]))


def matrix(entries: dict[tuple[int, int], float], neighbours: int = 6) -> Matrix:
    drafted = np.array([drafted for drafted, _ in entries], dtype=np.int64)
    targets = np.array([target for _, target in entries], dtype=np.int64)
    return Matrix.strongest(TOYS, drafted, targets, np.array(list(entries.values()), dtype=np.float64), neighbours)


def dense(found: Matrix) -> NDArray[np.float64]:
    """Shape (drafter.size, |T|); rows of tokens that are not shared are zero."""
    whole = np.zeros((TOYS.drafter.size, TOYS.target.size))
    for drafted in found.drafter_ids:
        targets, row = affinity_row(found, int(drafted))
        assert len(set(targets.tolist())) == len(targets)
        whole[drafted, targets] = row
    return whole


def expected_row(entries: dict[tuple[int, int], float], drafted: int, neighbours: int) -> Probabilities:
    row = np.array([entries.get((drafted, target), 0.0) for target in range(TOYS.target.size)])
    if not row.any():
        row[OWN[drafted]] = 1.0
    row[sorted(range(len(row)), key=lambda target: (-row[target], target))[neighbours:]] = 0.0
    return np.asarray(row / row.sum())


@given(weights, st.integers(1, 6))
def test_rows_are_the_heaviest_entries_normalized(entries: dict[tuple[int, int], float], neighbours: int) -> None:
    found = matrix(entries, neighbours)
    found.check(TOYS.target.size)
    assert found.drafter_ids.tolist() == SHARED
    for drafted in SHARED:
        assert dense(found)[drafted] == pytest.approx(expected_row(entries, drafted, neighbours), abs=1e-6)
        assert affinity_row(found, drafted)[1].sum() == pytest.approx(1.0, abs=1e-5)


@given(weights, distributions)
def test_redistribute_is_the_dense_product_and_sums_to_one(entries, distribution):
    found = matrix(entries)
    ids, probabilities = found.redistribute(np.array(SHARED), distribution)
    spread = np.zeros(TOYS.target.size)
    spread[ids] = probabilities
    assert ids.dtype == np.int64
    assert (np.diff(ids) > 0).all()
    assert (probabilities > 0).all()
    assert abs(probabilities.sum() - 1.0) < 1e-12
    assert spread == pytest.approx(distribution @ dense(found)[SHARED], abs=1e-5)


@given(distributions)
def test_the_identity_is_the_distribution_of_tli(distribution: Probabilities) -> None:
    ids, probabilities = identity(TOYS).redistribute(np.array(SHARED), distribution)
    assert ids.tolist() == [0, 2]
    assert probabilities == pytest.approx([distribution[1] + distribution[2], distribution[0]], abs=1e-15)


@pytest.mark.parametrize("drafted", [1, 4, 5, -1])
def test_tokens_that_are_not_shared_have_no_row(drafted: int) -> None:
    with pytest.raises(ValueError, match=f"draft token {drafted} is not a token of the target"):
        identity(TOYS).redistribute(np.array([0, drafted]), np.array([0.5, 0.5]))


def ids(*values: int) -> affinity_module.Ids:
    return np.array(values, dtype=np.int64)


BROKEN = [  # draft tokens, where their entries begin, target ids, weights
    ((0, 2), (0, 1, 2), (2, 6), (1, 1), "target id"),
    ((0, 2), (0, 1, 2), (2, -1), (1, 1), "target id"),
    ((2, 0), (0, 1, 2), (2, 0), (1, 1), "ascending"),
    ((-1, 0), (0, 1, 2), (2, 0), (1, 1), "ascending"),
    ((0, 2), (0, 2, 2), (2, 0), (1, 1), "no entries"),
    ((0, 2), (0, 2), (2, 0), (1, 1), "no entries"),
    ((0, 2), (0, 1, 3), (2, 0), (1, 1), "number of entries"),
    ((0, 2), (0, 1, 2), (2, 0), (1, 0), "above 0"),
    ((0, 2), (0, 1, 2), (2, 0), (1, np.nan), "above 0"),
    ((0, 2), (0, 1, 2), (2, 0), (1, 0.9), "sum to one"),
]


@pytest.mark.parametrize(("drafted", "starts", "targets", "weights", "complaint"), BROKEN)
def test_what_is_no_map_into_the_target_is_refused(drafted, starts, targets, weights, complaint) -> None:
    with pytest.raises(ValueError, match=complaint):
        Matrix(ids(*drafted), ids(*starts), np.array(targets, np.int32), np.array(weights, np.float32)).check(6)


def test_nothing_shared_is_an_empty_map() -> None:
    empty = identity(pair_of(("a",), ("b",)))
    empty.check(1)
    assert [part.tolist() for part in empty.redistribute(ids(), np.empty(0))] == [[], []]


def test_runs() -> None:
    assert (runs(ids(5, 0, 7), ids(2, 0, 3)).tolist(), runs(ids(), ids()).tolist()) == ([5, 6, 7, 8, 9], [])


def affinity(kernel: Matrix) -> affinity_module.Affinity:
    return affinity_module.Affinity.of(PAIR, kernel, TARGET.json, DRAFTER.json, "made up")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The file of an affinity."""
    affinity_module.save_affinity(affinity(identity(PAIR)), tmp_path / "affinity")
    return tmp_path / "affinity"


def test_a_file_gives_back_what_was_saved(path: Path) -> None:
    saved, loaded = affinity(identity(PAIR)), load_affinity(path)
    assert (loaded.target, loaded.drafter) == (tokenizer_digest(TARGET.json), tokenizer_digest(DRAFTER.json))
    assert (loaded.letters, loaded.ranks, loaded.made) == (saved.letters, saved.ranks, "made up")
    ids = PAIR.shared_drafter_ids[::3]
    distribution = np.arange(len(ids)) + 1.0
    distribution /= distribution.sum()
    found, due = (one.matrix.redistribute(ids, distribution) for one in (loaded, saved))
    assert all(map(np.array_equal, found, due))
    assert loaded.matrix.drafter_ids.tolist() == PAIR.shared_drafter_ids.tolist()
    vocabulary = TARGET.vocabulary()
    assert loaded.ranks  # else the next line says little
    assert all(loaded.rank(token) == vocabulary.rank(token) for token in range(vocabulary.size))


def test_another_drafter_is_refused() -> None:
    made = affinity(identity(PAIR))
    made.check_drafter(DRAFTER.json, DRAFTER.size)
    with pytest.raises(AffinityMismatch, match=r"made for a drafter with another tokenizer.*crossdraft affinity"):
        made.check_drafter(TARGET.json, DRAFTER.size)
    with pytest.raises(AffinityMismatch, match=r"has draft token \d+, and the drafter has 9: .*crossdraft affinity"):
        made.check_drafter(DRAFTER.json, 9)


def _rewritten(path: Path, name: str, value: object) -> None:
    """With another array, or another part of what is said of them."""
    with safe_open(path, "numpy") as file:
        about, arrays = file.metadata(), {one: file.get_tensor(one) for one in affinity_module.ARRAYS}
    if isinstance(value, str):
        about[name] = value
    else:
        arrays[name] = np.ascontiguousarray(value)
    path.write_bytes(save(arrays, about))


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("weights", np.full(len(PAIR.shared_drafter_ids), 0.5, np.float32), "do not sum to one"),
        ("weights", np.ones(len(PAIR.shared_drafter_ids)), "weights is not a list of float32"),
        ("target_ids", np.full(len(PAIR.shared_drafter_ids), PAIR.target.size, np.int32), "not in the target's"),
        ("drafter_ids", PAIR.shared_drafter_ids[::-1], "ascending order"),
        ("starts", np.zeros((2, 2), np.int64), "starts is not a list"),
        ("letters", json.dumps(["", *LETTERS[1:]]), "no letters"),
        ("letters", json.dumps({"a": 1}), "no letters"),
        ("letters", json.dumps([1, *LETTERS[1:]]), "damaged"),
        ("letters", json.dumps(["\u0100", *LETTERS[1:]]), "U.0100 is no letter"),
        ("letters", "[" * 200_000, "damaged"),
        ("ranks", "[[0, -1]]", "out of its range"),
        ("ranks", f"[[{PAIR.target.size}, 1]]", "out of its range"),
        ("ranks", '[["a", "b"]]', "damaged"),
        ("ranks", "[1]", "damaged"),
        ("format", "1", "format is 1"),
    ],
)
def test_damaged_values_are_refused(path: Path, name: str, value: object, complaint: str) -> None:
    _rewritten(path, name, value)
    with pytest.raises(AffinityMismatch, match=complaint) as found:
        load_affinity(path)
    assert str(path) in str(found.value)
    assert "make it again with `crossdraft affinity`" in str(found.value)


def test_damaged_files_are_refused(path: Path, tmp_path: Path) -> None:
    content = path.read_bytes()
    for number, raw in enumerate((b"", b"no archive", content[: len(content) // 2], b"\xff" * 8 + content[8:])):
        other = tmp_path / str(number)
        other.write_bytes(raw)
        with pytest.raises(AffinityMismatch, match="damaged or not an affinity file"):
            load_affinity(other)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(changes=st.dictionaries(st.floats(0, 1, exclude_max=True), st.integers(0, 255), min_size=1, max_size=4))
def test_bytes_that_changed_are_one_error_or_none(path: Path, changes: dict[float, int]) -> None:
    content = bytearray(path.read_bytes())
    for place, byte in changes.items():
        content[int(place * len(content))] = byte
    other = path.with_name("other")
    other.write_bytes(content)
    with suppress(AffinityMismatch):
        load_affinity(other)


# What the paper proves, on random rows; where its text says more than that, see docs/rdk.md.


def acceptance(p: np.ndarray, drafted: np.ndarray) -> float:
    return float(np.minimum(p, drafted).sum())


@pytest.mark.parametrize("seed", range(50))
def test_what_the_paper_proves_of_acceptance_and_of_noise(seed: int) -> None:
    """Lemma 2.3: acceptance is one minus half of the distance. Theorem 5.1: what M does to p bounds what RDK may lose
    to `tli`. Theorem 5.2: noise on logits is at most half as large on probabilities."""
    random = np.random.default_rng(seed)
    size = int(random.integers(2, 12))
    p, q, *rows = random.dirichlet(np.full(size, 0.3), 2 + size)
    assert acceptance(p, q) == pytest.approx(1 - np.abs(p - q).sum() / 2)
    off = np.abs(np.array(rows).T @ p - p).sum()
    assert np.abs(np.array(rows).T @ q - p).sum() <= np.abs(q - p).sum() + off + 1e-12
    logits, noise = random.standard_t(5, 8), random.normal(0, 10 ** random.uniform(-3, 1), 8)
    p, q = (np.exp(one - one.max()) / np.exp(one - one.max()).sum() for one in (logits, logits + noise))
    assert np.abs(p - q).sum() <= np.abs(noise).sum() / 2 + 1e-12


def test_of_two_tokens_rdk_accepts_more_if_the_drafters_is_the_rarer_one() -> None:
    """Theorem 5.3, whose condition on the logits makes that likely; where it is not the rarer one RDK may lose."""
    shares = np.linspace(0.0, 1.0, 21)
    for own in shares:  # of the drafter's only token in the target's distribution
        for kept in shares:  # of its mass by M
            gained = acceptance(np.array([own, 1 - own]), np.array([kept, 1 - kept])) - own
            assert gained >= -1e-12 or own > 0.5
    assert acceptance(np.array([0.9, 0.1]), np.array([0.2, 0.8])) < 0.9


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
        due = {token: weight / sum(row.values()) for token, weight in row.items() if weight}
        assert _row(matrix, drafted) == pytest.approx(due, abs=1e-6)


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
    strongest = {one: dict([min(row.items(), key=lambda entry: (-entry[1], entry[0]))]) for one, row in counts.items()}
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
    matrix = affinity_module.co_occurrence(pair, windows, tau, neighbours)
    assert windows.forgotten == 0
    if neighbours == 1:  # of equal covariances either may be the one
        assert (np.diff(matrix.starts).tolist(), matrix.weights.tolist()) == ([1] * len(rows), [1.0] * len(rows))
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


def test_a_corpus_without_tokens_has_no_covariances_and_no_ranking() -> None:
    some = kind("gpt2")
    windows = Windows(some.tokenization(), 3)
    windows.add("")
    with pytest.raises(ValueError, match="no tokens"):
        windows.covariances()
    with pytest.raises(ValueError, match="no tokens"):
        count_frequencies(some.json, some.tokenization(Side.DRAFTER), [""])


def test_two_draft_tokens_of_one_target_token_have_its_row() -> None:
    target = kind("gpt2").tokenization()
    letters = target.vocabulary.letters
    pair = Pair(target.vocabulary, Vocabulary((*letters[300:302], letters[300])))
    windows = Windows(target, 4)
    for text in CORPUS:
        windows.add(text)
    matrix = affinity_module.co_occurrence(pair, windows, 0.01, 8)
    assert _row(matrix, 0) == _row(matrix, 2)
    assert len(_row(matrix, 0)) > 1


@settings(max_examples=50)
@given(st.lists(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6)), max_size=20), max_size=6), st.integers(1, 9))
def test_pair_counts(batches: list[list[tuple[int, int]]], buffered: int) -> None:
    counts = affinity_module.PairCounts(7, buffered=buffered)
    for batch in batches:
        found = np.array(batch, dtype=np.int64).reshape(-1, 2)
        counts.add(found[:, 0], found[:, 1])
    wanted = sorted(Counter(pair for batch in batches for pair in batch).items())
    left, right, seen = (part.tolist() for part in counts.entries())
    assert (list(zip(zip(left, right, strict=True), seen, strict=True)), counts.forgotten) == (wanted, 0)


def test_rare_pairs_are_forgotten_and_counted() -> None:
    counts = affinity_module.PairCounts(100, most=4, buffered=1)
    ids = np.array([1, 1, 1, 2, 2, 2, 3, 4, 5])
    counts.add(ids, ids)
    left, _, seen = (part.tolist() for part in counts.entries())
    assert (dict(zip(left, seen, strict=True)), counts.forgotten) == ({1: 3, 2: 3}, 3)


@pytest.mark.parametrize("name", ["gpt2", "llama2"])
def test_counts_are_of_the_ids_in_mid_text(name: str) -> None:
    some = kind(name)
    tokenization = some.tokenization(Side.DRAFTER)
    ranking = count_frequencies(some.json, tokenization, TEXTS)
    ids = [token for text in TEXTS for token in tokenization.encode_continuation(from_bytes(text.encode()))]
    assert ranking.counts.tolist() == [ids.count(token) for token in range(some.size)]
    assert (ranking.tokens, ranking.tokenizer) == (len(ids), tokenizer_digest(some.json))
    assert ranking.counts[some.id_of(some.begin)] == 0


@given(st.integers(1, 9), st.sets(st.integers(0, 8), max_size=2), st.data())
def test_the_most_frequent_ids(size: int, always: set[int], data: st.DataObject) -> None:
    """And those that are always kept; of equals the lowest. Ids that were never seen count as 0."""
    always &= {*range(size)}
    count = data.draw(st.integers(max(1, len(always)), size))
    counts = [*RANKING.counts.tolist(), *[0] * 9][:size]
    order = sorted(range(size), key=lambda token: (token not in always, -counts[token], token))
    assert RANKING.most_frequent(count, size, tuple(always)).tolist() == sorted(order[:count])
    for wrong in (-1, 0, size + 1):
        with pytest.raises(ValueError, match=f"must be between 1 and {size}, the size of the vocabulary, got {wrong}"):
            RANKING.most_frequent(wrong, size)


def test_the_share_that_the_most_frequent_cover() -> None:
    assert [RANKING.covered(count) for count in (0, 1, 3, 4, 6)] == [0, 7 / 18, 17 / 18, 1, 1]


def test_a_file_of_frequencies_comes_back_is_small_and_is_refused_if_damaged_or_of_another_tokenizer(path: Path):
    some = kind("gpt2")
    written = count_frequencies(some.json, some.tokenization(Side.DRAFTER), TEXTS)
    written.write(path)
    read = read_frequencies(path, some.json, "model")
    assert read.tokenizer == written.tokenizer
    np.testing.assert_array_equal(read.counts, written.counts)
    assert path.stat().st_size < 8 * some.size + 200
    with pytest.raises(FrequenciesError, match=r"another tokenizer; make one with: .* --model some/name CORPUS"):
        read_frequencies(path, kind("llama2").json, "some/name")
    for damaged in (path.read_bytes()[:-9], b"\x93\xa1a\xa1b\xa1c", b"", None):
        path.unlink()
        path.mkdir() if damaged is None else path.write_bytes(damaged)
        with pytest.raises(FrequenciesError, match=r"(damaged|cannot read).*; make one with: crossdraft frequencies"):
            read_frequencies(path, some.json, "model")


@pytest.mark.parametrize("counts", [[], [0, 0], [5, -1, 3]])
def test_counts_that_no_corpus_gives_are_refused(tmp_path: Path, counts: list[int]) -> None:
    TokenFrequencies(tokenizer_digest("{}"), np.array(counts, dtype=np.int64)).write(tmp_path / "file")
    with pytest.raises(FrequenciesError, match="damaged"):
        read_frequencies(tmp_path / "file", "{}", "model")

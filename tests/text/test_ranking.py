"""Frequencies of ids: counting, choosing, and files that do not fit."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossdraft.text.frequencies import FrequenciesError, TokenFrequencies, count_frequencies, read_frequencies
from crossdraft.text.letters import Side, from_bytes
from crossdraft.text.vocabulary import tokenizer_digest
from tests.text.kinds import kind

TEXTS = ("def größer(x):\n    return x\n", "    the end\n", "")
RANKING = TokenFrequencies("abc", np.array([5, 0, 7, 5, 0, 1]))


@pytest.mark.parametrize("name", ["gpt2", "llama2"])
def test_counts_are_of_the_ids_in_mid_text(name: str) -> None:
    some = kind(name)
    tokenization = some.tokenization(Side.DRAFTER)
    ranking = count_frequencies(some.json, tokenization, TEXTS)
    ids = [token for text in TEXTS for token in tokenization.encode_continuation(from_bytes(text.encode()))]
    assert ranking.counts.tolist() == [ids.count(token) for token in range(some.size)]
    assert (ranking.tokens, ranking.tokenizer) == (len(ids), tokenizer_digest(some.json))
    assert ranking.counts[some.id_of(some.begin)] == 0


def test_a_corpus_without_tokens_has_no_ranking() -> None:
    some = kind("gpt2")
    with pytest.raises(ValueError, match="no tokens"):
        count_frequencies(some.json, some.tokenization(Side.DRAFTER), [""])


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


def test_a_file_comes_back_and_is_small(tmp_path: Path) -> None:
    some, path = kind("gpt2"), tmp_path / "file"
    written = count_frequencies(some.json, some.tokenization(Side.DRAFTER), TEXTS)
    written.write(path)
    read = read_frequencies(path, some.json, "model")
    assert read.tokenizer == written.tokenizer
    np.testing.assert_array_equal(read.counts, written.counts)
    assert path.stat().st_size < 8 * some.size + 200


def test_frequencies_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    some, path = kind("gpt2"), tmp_path / "file"
    count_frequencies(some.json, some.tokenization(Side.DRAFTER), TEXTS).write(path)
    with pytest.raises(FrequenciesError, match=r"another tokenizer; make one with: .* --model some/name CORPUS"):
        read_frequencies(path, kind("llama2").json, "some/name")


@pytest.mark.parametrize("damage", ["cut", "other", "empty", "folder"])
def test_damaged_files_are_refused(tmp_path: Path, damage: str) -> None:
    some, path = kind("gpt2"), tmp_path / "file"
    count_frequencies(some.json, some.tokenization(Side.DRAFTER), TEXTS).write(path)
    content = path.read_bytes()
    if damage == "folder":
        path.unlink()
        path.mkdir()
    else:
        path.write_bytes({"cut": content[:-9], "other": b"\x93\xa1a\xa1b\xa1c", "empty": b""}[damage])
    with pytest.raises(FrequenciesError, match=r"(damaged|cannot read).*; make one with: crossdraft frequencies"):
        read_frequencies(path, some.json, "model")


@pytest.mark.parametrize("counts", [[], [0, 0], [5, -1, 3]])
def test_counts_that_no_corpus_gives_are_refused(tmp_path: Path, counts: list[int]) -> None:
    TokenFrequencies(tokenizer_digest("{}"), np.array(counts, dtype=np.int64)).write(tmp_path / "file")
    with pytest.raises(FrequenciesError, match="damaged"):
        read_frequencies(tmp_path / "file", "{}", "model")

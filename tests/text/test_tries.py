"""Tries: what starts with what, and their arrays on disk."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossdraft.text import letters as spelling
from crossdraft.text import vocabulary as vocabularies
from crossdraft.text.letters import END, EVENTS, Letters, Role, Side, Spelling, codes_of, spelled
from crossdraft.text.vocabulary import Trie, Vocabulary, cache_folder

words = st.lists(st.text("ab\x00\xff" + Role.END_OF_TURN.letter, min_size=1, max_size=4), min_size=1, max_size=12)


def vocabulary(*letters: str) -> Vocabulary:
    return Vocabulary(letters=tuple(map(Letters, letters)))


@given(words, st.text("ab", max_size=3))
def test_a_span_is_the_tokens_with_a_prefix(letters: list[str], prefix: str) -> None:
    trie = Trie(vocabulary(*letters))
    first, end = trie.span(Letters(prefix))
    assert sorted(trie.order[first:end].tolist()) == [i for i, text in enumerate(letters) if text.startswith(prefix)]


@given(words)
def test_spelling_keeps_every_string(letters: list[str]) -> None:
    spelling = Spelling.read(spelled([Letters(text) for text in letters]))
    for token, text in enumerate(letters):
        start = int(spelling.starts[token])
        assert spelling.rest(token, start).tolist() == codes_of(text).tolist()
        assert spelling.rest(token, start + 1).tolist() == codes_of(text[1:]).tolist()
        assert spelling.codes[start + len(text)] == END


def test_codes_tell_bytes_roles_and_sides_apart() -> None:
    known = "".join(map(chr, range(256))) + "".join(role.letter for role in Role)
    codes = codes_of(known + Side.TARGET.control(0) + Side.DRAFTER.control(0)).tolist()
    assert codes[:256] == list(range(256))
    assert len(set(codes)) == len(codes) == EVENTS - 1
    assert END not in codes
    assert codes_of(Side.TARGET.control(60_000)).tolist() == codes_of(Side.TARGET.control(0)).tolist()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where tries are kept in this test; every trie is worth it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(vocabularies, "_WORTH_KEEPING", 1)
    return tmp_path / "cache"


def kept(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def same(one: Trie, other: Trie) -> bool:
    return np.array_equal(one.order, other.order) and np.array_equal(one.spelling.codes, other.spelling.codes)


def unable(vocabulary: Vocabulary) -> tuple[np.ndarray, np.ndarray]:
    raise AssertionError("built, and not read")


def test_the_second_one_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = Trie(vocabulary("b", "a", "ab", "a"))
    assert len(kept(folder)) == 1
    monkeypatch.setattr(vocabularies, "_built", unable)
    read = Trie(vocabulary("b", "a", "ab", "a"))
    assert same(read, built)
    assert read.extensions(Letters("a")) == ("ab",)
    with pytest.raises(AssertionError):
        Trie(vocabulary("b", "a", "ab"))


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: b"",
        lambda raw: raw[:-1],
        lambda raw: raw + b"\0\0",
        lambda raw: b"something else" + raw,
        lambda raw: raw[:-3] + bytes([raw[-3] ^ 1]) + raw[-2:],
    ],
    ids=["empty", "cut", "longer", "foreign", "one bit"],
)
def test_a_damaged_file_is_made_anew(folder: Path, damage: object) -> None:
    built = Trie(vocabulary("b", "a", "ab"))
    (path,) = kept(folder)
    sound = path.read_bytes()
    path.write_bytes(damage(sound))  # type: ignore[operator]
    assert same(Trie(vocabulary("b", "a", "ab")), built)
    assert path.read_bytes() == sound


def test_the_file_of_another_vocabulary_is_not_taken(folder: Path) -> None:
    Trie(vocabulary("b", "a", "ab"))
    (path,) = kept(folder)
    other = Trie(vocabulary("b", "ab", "a"))
    (second,) = (found for found in kept(folder) if found != path)
    second.write_bytes(path.read_bytes())
    assert same(Trie(vocabulary("b", "ab", "a")), other)


def test_a_file_of_another_coding_is_not_taken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    letters = ("a", Side.TARGET.control(0))
    before = Trie(vocabulary(*letters)).spelling.codes
    monkeypatch.setattr(spelling, "_NAMELESS", spelling._NAMELESS + 1)  # what one more role does
    monkeypatch.setattr(spelling, "EVENTS", EVENTS + 1)
    after = Trie(vocabulary(*letters)).spelling.codes
    assert after.tolist() == spelled(list(map(Letters, letters))).tolist() != before.tolist()


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="files have no owner")
def test_only_the_users_own_files_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Trie(vocabulary("b", "a"))
    (path,) = kept(folder)
    assert {parent.stat().st_mode & 0o777 for parent in path.parents[:2]} == {0o700}
    monkeypatch.setattr(os, "getuid", lambda: path.stat().st_uid + 1)
    monkeypatch.setattr(vocabularies, "_built", unable)
    with pytest.raises(AssertionError):
        Trie(vocabulary("b", "a"))


def test_a_relative_cache_folder_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    usual = cache_folder()
    assert usual.is_absolute()
    monkeypatch.setenv("XDG_CACHE_HOME", "some/folder")
    assert cache_folder() == usual
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "crossdraft"


def test_a_folder_that_cannot_be_made_is_no_error(folder: Path) -> None:
    folder.write_text("a file where the folder should be")
    assert Trie(vocabulary("b", "a")).order.tolist() == [1, 0]
    assert folder.read_text() == "a file where the folder should be"


def test_small_tries_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    Trie(vocabulary("b", "a"))
    assert kept(tmp_path) == []

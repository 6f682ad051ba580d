"""Corpora (files, folders, JSON lines) and outputs: what is read, and what is said of those that cannot be used."""

import json
import os
from errno import EACCES
from pathlib import Path

import pytest

from crossdraft.cli import corpus as corpora
from crossdraft.cli.corpus import corpus_texts
from crossdraft.cli.running import UsageError, check_output

LINES = "".join(f"line {number} is größer\n" for number in range(300))


def texts(path: Path, chunk: int = 1 << 18) -> list[str]:
    return list(corpus_texts(path, "reading", chunk))


@pytest.mark.parametrize("chunk", [40, 41, 57, 1000, 1 << 20])
def test_a_file_in_chunks_that_end_with_lines(tmp_path: Path, chunk: int) -> None:
    file = tmp_path / "text.txt"
    file.write_bytes(LINES.encode() + b"and no line end")
    found = texts(file, chunk)
    assert "".join(found) == LINES + "and no line end"
    assert all(text.endswith("\n") for text in found[:-1])
    assert max(len(text.encode()) for text in found) <= 2 * chunk


def test_a_line_longer_than_a_chunk_is_cut_between_characters(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("ö" * 5000, encoding="utf-8")
    found = texts(file, 101)
    assert "".join(found) == "ö" * 5000
    assert max(map(len, found)) <= 202


def test_a_folder_is_read_in_order_without_what_is_hidden(tmp_path: Path) -> None:
    (tmp_path / "b" / "c").mkdir(parents=True)
    (tmp_path / ".git").mkdir()
    for name in ("a.txt", "b/c/d.py", "b/a", ".git/config", ".hidden"):
        (tmp_path / name).write_text(name)
    assert texts(tmp_path) == ["a.txt", "b/a", "b/c/d.py"]


def test_json_lines_have_texts(tmp_path: Path) -> None:
    file = tmp_path / "corpus.jsonl"
    file.write_text(json.dumps({"text": "one\ntwo"}) + "\n\n" + json.dumps({"text": "three", "id": 7}))
    assert texts(file) == ["one\ntwo", "three"]


def test_what_is_not_text_is_skipped_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.bin").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "b.bin").write_bytes(b"text\0zero")
    (tmp_path / "c.txt").write_bytes("cut \u20ac".encode()[:-1])
    (tmp_path / "d.txt").write_text("good\n")
    (tmp_path / "e.txt").write_bytes(b"\xef\xbb\xbfmarked")
    (tmp_path / "f.jsonl").write_bytes(b'{"text": "\xff"}')
    assert texts(tmp_path) == ["good\n", "marked"]
    said = capsys.readouterr().err
    assert "skipped 4 of 6 files: not UTF-8" in said
    assert f"({tmp_path / 'a.bin'}, {tmp_path / 'b.bin'}, …)" in said


def refuse(path: Path) -> bool:
    raise PermissionError(EACCES, os.strerror(EACCES), str(path))


def test_folders_that_may_not_be_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "is_file", refuse)
    with pytest.raises(UsageError, match="cannot be read: Permission denied"):
        corpus_texts(tmp_path / "text.txt", "reading")
    monkeypatch.setattr(Path, "is_dir", refuse)
    with pytest.raises(UsageError, match=f"cannot write {tmp_path / 'out'}: Permission denied"):
        check_output(tmp_path / "out")


def test_places_that_may_not_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_output(tmp_path / "out")
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    refused = {tmp_path / "out": "Permission denied", tmp_path: "it is a folder", tmp_path / "none" / "out": "no such"}
    for place, complaint in refused.items():
        with pytest.raises(UsageError, match=complaint):
            check_output(place)


def test_corpora_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"there is no corpus .*nowhere"):
        corpus_texts(tmp_path / "nowhere", "reading")
    with pytest.raises(UsageError, match="has no files"):
        corpus_texts(tmp_path, "reading")


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("a", b"", "has no text: it is empty"),
        ("a", b"\xff", "has no text: 1 of 1 files are not UTF-8"),
        ("a.jsonl", b'{"text": "good"}\n{\n', "line 2 is not JSON"),
        ("a.jsonl", b'{"text": "good"}\n[1]\n', 'line 2 is not an object with a "text"'),
        ("a.jsonl", b'{"text": 1}\n', "line 1 is not"),
    ],
)
def test_corpora_without_text(tmp_path: Path, name: str, content: bytes, complaint: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=complaint):
        texts(tmp_path / name)


def test_a_line_that_never_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpora, "MAX_LINE", 1 << 20)
    file = tmp_path / "corpus.jsonl"
    file.write_text('{"text": "' + "a" * (1 << 21) + '"}')
    with pytest.raises(UsageError, match="line 1 is longer than 1 MiB"):
        texts(file)

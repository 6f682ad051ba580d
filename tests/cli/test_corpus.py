"""`crossdraft affinity` and `crossdraft frequencies`: the corpora that they read, their files, and what is refused."""

import json
import os
import subprocess
import sys
from errno import EACCES
from pathlib import Path

import numpy as np
import pytest

from crossdraft.cli import corpus as corpora
from crossdraft.cli.corpus import corpus_texts
from crossdraft.cli.running import UsageError, check_output
from crossdraft.text.affinity import Alignment, Matrix, Windows, co_occurrence, load_affinity
from crossdraft.text.frequencies import count_frequencies, read_frequencies
from crossdraft.text.letters import Side
from crossdraft.text.pairs import Pair
from crossdraft.text.vocabulary import tokenizer_digest
from tests.cli.conftest import Cli
from tests.text.kinds import kind

TEXTS = ("def main(argument):\n    return argument\n", "The quick brown fox\n")
TARGET, DRAFTER = kind("gpt2"), kind("llama2")  # those of the folders
KINDS = ("aligned", "co-occurrence")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number, text in enumerate(TEXTS):
        (folder / f"{number}.txt").write_text(text)
    return folder


@pytest.fixture
def counted(cli: Cli, drafter_folder: Path, corpus: Path, tmp_path: Path) -> Path:
    path = tmp_path / "frequencies"
    assert cli("frequencies", "--model", drafter_folder, corpus, "-o", path).code == 0
    return path


@pytest.fixture
def affinity(target_folder: Path, drafter_folder: Path, corpus: Path, tmp_path: Path) -> tuple[object, ...]:
    """A command line that makes a matrix."""
    pair = ("--target", target_folder, "--drafter", drafter_folder)
    return ("affinity", *pair, corpus, "-o", tmp_path / "out")


def expected(name: str) -> Matrix:
    """What the text layer makes of the same corpus, with the command's own defaults."""
    target, drafter = TARGET.tokenization(Side.TARGET), DRAFTER.tokenization(Side.DRAFTER)
    pair = Pair(target.vocabulary, drafter.vocabulary)
    alignment, windows = Alignment(pair, target, drafter), Windows(target, 8)
    for text in TEXTS:
        alignment.add(text)
        windows.add(text)
    matrices = {"aligned": alignment.matrix(64), "co-occurrence": co_occurrence(pair, windows, 1e-4, 64)}
    return matrices[name]


def same(one: Matrix, other: Matrix) -> bool:
    due = vars(other)
    return type(one) is type(other) and all(np.array_equal(value, due[name]) for name, value in vars(one).items())


@pytest.mark.parametrize("name", KINDS)
def test_each_kind(cli: Cli, affinity: tuple[object, ...], tmp_path: Path, name: str) -> None:
    ended = cli(*affinity, "--kind", name)
    assert ended.code == 0
    made = load_affinity(tmp_path / "out")
    assert (made.target, made.drafter) == (tokenizer_digest(TARGET.json), tokenizer_digest(DRAFTER.json))
    assert same(made.matrix, expected(name))
    made.check_drafter(DRAFTER.json, DRAFTER.size)
    ids, lines = made.matrix.drafter_ids, ended.out.splitlines()
    reached, _ = made.matrix.redistribute(ids, np.full(len(ids), 1 / len(ids)))  # a draft of all that may be drafted
    assert lines[0].startswith(f"wrote {tmp_path / 'out'}: {name}")
    for what, shown in (("draft tokens that the target has", f"{len(ids):,}"), ("stand for", f" {len(reached):,} of ")):
        assert [shown in line for line in lines if what in line] == [True]


def test_options_of_an_affinity(cli: Cli, affinity: tuple[object, ...], tmp_path: Path) -> None:
    assert cli(*affinity, "--neighbours", 1).code == 0
    one = load_affinity(tmp_path / "out").matrix
    assert len(one.weights) == len(one.drafter_ids)
    assert cli(*affinity, "--kind", "co-occurrence", "--temperature", 5, "--window", 3).code == 0
    assert load_affinity(tmp_path / "out").made == "co-occurrence, τ = 5, windows of 3 target tokens"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--temperature", 1), "--temperature is not an option of --kind aligned"),
        (("--kind", "co-occurrence", "--temperature", 0), "--temperature must be above 0"),
        (("--neighbours", 0), "--neighbours"),
        (("-o", "none/out"), "cannot write none/out"),
    ],
)
def test_an_affinity_that_cannot_be_made(cli, affinity, tmp_path, options, complaint):
    cli(*affinity, *options).failed(complaint)
    assert not (tmp_path / "out").exists()


def test_corpora_and_models_that_cannot_be_used(cli: Cli, affinity: tuple[object, ...], tmp_path: Path) -> None:
    command, target, folder, drafter, model, corpus, *output = affinity
    cli(command, target, folder, drafter, model, tmp_path / "none", *output).failed("there is no corpus")
    cli(command, target, folder, drafter, tmp_path, corpus, *output).failed("has no tokenizer.json", 1)
    (tmp_path / "empty.txt").write_text("")
    cli(command, target, folder, drafter, model, tmp_path / "empty.txt", *output).failed("has no text")
    assert not (tmp_path / "out").exists()


def test_the_file_is_the_count_and_a_table_says_what_to_keep(cli, drafter_folder, corpus, tmp_path):
    ended = cli("frequencies", "--model", drafter_folder, corpus, "-o", tmp_path / "out")
    some = kind("llama2")
    wanted = count_frequencies(some.json, some.tokenization(Side.DRAFTER), TEXTS)
    assert ended.code == 0
    assert read_frequencies(tmp_path / "out", some.json, "").counts.tolist() == wanted.counts.tolist()
    first, *table = ended.out.splitlines()
    assert first.startswith(f"counted {wanted.tokens:,} tokens of {corpus}")
    shares = {int(cells[1].split()[0]): cells[3].strip() for line in table if len(cells := line.split("│")) > 3}
    assert shares[some.size // 4] == f"{wanted.covered(some.size // 4):.2%}"
    assert shares[some.size] == "100.00%"


def test_what_reads_tokenizers_needs_neither_weights_nor_torch(target_folder: Path, corpus: Path, tmp_path: Path):
    model = tmp_path / "model"
    model.mkdir()
    for name in ("tokenizer.json", "config.json"):
        (model / name).write_bytes((target_folder / name).read_bytes())
    program = """
import sys
from pathlib import Path
from crossdraft.cli.corpus import count_tokens, make_affinity
from crossdraft.cli.inspect import inspect
from crossdraft.config.commands import AffinityOptions
model, corpus, output = sys.argv[1], *map(Path, sys.argv[2:])
make_affinity(model, model, corpus, output, AffinityOptions())
count_tokens(model, corpus, output)
inspect(model, model, None, None, False, True)
print("torch" in sys.modules)
"""
    command = [sys.executable, "-c", program, model, corpus, tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    *_, report, torch = done.stdout.splitlines()
    assert (json.loads(report)["same_vocabulary"], torch) == (True, "False")


def test_frequencies_that_cannot_be_counted(cli: Cli, drafter_folder: Path, corpus: Path, tmp_path: Path) -> None:
    command = ("frequencies", "-o", tmp_path / "out")
    cli(*command, "--model", drafter_folder, "nowhere").failed("there is no corpus nowhere")
    cli(*command, "--model", "./nowhere", corpus).failed("there is no folder ./nowhere", 1)
    assert not (tmp_path / "out").exists()


def test_heads_that_cannot_be_served(cli: Cli, drafter_folder: Path, counted: Path) -> None:
    for options, complaint in (
        (("--vocab-keep", 20), "--frequencies FILE that ranks them go together"),
        (("--frequencies", counted), "go together"),
        (("--vocab-keep", 99999, "--frequencies", counted), "the size of the vocabulary, got 99999"),
        (("--vocab-keep", 20, "--frequencies", "none"), "cannot read the frequencies"),
    ):
        cli("serve", "drafter", "--model", drafter_folder, *options).failed(complaint)


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
        ("a.jsonl", b'{"text": ' + b"[" * 100_000, "line 1 is not JSON"),
        ("a.jsonl", b'{"text": "a", "x": ' + b"9" * 5000 + b"}", "line 1 is not JSON"),
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

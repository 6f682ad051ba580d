"""`crossdraft affinity` and `crossdraft frequencies`: their files, and what is refused."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

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
    return type(one) is type(other) and all(
        np.array_equal(value, vars(other)[name]) for name, value in vars(one).items()
    )


@pytest.mark.parametrize("name", KINDS)
def test_each_kind(cli: Cli, affinity: tuple[object, ...], tmp_path: Path, name: str) -> None:
    ended = cli(*affinity, "--kind", name)
    assert ended.code == 0
    made = load_affinity(tmp_path / "out")
    assert (made.target, made.drafter) == (tokenizer_digest(TARGET.json), tokenizer_digest(DRAFTER.json))
    assert same(made.matrix, expected(name))
    made.check_drafter(DRAFTER.json, DRAFTER.size)
    lines = ended.out.splitlines()
    assert lines[0].startswith(f"wrote {tmp_path / 'out'}: {name}")
    assert any(
        "draft tokens that the target has" in line and f"{len(made.matrix.drafter_ids):,}" in line for line in lines
    )
    size = len(made.matrix.drafter_ids)
    reached, _ = made.matrix.redistribute(
        made.matrix.drafter_ids, np.full(size, 1 / size)
    )  # a draft of all that may be drafted
    (shown,) = (line for line in lines if "can stand for" in line)
    assert f" {len(reached):,} of " in shown


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
    empty = cli(command, target, folder, drafter, model, tmp_path / "empty.txt", *output)
    assert (empty.code, "has no text" in empty.err) == (2, True)
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


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--vocab-keep", "20"], "go together"),
        (["--frequencies", "FILE"], "go together"),
        (["--vocab-keep", "99999", "--frequencies", "FILE"], "the size of the vocabulary, got 99999"),
        (["--vocab-keep", "20", "--frequencies", "none"], "cannot read the frequencies"),
    ],
)
def test_heads_that_cannot_be_served(cli: Cli, drafter_folder: Path, counted: Path, options: list[str], complaint: str):
    given = [str(counted) if option == "FILE" else option for option in options]
    cli("serve", "drafter", "--model", drafter_folder, *given).failed(complaint)

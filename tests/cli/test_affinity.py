"""`crossdraft affinity`: the file of each kind, and what is refused."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from crossdraft.text.affinity import Affinity, FirstOrder, Kernel, Matrix, load_affinity
from crossdraft.text.affinity_estimates import Alignment, Windows, co_occurrence, first_pieces
from crossdraft.text.frequencies import count_frequencies
from crossdraft.text.letters import Side
from crossdraft.text.pairs import Pair
from crossdraft.text.vocabulary import tokenizer_digest
from tests.cli.conftest import Cli
from tests.text.kinds import kind

TEXTS = ("def main(argument):\n    return argument\n", "The quick brown fox\n")
TARGET, DRAFTER = kind("gpt2"), kind("llama2")  # those of the folders


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number, text in enumerate(TEXTS):
        (folder / f"{number}.txt").write_text(text)
    return folder


def expected(name: str) -> Kernel:
    """What the text layer makes of the same corpus, with the command's own defaults."""
    target, drafter = TARGET.tokenization(Side.TARGET), DRAFTER.tokenization(Side.DRAFTER)
    pair = Pair(target.vocabulary, drafter.vocabulary)
    counts = count_frequencies(TARGET.json, target, TEXTS).counts
    alignment, windows = Alignment(pair, target, drafter), Windows(target, 8)
    for text in TEXTS:
        alignment.add(text)
        windows.add(text)
    kernels: dict[str, Kernel] = {
        "aligned": alignment.matrix(64),
        "prefix": first_pieces(pair, drafter, counts, 64),
        "co-occurrence": co_occurrence(pair, windows, 1e-4, 64),
        "first-order": FirstOrder.of(pair, counts.astype(np.float64)),
    }
    return kernels[name]


def same(one: Kernel, other: Kernel) -> bool:
    return type(one) is type(other) and all(
        np.array_equal(value, vars(other)[name]) for name, value in vars(one).items()
    )


@pytest.mark.parametrize("name", ["aligned", "prefix", "co-occurrence", "first-order"])
def test_each_kind(
    cli: Cli, target_folder: Path, drafter_folder: Path, corpus: Path, tmp_path: Path, name: str
) -> None:
    pair = ("--target", target_folder, "--drafter", drafter_folder)
    ended = cli("affinity", *pair, corpus, "-o", tmp_path / "out", "--kind", name)
    assert ended.code == 0
    made = load_affinity(tmp_path / "out")
    assert (made.target, made.drafter) == (tokenizer_digest(TARGET.json), tokenizer_digest(DRAFTER.json))
    assert same(made.kernel, expected(name))
    made.check_drafter(DRAFTER.json, DRAFTER.size)
    lines = ended.out.splitlines()
    assert lines[0].startswith(f"wrote {tmp_path / 'out'}: {name}")
    assert any("draft tokens that the target has" in line and f"{len(made.drafter_ids):,}" in line for line in lines)
    size = len(made.drafter_ids)
    reached, _ = made.redistribute(made.drafter_ids, np.full(size, 1 / size))  # a draft of all that may be drafted
    (told,) = (line for line in lines if "can now propose" in line)
    assert f" {len(reached):,} of " in told


def run(cli: Cli, target: Path, drafter: Path, corpus: Path, output: Path, *options: object) -> Affinity:
    ended = cli("affinity", "--target", target, "--drafter", drafter, corpus, "-o", output, *options)
    assert ended.code == 0, ended.err
    return load_affinity(output)


def test_options(cli: Cli, target_folder: Path, drafter_folder: Path, corpus: Path, tmp_path: Path) -> None:
    where = (target_folder, drafter_folder, corpus, tmp_path / "out")
    one = run(cli, *where, "--neighbours", 1).kernel
    assert isinstance(one, Matrix)
    assert len(one.weights) == len(one.drafter_ids)
    kept = run(cli, *where, "--keep", 1).kernel
    pair = Pair(TARGET.vocabulary(), DRAFTER.vocabulary(Side.DRAFTER))
    assert same(kept, Matrix.identity(pair))
    hot = run(cli, *where, "--kind", "co-occurrence", "--temperature", 5, "--window", 3)
    assert hot.made == "co-occurrence, τ = 5, windows of 3 target tokens"


def test_needs_neither_weights_nor_torch(target_folder: Path, corpus: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for name in ("tokenizer.json", "config.json"):
        (model / name).write_bytes((target_folder / name).read_bytes())
    program = "import sys\nfrom pathlib import Path\nfrom crossdraft.cli.corpus import Options, make\n"
    program += "make(sys.argv[1], sys.argv[1], *map(Path, sys.argv[2:]), 'aligned', Options())\n"
    program += "print('torch' in sys.modules)"
    command = [sys.executable, "-c", program, model, corpus, tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
    assert (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--temperature", 1), "--temperature means nothing to --kind aligned"),
        (("--window", 4, "--kind", "prefix"), "--window means nothing to --kind prefix"),
        (("--keep", 0.5, "--kind", "first-order"), "--keep means nothing to --kind first-order"),
        (("--keep", 1.5), "--keep is a share"),
        (("--kind", "co-occurrence", "--temperature", 0), "--temperature must be above 0"),
        (("--kind", "co-occurrence", "--temperature", "nan"), "--temperature must be above 0"),
        (("--keep", "nan"), "--keep is a share"),
        (("--neighbours", 0), "--neighbours"),
        (("--window", 1, "--kind", "co-occurrence"), "--window"),
        (("--kind", "magic"), "--kind"),
    ],
)
def test_misuse(
    cli: Cli,
    target_folder: Path,
    drafter_folder: Path,
    corpus: Path,
    tmp_path: Path,
    options: tuple[object, ...],
    complaint: str,
) -> None:
    pair = ("--target", target_folder, "--drafter", drafter_folder)
    ended = cli("affinity", *pair, corpus, "-o", tmp_path / "out", *options)
    assert (ended.code, ended.out) == (2, "")
    assert complaint in ended.err
    assert not (tmp_path / "out").exists()


def test_places_that_cannot_be_used(
    cli: Cli, target_folder: Path, drafter_folder: Path, corpus: Path, tmp_path: Path
) -> None:
    pair = ("affinity", "--target", target_folder, "--drafter", drafter_folder)
    for output in (tmp_path, tmp_path / "none" / "out"):
        ended = cli(*pair, corpus, "-o", output)
        assert (ended.code, ended.out) == (2, "")
        assert f"cannot write {output}" in ended.err
    ended = cli(*pair, tmp_path / "none", "-o", tmp_path / "out")
    assert ended.code == 2
    assert "there is no corpus" in ended.err
    ended = cli("affinity", "--target", target_folder, "--drafter", tmp_path, corpus, "-o", tmp_path / "out")
    assert ended.code == 1
    assert "has no tokenizer.json" in ended.err


def test_empty_corpora_are_refused(cli: Cli, target_folder: Path, drafter_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    pair = ("affinity", "--target", target_folder, "--drafter", drafter_folder)
    for name in ("aligned", "prefix", "co-occurrence", "first-order"):
        ended = cli(*pair, tmp_path / "empty.txt", "-o", tmp_path / "out", "--kind", name)
        assert ended.code == 2
        assert "has no text" in ended.err
    assert not (tmp_path / "out").exists()

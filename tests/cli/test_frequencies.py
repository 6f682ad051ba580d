"""`crossdraft frequencies`, and drafters served with what it wrote."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from crossdraft.client import GenerationRequest, Overlap, SamplingOptions, connect
from crossdraft.rpc.clients import DrafterClient
from crossdraft.text.frequencies import count_frequencies, read_ranking
from crossdraft.text.letters import Side
from tests.cli.conftest import Cli, serving
from tests.text.kinds import kind

TEXTS = ("def main(argument):\n    return argument\n", "The quick brown fox\n")


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


def test_the_file_is_the_count_and_a_table_says_what_to_keep(
    cli: Cli, drafter_folder: Path, corpus: Path, tmp_path: Path
) -> None:
    ended = cli("frequencies", "--model", drafter_folder, corpus, "-o", tmp_path / "out")
    some = kind("llama2")
    wanted = count_frequencies(some.json, some.tokenization(Side.DRAFTER), TEXTS)
    assert ended.code == 0
    assert read_ranking(tmp_path / "out", some.json, "").counts.tolist() == wanted.counts.tolist()
    first, *table = ended.out.splitlines()
    assert first.startswith(f"counted {wanted.tokens:,} tokens of {corpus}")
    shares = {int(cells[1].split()[0]): cells[3].strip() for line in table if len(cells := line.split("│")) > 3}
    assert shares[some.size // 4] == f"{wanted.covered(some.size // 4):.2%}"
    assert shares[some.size] == "100.00%"


def test_needs_neither_weights_nor_torch(drafter_folder: Path, corpus: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for name in ("tokenizer.json", "config.json"):
        (model / name).write_bytes((drafter_folder / name).read_bytes())
    program = "import sys\nfrom pathlib import Path\nfrom crossdraft.cli.corpus import count\n"
    program += "count(sys.argv[1], *map(Path, sys.argv[2:]))\nprint('torch' in sys.modules)"
    command = [sys.executable, "-c", program, model, corpus, tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize(
    ("changed", "code", "complaint"),
    [
        ({"corpus": "nowhere"}, 2, "there is no corpus nowhere"),
        ({"--model": "./nowhere"}, 1, "there is no folder ./nowhere"),
        ({"-o": "no/such/file"}, 2, "cannot write no/such/file: no such folder"),
        ({"-o": "."}, 2, "cannot write .: it is a folder"),
    ],
)
def test_what_cannot_be(
    cli: Cli,
    drafter_folder: Path,
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changed: dict[str, str],
    code: int,
    complaint: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    given = {"corpus": corpus, "--model": drafter_folder, "-o": "out"} | changed
    ended = cli("frequencies", given["corpus"], "--model", given["--model"], "-o", given["-o"])
    assert (ended.code, ended.out) == (code, "")
    assert complaint in ended.err
    assert not (tmp_path / "out").exists()


def test_a_corpus_that_is_not_text(cli: Cli, drafter_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "noise").write_bytes(os.urandom(100) + b"\xff")
    ended = cli("frequencies", tmp_path / "noise", "--model", drafter_folder, "-o", tmp_path / "out")
    assert ended.code == 2
    assert "1 of 1 files are not UTF-8" in ended.err


def test_a_drafter_is_served_with_a_part_of_its_head(target: str, drafter_folder: Path, counted: Path) -> None:
    async def check(address: str) -> None:
        async with DrafterClient(address) as client:
            assert (await client.describe()).vocabulary_size == kind("llama2").size
        rounds = Overlap.OFF  # without them the output may end before the drafter is there
        request = GenerationRequest("The quick", "slem", max_tokens=8, options=SamplingOptions(0), overlap=rounds)
        async with connect(target, address) as pipeline, pipeline.run(request) as generation:
            async for _ in generation:
                pass
        assert generation.statistics is not None
        assert generation.statistics.drafter_lost == ""
        assert generation.statistics.draft_tokens

    with serving("drafter", drafter_folder, "--vocab-keep", "20", "--frequencies", str(counted)) as (_, ready):
        asyncio.run(check(ready["address"]))


@pytest.mark.parametrize(
    ("role", "options", "code", "complaint"),
    [
        ("target", ["--vocab-keep", "20", "--frequencies", "FILE"], 2, "No such option: --vocab-keep"),
        ("target", ["--vocab-keep", "20"], 2, "No such option: --vocab-keep"),
        ("drafter", ["--vocab-keep", "20"], 2, "are given together"),
        ("drafter", ["--frequencies", "FILE"], 2, "are given together"),
        ("drafter", ["--vocab-keep", "0", "--frequencies", "FILE"], 2, "--vocab-keep must be at least 1, got 0"),
        ("drafter", ["--vocab-keep", "99999", "--frequencies", "FILE"], 2, "the whole vocabulary, got 99999"),
        ("drafter", ["--vocab-keep", "20", "--frequencies", "none"], 2, "cannot read the frequencies"),
        ("drafter", ["--vocab-keep", "20", "--frequencies", __file__], 2, "is damaged, or not a file of frequencies"),
    ],
)
def test_options_that_cannot_be(
    cli: Cli, drafter_folder: Path, counted: Path, role: str, options: list[str], code: int, complaint: str
) -> None:
    given = [str(counted) if option == "FILE" else option for option in options]
    ended = cli("serve", role, "--model", drafter_folder, *given)
    assert (ended.code, ended.out) == (code, "")
    assert complaint in ended.err.splitlines()[-1]

"""`crossdraft bench pruning`: what is measured, and what is refused."""

import json
from pathlib import Path

import pytest

from crossdraft.bench.acceptance import sizes_of
from crossdraft.console.processes import Wanted
from tests.bench.conftest import Measure
from tests.cli.conftest import Cli
from tests.text.kinds import kind


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """Prompts and a corpus."""
    prompts, corpus = tmp_path / "prompts.jsonl", tmp_path / "corpus.txt"
    prompts.write_text(json.dumps({"text": "The quick"}) + "\n" + json.dumps({"text": "brown"}) + "\n")
    corpus.write_text("The quick brown fox\n")
    return prompts, corpus


def test_each_size_of_the_head_is_a_cell(
    measure: Measure, started: list[Wanted], files: tuple[Path, Path], drafter_folder: Path
) -> None:
    prompts, corpus = files
    size = kind("llama2").size
    options = ("--share", 0.5, "--share", 0.1, "--max-tokens", 5, "--temperature", 0, "--temperature", 1)
    given = ("--prompts", prompts, "--corpus", corpus, "--drafter", drafter_folder)
    cells = measure("pruning", *given, *options)
    kept = [size, round(size / 2), round(size / 10)]
    assert [(one["keep"], one["temperature"]) for one in cells] == [(n, t) for n in kept for t in (0.0, 1.0)]
    assert all(one["draft_tokens"] for one in cells)
    assert cells[0]["covered"] == 1
    more_options = [one.more for one in started if one.role == "drafter"]
    assert more_options[0] == ()
    assert [(more[0], more[1], more[2]) for more in more_options[1:]] == [
        ("--vocab-keep", str(keep), "--frequencies") for keep in kept[1:]
    ]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--share", "0"), "--share must be above 0 and at most 1, got 0"),
        (("--share", "1.5"), "--share must be above 0"),
        (("--corpus", "nowhere"), "there is no corpus nowhere"),
    ],
)
def test_what_is_refused_before_anything_starts(
    cli: Cli, files: tuple[Path, Path], options: tuple[str, ...], complaint: str
) -> None:
    cli("bench", "pruning", "--prompts", files[0], *options).failed(complaint)


def test_the_whole_head_comes_first() -> None:
    assert sizes_of(1000, [0.1, 1.0, 0.25]) == [1000, 250, 100]
    assert sizes_of(3, [0.01]) == [3, 1]

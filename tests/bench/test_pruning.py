"""`crossdraft bench pruning` and `bench head`: what is measured, and what is refused."""

import json
from pathlib import Path

import pytest

from crossdraft.bench.engine import StepTime, sizes_of
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


def test_a_step_is_its_parts(measure: Measure, drafter_folder: Path) -> None:
    steps = measure("head", "--drafter", drafter_folder, "--share", 0.5, "--turns", 2)
    size = kind("llama2").size
    assert [one["keep"] for one in steps] == [size, size // 2] * 2
    for one in steps:
        parts = [one[name] for name in ("layers_ms", "head_ms", "softmax_ms", "draw_ms")]
        assert all(part > 0 for part in parts)
        assert one["head_and_softmax"] == pytest.approx((one["head_ms"] + one["softmax_ms"]) / sum(parts))
    assert steps[0]["layers_ms"] == steps[1]["layers_ms"]
    assert (steps[0]["faster"], steps[2]["faster"]) == (1, 1)


@pytest.mark.parametrize(
    ("command", "options", "code", "complaint"),
    [
        ("pruning", ("--share", "0"), 2, "--share must be above 0 and at most 1, got 0"),
        ("pruning", ("--share", "1.5"), 2, "--share must be above 0"),
        ("pruning", ("--corpus", "nowhere"), 2, "there is no corpus nowhere"),
        ("head", ("--share", "2"), 2, "--share must be above 0"),
        ("head", ("--drafter", "random:nothing"), 1, "there is no shape 'nothing': there are qwen2.5-0.5b"),
        ("head", ("--drafter", "./nowhere"), 1, "there is no folder ./nowhere"),
    ],
)
def test_what_is_refused_before_anything_starts(
    cli: Cli, files: tuple[Path, Path], command: str, options: tuple[str, ...], code: int, complaint: str
) -> None:
    more = ("--prompts", files[0]) if command == "pruning" else ()
    outcome = cli("bench", command, *more, *options)
    assert (outcome.code, outcome.out) == (code, "")
    assert complaint in outcome.err


def test_the_whole_head_comes_first() -> None:
    assert sizes_of(1000, [0.1, 1.0, 0.25]) == [1000, 250, 100]
    assert sizes_of(3, [0.01]) == [3, 1]


def test_shares_of_a_step() -> None:
    time = StepTime(layers=3.0, head=4.0, distribution=2.0, draw=1.0)
    assert (time.total, time.head_and_distribution) == (10.0, 0.6)

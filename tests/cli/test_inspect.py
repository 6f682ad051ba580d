"""`crossdraft inspect`: the report of a pair, from tokenizers and configs alone."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from crossdraft.console.pictures import combinations_figure, plot_combinations
from crossdraft.text.letters import Side
from crossdraft.text.report import combinations_of, compare
from tests.cli.conftest import Cli
from tests.text.kinds import kind


def test_json_is_the_report(cli: Cli, target_folder: Path, drafter_folder: Path, tmp_path: Path) -> None:
    sample = tmp_path / "sample.txt"
    sample.write_text("def main(): pass\n")
    ended = cli("inspect", target_folder, drafter_folder, "--json", "--sample", sample)
    report = compare(
        kind("gpt2").tokenization(Side.TARGET), kind("llama2").tokenization(Side.DRAFTER), sample.read_text()
    )
    assert (ended.code, ended.err) == (0, "")
    assert json.loads(ended.out) == json.loads(json.dumps(asdict(report)))


def test_tables_for_people(cli: Cli, target_folder: Path, drafter_folder: Path) -> None:
    other = cli("inspect", target_folder, drafter_folder).out
    same = cli("inspect", target_folder, target_folder).out
    assert [line.split("│")[2].strip() for line in (other + same).splitlines() if "same vocabulary" in line] == [
        "no",
        "yes",
    ]
    for part in ("tokens that both have", "look-ahead", "special tokens", "that the other can write"):
        assert part in other


@pytest.mark.parametrize(
    ("drafter", "options", "code", "complaint"),
    [
        ("./nowhere", (), 1, "there is no folder ./nowhere"),
        ("bundled:nothing", (), 1, "there is no bundled model 'bundled:nothing'"),
        (".", (), 1, ". has no tokenizer.json"),
        ("damaged", (), 1, "is damaged, it is not JSON"),
        (None, ("--sample", "none.txt"), 2, "none.txt cannot be read as UTF-8 text"),
        (None, ("--sample", "empty.txt"), 2, "empty.txt is empty"),
        (None, ("--plot", "combinations.txt"), 2, "--plot writes .png"),
    ],
)
def test_what_cannot_be_compared(
    cli: Cli,
    target_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    drafter: str | None,
    options: tuple[str, ...],
    code: int,
    complaint: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("damaged").mkdir()
    Path("damaged/tokenizer.json").write_text("{")
    Path("empty.txt").write_text("\n")
    cli("inspect", target_folder, drafter or target_folder, *options).failed(complaint, code)


def test_a_picture(cli: Cli, target_folder: Path, drafter_folder: Path, tmp_path: Path) -> None:
    picture = tmp_path / "combinations.png"
    ended = cli("inspect", target_folder, drafter_folder, "--plot", picture)
    assert (ended.code, ended.err) == (0, "")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_axes_of_few_ways_are_readable_and_long_tokens_are_said_to_be_cut(tmp_path: Path) -> None:
    bytes_only = combinations_of([1] * 50 + [2] * 949 + [40], [1] * 1000)
    figure = combinations_figure("bytes", bytes_only)
    left, right = figure.axes
    figure.canvas.draw()
    vertical, horizontal = (left.get_ylim(), left.get_yticklabels()), (right.get_xlim(), right.get_xticklabels())
    for (low, high), labels in (vertical, horizontal):
        assert high - low >= 1
        exponents = [float(label.get_text().split("{")[1].rstrip("}$")) for label in labels if label.get_text()]
        assert all(exponent.is_integer() for exponent in exponents)
    assert "1 token of more than 2 letters is not shown" in left.get_xlabel()
    plot_combinations(tmp_path / "large.png", "large", combinations_of([1, 2000], [1, 2**1999]))  # beyond a float
    assert (tmp_path / "large.png").stat().st_size > 10_000

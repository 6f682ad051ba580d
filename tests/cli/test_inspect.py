"""`crossdraft inspect`: the report of a pair, from tokenizers and configs alone."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from crossdraft.text.letters import Side
from crossdraft.text.report import compare
from tests.cli.conftest import Cli
from tests.text.kinds import ALL, LOSSY, kind


def test_json_is_the_report(cli: Cli, target_folder: Path, drafter_folder: Path, tmp_path: Path) -> None:
    sample = tmp_path / "sample.txt"
    sample.write_text("def main(): pass\n")
    ended = cli("inspect", target_folder, drafter_folder, "--json", "--sample", sample)
    pair = kind("gpt2").tokenization(Side.TARGET), kind("llama2").tokenization(Side.DRAFTER)
    report = compare(*pair, sample.read_text())
    assert (ended.code, ended.err) == (0, "")
    assert json.loads(ended.out) == json.loads(json.dumps(asdict(report)))


def test_tables_for_people(cli: Cli, target_folder: Path, drafter_folder: Path) -> None:
    other = cli("inspect", target_folder, drafter_folder).out
    same = cli("inspect", target_folder, target_folder).out
    said = [line.split("│")[2].strip() for line in (other + same).splitlines() if "same vocabulary" in line]
    assert said == ["no", "yes"]
    assert other.splitlines()[-1].startswith("Different vocabularies: the drafter can be used, by default with `slem`")
    assert same.splitlines()[-1].startswith("One vocabulary: all methods can be used")
    parts = ("tokens that both have", "look-ahead", "special tokens", "that the other can write", "encoded as unknown")
    assert [part for part in parts if part not in other] == []


@pytest.mark.parametrize("name", ALL)
def test_every_kind_of_tokenizer_can_be_inspected(cli: Cli, drafter_folder: Path, tmp_path: Path, name: str) -> None:
    some = kind(name)
    (tmp_path / "tokenizer.json").write_text(some.json)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": some.begin, "eos_token": some.end}))
    ended = cli("inspect", tmp_path, drafter_folder)
    assert (ended.code, ended.err) == (0, "")
    (line,) = [line for line in ended.out.splitlines() if "text comes back unchanged" in line]
    assert ("because" in line) == (name in LOSSY), line
    (line,) = [line for line in ended.out.splitlines() if "text encoded as unknown" in line]
    assert ("none" not in line.split("│")[2]) == (name == "small_unigram"), line


def test_a_file_and_a_chart(cli: Cli, target_folder: Path, drafter_folder: Path) -> None:
    """A tokenizer.json by itself has the same tokens, and no control symbols."""
    ended = cli("inspect", target_folder / "tokenizer.json", drafter_folder, "--longest", "2", "--plot")
    assert (ended.code, ended.err) == (0, "")
    chart = ended.out.rpartition("doubling")[2].splitlines()
    assert [line.split("│")[1].strip() for line in chart if "│" in line] == ["1", "2"], ended.out


def test_what_cannot_be_compared(cli: Cli, target_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    (tmp_path / "empty.txt").write_text("\n")
    cli("inspect", target_folder, "bundled:nothing").failed("there is no bundled model 'bundled:nothing'", 1)
    cli("inspect", target_folder, tmp_path).failed("is damaged, it is not JSON", 1)
    same = ("inspect", target_folder, target_folder, "--sample")
    cli(*same, tmp_path / "none.txt").failed("none.txt cannot be read as UTF-8 text")
    cli(*same, tmp_path / "empty.txt").failed("empty.txt is empty")

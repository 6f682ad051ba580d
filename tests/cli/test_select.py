"""`crossdraft select`: its advice, and the command over services that run."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from crossdraft.cli.measuring import Table
from crossdraft.cli.select import CERTAIN, COLUMNS, Candidate, advice, best_of
from tests.cli.conftest import Cli

CANDIDATE = Candidate("bundled:b", "slem", 0.5, 1.4, "lock-step, 4", 1.25, 0.1, 12.5, 10.0, 1, 1.1, {})


def test_the_advice_is_the_fastest_one_if_it_is_faster_than_none_beyond_chance() -> None:
    slower = replace(CANDIDATE, method="tli", measured=1.1, error=0.05)
    assert best_of([slower, CANDIDATE]) == CANDIDATE
    assert advice([slower, CANDIDATE]).startswith("Use bundled:b with method slem: 1.25 ± 0.10 times as fast")
    useless = [replace(slower, measured=0.7), replace(CANDIDATE, measured=0.9)]
    assert best_of(useless) is None
    assert "None helps" in advice(useless)
    assert "bundled:b with method slem, is 0.90 ± 0.10 times as fast" in advice(useless)
    assert "measure more prompts" not in advice(useless)
    assert (best_of([]), advice([])) == (None, "None helps: no method can be used with these drafters.")
    doubtful = replace(CANDIDATE, measured=1.29, error=0.5)
    said = advice([doubtful, replace(CANDIDATE, method="tli", measured=0.9)])
    assert best_of([doubtful]) is None
    assert said.startswith("None is shown to help: the best, bundled:b with method slem, is 1.29 ± 0.50")
    assert "may be chance: measure more prompts (--limit)" in said


def test_a_speed_without_repeats_is_none_where_all_outputs_repeat_themselves() -> None:
    shown = [Table.of([one], COLUMNS).rows[0][6] for one in (CANDIDATE, replace(CANDIDATE, without_repeats=0.0))]
    assert shown == ["1.10 × (1)", "none (1)"]


@pytest.fixture
def prompts_file(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    texts = {"prose": "The quick", "code": "def main():"}
    path.write_text("".join(json.dumps({"text": text, "category": kind}) + "\n" for kind, text in texts.items()))
    return path


def test_services_that_run_are_measured_and_the_fastest_is_named(cli: Cli, pair: tuple[str, ...], prompts_file: Path):
    options = ("--method", "slem", "--method", "tli", "--method", "rdk", "--max-tokens", 6)
    outcome = cli("select", *pair, "--prompts", prompts_file, *options, "--json")
    assert outcome.code == 0, outcome.err
    (found,) = outcome.records
    assert [(one["drafter"], one["method"]) for one in found["candidates"]] == [(pair[3], "slem"), (pair[3], "tli")]
    for one in found["candidates"]:
        assert one["mostly"]
        assert one["measured"] == pytest.approx(one["tokens_per_second"] / one["plain_tokens_per_second"])
        assert set(one["kinds"]) == {"prose", "code"}
        assert (one["without_repeats"] == 0) == (one["repeating"] == 2)
    assert [one["method"] for one in found["skipped"]] == ["rdk"]
    faster = [one for one in found["candidates"] if one["measured"] - CERTAIN * one["error"] > 1]  # as times have it
    fastest = max(faster or found["candidates"], key=lambda one: one["measured"])
    assert f"with method {fastest['method']}" in found["advice"]
    assert (found["choice"] is None) == found["advice"].startswith("None ") == (not faster)


def test_a_table_for_people(cli: Cli, pair: tuple[str, ...], prompts_file: Path) -> None:
    options = ("--method", "seeded", "--max-tokens", 4, "--temperature", 1)
    outcome = cli("select", *pair, "--prompts", prompts_file, *options)
    assert outcome.code == 0, outcome.err
    for part in ("tokens/pass", "without repeats", "By the kind of prompt", "prose", "mostly", "seeded"):
        assert part in outcome.out
    assert "None " in outcome.out or "Use " in outcome.out


@pytest.mark.parametrize(
    ("options", "code", "complaint"),
    [
        (("--prompts", "nowhere.jsonl"), 2, "cannot read the prompts"),
        (("--prompts", "broken.jsonl"), 2, "broken.jsonl, line 1 is no prompt"),
        (("--method", "guess"), 2, "unknown method 'guess'"),
        (("--target", "127.0.0.1:1", "--drafter", "no/such"), 1, "crossdraft: no/such is neither a folder nor in the"),
        (("--target", "127.0.0.1:1", "--drafter", "127.0.0.1:1"), 1, "127.0.0.1:1"),
        (("--target", "127.0.0.1:1", "--drafter", "127.0.0.1:99999"), 2, "--drafter must be HOST:PORT, such as"),
    ],
)
def test_what_cannot_be_done_is_said(cli, tmp_path, monkeypatch, options, code, complaint):
    monkeypatch.chdir(tmp_path)
    Path("broken.jsonl").write_text("{\n")
    cli("select", *options).failed(complaint, code)

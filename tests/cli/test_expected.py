"""`crossdraft bench expected`: distributions are read, nothing is drawn."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Cli, Outcome


@pytest.fixture
def prompts_file(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("The quick", "A brown fox", "jumps")))
    return path


def measured(outcome: Outcome, path: Path) -> dict[str, Any]:
    assert outcome.code == 0, outcome.err
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_every_method_that_the_pair_can_do_is_a_cell(
    cli: Cli, target_folder: Path, drafter_folder: Path, prompts_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    models = ("--target", target_folder, "--drafter", drafter_folder)
    outcome = cli("bench", "expected", "--prompts", prompts_file, *models, "-k", 2, "--after", 1, "--json", out)
    found = measured(outcome, out)
    methods = {"union", "tli", "coupled", "coupled-shared", "slem", "seeded", "slrs"}
    assert {cell["method"] for cell in found["cells"]} == methods
    assert {cell["temperature"] for cell in found["cells"]} == {0.0, 0.6, 1.0}
    for cell in found["cells"]:
        assert 0 <= cell["acceptance"] <= cell["acceptance"] + cell["pruned"] <= 1 + 1e-9
        assert f"{cell['acceptance']:.4f}" in outcome.out
    always = [one for one in found["comparisons"] if (one["more"], one["less"]) != ("slrs", "slem")]
    assert len(always) == 9
    assert all(one["holds"] and one["below"] == 0 for one in always)


def test_a_target_that_drafts_for_itself_is_always_right(
    cli: Cli, target_folder: Path, prompts_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    models = ("--target", target_folder, "--drafter", target_folder)
    found = measured(cli("bench", "expected", "--prompts", prompts_file, *models, "-k", 1, "--json", out), out)
    acceptance = {(cell["method"], cell["temperature"]): cell["acceptance"] for cell in found["cells"]}
    for method in ("standard", "union", "tli", "coupled", "coupled-shared"):
        assert acceptance[method, 1.0] == pytest.approx(1), method
    assert 0.95 < acceptance["seeded", 1.0] < 1  # control symbols without a role have no letters in common
    assert {method: value for (method, temperature), value in acceptance.items() if temperature == 0} == {
        method: pytest.approx(1) for method, _ in acceptance
    }
    assert acceptance["slem", 1.0] < 0.9  # two independent draws


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--prompts", "nowhere.jsonl"), "--prompts"),
        (("-k", "0"), "-k must be at least 1"),
        (("--least", "1"), "--least must be 0 or more and below 1"),
        (("--temperature", "-1"), "a temperature must be 0 or more"),
        (("--after", "-1"), "--after must be 0 or more"),
        (("--affinity", "file.npz"), "--affinity takes NAME=FILE"),
        (("--affinity", "other=file.npz"), "--affinity names the drafter 'other'"),
        (("--affinity", "bundled:drafter-a=nowhere.npz"), "the affinity of bundled:drafter-a cannot be used"),
    ],
)
def test_wrong_options(cli: Cli, prompts_file: Path, options: tuple[str, ...], complaint: str) -> None:
    outcome = cli("bench", "expected", "--prompts", prompts_file, *options)
    assert outcome.code == 2
    assert complaint in outcome.err


def test_models_that_are_not_there(cli: Cli, prompts_file: Path) -> None:
    outcome = cli("bench", "expected", "--prompts", prompts_file, "--target", "./nowhere")
    assert outcome.code == 1
    assert "there is no folder ./nowhere" in outcome.err

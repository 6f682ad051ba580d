"""`crossdraft bench expected`: distributions are read, nothing is drawn."""

from pathlib import Path

import pytest

from tests.bench.conftest import Measure
from tests.cli.conftest import Cli


def test_every_method_that_the_pair_can_do_is_a_cell(
    measure: Measure, target_folder: Path, drafter_folder: Path, prompts_file: Path
) -> None:
    models = ("--target", target_folder, "--drafter", drafter_folder)
    found = measure("expected", "--prompts", prompts_file, "--limit", 1, *models, "-k", 2, "--after", 1)
    cells, comparisons = ([one for one in found if key in one] for key in ("method", "more"))
    methods = {"union", "tli", "coupled", "coupled-shared", "slem", "seeded", "slrs"}
    assert {cell["method"] for cell in cells} == methods
    assert {cell["temperature"] for cell in cells} == {0.0, 0.6, 1.0}
    for cell in cells:
        assert 0 <= cell["acceptance"] <= cell["acceptance"] + cell["pruned"] <= 1 + 1e-9
    always = [one for one in comparisons if (one["more"], one["less"]) != ("slrs", "slem")]
    assert len(always) == 9
    assert all(one["holds"] and one["below"] == 0 for one in always)


def test_a_target_that_drafts_for_itself_is_always_right(
    measure: Measure, target_folder: Path, prompts_file: Path
) -> None:
    models = ("--target", target_folder, "--drafter", target_folder)
    found = measure("expected", "--prompts", prompts_file, *models, "-k", 1)
    acceptance = {(one["method"], one["temperature"]): one["acceptance"] for one in found if "method" in one}
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
        (("--temperature", "-1"), "temperature must be 0 or more"),
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

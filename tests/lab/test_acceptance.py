"""`crossdraft bench acceptance`: what is measured, how it is summed up, what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from crossdraft.cli.measuring import SEED, Setting
from crossdraft.cli.processes import Wanted
from crossdraft.lab.acceptance import cell_of, settings_of
from crossdraft.lab.commands import AcceptancePlan
from tests.cli.conftest import Cli
from tests.lab.conftest import Measure, figures

SETTING = Setting("slem", "some/drafter", 1.0, 5)


def test_every_combination_is_a_cell(measure: Measure, started: object, prompts_file: Path) -> None:
    options = ("--temperature", 0, "--temperature", 1, "-k", 1, "-k", 3, "--max-tokens", 6, "--limit", 2)
    methods = ("--method", "slem", "--method", "seeded")
    cells = measure("acceptance", "--prompts", prompts_file, "--drafter", "tiny", *methods, *options)
    assert [(cell["method"], cell["temperature"], cell["k"]) for cell in cells] == [
        (method, temperature, k) for method in ("slem", "seeded") for temperature in (0.0, 1.0) for k in (1, 3)
    ]
    for cell in cells:
        assert cell["prompts"] == 2
        assert 2 <= cell["tokens"] <= 12
        assert cell["tokens_per_pass"] == pytest.approx(cell["tokens"] / cell["passes"])
        assert cell["draft_tokens"] > 0
        assert {kind: some["prompts"] for kind, some in cell["kinds"].items()} == {"prose": 1, "code": 1}
        assert sum(some["tokens"] for some in cell["kinds"].values()) == cell["tokens"]
    greedy = [(cell["tokens"], cell["drafter"]) for cell in cells if cell["temperature"] == 0]
    assert greedy == [(greedy[0][0], "tiny")] * 4  # the same text, however it is drafted


def test_what_a_pair_cannot_do_is_skipped_with_its_reason(
    cli: Cli, measure: Measure, started: object, prompts_file: Path
) -> None:
    options = ("--method", "rdk", "--method", "tokentiming", "--temperature", 1, "--temperature", 0)
    given = ("--prompts", prompts_file, "--limit", 1, "--drafter", "tiny", "--max-tokens", 4)
    skipped, *cells = measure("acceptance", *given, *options)
    assert [cell["method"] for cell in cells] == ["tokentiming"] * 2
    assert (skipped["method"], skipped["drafter"]) == ("rdk", "tiny")
    assert "affinity matrix" in skipped["reason"]
    assert f"Skipped rdk with tiny: it {skipped['reason']}" in cli("bench", "acceptance", *given, *options).out


def test_a_method_for_one_vocabulary_starts_the_target_as_its_own_drafter(
    measure: Measure, started: list[Wanted], prompts_file: Path
) -> None:
    options = ("--target", "big", "--method", "standard", "--temperature", 0, "--max-tokens", 4)
    (skipped,) = measure("acceptance", "--prompts", prompts_file, "--limit", 1, *options)
    assert [(one.role, one.model) for one in started] == [("target", "big"), ("drafter", "big")]
    assert "vocabular" in skipped["reason"]  # those that run here have two


@pytest.mark.full
def test_a_target_that_drafts_for_itself_is_always_right(
    measure: Measure, target_folder: Path, prompts_file: Path
) -> None:
    options = ("--target", target_folder, "--method", "standard", "--temperature", 0, "--max-tokens", 12)
    (cell,) = measure("acceptance", "--prompts", prompts_file, "--limit", 1, *options)
    assert (cell["drafter"], cell["acceptance"]) == (str(target_folder), 1.0)
    assert cell["tokens_per_pass"] > 2


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--prompts", "nowhere.jsonl"), "cannot read the prompts"),
        (("--method", "guess"), "unknown method"),
        (("--temperature", "-1"), "temperature must be 0 or more"),
        (("--affinity", "file.npz"), "--affinity takes NAME=FILE"),
        (("--affinity", "a=b"), "NAME one of bundled:drafter-a, bundled:drafter-b, bundled:drafter-c, got 'a=b'"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(
    cli: Cli, prompts_file: Path, options: tuple[str, ...], complaint: str
) -> None:
    cli("bench", "acceptance", "--prompts", prompts_file, *options).failed(complaint)


def test_settings_are_in_the_order_of_drafters_each_with_its_affinity() -> None:
    plan = AcceptancePlan(target="big", drafter=("one", "two"), temperatures=(1.0,))
    settings = settings_of(replace(plan, methods=("standard", "slem", "tli")))
    pairs = [(setting.method, setting.drafter) for setting in settings]
    assert pairs == [("slem", "one"), ("tli", "one"), ("slem", "two"), ("tli", "two"), ("standard", "big")]
    given = settings_of(replace(plan, methods=("rdk",), affinity=("two=m",)))
    assert [(setting.drafter, setting.options) for setting in given] == [("one", ()), ("two", ("--affinity", "m"))]
    trees = settings_of(replace(plan, drafter=("one",), methods=("slem", "slrs"), k=(5, 9), tree=(0, 8)))
    assert [(one.method, one.k, one.nodes) for one in trees] == [
        *(("slem", 5, 0), ("slem", 5, 8), ("slem", 9, 0)),
        *(("slrs", 5, 0), ("slrs", 9, 0)),
    ]


def test_only_methods_that_take_a_seed_get_one_and_each_prompt_other_noise() -> None:
    seeded = replace(SETTING, method="seeded").requests(["a", "b"], 3)
    assert [(request.seed, request.choice) for request in seeded] == [(SEED, 0), (SEED, 1)]
    assert [request.seed for request in replace(SETTING, method="tli").requests(["a"], 3)] == [None]


def test_a_cell_is_a_ratio_of_sums_with_the_error_over_prompts() -> None:
    # Equally many passes: the ratio is the mean of 1 and 2, whose standard error is (2 − 1) / 2.
    counts: list[dict[str, Any]] = [
        {"tokens": 10, "accepted": 3, "corrected": 1, "drafted_at": (4, 2), "judged_at": (4, 1), "accepted_at": (3, 1)},
        {"tokens": 20, "accepted": 6, "drafted_at": (4,), "judged_at": (4,), "accepted_at": (2,)},
    ]
    made = [(figures(passes=10, row_misses=2, draft_tokens=50, **count), False) for count in counts]
    cell = cell_of(SETTING, made, seconds=1.5)
    assert cell.standard_error == pytest.approx(0.5)
    assert (cell.tokens_per_pass, cell.acceptance) == (1.5, 0.9)
    assert cell.tokens_per_planned_pass == 30 / 16
    assert (cell.acceptance_at, cell.accepted_length) == ((5 / 8, 1.0), 6 / 8)
    assert (cell.tokens, cell.passes, cell.row_misses, cell.draft_tokens, cell.seconds) == (30, 20, 4, 100, 1.5)
    assert (cell.method, cell.drafter, cell.temperature, cell.k, cell.prompts) == ("slem", "some/drafter", 1.0, 5, 2)
    alone = cell_of(SETTING, [(figures(tokens=4, passes=2), True)])
    assert (alone.standard_error, alone.repeating, alone.without_repeats) == (0, 1, 0)

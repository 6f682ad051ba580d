"""`crossdraft bench`: what is measured, and how it is summed up."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from crossdraft.bench import harness, workload
from crossdraft.bench.acceptance import cell_of
from crossdraft.bench.overhead import Recording, round_of
from crossdraft.bench.workload import Setting, settings_of
from crossdraft.client import Statistics
from crossdraft.console.processes import Wanted
from tests.cli.conftest import Cli

SETTING = Setting("slem", "some/drafter", 1.0, 5)
NO_PLACES = dict.fromkeys(("proposed_at", "judged_at", "accepted_at"), ())
NOTHING: dict[str, Any] = (
    dict.fromkeys(Statistics.__annotations__, 0) | {"method": "slem", "drafter_lost": ""} | NO_PLACES
)


def figures(**counted: float) -> Statistics:
    """Of a generation with these, and nothing else."""
    return Statistics(**NOTHING | counted)


@pytest.fixture
def prompts_file(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("The quick", "A brown fox", "jumps")))
    return path


@pytest.fixture
def running(pair: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """The services that are there, in place of started ones."""
    addresses = dict(zip(("target", "drafter"), pair[1::2], strict=True))

    @asynccontextmanager
    async def services(wanted: Sequence[Wanted]) -> AsyncIterator[list[str]]:
        yield [addresses[one.role] for one in wanted]

    monkeypatch.setattr(workload, "services", services)


def test_every_combination_is_a_cell(cli: Cli, running: None, prompts_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    options = ("--method", "slem", "--method", "seeded", "-k", 1, "-k", 3, "--max-tokens", 6, "--json", out)
    outcome = cli("bench", "acceptance", "--prompts", prompts_file, "--limit", 2, "--drafter", "tiny", *options)
    assert outcome.code == 0, outcome.err
    cells = json.loads(out.read_text())["cells"]
    assert [(cell["method"], cell["temperature"], cell["k"]) for cell in cells] == [
        (method, temperature, k) for method in ("slem", "seeded") for temperature in (0.0, 0.6, 1.0) for k in (1, 3)
    ]
    for cell in cells:
        assert cell["prompts"] == 2
        assert 2 <= cell["tokens"] <= 12
        assert cell["tokens_per_pass"] == pytest.approx(cell["tokens"] / cell["passes"])
        assert cell["draft_tokens"] > 0
        assert f"{cell['tokens_per_pass']:.2f} ± {cell['standard_error']:.2f}" in outcome.out
    greedy = [(cell["tokens"], cell["drafter"]) for cell in cells if cell["temperature"] == 0]
    assert greedy == [(greedy[0][0], "tiny")] * 4  # the same text, however it is drafted


def test_what_a_pair_cannot_do_is_skipped_with_its_reason(
    cli: Cli, running: None, prompts_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    options = ("--method", "rdk", "--method", "tokentiming", "--temperature", 1, "--max-tokens", 4, "--json", out)
    outcome = cli("bench", "acceptance", "--prompts", prompts_file, "--limit", 1, "--drafter", "tiny", *options)
    assert outcome.code == 0, outcome.err
    found = json.loads(out.read_text())
    assert [cell["method"] for cell in found["cells"]] == ["tokentiming"]
    (skipped,) = found["skipped"]
    assert (skipped["method"], skipped["drafter"]) == ("rdk", "tiny")
    assert "affinity matrix" in skipped["reason"]
    assert f"Skipped rdk with tiny: it {skipped['reason']}" in outcome.out


def test_an_affinity_is_given_to_its_drafter_only(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Wanted] = []

    @asynccontextmanager
    async def services(wanted: Sequence[Wanted]) -> AsyncIterator[list[str]]:
        started.extend(wanted)
        yield ["nowhere:1" for _ in wanted]

    monkeypatch.setattr(workload, "services", services)
    workload = workload.Workload(
        "big", settings_of("big", ["a", "b"], ["rdk"], [1.0], [5]), ("x",), 1, {"b": Path("m")}
    )

    async def run() -> None:
        async for _ in workload.running_pairs(given):
            pass

    asyncio.run(run())
    assert [(one.model, one.more) for one in started] == [("big", ()), ("a", ()), ("b", ("--affinity", "m"))]


def test_a_method_for_one_vocabulary_starts_the_target_as_its_own_drafter(
    cli: Cli, target_folder: Path, prompts_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    options = ("--target", target_folder, "--method", "standard", "--temperature", 0, "--max-tokens", 12)
    outcome = cli("bench", "acceptance", "--prompts", prompts_file, "--limit", 1, *options, "--json", out)
    assert outcome.code == 0, outcome.err
    (cell,) = json.loads(out.read_text())["cells"]
    assert (cell["drafter"], cell["acceptance"]) == (str(target_folder), 1.0)
    assert cell["tokens_per_pass"] > 2


def test_a_round_is_its_parts(cli: Cli, running: None, prompts_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    options = ("--drafter", "tiny", "--method", "tli", "--max-tokens", 8, "--json", out)
    outcome = cli("bench", "round", "--prompts", prompts_file, "--limit", 1, *options)
    assert outcome.code == 0, outcome.err
    (found,) = json.loads(out.read_text())["rounds"]
    parts = [found[name] for name in ("verification_ms", "codec_ms", "transport_ms")]
    assert all(part > 0 for part in parts)
    assert sum(parts) == pytest.approx(found["outside_ms"])
    assert found["rounds"] >= 1  # the drawn text may end at once
    assert found["bytes_per_token"] > 100  # rows travel


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--prompts", "nowhere.jsonl"), "--prompts"),
        (("--method", "guess"), "unknown method"),
        (("--temperature", "-1"), "temperature must be 0 or more"),
        (("-k", "0"), "k must be between"),
        (("--concurrency", "0"), "--concurrency"),
        (("--limit", "0"), "--limit"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(
    cli: Cli, prompts_file: Path, options: tuple[str, ...], complaint: str
) -> None:
    outcome = cli("bench", "acceptance", "--prompts", prompts_file, *options)
    assert outcome.code == 2
    assert complaint in outcome.err


def test_settings_are_in_the_order_of_drafters() -> None:
    settings = settings_of("big", ["one", "two"], ["standard", "slem", "tli"], [1.0], [5])
    pairs = [(setting.method, setting.drafter) for setting in settings]
    assert pairs == [("slem", "one"), ("tli", "one"), ("slem", "two"), ("tli", "two"), ("standard", "big")]


def test_only_methods_that_take_a_seed_get_one_and_each_prompt_other_noise() -> None:
    seeded = replace(SETTING, method="seeded").requests(["a", "b"], 3)
    assert [(request.seed, request.choice) for request in seeded] == [(harness.SEED, 0), (harness.SEED, 1)]
    assert [request.seed for request in replace(SETTING, method="tli").requests(["a"], 3)] == [None]


def test_a_cell_is_a_ratio_of_sums_with_the_error_over_prompts() -> None:
    # Equally many passes: the ratio is the mean of 1 and 2, whose standard error is (2 − 1) / 2.
    counts: list[dict[str, Any]] = [
        {
            "tokens": 10,
            "accepted": 3,
            "corrected": 1,
            "proposed_at": (4, 2),
            "judged_at": (4, 1),
            "accepted_at": (3, 1),
        },
        {"tokens": 20, "accepted": 6, "proposed_at": (4,), "judged_at": (4,), "accepted_at": (2,)},
    ]
    cell = cell_of(SETTING, [figures(passes=10, row_misses=2, draft_tokens=50, **count) for count in counts], 1.5)
    assert cell.standard_error == pytest.approx(0.5)
    assert (cell.tokens_per_pass, cell.acceptance) == (1.5, 0.9)
    assert cell.tokens_per_planned_pass == 30 / 16
    assert (cell.acceptance_at, cell.accepted_length) == ((5 / 8, 1.0), 6 / 8)
    assert (cell.tokens, cell.passes, cell.row_misses, cell.draft_tokens, cell.seconds) == (30, 20, 4, 100, 1.5)
    assert (cell.method, cell.drafter, cell.temperature, cell.k, cell.prompts) == ("slem", "some/drafter", 1.0, 5, 2)


def test_one_prompt_has_no_standard_error() -> None:
    assert cell_of(SETTING, [figures(tokens=4, passes=2)], 1.0).standard_error == 0


def test_a_round_is_the_median_over_generations_of_means_over_rounds() -> None:
    recordings = [
        Recording(figures(epochs=10, tokens=20, wire_seconds=wire, verification_seconds=0.02, bytes_sent=100), 0.01)
        for wire in (0.05, 0.07, 9.0)
    ]
    found = round_of(SETTING, recordings)
    assert found.verification_ms == pytest.approx(2)
    assert found.codec_ms == pytest.approx(1)
    assert found.transport_ms == pytest.approx(6)
    assert found.outside_ms == pytest.approx(9)
    assert (found.rounds, found.generations, found.bytes_per_token) == (30, 3, 5)

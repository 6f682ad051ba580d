"""`crossdraft bench overlap`: what is compared, how it is summed up, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from crossdraft.bench.commands import OverlapPlan
from crossdraft.bench.harness import Timed
from crossdraft.bench.overlap import (
    CONTROLLED,
    PLAIN_CONFIGURATION,
    Assisted,
    Generators,
    OverlapBenchmark,
    OverlapConditions,
    branched,
    compared,
    lock_steps,
    overlapped,
)
from crossdraft.bench.services import Served
from crossdraft.types.request import Overlap
from tests.bench.conftest import Measure, figures
from tests.cli.conftest import Cli

BENCH = OverlapBenchmark(
    OverlapPlan(logit_noise=(0.0, 0.5), delay_ms="0,2", method="slem", k=(1,), window=("4,1",), branches=("2,1",))
)
CONDITIONS = OverlapConditions("seeded", 1.0, 0.5, 5.0)


def test_each_way_is_asked_for_what_it_says() -> None:
    (locked,), (drafted_on,) = lock_steps((3,)), overlapped(((16, 4),))
    (with_branches,) = branched(drafted_on, ((4, 2),))
    assert [way.label for way in (PLAIN_CONFIGURATION, locked, drafted_on, with_branches, CONTROLLED)] == [
        *("plain", "lock-step, K = 3", "overlapped, 16/4", "with branches, 16/4, branches 4×2", "controlled")
    ]
    request = BENCH.request(locked, 1.0, 0)
    assert (request.overlap, request.num_speculative_tokens, request.max_draft_tokens) == (Overlap.OFF, 3, None)
    request = BENCH.request(with_branches, 1.0, 1, max_tokens=7)
    assert (request.prompt, request.max_tokens, request.choice) == (BENCH.prompts[1], 7, 1)
    assert (request.overlap, request.max_draft_tokens, request.min_draft_tokens) == (Overlap.ON, 16, 4)
    assert (request.branches, request.branch_width) == (4, 2)
    request = BENCH.request(CONTROLLED, 1.0, 0)
    assert (request.overlap, request.max_draft_tokens, request.branches) == (Overlap.AUTO, None, None)


def test_only_a_method_that_takes_a_seed_gets_one() -> None:
    assert BENCH.request(CONTROLLED, 1.0, 0).seed is not None
    for method in ("coupled", None):
        assert OverlapBenchmark(replace(BENCH.plan, method=method)).request(CONTROLLED, 1.0, 0).seed is None


DRAFTED: dict[str, Any] = {"judged_at": (4,), "accepted_at": (3,)}


def outcome(seconds: float, **counted: float) -> Timed:
    return Timed(100, seconds, figures(tokens=100, **counted))


def test_a_cell_has_ratios_to_plain_decoding_and_to_lock_step() -> None:
    (locked,), (drafted_on,) = lock_steps((3,)), overlapped(((16, 4),))
    found = {
        PLAIN_CONFIGURATION: [outcome(4.0, passes=100), outcome(4.0, passes=100)],
        locked: [outcome(2.0, passes=50), outcome(2.0, passes=50)],
        drafted_on: [
            outcome(
                1.0, passes=20, idle_seconds=0.2, target_lane_seconds=1.0, branches_tried=4, branches_hit=1, **DRAFTED
            ),
            outcome(
                1.0, passes=30, idle_seconds=0.4, target_lane_seconds=1.0, branches_tried=6, branches_hit=2, **DRAFTED
            ),
        ],
        Assisted(None, 1): [Timed(80, 1.0), Timed(80, 3.0)],
    }
    plain, lock, ours, other = compared(CONDITIONS, found, {"overlapped": 5.0})
    assert (plain.ratio.value, lock.ratio.value, ours.ratio.value, other.ratio.value) == (1, 2, 4, 1.6)
    assert ours.beside_lock_step is not None
    assert ours.beside_lock_step.value == 2
    assert (ours.predicted, ours.kept, plain.predicted, plain.kept) == (5.0, 0.8, None, None)
    assert (ours.tokens_per_pass, ours.idle, ours.branches_hit) == (4.0, pytest.approx(0.3), 0.3)
    assert (other.speed, other.branches_hit) == (40.0, None)


def test_the_controller_is_held_to_the_better_of_lock_step_and_plain_and_each_way_has_a_row() -> None:
    (locked,) = lock_steps((3,))
    found = {PLAIN_CONFIGURATION: [outcome(1.0)], locked: [outcome(0.5)], CONTROLLED: [outcome(1.25)]}
    results = compared(CONDITIONS, found, {"lock-step": 1.9})
    assert results[-1].beside_better is not None
    assert results[-1].beside_better.value == 0.4
    *_, slow = compared(CONDITIONS, found | {locked: [outcome(2.0)]}, {})
    assert slow.beside_better is not None
    assert slow.beside_lock_step is not None
    assert (slow.beside_better.value, slow.beside_lock_step.value) == (0.8, 1.6)
    (table,) = BENCH.report(results)
    lines = table.markdown().splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert [line.split(" | ")[3] for line in lines[2:]] == ["plain", "lock-step, K = 3", "controlled"]
    assert "| 2.00 [2.00, 2.00] | 1.90 | 1.05 |" in lines[3]


OPTIONS = ("--pace-target", "1,0", "--pace-drafter", "0,0", "--max-tokens", 8)
TRIED = ("-k", 1, "-k", 3, "--window", "4,1", "--branches", "2,1")


def test_every_kind_is_compared(measure: Measure, started: list[Served], prompts_file: Path) -> None:
    found = measure("overlap", "--prompts", prompts_file, "--limit", 1, *OPTIONS, *TRIED, "--temperature", 1)
    cache = ("--cache-mib", "64")  # of all tests
    assert [served.options for served in started] == [(*cache, "--pace", "1,0"), (*cache, "--pace", "0,0")]
    assert [one["name"] for one in found] == ["plain", "lock-step", "overlapped", "with branches", "controlled"]
    assert all(one["tokens"] > 0 and one["seconds"] > 0 for one in found)
    assert found[0]["ratio"]["value"] == 1
    assert [one["predicted"] is None for one in found] == [True, False, False, False, True]


async def test_every_condition_is_a_cell(started: list[Served], monkeypatch: pytest.MonkeyPatch) -> None:
    async def measured(stage: Generators, conditions: OverlapConditions) -> list[OverlapConditions]:
        return [conditions]

    monkeypatch.setattr(Generators, "measured", measured)
    assert [one async for one in BENCH.measure(lambda count=1, doing="": None)] == [
        OverlapConditions("slem", temperature, noise, delay)
        for noise in (0.0, 0.5)
        for delay in (0.0, 2.0)
        for temperature in (0.0, 1.0)
    ]
    assert [served.logit_noise for served in started] == [0.0, 0.0, 0.5]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--delay-ms", "1,x"), "--delay-ms takes numbers"),
        (("--delay-ms", "0.5,-1"), "--delay-ms must be between"),
        (("--window", "8"), "--draft-tokens: MAX,MIN expected, two whole numbers such as 16,4, got 8\n"),
        (("--branches", "1,2,3"), "--branches: DEPTH,WIDTH expected"),
        (("--window", "4,5"), "got min_draft_tokens 5, max_draft_tokens 4"),
        (("--branches", "0,0"), "got depth 0, width 0"),
        (("--pace-target", "fast"), "a pace is A,B, two numbers of milliseconds such as 20,0.5, got fast\n"),
        (("--pace-drafter", "-1,0"), "0 or more, got -1,0\n"),
        (("--logit-noise", "-1"), "--logit-noise must be 0 or more, got -1\n"),
        (("--method", "guess"), "unknown method"),
        (("--method", "slrs"), "judges a whole draft at once"),
        (("--temperature", "-1"), "temperature must be 0 or more"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(
    cli: Cli, started: list[Served], options: tuple[str, ...], complaint: str
) -> None:
    cli("bench", "overlap", *options).failed(complaint)
    assert not started

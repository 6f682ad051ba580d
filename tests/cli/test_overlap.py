"""`crossdraft bench overlap`: what is compared, how it is summed up, and what is refused."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from crossdraft.bench import overlap
from crossdraft.bench.harness import markdown
from crossdraft.bench.overlap import (
    GOVERNED,
    HEADINGS,
    PLAIN,
    Assisted,
    Conditions,
    Distant,
    Outcome,
    Served,
    Task,
    branched,
    cell_of,
    delays_of,
    lock_steps,
    overlapped,
    rows_of,
)
from crossdraft.console.processes import Running
from crossdraft.types.request import Overlap
from tests.cli.conftest import Cli
from tests.cli.test_bench import figures

TASK = Task(("one", "two"), "seeded", 1.0, 32)
CONDITIONS = Conditions("seeded", 1.0, 0.5, 5.0)


def test_each_way_is_asked_for_what_it_says() -> None:
    (locked,), (drafted_on,) = lock_steps((3,)), overlapped(((16, 4),))
    (with_branches,) = branched(drafted_on, ((4, 2),))
    assert [way.label for way in (PLAIN, locked, drafted_on, with_branches, GOVERNED)] == [
        *("plain", "lock-step, K = 3", "overlapped, 16/4", "with branches, 16/4, branches 4×2", "governed")
    ]
    request = TASK.request(locked, 0)
    assert (request.overlap, request.k, request.window) == (Overlap.OFF, 3, None)
    request = TASK.request(with_branches, 1, max_tokens=7)
    assert (request.prompt, request.max_tokens, request.choice) == ("two", 7, 1)
    assert (request.overlap, request.window, request.wait) == (Overlap.ON, 16, 4)
    assert (request.branches, request.branch_width) == (4, 2)
    request = TASK.request(GOVERNED, 0)
    assert (request.overlap, request.window, request.branches) == (Overlap.AUTO, None, None)


def test_only_a_method_that_takes_a_seed_gets_one() -> None:
    assert TASK.request(GOVERNED, 0).seed is not None
    assert Task(("one",), "coupled", 1.0, 8).request(GOVERNED, 0).seed is None
    assert Task(("one",), None, 1.0, 8).request(GOVERNED, 0).seed is None


def outcome(seconds: float, **counted: float) -> Outcome:
    return Outcome(100, seconds, figures(tokens=100, **counted))


def test_a_cell_has_ratios_to_plain_decoding_and_to_lock_step() -> None:
    (locked,), (drafted_on,) = lock_steps((3,)), overlapped(((16, 4),))
    found = {
        PLAIN: [outcome(4.0, passes=100), outcome(4.0, passes=100)],
        locked: [outcome(2.0, passes=50), outcome(2.0, passes=50)],
        drafted_on: [
            outcome(1.0, passes=20, idle_seconds=0.2, target_lane_seconds=1.0, branches_tried=4, branches_hit=1),
            outcome(1.0, passes=30, idle_seconds=0.4, target_lane_seconds=1.0, branches_tried=6, branches_hit=2),
        ],
        Assisted(None, 1): [Outcome(80, 1.0), Outcome(80, 3.0)],
    }
    cell = cell_of(CONDITIONS, found, {"overlapped": 5.0})
    plain, lock, ours, other = cell.ways
    assert (plain.ratio.value, lock.ratio.value, ours.ratio.value, other.ratio.value) == (1, 2, 4, 1.6)
    assert ours.beside_lock_step is not None
    assert ours.beside_lock_step.value == 2
    assert (ours.predicted, ours.kept, plain.predicted, plain.kept) == (5.0, 0.8, None, None)
    assert (ours.tokens_per_pass, ours.idle, ours.branches_hit) == (4.0, pytest.approx(0.3), 0.3)
    assert (other.speed, other.branches_hit) == (40.0, None)


def test_the_better_of_lock_step_and_plain_is_what_the_controller_is_held_to() -> None:
    (locked,) = lock_steps((3,))
    found = {PLAIN: [outcome(1.0)], locked: [outcome(2.0)], GOVERNED: [outcome(1.25)]}
    governed = cell_of(CONDITIONS, found, {}).ways[-1]
    assert governed.beside_better is not None
    assert governed.beside_lock_step is not None
    assert (governed.beside_better.value, governed.beside_lock_step.value) == (0.8, 1.6)


def test_the_table_has_a_row_for_each_way() -> None:
    (locked,) = lock_steps((3,))
    cell = cell_of(CONDITIONS, {PLAIN: [outcome(1.0)], locked: [outcome(0.5)]}, {"lock-step": 1.9})
    lines = markdown(HEADINGS, rows_of([cell])).splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert [line.split(" | ")[3] for line in lines[2:]] == ["plain", "lock-step, K = 3"]
    assert "| 2.00 [2.00, 2.00] | 1.90 | 1.05 |" in lines[3]


@pytest.fixture
def running(pair: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> list[Served]:
    """What was to be started; the services that are there take their places."""
    asked: list[Served] = []

    @asynccontextmanager
    async def target_service(target: Served) -> AsyncIterator[Running]:
        asked.append(target)
        yield Running(pair[1], 0)

    @asynccontextmanager
    async def drafter_service(drafter: Served, distant: bool) -> AsyncIterator[Distant]:
        asked.append(drafter)
        yield Distant(pair[3], 0, None)

    monkeypatch.setattr(overlap, "target_service", target_service)
    monkeypatch.setattr(overlap, "drafter_service", drafter_service)
    return asked


def test_every_condition_is_a_cell(cli: Cli, running: list[Served], tmp_path: Path) -> None:
    prompts, out, table = (tmp_path / name for name in ("prompts.jsonl", "out.json", "out.md"))
    prompts.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("The quick", "A brown fox")))
    options = ("--temperature", 0, "--temperature", 1, "--logit-noise", 0, "--logit-noise", 0.5, "--max-tokens", 8)
    paces = ("--pace-target", "1,0", "--pace-drafter", "0,0")
    tried = ("-k", 1, "-k", 3, "--window", "4,1", "--branches", "2,1")
    outcome = cli(
        "bench", "overlap", "--prompts", prompts, *options, *paces, *tried, "--json", out, "--markdown", table
    )
    assert outcome.code == 0, outcome.err
    assert outcome.out == table.read_text()
    assert [served.options for served in running] == [
        *(("--pace", "1,0"), ("--pace", "0,0"), ("--pace", "0,0", "--logit-noise", "0.5"))
    ]
    cells = json.loads(out.read_text())["cells"]
    conditions = [(cell["conditions"]["logit_noise"], cell["conditions"]["temperature"]) for cell in cells]
    assert conditions == [(0, 0), (0, 1), (0.5, 0), (0.5, 1)]
    for cell in cells:
        names = [way["name"] for way in cell["ways"]]
        assert names == ["plain", "lock-step", "overlapped", "with branches", "governed"]
        assert all(way["tokens"] > 0 and way["seconds"] > 0 for way in cell["ways"])
        assert cell["ways"][0]["ratio"]["value"] == 1
        assert [way["predicted"] is None for way in cell["ways"]] == [True, False, False, False, False]
        assert cell["estimates"]["pass_base"] >= 0.0005  # paced to 0.001: an estimate from few passes


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--delay-ms", "1,x"), "--delay-ms takes numbers"),
        (("--delay-ms", "-1"), "--delay-ms must be between"),
        (("--delay-ms", "5,-1"), "got -1\n"),
        (("--window", "8"), "--window: WINDOW,WAIT expected, two whole numbers such as 16,4, got 8\n"),
        (("--branches", "1,2,3"), "--branches: DEPTH,WIDTH expected"),
        (("--window", "4,5"), "got window 4, wait 5"),
        (("--branches", "0,0"), "got depth 0, width 0"),
        (("--pace-target", "fast"), "a pace is A,B, two numbers of milliseconds such as 20,0.5, got fast\n"),
        (("--pace-drafter", "-1,0"), "0 or more, got -1,0\n"),
        (("--logit-noise", "-1"), "--logit-noise must be 0 or more, got -1\n"),
        (("-k", "0"), "-k must be at least 1"),
        (("--repeat", "0"), "--repeat must be at least 1"),
        (("--method", "guess"), "unknown method"),
        (("--temperature", "-1"), "temperature must be 0 or more"),
        (("--json", "/nowhere/x.json"), "no such folder"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(
    cli: Cli, running: list[Served], options: tuple[str, ...], complaint: str
) -> None:
    outcome = cli("bench", "overlap", *options)
    assert outcome.code == 2
    assert complaint in outcome.err
    assert not running


def test_delays_are_numbers() -> None:
    assert delays_of("0,0.5,20") == (0.0, 0.5, 20.0)

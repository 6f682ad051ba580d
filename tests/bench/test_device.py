"""`crossdraft bench device`: its order, its time limit, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from crossdraft.bench import device
from crossdraft.console.running import CommandFailed, UsageError

DEVICE = device.DeviceBenchmark(("1b", "14b"), "d", "cuda:0", "bfloat16", "1,16", 32, 10, 512, 100.0, Path("p.jsonl"))


def test_passes_of_all_sizes_come_before_any_throughput() -> None:
    steps = device.steps_of(DEVICE)
    assert [step.title for step in steps] == ["1b: a pass", "14b: a pass", "1b: many outputs", "14b: many outputs"]
    for step, kind in zip(steps, ("engine", "engine", "throughput", "throughput"), strict=True):
        assert step.arguments[0] == kind
        assert device.SIZES[step.title.partition(":")[0]] in step.arguments
        assert "--enforce-eager" not in step.arguments
    assert all("--enforce-eager" in step.arguments for step in device.steps_of(replace(DEVICE, enforce_eager=True)))


def test_only_shapes_that_can_be_read_are_measured() -> None:
    with pytest.raises(UsageError, match="LAYERSxHIDDEN"):
        replace(DEVICE, device="cpu", sizes=("inflated:big:bundled:target",)).check()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"sizes": ("3b",)}, "there is no size '3b': give 1b, 7b, 14b"),
        ({"sizes": ("bundled:none",)}, "there is no bundled model"),
        ({"drafter": "bundled:none"}, "there is no bundled model"),
        ({"device": "cuda:99"}, "device 'cuda:99' cannot be used here"),
        ({"concurrency": "1,0"}, "--concurrency must be numbers from 1 on"),
        ({"concurrency": "1,x"}, "--concurrency must be numbers from 1 on"),
    ],
    ids=str,
)
def test_what_no_measurement_could_use_is_said_at_once(changes: dict[str, object], why: str) -> None:
    plan = replace(DEVICE, device="cpu", drafter="bundled:drafter-b")
    plan.check()
    with pytest.raises(UsageError, match=why):
        replace(plan, **changes).check()


def test_no_more_sessions_are_in_a_pass_than_outputs_at_once() -> None:
    (engine, *_) = device.steps_of(replace(DEVICE, concurrency="1,4"))
    assert [part for part in engine.arguments if part[0].isdecimal() and "x" in part] == ["1x1", "1x6"]


async def found_by(benchmark: device.DeviceBenchmark) -> list[device.Finding]:
    return [one async for one in benchmark.measure(lambda count=1, doing="": None)]


async def test_what_fails_or_does_not_fit_is_said() -> None:
    wrong = await device.run(device.Step("wrong", ("no-such-bench",)), 100.0)
    late = await device.run(device.Step("late", ("distribution",)), 0.01)
    assert wrong.failed
    assert wrong.text.startswith("Failed (2): ")
    assert "no-such-bench" in wrong.text
    assert (late.text, late.record) == ("Broken off after 0 seconds: its time was over.", None)


def test_findings_are_written_and_a_failure_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []

    async def run(step: device.Step, seconds: float) -> device.Finding:
        given.append(seconds)
        return device.Finding(step.title, "table\n", {"a": 1}, failed="outputs" in step.title)

    monkeypatch.setattr(device, "run", run)
    benchmark = replace(DEVICE, device="cpu", drafter="bundled:drafter-b")
    with pytest.raises(CommandFailed, match="2 of 4 measurements failed"):
        benchmark.run_in(tmp_path / "new")
    assert "## 1b: a pass\n\ntable\n" in (tmp_path / "new" / "device.md").read_text()
    results = json.loads((tmp_path / "new" / "device.json").read_text())["results"]
    assert [one["record"] for one in results] == [None, *[{"a": 1}] * 4]
    assert given == [40.0] * 4  # none may take all the time


async def test_nothing_is_begun_when_the_time_is_over() -> None:
    found = await found_by(replace(DEVICE, device="cpu", seconds=1.0))
    assert ["Left out" in one.text for one in found] == [False, *[True] * 4]
    with pytest.raises(CommandFailed, match="nothing was measured"):
        DEVICE.finish(found)


async def test_warnings_of_a_measurement_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = tmp_path / "bench"
    said.write_text(
        "#!/bin/sh\n"
        "echo 'crossdraft: no more forwards are captured' >&2\n"
        "echo noise >&2\n"
        "eval table=\\${$#}\n"  # the last argument
        'echo table >"$table"\n'
        "echo '{}' >\"${table%md}json\"\n"
    )
    said.chmod(0o755)
    monkeypatch.setattr(device.sys, "executable", str(said))
    found = await device.run(device.Step("a pass", ("engine",)), 100.0)
    assert found.text == "table\n\n\ncrossdraft: no more forwards are captured"

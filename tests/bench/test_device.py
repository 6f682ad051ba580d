"""`crossdraft bench device`: its order, its time limit, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from crossdraft.bench import device
from crossdraft.bench.commands import DevicePlan
from crossdraft.console.running import CommandFailed, UsageError

PLAN = DevicePlan(Path("out"), size=("1b", "14b"), device="cpu", concurrency="1,16", seconds=100.0)
DEVICE = device.DeviceBenchmark(PLAN)


def with_(**changes: Any) -> device.DeviceBenchmark:
    return device.DeviceBenchmark(replace(PLAN, **changes))


def test_each_size_is_a_measurement() -> None:
    steps = device.steps_of(DEVICE)
    assert [step.title for step in steps] == ["1b", "14b"]
    for step in steps:
        assert step.arguments[0] == "throughput"
        assert device.SIZES[step.title] in step.arguments
        assert "--enforce-eager" not in step.arguments
    assert all("--enforce-eager" in step.arguments for step in device.steps_of(with_(enforce_eager=True)))


def test_only_shapes_that_can_be_read_are_measured() -> None:
    with pytest.raises(UsageError, match="LAYERSxHIDDEN"):
        with_(size=("inflated:big:bundled:target",)).check()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"size": ("3b",)}, "there is no size '3b': give 1b, 7b, 14b"),
        ({"size": ("bundled:none",)}, "there is no bundled model"),
        ({"drafter": "bundled:none"}, "there is no bundled model"),
        ({"device": "cuda:99"}, "device 'cuda:99' cannot be used here"),
        ({"concurrency": "1,0"}, "--concurrency must be between 1 and 1024"),
        ({"concurrency": "1,x"}, "--concurrency takes numbers"),
    ],
    ids=str,
)
def test_what_no_measurement_could_use_is_said_at_once(changes: dict[str, object], why: str) -> None:
    DEVICE.check()
    with pytest.raises(UsageError, match=why):
        with_(**changes).check()


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
        return device.Finding(step.title, "table\n", {"a": 1}, failed=step.title == "14b")

    monkeypatch.setattr(device, "run", run)
    with pytest.raises(CommandFailed, match="1 of 2 measurements failed"):
        with_(output=tmp_path / "new").run()
    assert "## 1b\n\ntable\n" in (tmp_path / "new" / "device.md").read_text()
    results = json.loads((tmp_path / "new" / "device.json").read_text())["results"]
    assert [one["record"] for one in results] == [None, {"a": 1}, {"a": 1}]
    assert given == [40.0] * 2  # none may take all the time


async def test_nothing_is_begun_when_the_time_is_over() -> None:
    found = await found_by(with_(seconds=1.0))
    assert ["Left out" in one.text for one in found] == [False, True, True]
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
    found = await device.run(device.Step("1b", ("throughput",)), 100.0)
    assert found.text == "table\n\n\ncrossdraft: no more forwards are captured"


def test_a_device_is_told_with_the_versions_that_drive_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device.described("cpu").startswith(f"cpu; torch {torch.__version__}")
    found = SimpleNamespace(name="A GPU", total_memory=3 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    assert device.described("cuda:0").startswith("A GPU, 3072 MiB; torch ")

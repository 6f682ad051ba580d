"""`crossdraft bench engine`, `memory`, `prefill` and `device`: how they are summed up, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from crossdraft.bench import device
from crossdraft.bench.engine import Load, PassTime, loads_of
from crossdraft.bench.throughput import Arrival, PrefillPlan, Sample, Soaked, Stream, memory_report, prefill_report
from crossdraft.console.running import Misused
from tests.cli.conftest import Cli


def test_loads_are_sessions_and_tokens() -> None:
    assert loads_of(["1x1", "16x6"]) == (Load(1, 1), Load(16, 6))
    for text in ("16", "0x1", "axb"):
        with pytest.raises(Misused, match="--load takes"):
            loads_of([text])


def test_overhead_is_to_one_bare_forward_and_to_all_of_them_alone() -> None:
    time = PassTime(Load(16, 1), engine=0.012, model=0.011, bare=0.010, alone=0.006, difference=0.0)
    assert (time.overhead, time.beside_alone) == (pytest.approx(1.2), pytest.approx(0.125))


def test_a_pass_of_the_bundled_target_is_measured(cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    outcome = cli("bench", "engine", "--load", "2x2", "--turns", 1, "--context", 8, "--json", out, "--enforce-eager")
    assert outcome.code == 0, outcome.err
    (time,) = json.loads(out.read_text())["times"]
    assert (time["load"], time["difference"] < 1e-3) == ({"sessions": 2, "tokens": 2}, True)
    assert "| 2 | 2 |" in outcome.out


def test_growth_counts_from_a_tenth_of_the_sessions() -> None:
    samples = [Sample(number, 1.0, 500.0 + min(number, 3), 10, 2) for number in range(1, 21)]
    found = Soaked(40, 480.0, tuple(samples), 0)
    assert found.grown == 0.0
    text = memory_report(found, 8)
    assert "| 20 | 1 | 503 | 2 | 10 | 25% |" in text
    assert "grew by 0.0 MiB" in text


def test_sessions_longer_than_the_budget_are_refused(cli: Cli) -> None:
    outcome = cli("bench", "memory", "--sessions", 10, "--longest", 1024, "--cache-mib", 1)
    assert (outcome.code, "raise it" in outcome.err) == (2, True)


def test_gaps_are_those_that_a_time_touches() -> None:
    stream = Stream([0.0, 1.0, 2.0, 4.0, 5.0, 6.0])
    assert stream.gaps(2.5, 4.5) == [2.0, 1.0]
    assert stream.gaps(10.0, 11.0) == []


def test_the_longest_gap_is_compared_with_the_usual_one() -> None:
    arrivals = [Arrival((0.01, 0.01), (0.02, 0.03), 0.5, 0.4), Arrival((0.01,), (), 0.5, 0.4)]
    text = prefill_report(PrefillPlan("t", 8, 1500, 2, 64), arrivals)
    assert "| while it was read | 2 | 25.0 | 29.9 | 30.0 | 2.00 |" in text
    assert "after 500 ms (median); without streams after 400 ms" in text


DEVICE = device.Plan(("1b", "14b"), "d", "cuda:0", "bfloat16", "1,16", 32, 10, 512, 100.0, Path("p.jsonl"))


def test_passes_of_all_sizes_come_before_any_throughput() -> None:
    steps = device.steps_of(DEVICE)
    assert [step.title for step in steps] == ["1b: a pass", "14b: a pass", "1b: many outputs", "14b: many outputs"]
    for step, kind in zip(steps, ("engine", "engine", "throughput", "throughput"), strict=True):
        assert step.arguments[0] == kind
        assert device.SIZES[step.title.partition(":")[0]] in step.arguments
        assert "--enforce-eager" not in step.arguments
    assert all("--enforce-eager" in step.arguments for step in device.steps_of(replace(DEVICE, enforce_eager=True)))


def test_only_shapes_that_can_be_read_are_measured() -> None:
    with pytest.raises(Misused, match="LAYERSxHIDDEN"):
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
    with pytest.raises(Misused, match=why):
        replace(plan, **changes).check()


def test_no_more_sessions_are_in_a_pass_than_outputs_at_once() -> None:
    (engine, *_) = device.steps_of(replace(DEVICE, concurrency="1,4"))
    assert [part for part in engine.arguments if part[0].isdecimal() and "x" in part] == ["1x1", "1x6"]


async def test_what_fails_or_does_not_fit_is_said_and_the_rest_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "LEAST", 0.0)
    findings = device.Findings(DEVICE, tmp_path)
    findings.add("before", "text\n", {"a": 1})
    await device._take(device.Step("wrong", ("no-such-bench",)), 0, 100.0, findings)
    await device._take(device.Step("late", ("distribution",)), 1, 0.01, findings)
    text = (tmp_path / "device.md").read_text()
    assert "## before\n\ntext\n" in text
    assert "Failed (2): " in text
    assert "no-such-bench" in text
    assert "Broken off after 0 seconds" in text
    assert json.loads((tmp_path / "device.json").read_text())["measured"]["before"] == {"a": 1}


async def test_nothing_is_begun_when_the_time_is_over(tmp_path: Path) -> None:
    findings = device.Findings(replace(DEVICE, seconds=1.0), tmp_path)
    await device._measure(device.steps_of(DEVICE), findings)
    assert (tmp_path / "device.md").read_text().count("Left out") == 4


async def test_none_may_take_all_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []

    async def take(step: device.Step, number: int, seconds: float, findings: device.Findings) -> None:
        given.append(seconds)
        findings.add(step.title, "taken")

    monkeypatch.setattr(device, "_take", take)
    await device._measure(device.steps_of(DEVICE), device.Findings(DEVICE, tmp_path))
    assert given == [40.0] * 4


async def test_what_a_measurement_warns_of_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    findings = device.Findings(DEVICE, tmp_path)
    await device._take(device.Step("a pass", ("engine",)), 0, 100.0, findings)
    text = (tmp_path / "device.md").read_text()
    assert "table" in text
    assert "crossdraft: no more forwards are captured" in text
    assert "noise" not in text

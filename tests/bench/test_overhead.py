"""`crossdraft bench overhead`, `round` and `verification`: what our own code costs."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from crossdraft.bench import overhead
from crossdraft.bench.made_up import MadeUp
from crossdraft.bench.overhead import Recording, round_of
from crossdraft.bench.workload import Setting
from crossdraft.console.processes import Running
from tests.bench.conftest import Measure, figures, in_a_thread
from tests.cli.conftest import Cli


def test_a_round_is_its_parts(measure: Measure, started: object, prompts_file: Path) -> None:
    options = ("--drafter", "tiny", "--method", "tli", "--max-tokens", 8)
    (found,) = measure("round", "--prompts", prompts_file, "--limit", 1, *options)
    parts = [found[name] for name in ("verification_ms", "codec_ms", "transport_ms")]
    assert all(part > 0 for part in parts)
    assert sum(parts) == pytest.approx(found["outside_ms"])
    assert found["rounds"] >= 1  # the drawn text may end at once
    assert found["bytes_per_token"] > 100  # rows travel


def test_a_round_is_the_median_over_generations_of_means_over_rounds() -> None:
    recordings = [
        Recording(figures(epochs=10, tokens=20, wire_seconds=wire, verification_seconds=0.02, bytes_sent=100), 0.01)
        for wire in (0.05, 0.07, 9.0)
    ]
    found = round_of(Setting("slem", "some/drafter", 1.0, 5), recordings)
    assert found.verification_ms == pytest.approx(2)
    assert found.codec_ms == pytest.approx(1)
    assert found.transport_ms == pytest.approx(6)
    assert found.outside_ms == pytest.approx(9)
    assert (found.rounds, found.generations, found.bytes_per_token) == (30, 3, 5)


@asynccontextmanager
async def running(wanted: Sequence[MadeUp]) -> AsyncIterator[list[Running]]:
    """The services in a thread of this process."""
    target, drafter = wanted
    with in_a_thread(target.server, drafter.server) as addresses:
        yield [Running(address, 0) for address in addresses.values()]


@pytest.mark.parametrize("processes", [False, pytest.param(True, marks=pytest.mark.full)])
def test_what_the_orchestrator_costs(
    measure: Measure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: bool
) -> None:
    if not processes:
        monkeypatch.setattr(overhead, "running", running)
    profile = tmp_path / "profile.txt"
    costs = measure(
        *("overhead", "--method", "slem", "--size", 2000, "--tokens", 24, "--outputs", 1),
        *("--pass-ms", 2, "--draft-token-ms", 0, "--profile", profile),
    )
    kinds = [(one["epochs"]["overlap"], one["epochs"]["branches"]) for one in costs]
    assert kinds == [(False, 0), (True, 0), (True, 4)]
    for one in costs:
        assert 0 < one["session_ms"] < one["loop_ms"] <= one["cpu_ms"]
        assert one["bytes_per_token"] == pytest.approx(one["target_bytes"] + one["drafter_bytes"])
    assert "crossdraft/session/" in profile.read_text()


def test_a_method_that_needs_a_model_is_refused(cli: Cli) -> None:
    outcome = cli("bench", "overhead", "--method", "slrs", "--size", 2000)
    assert outcome.code == 2
    assert "slrs needs a drafter's model" in outcome.err


def test_a_method_that_a_request_may_not_name_is_refused_before_anything_starts(cli: Cli) -> None:
    outcome = cli("bench", "overhead", "--method", "tokentiming", "--proposal-ms", 1)
    assert outcome.code == 2
    assert "allow_inexact" in outcome.err


def test_every_method_is_measured(measure: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "REPLAYS", 1)
    monkeypatch.setattr(overhead, "TOKENS", 100)
    methods = ("standard", "rdk", "coupled")
    options = [part for name in methods for part in ("--method", name)]
    costs = measure("verification", *options, "--size", 1500, "--rounds", 20, "-k", 3, "--width", 32)
    assert [cost["method"] for cost in costs] == list(methods)
    for cost in costs:
        assert cost["rounds"] >= 20
        assert 0 < cost["median_ms"] <= cost["p90_ms"]
        assert 0.2 < cost["acceptance"] < 1
        assert cost["tokens_per_pass"] > 1
        assert (cost["k"], cost["width"]) == (3, 32)


def test_methods_that_are_left_out_are_named(cli: Cli) -> None:
    outcome = cli("bench", "verification", "--method", "slem", "--size", 1000, "--rounds", 20, "--width", 8)
    assert outcome.err.startswith("left out: ")
    assert "slrs" in outcome.err
    assert "slem" not in outcome.err.splitlines()[0]


@pytest.mark.parametrize(("name", "said"), [("slrs", "leave it out"), ("unheard-of", "unknown method")])
def test_methods_that_cannot_be_measured_are_refused(cli: Cli, name: str, said: str) -> None:
    outcome = cli("bench", "verification", "--method", name)
    assert outcome.code == 2
    assert said in outcome.err

"""`crossdraft bench engine`, `memory` and `prefill`: how they are summed up, and what is refused."""

from pathlib import Path

import pytest

from crossdraft.bench import engine
from crossdraft.bench.commands import MemoryPlan, PrefillPlan
from crossdraft.bench.engine import Floor, Load, Memory, PassTime, Sample, grown, loads_of
from crossdraft.bench.harness import Table
from crossdraft.bench.prefill import Arrival, Prefill, Stream
from crossdraft.console.running import UsageError
from tests.bench.conftest import Cli, Measure


def test_loads_are_sessions_and_tokens() -> None:
    assert loads_of(["1x1", "16x6"]) == (Load(1, 1), Load(16, 6))
    for text in ("16", "0x1", "axb"):
        with pytest.raises(UsageError, match="--load takes"):
            loads_of([text])


def test_overhead_is_to_one_bare_forward_and_to_all_of_them_alone() -> None:
    time = PassTime(
        Load(16, 1), engine=0.012, model=0.011, bare=0.010, alone=0.006, difference=0.0, floor=Floor(1, 1.0), captured=0
    )
    assert (time.overhead, time.beside_alone) == (pytest.approx(1.2), pytest.approx(0.125))


def test_a_pass_is_measured(measure: Measure, target_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "floor_of", lambda model: Floor(1, 1.0))
    options = ("--turns", 1, "--context", 8, "--enforce-eager")
    (time,) = measure("engine", "--target", target_folder, "--load", "2x2", *options)
    assert (time["load"], time["difference"] < 1e-3) == ({"sessions": 2, "tokens": 2}, True)


def test_growth_counts_from_a_tenth_of_the_sessions() -> None:
    samples = [Sample(number, 1.0, 500.0 + min(number, 3), 10, 2, 40, 480.0) for number in range(1, 21)]
    assert grown(samples) == 0.0
    table, text = Memory(MemoryPlan()).report(samples)
    assert isinstance(table, Table)
    assert table.rows[-1] == ("20", "1", "503", "2", "10", "25%")
    assert "grew by 0.0 MiB" in str(text)


def test_sessions_longer_than_the_budget_are_refused(cli: Cli) -> None:
    outcome = cli("bench", "memory", "--sessions", 10, "--longest", 1024, "--cache-mib", 1)
    assert (outcome.code, "set --cache-mib to" in outcome.err) == (2, True)


def test_gaps_are_those_that_a_time_touches() -> None:
    stream = Stream([0.0, 1.0, 2.0, 4.0, 5.0, 6.0])
    assert stream.gaps(2.5, 4.5) == [2.0, 1.0]
    assert stream.gaps(10.0, 11.0) == []


def test_the_longest_gap_is_compared_with_the_usual_one() -> None:
    arrivals = [Arrival((0.01, 0.01), (0.02, 0.03), 0.5, 0.4), Arrival((0.01,), (), 0.5, 0.4)]
    table, text = Prefill(PrefillPlan()).report(arrivals)
    assert isinstance(table, Table)
    assert table.rows[1] == ("while it was read", "2", "25.0", "29.9", "30.0", "2.00")
    assert "after 500 ms (median); without streams after 400 ms" in str(text)

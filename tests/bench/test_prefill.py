"""`crossdraft bench prefill`: how it is summed up."""

from crossdraft.bench.commands import PrefillPlan
from crossdraft.bench.harness import Table
from crossdraft.bench.prefill import Arrival, EndlessStream, Prefill


def test_gaps_are_those_that_a_time_touches() -> None:
    stream = EndlessStream([0.0, 1.0, 2.0, 4.0, 5.0, 6.0])
    assert stream.gaps(2.5, 4.5) == [2.0, 1.0]
    assert stream.gaps(10.0, 11.0) == []


def test_the_longest_gap_is_compared_with_the_usual_one() -> None:
    arrivals = [Arrival((0.01, 0.01), (0.02, 0.03), 0.5, 0.4), Arrival((0.01,), (), 0.5, 0.4)]
    table, text = Prefill(PrefillPlan()).report(arrivals)
    assert isinstance(table, Table)
    assert table.rows[1] == ("while it was read", "2", "25.0", "29.9", "30.0", "2.00")
    assert "after 500 ms (median); without streams after 400 ms" in str(text)

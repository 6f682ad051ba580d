"""Figures of timelines that were written by hand."""

from bisect import bisect_left
from dataclasses import replace

import pytest

from crossdraft.lab.loadtest.figures import LoadRun
from crossdraft.lab.outputs import Output, Spread
from crossdraft.types.messages import Pass, PassDone
from crossdraft.types.statistics import BOUNDS, COARSE, Trips
from crossdraft.types.trees import TokenTree
from tests.client.test_measurements import measured
from tests.lab.loadtest.values import FAILED, FIGURES, TARGET, WHOLE


def summary_of(*outputs: Output) -> LoadRun:
    return LoadRun.of(None, outputs)


def near(found: Spread | None, *wanted: float) -> None:
    assert found is not None
    assert (found.count, found.mean, found.p50, found.p90, found.p99) == pytest.approx(wanted)


def test_latencies_of_one_request() -> None:
    found = summary_of(WHOLE)
    near(found.first_token_ms, 1, *[100] * 4)
    near(found.between_chunks_ms, 3, 100, 100, 180, 198)  # 100, 0 and 200
    near(found.per_token_ms, 1, *[100] * 4)  # 300 for three
    near(found.end_to_end_ms, 1, *[500] * 4)
    near(found.front_ms, 4, 20, 20, 27, 29.7)  # 10, 20, 20 and 30
    assert (found.requests, found.errors, found.tokens) == (1, {}, 4)
    assert (found.seconds, found.tokens_per_second, found.requests_per_second) == pytest.approx((0.5, 8, 2))


def test_errors_are_counted_by_kind_and_have_no_latencies() -> None:
    cut = replace(WHOLE, asked=10.5, error="broken off")
    silent = replace(WHOLE, moments=(), made=())
    found = summary_of(WHOLE, FAILED, cut, silent)
    assert found.errors == {"HTTP 429": 1, "broken off": 1, "no token": 1}
    near(found.end_to_end_ms, 1, *[500] * 4)
    assert (found.tokens, found.seconds) == (4, pytest.approx(2.5))  # until the end of the one that failed
    nothing = summary_of(FAILED)
    assert (nothing.first_token_ms, nothing.acceptance, nothing.hops, nothing.tokens_per_second) == (None, None, (), 0)


def test_a_single_token_has_no_time_per_token() -> None:
    short = replace(WHOLE, moments=(10.1,), made=(), figures=replace(FIGURES, tokens=1))
    found = summary_of(short)
    assert (found.per_token_ms, found.between_chunks_ms, found.front_ms) == (None, None, None)


def test_acceptance_is_of_all_outputs_together() -> None:
    other = replace(WHOLE, figures=replace(FIGURES, judged_at=(2, 2, 1), accepted_at=(1, 1, 0), accepted=4))
    found = summary_of(WHOLE, other)
    assert (found.acceptance, found.tokens_per_pass) == (6 / 8, 2.0)
    assert found.places == (3 / 4, 1 / 3, 0.0)


def test_hops_say_where_round_trips_went() -> None:
    target, drafter = summary_of(WHOLE, WHOLE).hops
    assert (target.role, target.questions, target.questions_per_token) == ("target", 8, 1.0)
    near(target.round_trip_ms, 8, 4, 4.875, 4.975, 4.9975)
    assert (target.queueing_ms, target.wire_ms) == pytest.approx((1.0, 3.0))
    assert (target.model_share, target.idle_share) == pytest.approx((0.4, 0.5))
    assert (target.serialization_ms_per_token, target.model_ms_per_token) == pytest.approx((0.5, 100))
    assert (target.bytes_per_token, target.lost) == (100.0, 0)
    assert (drafter.role, drafter.lost, drafter.queueing_ms) == ("drafter", 2, 0.0)


def test_a_lane_without_questions_has_no_round_trip() -> None:
    idle = replace(TARGET, trips=Trips())
    found = summary_of(replace(WHOLE, figures=replace(FIGURES, lanes=(idle,)))).hops
    assert [(hop.role, hop.questions, hop.round_trip_ms) for hop in found] == [("target", 0, None)]


def test_a_spread_of_known_values() -> None:
    assert Spread.of(one / 1000 for one in range(101)) == Spread(101, *map(pytest.approx, (50.0, 50.0, 90.0, 99.0)))
    assert Spread.of([0.002]) == Spread(1, 2.0, 2.0, 2.0, 2.0)
    assert Spread.of([]) is None


@pytest.mark.parametrize(
    ("counts", "median"), [((0, 4, 0, 0), 2.0), ((2, 2, 0, 0), 1.0), ((1, 0, 3, 0), 3 + 2 / 3), ((0, 0, 0, 3), 5.0)]
)
def test_quantiles_of_bins_are_linear_within_a_bin(counts: tuple[int, ...], median: float) -> None:
    assert Spread.of_bins(counts, [1.0, 3.0, 5.0], 1.0).p50 == pytest.approx(median)


@pytest.mark.parametrize("seconds", [0.00011, 0.0007, 0.0013, 0.0101, 0.045, 0.0525, 0.101, 0.3, 0.97])
def test_round_trips_that_all_took_as_long_are_said_to_have_taken_about_as_long(seconds: float) -> None:
    happened: list[tuple[object, float]] = []
    for number in range(6):
        happened += [(Pass(number, (), TokenTree()), 0.0), (PassDone(number, (), 0.0), seconds)]
    trips = measured("target", *happened).figures(99.0).trips
    found = Spread.of_bins(trips.counts, BOUNDS, 6 * seconds)
    assert [found.p50, found.p90, found.p99] == pytest.approx([seconds] * 3, rel=0.15)
    assert trips.coarse[bisect_left(COARSE, seconds)] == sum(trips.coarse) == 6
    assert len(trips.coarse) == len(COARSE) + 1

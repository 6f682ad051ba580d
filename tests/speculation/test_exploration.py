"""How a controller gets to know a drafter: what it tries, and what that may lose."""

import os
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from crossdraft.speculation.choice import Judged, PassSeen, Workload, lock_step
from crossdraft.speculation.controller import Adaptive, ExplorationBudget
from crossdraft.speculation.cost_model import forecast
from tests.speculation.controlled import CHAINS, NEVER_SLOWER, PASS, Counting, relative, run, workload

FAR = Workload((0.95,), 0.35, 0.05 * PASS, PASS, 0.03 * PASS, drafter_trip=2 * PASS)


def test_a_good_drafter_far_away_is_found_out_though_the_targets_own_tokens_say_little_of_it() -> None:
    """Where the target never waits, all that is compared is what it has drawn by itself."""
    rounds = max(run(FAR, lock_step(k).choice, 2000, 1).speed for k in (8, 16, 32))
    assert np.median([run(FAR, Adaptive(limits=CHAINS), 512, seed).speed for seed in range(3)]) > 0.95 * rounds
    assert np.median([run(FAR, Adaptive(limits=CHAINS), 64, seed).speed for seed in range(7)]) * PASS > 1.4


def test_what_trying_may_lose_is_bounded() -> None:
    """Far away, each try costs more than two passes, and such a drafter is never worth it."""
    useless = replace(FAR, acceptance=(0.1,), match=0.05)
    for tokens, least in ((64, 0.88), (512, 0.965)):
        assert relative(useless, tokens, range(3)) >= least
    counting = Counting()
    run(useless, counting, 3000)
    gaps = np.diff(counting.times("little is known"))
    assert len(gaps) >= 1
    assert gaps[-1] > 20 * PASS


@pytest.mark.parametrize("cell", [(0.3, 0.5, 0.0), (0.6, 0.5, 0.5), (0.3, 0.2, 0.1), (0.6, 0.05, 0.1)], ids=str)
def test_a_drafter_that_slows_the_target_is_not_used_where_that_loses(cell: tuple[float, float, float]) -> None:
    """One machine for both: what plain decoding takes is measured while the drafter rests."""
    given = replace(workload(*cell, node=0.05), contention=1.6)
    best = max(1.0, *(PASS * forecast(given, lock_step(k).choice).speed for k in (1, 2, 3, 4, 6)))
    assert relative(given, 512, range(3)) >= 0.9 * best  # three runs are good to some 3 %
    assert relative(given, 512, range(3)) >= NEVER_SLOWER


FULL = "CROSSDRAFT_FULL_TESTS" in os.environ
GRID = list(product((0.3, 0.6, 0.8, 0.95), (0.05, 0.2), (0.0, 0.1, 0.5, 2.0), (0.35, 0.7), (1.0, 1.3, 1.6)))


def test_never_far_below_the_better_of_lock_step_and_plain_decoding() -> None:
    """Acceptance, drafter's time and round trip in passes, what is left of it after plain tokens, contention."""
    shares = []
    for number, (acceptance, token, trip, match, contention) in enumerate(GRID[:: 4 if FULL else 16]):
        given = Workload((acceptance,), match * acceptance, token * PASS, PASS, 0.03 * PASS, drafter_trip=trip * PASS,
                         contention=contention)  # fmt: skip
        best = max(
            1.0, *(PASS * forecast(given, lock_step(k).choice).speed for k in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32))
        )
        shares.append(relative(given, 512, range(number, number + 1)) / best)  # one run is good to some 5 %
    assert np.median(shares) >= NEVER_SLOWER
    assert np.quantile(shares, 0.1) >= 0.9
    assert min(shares) >= 0.8


def test_an_allowance_is_spent_by_epochs_that_lose_and_filled_by_time() -> None:
    allowance = ExplorationBudget(2.0)
    allowance.observe(PassSeen(1, 1.0, 1.0, 0.0), 1.0)
    allowance.observe(Judged(0, 0, refused=True, tokens=1, settled=0), 1.0)
    allowance.over(drafted=True, plain=1.0, now=3.5)
    assert allowance.level == pytest.approx(2.0 - 2.5, abs=0.1)  # three passes and a half for one token
    assert not allowance.covers(1.0)
    allowance.over(drafted=False, plain=1.0, now=203.5)
    assert allowance.level == pytest.approx(2.5, abs=0.1)
    assert allowance.covers(2.0)
    assert not allowance.covers(3.0)
    allowance.observe(Judged(0, 9, refused=True, tokens=40, settled=0), 204.0)
    allowance.over(drafted=True, plain=1.0, now=210.0)
    assert allowance.covers(5.0)  # a first try always is affordable
    assert not allowance.covers(9.0)


def test_a_pause_of_the_target_is_not_all_the_drafters_fault() -> None:
    allowance = ExplorationBudget()
    allowance.observe(PassSeen(1, 1.0, 1.0, 0.0), 1.0)
    allowance.observe(Judged(0, 5, refused=True, tokens=6, settled=0), 2.0)
    allowance.over(drafted=True, plain=1.0, now=502.0)
    assert allowance.overdrawn
    allowance.over(drafted=False, plain=1.0, now=1002.0)
    assert allowance.covers(1.0)


def test_what_may_be_lost_is_inherited() -> None:
    controller = Adaptive(limits=CHAINS)
    run(replace(FAR, acceptance=(0.1,), match=0.05), controller, 40)
    assert controller.estimates.allowance < 3.0
    assert Adaptive(controller.estimates).estimates.allowance == controller.estimates.allowance

"""Costs that are fitted from answers, and acceptance by place."""

import pytest

from crossdraft.speculation.estimates import PLACES, PRIOR, Acceptance, Fared, FittedCost, Recent, StepCost

TRUE = StepCost(0.008, 0.0001, 0.00002)


def fitted(*steps: tuple[int, int], before: StepCost | None = None) -> FittedCost:
    found = FittedCost(before or StepCost())
    for _ in range(30):
        for sessions, tokens in steps:
            for _ in range(sessions):  # each has an answer
                found.add(TRUE.seconds(sessions, tokens), sessions, tokens, 1 / sessions)
    return found


def test_a_cost_is_fitted_to_steps_of_several_sizes() -> None:
    found = fitted((1, 0), (16, 0), (16, 128), (64, 512)).cost
    assert found.base == pytest.approx(TRUE.base, rel=0.05)
    assert found.session == pytest.approx(TRUE.session, rel=0.1)
    assert found.token == pytest.approx(TRUE.token, rel=0.1)


def test_steps_that_are_all_alike_keep_the_slopes_and_fix_the_base() -> None:
    found = fitted((16, 128), before=StepCost(0.02, 0.0001, 0.00002)).cost
    assert found.seconds(16, 128) == pytest.approx(TRUE.seconds(16, 128), rel=0.01)
    assert (found.session, found.token) == pytest.approx((0.0001, 0.00002), rel=0.01)
    again = fitted((16, 128), before=found).cost
    assert again.base == pytest.approx(found.base, rel=0.01)


def test_what_many_sessions_cost_is_still_known_after_a_time_with_few() -> None:
    found = fitted((64, 0), (8, 0))
    for step in range(400):  # noise by which more sessions seem to cost nothing
        sessions = 7 + step % 2
        found.add(TRUE.seconds(8) * (1.02 if sessions == 7 else 0.98), sessions)
    assert found.cost.seconds(64) == pytest.approx(TRUE.seconds(64), rel=0.1)
    assert found.cost.seconds(8) == pytest.approx(TRUE.seconds(8), rel=0.02)


def test_no_part_of_a_cost_is_negative_however_noisy_steps_are() -> None:
    found = FittedCost(StepCost())
    for sessions, seconds in [(62, 0.001), (63, 0.001), *[(64, 0.0016)] * 400]:
        found.add(seconds, sessions)
        assert min(found.cost.base, found.cost.session, found.cost.token) >= 0
    assert found.cost.seconds(64) == pytest.approx(0.0016, rel=0.05)
    assert found.cost.base > 0.0001


def test_a_pause_of_the_machine_is_no_cost_and_a_real_change_is() -> None:
    found = fitted((1, 0))
    usual = found.cost.seconds(1)
    found.add(10.0, 1)
    assert found.cost.seconds(1) < 1.2 * usual
    for _ in range(300):
        found.add(5 * usual, 1)
    assert found.cost.seconds(1) == pytest.approx(5 * usual, rel=0.1)


@pytest.mark.parametrize("seconds", [0.0, 5e-6])
def test_a_step_of_no_time_is_no_cost_and_a_fast_service_is(seconds: float) -> None:
    found = fitted((1, 0))
    usual = found.cost.seconds(1)
    found.add(seconds, 1)
    assert found.cost.seconds(1) > 0.75 * usual
    for _ in range(300):
        found.add(usual / 5, 1)
    assert found.cost.seconds(1) == pytest.approx(usual / 5, rel=0.1)


def test_the_median_of_the_latest_ignores_stalls() -> None:
    recent = Recent(0.5)
    for number in (0.1, 0.1, 9.0, 0.1):
        recent.add(number)
    assert recent.value == 0.1
    assert Recent().value == 0.0


def test_acceptance_is_known_by_place() -> None:
    found = Acceptance()
    for _ in range(40):
        found.add(0, 2, True)  # the third is always refused
    chances = found.chances()
    assert chances[0] > 0.9
    assert chances[2] < 0.2
    assert len(chances) > PLACES[-1]
    assert Acceptance(found.state).chances() == pytest.approx(chances)


def test_it_begins_optimistic_and_is_tested_after_some_draft_tokens() -> None:
    found = Acceptance()
    assert found.chances()[0] == pytest.approx(0.9, abs=0.02)
    assert not found.tested
    found.add(0, int(PRIOR), False)
    assert found.tested


def test_a_text_is_taken_for_an_average_one_until_it_clearly_differs() -> None:
    usual, hard, easy = Fared(), Fared(), Fared()
    for number in range(10):
        usual.add(number % 2, [0.5])
        hard.add(0, [0.9])
        easy.add(8, [0.5] * 8)
    assert usual.factor == 1.0
    assert hard.factor < 0.5
    assert 1.7 < easy.factor < 2.0


def test_it_is_the_latest_part_of_a_text_that_counts() -> None:
    found = Fared()
    for accepted in (*[0] * 200, *[1] * 600):
        found.add(accepted, [0.5])
    assert found.factor > 1.5


@pytest.mark.parametrize("share", [0.02, 0.5, 0.95])
def test_what_was_learned_outlasts_a_few_draft_tokens_that_confirm_it(share: float) -> None:
    known = ((1000 * share, 1000.0), (1000.0, 1000.0), *(((0.0, 0.0),) * len(PLACES)))
    found = Acceptance(known)
    for _ in range(5):
        found.add(0, round(share / (1 - share)), True)
    assert found.state[0][1] > 1000


def test_comparisons_with_the_targets_own_tokens_say_less() -> None:
    rows, draws = Acceptance(), Acceptance()
    for number in range(100):
        rows.compare(number % 2, True, 0.7)
        draws.compare(number % 2, True, 1.0)
    assert rows.chances()[0] > draws.chances()[0]

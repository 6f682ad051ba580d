"""What steps take: prompts beside streams, nobody starved, and who is waited for; on a simulated device."""

import random
from collections.abc import Iterator
from itertools import chain, pairwise, repeat
from statistics import mean, median

import pytest

from crossdraft.engine import scheduler as scheduling
from crossdraft.engine.scheduler import LEAST, Pause, Ready, Scheduler, Step, divided, worth_waiting
from tests.engine.simulated import CHUNK, Client, World, line, simulated

DEVICE = line(0.018, 0.0005)  # 20 ms for a pass of a few tokens


def about(gap: float, seed: int) -> Iterator[float]:
    """Gaps that vary by a fifth."""
    draw = random.Random(seed)
    while True:
        yield max(0.0, draw.gauss(gap, gap / 5))


def streams(count: int, gap: float = 0.003) -> list[Client]:
    return [Client(str(one), about(gap, one), begins=0.005 * one) for one in range(count)]


def prompt(name: str, tokens: int, at: float) -> Client:
    """Asks once."""
    return Client(name, chain([], repeat(1e6)), chain([tokens], repeat(0)), end=1, begins=at)


def without_waiting(patch: pytest.MonkeyPatch, clients: list[Client], until: float) -> World:
    with patch.context() as patched:
        patched.setattr(scheduling, "worth_waiting", lambda *_: 0.0)
        return simulated(clients, DEVICE, until)


@pytest.mark.parametrize("device", [line(0.018, 0.0005), line(0.018, 0.002), line(0.018, 2e-5)])
def test_a_prompt_beside_eight_streams_stretches_no_step_beyond_twice_the_usual(device) -> None:
    clients = streams(8)
    world = simulated([*clients, prompt("long", 1500, 2.0)], device, 12.0)
    usual = median(step.seconds for step in world.steps if "long" not in step.tokens and len(step.tokens) == 8)
    beside = [step for step in world.steps if "long" in step.tokens]
    assert max(step.seconds for step in beside) < 2 * usual
    assert sum(step.tokens["long"] for step in beside) == 1501
    (answer,) = world.of("long")
    assert answer.ended - answer.asked < 4 * device(1501)  # it has its share of the device all the same


def test_a_prompt_alone_takes_whole_chunks() -> None:
    world = simulated([prompt("warm", 400, 0.0), prompt("long", 1500, 5.0)], DEVICE, 10.0)
    assert [step.tokens["long"] for step in world.steps if "long" in step.tokens][-2:] == [CHUNK, 1501 - 2 * CHUNK]


def test_a_short_prompt_does_not_wait_for_a_long_one_and_the_long_one_goes_on() -> None:
    world = simulated([*streams(4), prompt("long", 4000, 1.0), prompt("short", 100, 1.5)], DEVICE, 20.0)
    (short,), (long,) = world.of("short"), world.of("long")
    assert short.ended - short.asked < 0.5
    assert long.ended > short.ended
    during = [step for step in world.steps if short.began <= step.began < short.ended]
    assert all(step.tokens.get("long", 0) > 0 for step in during)


def test_nobody_starves_whatever_the_others_ask() -> None:
    flood = [prompt(f"p{one}", 600, 0.1 * one) for one in range(60)]  # more than the device can do
    greedy = [Client(f"g{one}", repeat(0.0), end=200) for one in range(6)]  # more than a chunk, again at once
    modest = [Client("m", repeat(0.0), end=1), Client("r", about(0.05, 3), end=3)]
    world = simulated([*flood, *greedy, *modest], DEVICE, 20.0)
    for name in ("m", "r", *(f"g{one}" for one in range(6))):
        served = world.of(name)
        assert len(served) > 15
        assert max(later.ended - one.ended for one, later in pairwise(served)) < 2.5
    ends = [answer.ended for client in flood for answer in world.of(client.name)]
    assert len(ends) > 10
    assert world.of("p0")[0].ended < 6  # the oldest prompt has its share, however many come after it
    assert all(sum(step.tokens.values()) <= CHUNK + LEAST for step in world.steps)


def test_each_prompt_that_waits_longest_gets_tokens_in_every_step() -> None:
    world = simulated([*streams(8), *(prompt(f"p{one}", 300, 1 + 0.01 * one) for one in range(5))], DEVICE, 20.0)
    for name in (f"p{one}" for one in range(5)):
        assert len(world.of(name)) == 1
    first = world.of("p0")[0]
    assert all(step.tokens.get("p0", 0) > 0 for step in world.steps if first.began <= step.began < first.ended)


@pytest.mark.parametrize(("count", "gain"), [(2, 1.4), (4, 1.3), (8, 1.2), (16, 1.1)])
def test_sessions_that_come_back_soon_share_their_steps(count: int, gain: float, monkeypatch) -> None:
    together, apart = simulated(streams(count), DEVICE, 10.0), without_waiting(monkeypatch, streams(count), 10.0)
    assert len(together.answers) > gain * len(apart.answers)
    waited = [answer.began - answer.asked for answer in together.answers]
    assert mean(waited) < 0.25 * mean(answer.began - answer.asked for answer in apart.answers)
    assert mean(len(step.tokens) for step in together.steps[10:]) > 0.9 * count


@pytest.mark.parametrize("gap", [0.012, 0.02, 0.04, 0.3])
@pytest.mark.parametrize("count", [2, 8])
def test_waiting_never_costs_what_it_does_not_bring(count: int, gap: float, monkeypatch) -> None:
    with_it, without = (
        simulated(streams(count, gap), DEVICE, 10.0),
        without_waiting(monkeypatch, streams(count, gap), 10.0),
    )
    assert len(with_it.answers) > 0.98 * len(without.answers)


def test_a_lone_session_never_waits() -> None:
    world = simulated([Client("a", about(0.003, 1))], DEVICE, 5.0)
    assert world.paused == 0
    assert all(answer.began == answer.asked for answer in world.answers)


def test_a_session_whose_companion_left_soon_waits_no_more() -> None:
    leaving = Client("b", chain(repeat(0.003, 100), repeat(1e6)))
    world = simulated([Client("a", about(0.003, 1)), leaving], DEVICE, 10.0)
    left = world.of("b")[-1].ended
    late = [answer.began - answer.asked for answer in world.of("a") if answer.asked > left + 0.1]
    assert len(late) > 100
    assert max(late) == 0


def test_no_pause_is_longer_in_all_than_its_share_of_a_step() -> None:
    scheduler = Scheduler(CHUNK)
    for _ in range(20):
        scheduler.stepped(6, 0.02)
    now = 0.0
    for _ in range(3):
        for name in "abcdefgh":
            scheduler.returns.asked(name, now)
            scheduler.returns.answered(name, now)
        now += 0.01
    decided: Step | Pause = Pause(None)
    began = now
    while isinstance(decided := scheduler.next([Ready("z", began, 6, 6)], now), Pause):
        now += 0.0005
        for name in "abcdefgh":  # they put it off again and again
            scheduler.returns.answered(name, now - 0.009)
    assert 0 < now - began <= scheduling.PATIENCE * 0.02 + 0.001
    assert decided == Step({0: 6})


def test_the_rule_of_waiting() -> None:
    assert worth_waiting(1, 0.02, []) == 0
    assert worth_waiting(1, 0.02, [0.003]) == 0.003
    assert worth_waiting(1, 0.02, [0.011]) == 0  # d / 2 is 10 ms
    assert worth_waiting(15, 0.02, [0.003]) == 0  # fifteen wait for one
    assert worth_waiting(1, 0.02, [0.003, 0.004, 0.019]) == 0.004
    assert worth_waiting(1, 0.0, [0.003]) == 0


def test_nothing_due_is_a_pause_until_something_comes() -> None:
    assert Scheduler(CHUNK).next([], 0.0) == Pause(None)


def test_works_that_exceed_a_chunk_take_turns_by_age_and_one_alone_is_never_too_large() -> None:
    scheduler = Scheduler(64)
    ready = [Ready("c", 3.0, 40, 40), Ready("a", 1.0, 40, 40), Ready("b", 2.0, 20, 20)]
    assert scheduler.next(ready, 4.0) == Step({1: 40, 2: 20})
    assert scheduler.next([Ready("a", 1.0, 200, 200)], 4.0) == Step({0: 200})
    assert scheduler.next([Ready("a", 1.0, 0, 0)], 4.0) == Step({0: 1})  # nothing to be fed, and an answer all the same


def test_who_asks_for_the_largest_trees_keeps_nobody_out_of_a_step() -> None:
    small = [Client(f"s{number}") for number in range(8)]
    large = [Client(f"l{number}", end=2 * CHUNK, gaps=repeat(0.0)) for number in range(4)]
    world = simulated(small + large, line(0.02, 0.0005), 10.0)
    assert all(set(step.tokens) >= {client.name for client in small} for step in world.steps[2::2])
    assert min(len(world.of(client.name)) for client in large) >= 3


def test_the_rest_of_a_prompt_is_divided_as_before() -> None:
    assert Ready("a", 0.0, 12, 1).long is False
    assert Ready("a", 0.0, 12, 1, begun=True).long is True
    assert Ready("a", 0.0, 7, 7, begun=True).long is False
    assert divided({3: 1000, 1: 50, 2: 60}, 80) == {1: 40, 3: 40}
    assert divided({3: 10, 1: 50, 2: 60}, 80) == {3: 10, 1: 50, 2: 20}
    assert divided({3: 1000, 1: 5}, 80) == {1: 5, 3: 75}

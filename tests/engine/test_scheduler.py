"""What steps compute: prompts beside streams, nobody starved, who is waited for; costs and return times are learned."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise, repeat
from statistics import mean, median
from typing import Any

import pytest

from crossdraft.engine import scheduler as schedulers
from crossdraft.engine.requests import ForwardRequest
from crossdraft.types.trees import TokenTree

CHUNK = 512


@dataclass
class Client:
    """A session: asks for a request, and again after each answer."""

    name: str
    gaps: Iterator[float] = field(default_factory=lambda: repeat(0.003))  # seconds from an answer to the next request
    text: Iterator[int] = field(default_factory=lambda: repeat(0))  # tokens that may come in several steps
    end: int = 6  # tokens of each request that go together
    begins: float = 0.0
    asked: float | None = field(default=None, init=False)
    began: float | None = field(default=None, init=False)
    left: int = field(default=0, init=False)  # tokens


@dataclass(frozen=True)
class Answered:
    """One request."""

    client: str
    asked: float
    began: float  # its first step
    ended: float
    sessions: int  # in its last step


@dataclass(frozen=True)
class Taken:
    """One step."""

    began: float
    seconds: float
    tokens: dict[str, int]


@dataclass
class World:
    """Everything that happened."""

    answers: list[Answered] = field(default_factory=list)
    steps: list[Taken] = field(default_factory=list)

    def of(self, name: str) -> list[Answered]:
        return [answer for answer in self.answers if answer.client == name]


def ready(session: object, asked: float, due: int, end: int = 1, **more: Any) -> ForwardRequest:
    """A request of so many tokens still, of which the last ones go together."""
    tree = TokenTree((0,) * (end - 1), tuple(range(-1, end - 2)))
    return ForwardRequest(session, (0,), tree, asked=asked, due=due, **more)


def line(base: float, each: float) -> Callable[[int], float]:
    """A device whose step takes base + each * tokens, in seconds."""
    return lambda tokens: base + each * tokens


def simulated(clients: list[Client], seconds: Callable[[int], float], until: float) -> World:
    """Lets clients and a device go on until a time."""
    scheduler, world = schedulers.Scheduler(CHUNK), World()
    coming = {client.name: client.begins for client in clients}
    named = {client.name: client for client in clients}
    now = 0.0
    while now < until:
        for name in [name for name, at in coming.items() if at <= now]:
            client = named[name]
            client.asked, client.left, client.began = coming.pop(name), next(client.text) + client.end, None
            scheduler.returns.asked(name, client.asked)
        waiting = [client for client in clients if client.asked is not None]
        asking = [ready(one.name, one.asked, one.left, one.end, began=one.began) for one in waiting]
        decided = scheduler.next(asking, now)
        if isinstance(decided, schedulers.Pause):
            later = [] if decided.seconds is None else [now + decided.seconds]
            following = min([*coming.values(), *later, until])
            now = max(following, now + 1e-9)
            continue
        taken = {str(one.session): one.tokens for one in decided}
        took = seconds(sum(taken.values()))
        world.steps.append(Taken(now, took, taken))
        scheduler.stepped(sum(taken.values()), took)
        for name, tokens in taken.items():
            client = named[name]
            client.began = now if client.began is None else client.began
            client.left -= tokens
            if not client.left:
                world.answers.append(Answered(name, client.asked, client.began, now + took, len(taken)))
                client.asked = None
                scheduler.returns.answered(name, now + took)
                coming[name] = now + took + next(client.gaps)
        now += took
    return world


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
        patched.setattr(schedulers, "worth_waiting", lambda *_: 0.0)
        return simulated(clients, DEVICE, until)


@pytest.mark.parametrize("device", [DEVICE, line(0.018, 0.002), line(0.018, 2e-5)])
def test_a_prompt_beside_eight_streams_stretches_no_step_beyond_twice_the_usual(device) -> None:
    clients = streams(8)
    world = simulated([*clients, prompt("long", 1500, 1.0)], device, 11.0)
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
    assert all(sum(step.tokens.values()) <= CHUNK + schedulers.LEAST for step in world.steps)


@pytest.mark.parametrize(("count", "gain"), [(2, 1.4), (16, 1.1)])
def test_sessions_that_come_back_soon_share_their_steps(count: int, gain: float, monkeypatch) -> None:
    together, apart = simulated(streams(count), DEVICE, 4.0), without_waiting(monkeypatch, streams(count), 4.0)
    assert len(together.answers) > gain * len(apart.answers)
    waited = [answer.began - answer.asked for answer in together.answers]
    assert mean(waited) < 0.25 * mean(answer.began - answer.asked for answer in apart.answers)
    assert mean(len(step.tokens) for step in together.steps[10:]) > 0.9 * count


@pytest.mark.parametrize(("count", "gap"), [(2, 0.012), (8, 0.02), (2, 0.04), (8, 0.3)])
def test_waiting_never_costs_what_it_does_not_bring(count: int, gap: float, monkeypatch) -> None:
    without = without_waiting(monkeypatch, streams(count, gap), 10.0)
    assert len(simulated(streams(count, gap), DEVICE, 10.0).answers) > 0.98 * len(without.answers)


def test_a_session_whose_companion_left_soon_waits_no_more() -> None:
    leaving = Client("b", chain(repeat(0.003, 100), repeat(1e6)))
    world = simulated([Client("a", about(0.003, 1)), leaving], DEVICE, 10.0)
    left = world.of("b")[-1].ended
    late = [answer.began - answer.asked for answer in world.of("a") if answer.asked > left + 0.1]
    assert len(late) > 100
    assert max(late) == 0


def expecting(scheduler: schedulers.Scheduler) -> float:
    """A scheduler that expects eight sessions back in a moment, from the returned time on."""
    for _ in range(20):
        scheduler.stepped(6, 0.02)
    now = 0.0
    for _ in range(3):
        for name in "abcdefgh":
            scheduler.returns.asked(name, now)
            scheduler.returns.answered(name, now)
        now += 0.01
    return now


@pytest.mark.parametrize(("halves", "most"), [(True, 2 * 0.01 + 0.02), (False, schedulers.MOST_PUT_OFF * 0.02)])
def test_no_pause_is_longer_in_all_than_a_round_or_its_share_of_a_step(halves: bool, most: float) -> None:
    scheduler = schedulers.Scheduler(CHUNK)
    scheduler.halves = halves
    for tokens in range(1, 100):
        scheduler.stepped(tokens, 0.02)
    began = now = expecting(scheduler)
    while isinstance(decided := scheduler.next([ready("z", began, 6, 6)], now), schedulers.Pause):
        now += 0.0005
        for name in "abcdefgh":  # they put it off again and again
            scheduler.returns.answered(name, now - 0.009)
    assert (schedulers.MOST_PUT_OFF * 0.02 + 0.001 if halves else 0) < now - began <= most + 0.001
    assert [one.tokens for one in decided] == [6]


def stepped(scheduler: schedulers.Scheduler, *asked: ForwardRequest, at: float = 4.0) -> list[ForwardRequest]:
    decided = scheduler.next(asked, at)
    assert not isinstance(decided, schedulers.Pause)
    return decided


def going_round(count: int, each: float = 1e-5) -> tuple[schedulers.Scheduler, float]:
    """A scheduler with so many sessions that are 20 ms away after each step of 6 ms, and all have been for 10."""
    scheduler = schedulers.Scheduler(CHUNK)
    scheduler.halves = True
    for tokens in range(1, 100):
        scheduler.stepped(tokens, 0.006 + each * tokens)
    for visit in range(40):
        for name in range(count):
            scheduler.returns.asked(name, 0.026 * visit)
            scheduler.returns.answered(name, 0.026 * visit + 0.006)
    return scheduler, 0.026 * 39 + 0.016


def asking(*names: int | str, at: float = 0.0, text: int = 0) -> list[ForwardRequest]:
    return [ready(name, at, 6 + text, 6) for name in names]


def test_beside_another_model_a_step_has_half_of_those_that_go_round() -> None:
    scheduler, now = going_round(8)
    for count in range(1, 8):
        decided = scheduler.next(asking(*range(count), at=now), now)
        assert isinstance(decided, schedulers.Pause if count < 4 else list), count
    assert isinstance(scheduler.next(asking(0, text=100, at=now), now), list)  # a prompt
    assert isinstance(scheduler.next([replace(asking(0, at=now)[0], back=False)], now), list)
    assert isinstance(scheduler.next(asking(0, at=now), now + 0.1), list)  # the others are late


def test_who_is_back_at_once_waits_for_nobody_that_is_long_away_nor_where_a_step_has_no_base() -> None:
    scheduler, now = going_round(8)
    for visit in range(60):
        scheduler.returns.answered("near", now - 0.02 + 0.0001 * visit)
        scheduler.returns.asked("near", now - 0.02 + 0.0001 * (visit + 1))
    assert isinstance(scheduler.next(asking("near", at=now), now), list)
    for each, waits in ((1e-5, True), (0.002, False)):
        scheduler, now = going_round(8, each)
        assert isinstance(scheduler.next(asking(0, at=now), now - 0.009), schedulers.Pause) == waits


def test_nobody_is_waited_for_where_a_shared_step_saves_nothing() -> None:
    scheduler = schedulers.Scheduler(CHUNK, shared=False)
    now = expecting(scheduler)
    for name in "abcdefgh":
        scheduler.returns.answered(name, now - 0.009)
    assert [one.tokens for one in stepped(scheduler, ready("z", now, 6, 6), at=now)] == [6]


def test_the_rule_of_waiting() -> None:
    assert schedulers.worth_waiting(1, 0.02, []) == 0
    assert schedulers.worth_waiting(1, 0.02, [0.003]) == 0.003
    assert schedulers.worth_waiting(1, 0.02, [0.011]) == 0  # d / 2 is 10 ms
    assert schedulers.worth_waiting(15, 0.02, [0.003]) == 0  # fifteen wait for one
    assert schedulers.worth_waiting(1, 0.02, [0.003, 0.004, 0.019]) == 0.004
    assert schedulers.worth_waiting(1, 0.0, [0.003]) == 0


def test_works_that_exceed_a_chunk_take_turns_by_age_and_one_alone_is_never_too_large() -> None:
    scheduler = schedulers.Scheduler(64)
    found = stepped(scheduler, ready("c", 3.0, 40, 40), ready("a", 1.0, 40, 40), ready("b", 2.0, 20, 20))
    assert [(one.session, one.tokens) for one in found] == [("a", 40), ("b", 20)]
    assert scheduler.next([], 4.0) == schedulers.Pause(None)
    assert [one.tokens for one in stepped(scheduler, ready("a", 1.0, 200, 200))] == [200]
    assert [one.tokens for one in stepped(scheduler, ready("a", 1.0, 0))] == [1]  # an answer all the same


def test_who_asks_for_the_largest_trees_keeps_nobody_out_of_a_step() -> None:
    small = [Client(f"s{number}") for number in range(8)]
    large = [Client(f"l{number}", end=2 * CHUNK, gaps=repeat(0.0)) for number in range(4)]
    world = simulated(small + large, line(0.02, 0.0005), 10.0)
    assert all(set(step.tokens) >= {client.name for client in small} for step in world.steps[2::2])
    assert min(len(world.of(client.name)) for client in large) >= 3


def test_the_rest_of_a_prompt_is_divided_as_before() -> None:
    assert not schedulers.is_long(ready("a", 0.0, 12))
    assert schedulers.is_long(ready("a", 0.0, 12, began=0.0))
    assert not schedulers.is_long(ready("a", 0.0, 7, 7, began=0.0))
    assert schedulers.divided([1000, 50, 60], 80) == [40, 40, 0]
    assert schedulers.divided([10, 50, 60], 80) == [10, 50, 20]
    assert schedulers.divided([1000, 5], 80) == [75, 5]


def learned(steps: list[tuple[int, float]]) -> schedulers.StepCosts:
    costs = schedulers.StepCosts()
    for tokens, seconds in steps:
        costs.observe(tokens, seconds)
    return costs


def test_a_line_is_found_through_noise() -> None:
    draw = random.Random(3)
    sizes = [draw.choice((6, 12, 30, 60)) for _ in range(200)]
    costs = learned([(size, (0.02 + 0.001 * size) * draw.uniform(0.9, 1.1)) for size in sizes])
    for size in (1, 6, 40, 100):
        assert costs.seconds(size) == pytest.approx(0.02 + 0.001 * size, rel=0.08)
    assert costs.tokens(0.06) == pytest.approx(40, abs=4)


def test_more_than_any_step_had_is_taken_to_last_longer_and_is_not_tried_at_once() -> None:
    costs = learned([(6, 0.03)] * 50)
    assert costs.seconds(6) == pytest.approx(0.03)
    assert 0.03 < costs.seconds(12) < 0.06
    assert 6 < costs.tokens(0.06) <= schedulers.REACH * 6
    flat = learned([(size, 0.01) for size in range(1, 9)])
    assert flat.tokens(1.0) == schedulers.REACH * 8


def test_one_stall_changes_little_and_a_machine_that_became_slower_is_noticed() -> None:
    costs = learned([(size, 0.02 + 0.001 * size) for size in (6, 12) * 50])
    costs.observe(6, 1.0)
    assert costs.seconds(6) == pytest.approx(0.026, rel=0.05)
    for size in (6, 12) * 150:
        costs.observe(size, 0.06 + 0.001 * size)
    assert costs.seconds(6) == pytest.approx(0.066, rel=0.1)


def test_nothing_is_known_before_the_first_step_and_a_step_without_time_or_tokens_says_nothing() -> None:
    costs = learned([(5, 0.0)])
    assert costs.seconds(100) == 0.0
    assert costs.tokens(1.0) == schedulers.REACH
    costs = learned([(6, 0.02)] * 50 + [(0, 5e-5)])  # a forward that failed, or whose tokens are all cached
    assert costs.seconds(6) == pytest.approx(0.02)


@pytest.mark.parametrize("steps", [[(8, 0.001), (1, 0.1)] * 20, [(0, 0.01)] * 5, [(100, 1e-9), (1, 10.0)] * 30])
def test_no_estimate_is_negative_or_falls_with_tokens(steps: list[tuple[int, float]]) -> None:
    costs = learned(steps)
    times = [costs.seconds(size) for size in range(0, 600, 50)]
    assert times == sorted(times)
    assert times[0] >= -1e-12
    assert costs.tokens(0.05) <= schedulers.REACH * 100


def visited(returns: schedulers.ReturnTimes, session: str, gaps: list[float], now: float = 0.0) -> float:
    """Asks, and is answered at once, with these gaps between; when that ended, with an answer."""
    returns.asked(session, now)
    for gap in gaps:
        returns.answered(session, now)
        now += gap
        returns.asked(session, now)
    returns.answered(session, now)
    return now


def test_a_session_is_expected_when_it_came_back_before_and_one_that_varies_later() -> None:
    returns = schedulers.ReturnTimes()
    now = visited(returns, "a", [0.003] * 50)
    assert returns.expected(now)["a"] == pytest.approx(0.003, abs=1e-4)
    assert returns.expected(now + 0.002)["a"] == pytest.approx(0.001, abs=1e-4)
    now = visited(returns, "b", [0.001, 0.005] * 50, now)
    assert 0.005 < returns.expected(now)["b"] < 0.012


def test_whoever_asks_or_is_late_or_over_is_not_expected_and_one_that_never_came_back_is_as_others_are() -> None:
    returns = schedulers.ReturnTimes()
    now = visited(returns, "a", [0.003] * 9)
    assert set(returns.expected(now)) == {"a"}
    assert not returns.expected(now + 0.1)
    returns.asked("a", now)
    assert not returns.expected(now)
    returns.answered("a", now)
    returns.over("a")
    assert not returns.expected(now)
    returns.over("never heard of")
    returns = schedulers.ReturnTimes()
    returns.asked("first", 0.0)
    returns.answered("first", 0.0)
    assert not returns.expected(0.0)  # nobody ever came back: nothing is known
    now = visited(returns, "a", [0.003] * 50)
    returns.asked("b", now)
    returns.answered("b", now)
    assert set(returns.expected(now)) == {"a", "b"}
    assert returns.expected(now)["b"] == pytest.approx(0.003, abs=1e-3)


def test_an_absence_is_learned_if_it_lasts_and_at_once_if_it_becomes_much_shorter() -> None:
    returns = schedulers.ReturnTimes()
    now = visited(returns, "a", [*[0.003] * 50, 5.0])
    assert returns.expected(now)["a"] < 0.02
    now = visited(returns, "a", [0.05] * 50, now)
    assert returns.expected(now)["a"] == pytest.approx(0.05, rel=0.2)
    returns = schedulers.ReturnTimes()  # after rounds, in which a draft came first, it drafts beside passes
    now = visited(returns, "a", [0.04] * 50)
    now = visited(returns, "a", [0.002] * 2, now)  # an average would need 30 steps
    assert returns.expected(now)["a"] < 0.005
    now = visited(returns, "b", [0.04, 0.002] * 25, now)  # by turns it is no change
    assert returns.expected(now)["b"] > 0.04


# Which sessions have KV slots, which wait for them, and which are preempted.


class Cache:
    """Room for some sessions, of one size all."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.sessions: set[object] = set()

    def admits(self, request: ForwardRequest) -> bool:
        return request.session in self.sessions or len(self.sessions) < self.size

    def close(self, session: object) -> None:
        self.sessions.discard(session)


class Service:
    """Steps whoever is seated, for as long as the test says."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.admission = schedulers.Admission(self.cache.admits, self.cache.close)

    def step(
        self, requests: list[ForwardRequest], now: float, expected: tuple[str, ...] = (), answers: bool = True
    ) -> list[str]:
        stepped = []
        for request in self.admission.admitted(requests, expected, now):
            if self.cache.admits(request):
                self.cache.sessions.add(request.session)
                self.admission.stepped(request.session, now)
                if answers:
                    self.admission.answered(request, now, schedulers.StepCosts())
                stepped.append(str(request.session))
        return stepped


def asks(name: str, at: float = 0.0) -> ForwardRequest:
    return ForwardRequest(name, (1, 2), asked=at)


def test_who_fits_is_seated_and_who_does_not_waits() -> None:
    service = Service(Cache(2))
    assert service.step([asks("a"), asks("b"), asks("c")], 0.0) == ["a", "b"]
    assert service.step([asks("a", 0.1), asks("b", 0.1), asks("c")], 0.1) == ["a", "b"]
    assert service.admission.preemptions == 0
    service.admission.close("a")
    assert service.step([asks("b", 0.2), asks("c")], 0.2) == ["b", "c"]


def test_idle_sessions_give_their_places_at_once_the_least_recently_used_first() -> None:
    service = Service(Cache(2))
    service.step([asks("a"), asks("b")], 0.0)
    service.step([asks("a", 0.1)], 0.1)
    assert service.step([asks("c", 0.2)], 0.2) == ["c"]
    assert service.cache.sessions == {"a", "c"}


def test_who_is_expected_back_keeps_its_places_for_its_turn() -> None:
    service = Service(Cache(1))
    service.step([asks("a")], 0.0)
    late = max(schedulers.WAIT, schedulers.LEAST_TURN)
    assert service.step([asks("b", 0.1)], 0.2, expected=("a",)) == []
    assert service.step([asks("b", 0.1)], 0.1 + late, expected=("a",)) == ["b"]


def test_sessions_take_turns_and_all_get_as_much() -> None:
    service, names = Service(Cache(3)), [f"s{one}" for one in range(8)]
    asked, served = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0)
    for tick in range(1500):
        now = 0.01 * tick
        for name in service.step([asks(name, asked[name]) for name in sorted(names, key=lambda n: asked[n])], now):
            served[name] += 1
            asked[name] = now
    assert sum(served.values()) > 0.95 * 3 * 1500  # places are never idle
    assert max(served.values()) < 1.3 * min(served.values())
    assert service.admission.preemptions < 15 / schedulers.LEAST_TURN * 3


def test_one_whose_prompt_is_being_fed_is_not_driven_out_before_its_first_answer() -> None:
    service = Service(Cache(1))
    service.step([asks("a")], 0.0, answers=False)
    assert service.step([asks("a"), asks("b")], 60.0, answers=False) == ["a"]
    service.step([asks("a"), asks("b")], 60.0)
    assert service.step([asks("b"), asks("a", 60.1)], 60.1) == ["a"]
    assert service.step([asks("b"), asks("a", 60.1)], 60.0 + schedulers.LEAST_TURN) == ["b"]


def test_what_becomes_free_is_for_whoever_waited_longest() -> None:
    class Sized(Cache):
        def admits(self, request: ForwardRequest) -> bool:
            taken = sum(2 if session == "large" else 1 for session in self.sessions)
            return request.session in self.sessions or taken + len(request.context) <= self.size

    service = Service(Sized(2))
    assert service.step([ForwardRequest(name, (1,), asked=0.4) for name in "st"], 0.4) == ["s", "t"]
    large, later = ForwardRequest("large", (1, 2), asked=0.1), ForwardRequest("u", (1,), asked=0.2)
    service.admission.close("t")
    assert service.step([large, later], 0.1 + schedulers.WAIT, expected=("s",)) == []  # not "u", which would fit
    assert service.step([large, later], 0.4 + schedulers.LEAST_TURN, expected=("s",)) == ["large"]


def test_if_nobody_can_go_on_somebody_gives_way_at_once() -> None:
    class Growing(Cache):
        full = False

        def admits(self, request: ForwardRequest) -> bool:
            return not self.full or len(self.sessions) < 2

    service = Service(Growing(2))
    service.step([asks("a"), asks("b")], 0.0)
    service.cache.full = True  # each needs more than it has
    assert service.step([asks("a", 0.1), asks("b", 0.1)], 0.1) == ["a"]
    assert service.cache.sessions == {"a"}


def test_of_a_session_with_two_jobs_the_older_one_is_seated() -> None:
    service = Service(Cache(2))
    assert service.step([asks("a", 0.0), asks("a", 0.1)], 0.2) == ["a"]

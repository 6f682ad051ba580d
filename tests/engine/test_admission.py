"""Which sessions have KV slots, which wait for them, and which are preempted."""

from crossdraft.engine.requests import ForwardRequest as Request
from crossdraft.engine.scheduler import LEAST_TURN, WAIT, Admission, StepCosts


class Cache:
    """Room for some sessions, of one size all."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.sessions: set[object] = set()

    def admits(self, request: Request) -> bool:
        return request.session in self.sessions or len(self.sessions) < self.size

    def close(self, session: object) -> None:
        self.sessions.discard(session)


class Service:
    """Steps whoever is seated, for as long as the test says."""

    def __init__(self, size: int) -> None:
        self.cache = Cache(size)
        self.admission = Admission(self.cache.admits, self.cache.close)

    def step(
        self, requests: list[Request], now: float, expected: tuple[str, ...] = (), answers: bool = True
    ) -> list[str]:
        stepped = []
        for request in self.admission.admitted(requests, expected, now):
            if self.cache.admits(request):
                self.cache.sessions.add(request.session)
                self.admission.stepped(request.session, now)
                if answers:
                    self.admission.answered(request, now, StepCosts())
                stepped.append(str(request.session))
        return stepped


def asks(name: str, at: float = 0.0) -> Request:
    return Request(name, (1, 2), asked=at)


def test_who_fits_is_seated_and_who_does_not_waits() -> None:
    service = Service(2)
    assert service.step([asks("a"), asks("b"), asks("c")], 0.0) == ["a", "b"]
    assert service.step([asks("a", 0.1), asks("b", 0.1), asks("c")], 0.1) == ["a", "b"]
    assert service.admission.preemptions == 0
    service.admission.close("a")
    assert service.step([asks("b", 0.2), asks("c")], 0.2) == ["b", "c"]


def test_idle_sessions_give_their_places_at_once_the_least_recently_used_first() -> None:
    service = Service(2)
    service.step([asks("a"), asks("b")], 0.0)
    service.step([asks("a", 0.1)], 0.1)
    assert service.step([asks("c", 0.2)], 0.2) == ["c"]
    assert service.cache.sessions == {"a", "c"}


def test_who_is_expected_back_keeps_its_places_for_its_turn() -> None:
    service = Service(1)
    service.step([asks("a")], 0.0)
    late = max(WAIT, LEAST_TURN)
    assert service.step([asks("b", 0.1)], 0.2, expected=("a",)) == []
    assert service.step([asks("b", 0.1)], 0.1 + late, expected=("a",)) == ["b"]


def test_sessions_take_turns_and_all_get_as_much() -> None:
    service, names = Service(3), [f"s{one}" for one in range(8)]
    asked, served = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0)
    for tick in range(1500):
        now = 0.01 * tick
        for name in service.step([asks(name, asked[name]) for name in sorted(names, key=lambda n: asked[n])], now):
            served[name] += 1
            asked[name] = now
    assert sum(served.values()) > 0.95 * 3 * 1500  # places are never idle
    assert max(served.values()) < 1.3 * min(served.values())
    assert service.admission.preemptions < 15 / LEAST_TURN * 3


def test_one_whose_prompt_is_being_fed_is_not_driven_out_before_its_first_answer() -> None:
    service = Service(1)
    service.step([asks("a")], 0.0, answers=False)
    assert service.step([asks("a"), asks("b")], 60.0, answers=False) == ["a"]
    service.step([asks("a"), asks("b")], 60.0)
    assert service.step([asks("b"), asks("a", 60.1)], 60.1) == ["a"]
    assert service.step([asks("b"), asks("a", 60.1)], 60.0 + LEAST_TURN) == ["b"]


def test_what_becomes_free_is_for_whoever_waited_longest() -> None:
    class Sized(Cache):
        def admits(self, request: Request) -> bool:
            taken = sum(2 if session == "large" else 1 for session in self.sessions)
            return request.session in self.sessions or taken + len(request.context) <= self.size

    service = Service(2)
    service.cache = Sized(2)
    service.admission = Admission(service.cache.admits, service.cache.close)
    assert service.step([Request(name, (1,), asked=0.4) for name in "st"], 0.4) == ["s", "t"]
    large, later = Request("large", (1, 2), asked=0.1), Request("u", (1,), asked=0.2)
    service.admission.close("t")
    assert service.step([large, later], 0.1 + WAIT, expected=("s",)) == []  # not "u", which would fit
    assert service.step([large, later], 0.4 + LEAST_TURN, expected=("s",)) == ["large"]


def test_if_nobody_can_go_on_somebody_gives_way_at_once() -> None:
    class Growing(Cache):
        full = False

        def admits(self, request: Request) -> bool:
            return not self.full or len(self.sessions) < 2

    service = Service(2)
    service.cache = Growing(2)
    service.admission = Admission(service.cache.admits, service.cache.close)
    service.step([asks("a"), asks("b")], 0.0)
    service.cache.full = True  # each needs more than it has
    assert service.step([asks("a", 0.1), asks("b", 0.1)], 0.1) == ["a"]
    assert service.cache.sessions == {"a"}


def test_of_a_session_with_two_jobs_the_older_one_is_seated() -> None:
    service = Service(2)
    assert service.step([asks("a", 0.0), asks("a", 0.1)], 0.2) == ["a"]

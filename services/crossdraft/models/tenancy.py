"""Who has places in the cache, and who gives them up for a session that has none. Times are told, in seconds."""

from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from crossdraft.models.feeds import Work

WAIT = 0.5  # seconds that a session waits for places to become free by themselves
LEAST_TURN = 0.5  # seconds that a session keeps its places, from its first answer on
REFEEDING = 4  # ... and so many times as long as it takes to feed its text again: at most a fifth is spent on that


class Asking(Protocol):
    """A job that asks for a work."""

    @property
    def work(self) -> Work:
        """What it asks for."""
        ...

    @property
    def asked(self) -> float:
        """Since when."""
        ...


class Places(Protocol):
    """Of an engine."""

    def admits(self, work: Work) -> bool:
        """Whether its session has places for it, or can have them without those of another live one."""
        ...

    def close(self, session: Hashable) -> None:
        """The session's places are free."""


A = TypeVar("A", bound=Asking)


@dataclass
class _Tenant:
    """A session that has places."""

    used: float  # when it took part in a step last
    until: float = float("inf")  # its turn ends then; it begins with its first answer


class Tenancy:
    """Sessions that have places.

    One that asks for nothing and is not expected to gives its places whenever others need them, the least recently
    used first. Where there is not enough for all the others they take turns: a turn begins with the first answer, so
    that each gets something for its prompt, and is long enough that feeding the text again is a small part of it.
    """

    def __init__(self, places: Places) -> None:
        self.evictions = 0  # sessions that gave their places to others
        self._places = places
        self._tenants: dict[Hashable, _Tenant] = {}

    def stepped(self, session: Hashable, now: float) -> None:
        """It took part in a step, and so has places."""
        self._tenants.setdefault(session, _Tenant(now)).used = now

    def answered(self, session: Hashable, now: float, feeding: float) -> None:
        """It has an answer; to feed its whole text takes `feeding` seconds."""
        tenant = self._tenants[session]
        if tenant.until == float("inf"):
            tenant.until = now + max(LEAST_TURN, REFEEDING * feeding)

    def close(self, session: Hashable) -> None:
        """It has no places any more."""
        self._tenants.pop(session, None)
        self._places.close(session)

    def seated(self, asking: Iterable[A], expected: Collection[Hashable], now: float) -> list[A]:
        """Those who have places for their works, or can have them now; of each session the one who asked first.

        Args:
            asking: all, those who asked first before others.
            expected: sessions that should ask for something soon.
            now: the time.
        """
        first: dict[Hashable, A] = {}
        for one in asking:
            first.setdefault(one.work.session, one)
        busy = {*first, *expected}
        seated: dict[Hashable, A] = {}
        awaited = False  # somebody has waited long: what becomes free is not for those behind
        for session, one in first.items():
            newcomer = session not in self._tenants
            if not (newcomer and awaited) and self._seat(one, busy, now):
                seated[session] = one
            elif now >= one.asked + WAIT:
                awaited = True
        if not seated and first and not self._tenants.keys() - first.keys():
            session, one = next(iter(first.items()))
            self._force(one)
            seated[session] = one
        return [one for session, one in seated.items() if self._places.admits(one.work)]

    def _seat(self, one: Asking, busy: Collection[Hashable], now: float) -> bool:
        """Whether it has places, once those that give theirs have done so."""
        while not self._places.admits(one.work):
            victim = self._victim(one, busy, now)
            if victim is None:
                return False
            self._evict(victim)
        return True

    def _force(self, one: Asking) -> None:
        """Nobody else can go on: those whose turns end first give their places."""
        while not self._places.admits(one.work) and (others := self._others(one)):
            self._evict(min(others, key=lambda session: others[session].until))

    def _victim(self, one: Asking, busy: Collection[Hashable], now: float) -> Hashable | None:
        """Who gives its places now; None: nobody yet."""
        others = self._others(one)
        idle = [session for session in others if session not in busy]
        if idle:
            return min(idle, key=lambda session: others[session].used)
        first = min(others, key=lambda session: others[session].until, default=None)
        return first if first is not None and now >= max(one.asked + WAIT, others[first].until) else None

    def _others(self, one: Asking) -> dict[Hashable, _Tenant]:
        return {session: tenant for session, tenant in self._tenants.items() if session != one.work.session}

    def _evict(self, session: Hashable) -> None:
        self.evictions += 1
        self.close(session)

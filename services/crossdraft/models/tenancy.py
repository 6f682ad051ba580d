"""Who gives up its places in the cache for a session that has none. No clock: times are told, in seconds."""

from collections.abc import Collection, Hashable
from dataclasses import dataclass

WAIT = 0.5  # seconds that a session waits for places to become free by themselves
LEAST_TURN = 0.5  # seconds that a session keeps its places, from its first answer on
REFEEDING = 4  # ... and so many times as long as it takes to feed its text again: at most a fifth is spent on that


@dataclass
class _Tenant:
    """A session that has places."""

    used: float  # when it took part in a step last
    until: float = float("inf")  # its turn ends then; it begins with its first answer


class Tenancy:
    """Sessions that have places.

    Where there is not enough for all they take turns. One that has nothing to ask for and is not expected back gives
    its places at once, the least recently used first.
    """

    def __init__(self) -> None:
        self._tenants: dict[Hashable, _Tenant] = {}

    def __contains__(self, session: Hashable) -> bool:
        return session in self._tenants

    def stepped(self, session: Hashable, now: float) -> None:
        """It took part in a step, and so has places."""
        self._tenants.setdefault(session, _Tenant(now)).used = now

    def answered(self, session: Hashable, now: float, feeding: float) -> None:
        """It has an answer; to feed its whole text takes `feeding` seconds."""
        tenant = self._tenants.get(session)
        if tenant is not None and tenant.until == float("inf"):
            tenant.until = now + max(LEAST_TURN, REFEEDING * feeding)

    def over(self, session: Hashable) -> None:
        """It has no places any more."""
        self._tenants.pop(session, None)

    def victim(self, asking: Hashable, since: float, busy: Collection[Hashable], now: float) -> Hashable | None:
        """Who gives its places to a session that asks for some since a time; None: nobody yet.

        Args:
            asking: the session; it may have places, but too few.
            since: when it asked.
            busy: sessions that ask for something, or are expected to.
            now: the time.
        """
        others = {session: tenant for session, tenant in self._tenants.items() if session != asking}
        idle = [session for session in others if session not in busy]
        if idle:
            return min(idle, key=lambda session: others[session].used)
        first = min(others, key=lambda session: others[session].until, default=None)
        return first if first is not None and now >= max(since + WAIT, others[first].until) else None

    def first(self, asking: Hashable) -> Hashable | None:
        """Who does so if otherwise nothing could go on: the one whose turn ends first."""
        others = [session for session in self._tenants if session != asking]
        return min(others, key=lambda session: self._tenants[session].until, default=None)

"""The services that sessions are opened with, and which of them is next."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Generic, TypeVar

from crossdraft.rpc.errors import ServiceError
from crossdraft.rpc.links import DrafterClient, TargetClient

FORGIVEN_SECONDS = 30.0  # after its last failure a service is preferred no less than any other

Service = TypeVar("Service")


@dataclass(frozen=True, eq=False)
class _Place(Generic[Service]):
    """One service of a roster."""

    service: Service
    failed_at: float | None = None  # seconds; None: it never failed
    sessions: int = 0  # that it has now
    leaving: bool = False  # no session is opened there any more


class Roster(Generic[Service]):
    """The services of one role by address, and which of them the next session is opened with.

    All generations of a pipeline share it, so that each knows what failed for another. It is told the time, in seconds
    of a monotonic clock.
    """

    def __init__(self, role: str, reachable: Callable[[Service], bool | None] = lambda _: None) -> None:
        self.role = role  # "target" or "drafter", for error texts
        self.lacking = f"there is no {role}"  # why, where it is empty
        self.replaced: ServiceError | None = None  # set: no session is opened any more, as what is served is another
        self._reachable = reachable  # whether a service can be reached now; None: that is not known
        self._places: dict[str, _Place[Service]] = {}

    def __len__(self) -> int:
        return sum(not place.leaving for place in self._places.values())

    def __getitem__(self, address: str) -> Service:
        return self._places[address].service

    def __contains__(self, address: str) -> bool:
        """Whether sessions are opened there, or still go on."""
        return address in self._places

    def add(self, address: str, service: Service) -> None:
        """Add a service; an address that is there already keeps its service."""
        known = self._places.get(address)
        if known is None or known.leaving:
            self._places[address] = _Place(service, sessions=0 if known is None else known.sessions)

    def remove(self, address: str, why: str = "") -> None:
        """Open no session there any more; those that are open go on."""
        self.lacking = why or self.lacking
        self._change(address, leaving=True)

    def retire(self, replaced: ServiceError) -> None:
        """Open no session at all any more: what is served is another model."""
        self.replaced = replaced

    def take(self, used: Collection[str], blamed: Collection[str], now: float) -> str | None:
        """The address where the next session is opened; `give_back` when it has ended.

        Args:
            used: where this generation has sessions already: only taken if no other is left that may be there.
            blamed: where this generation opens none again.
            now: seconds.

        Returns:
            Of those that may be there one that is not used, that has not failed lately, that is known to be there, that
            failed least recently, and that has the fewest sessions, in this order; None if no address is left.
        """

        def cost(address: str) -> tuple[bool, bool, bool, bool, float, int]:
            place = self._places[address]
            failed = -inf if place.failed_at is None else place.failed_at
            failed = failed if now - failed < FORGIVEN_SECONDS else -inf
            there = self._reachable(place.service)
            return there is False, address in used, failed > -inf, there is None, failed, place.sessions

        free = (address for address, place in self._places.items() if not place.leaving and address not in blamed)
        chosen = min(free, key=cost, default=None)
        if chosen is not None:
            self._change(chosen, sessions=self._places[chosen].sessions + 1)
        return chosen

    def give_back(self, address: str) -> None:
        """A session there has ended."""
        self._change(address, sessions=self._places[address].sessions - 1)

    def failed(self, address: str, now: float) -> None:
        """A session there failed, or its service was blamed."""
        self._change(address, failed_at=now)

    def _change(self, address: str, **changed: Any) -> None:
        """Keep what is new about a place, or forget one that is left; nothing if it is forgotten already."""
        if address in self._places:
            place = self._places[address] = replace(self._places[address], **changed)
            if place.leaving and not place.sessions:
                del self._places[address]


@dataclass(frozen=True, eq=False)
class Services:
    """Where a generation can open sessions."""

    targets: Roster[TargetClient]
    drafters: Roster[DrafterClient]

    def of(self, role: str) -> Roster[Any]:
        """`targets` or `drafters`."""
        roster: Roster[Any] = getattr(self, role)
        return roster

"""The services of one role, and which of them the next session is opened with. Pure: it is told the time."""

from collections.abc import Collection
from dataclasses import dataclass
from math import inf
from typing import Generic, TypeVar

FORGIVEN_SECONDS = 30.0  # after its last failure a service is taken like any other

Service = TypeVar("Service")


@dataclass
class _Place(Generic[Service]):
    """One of them."""

    service: Service
    failed_at: float | None = None  # seconds; None: it never failed
    sessions: int = 0  # that it has now
    leaving: bool = False  # no session is opened there any more


class Roster(Generic[Service]):
    """Services by address. All generations of a pipeline share one, so that what failed for one is known to all."""

    def __init__(self, role: str) -> None:
        self.role = role  # "target" or "drafter", for error texts
        self._places: dict[str, _Place[Service]] = {}

    def __len__(self) -> int:
        return sum(not place.leaving for place in self._places.values())

    def __getitem__(self, address: str) -> Service:
        return self._places[address].service

    def add(self, address: str, service: Service) -> None:
        """One more; an address that is there already keeps its place."""
        place = self._places.setdefault(address, _Place(service))
        if place.leaving:
            place.service, place.leaving, place.failed_at = service, False, None

    def remove(self, address: str) -> None:
        """No session is opened there any more; those that are go on."""
        if address in self._places:
            self._places[address].leaving = True
            self._forget(address)

    def __contains__(self, address: str) -> bool:
        """Whether sessions are opened there, or still go on."""
        return address in self._places

    def take(self, used: Collection[str], blamed: Collection[str], now: float) -> str | None:
        """The address where the next session is opened; `give_back` when it has ended.

        Args:
            used: where this generation has sessions already: only taken if no other is left.
            blamed: where this generation opens none again.
            now: seconds of a monotonic clock.

        Returns:
            Of the others the one that failed least recently, and of those the one with the fewest sessions; None if
            no address is left.
        """

        def cost(address: str) -> tuple[bool, float, int]:
            place = self._places[address]
            failed_at = (
                -inf if place.failed_at is None or now - place.failed_at >= FORGIVEN_SECONDS else place.failed_at
            )
            return (address in used, failed_at, place.sessions)

        staying = (address for address, place in self._places.items() if not place.leaving)
        chosen = min((address for address in staying if address not in blamed), key=cost, default=None)
        if chosen is not None:
            self._places[chosen].sessions += 1
        return chosen

    def give_back(self, address: str) -> None:
        """A session there has ended."""
        self._places[address].sessions -= 1
        self._forget(address)

    def failed(self, address: str, now: float) -> None:
        """A session there failed, or its service was blamed."""
        if address in self._places:
            self._places[address].failed_at = now

    def _forget(self, address: str) -> None:
        place = self._places[address]
        if place.leaving and not place.sessions:
            del self._places[address]

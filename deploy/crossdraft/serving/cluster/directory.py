"""Which services answer, and where. Pure: it is told the time.

Services announce themselves again and again, so that a directory that is lost and comes back knows them all soon, and
a node that is lost is forgotten without anybody's saying so. It decides only where sessions are opened: a session
notices the end of its service by itself, and sooner.
"""

from dataclasses import dataclass

ANNOUNCED_EVERY = 1.0  # seconds
FORGOTTEN_AFTER = 5.0  # seconds since a service was heard of


@dataclass(frozen=True)
class Entry:
    """A service that answers."""

    model: str  # name of the served model
    drafter: str  # name of the drafter; "": it is a target
    address: str  # host:port
    node: str  # where it runs, for people

    @property
    def role(self) -> str:
        """For people."""
        return f"drafter {self.drafter}" if self.drafter else "target"


class Directory:
    """The services of a cluster."""

    def __init__(self) -> None:
        self.version = 0  # counts changes
        self._heard: dict[str, tuple[Entry, float]] = {}  # by address, with the time of the latest announcement

    def announce(self, entry: Entry, now: float) -> None:
        """It is there; `now` in seconds of a clock that never goes back."""
        known = self._heard.get(entry.address)
        self._heard[entry.address] = (entry, now)
        self.version += known is None or known[0] != entry

    def withdraw(self, address: str) -> None:
        """No session is to be opened there any more."""
        self.version += self._heard.pop(address, None) is not None

    def forget(self, now: float) -> None:
        """Those that have not been heard of for too long are not there."""
        silent = [address for address, (_, at) in self._heard.items() if now - at > FORGOTTEN_AFTER]
        for address in silent:
            self.withdraw(address)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All of them, in the order of their addresses."""
        return tuple(self._heard[address][0] for address in sorted(self._heard))

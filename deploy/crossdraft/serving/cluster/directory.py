"""Which processes there are, and where. Pure: it is told the time.

Processes announce themselves again and again, so that a directory that is lost and comes back knows them all soon, and
a node that is lost is forgotten without anybody's saying so. It decides only where sessions are opened: a session
notices the end of its service by itself, and sooner.
"""

from dataclasses import dataclass
from enum import StrEnum

ANNOUNCED_EVERY = 1.0  # seconds
FORGOTTEN_AFTER = 8.0  # seconds since a process was heard of
SETTLED_AFTER = 3.0  # seconds after which a new directory has heard of every process that is there


class Role(StrEnum):
    """What a process does."""

    TARGET = "target"
    DRAFTER = "drafter"
    ORCHESTRATOR = "orchestrator"
    HTTP = "http"  # the ingress behind Serve's proxies
    GRPC = "grpc"  # the front for gRPC clients


@dataclass(frozen=True)
class Entry:
    """A process that answers."""

    id: str  # of its actor; it stays when the process is started again
    role: Role
    model: str  # name of the served model; empty for fronts
    name: str  # of a drafter, else empty
    address: str  # host:port of its gRPC server; empty where it has none
    metrics: str  # host:port where Prometheus reads
    node: str  # the node's address
    process: int  # its id on the node

    @property
    def what(self) -> str:
        """For people."""
        return f"{self.role} {self.name}" if self.name else str(self.role)


class Directory:
    """The processes of a cluster.

    Args:
        began: when, in seconds of a clock that never goes back.
        version: counts changes from here on; two directories must not count the same.
    """

    def __init__(self, began: float = 0.0, version: int = 0) -> None:
        self.version = version
        self._settled_at = began + SETTLED_AFTER
        self._heard: dict[str, tuple[Entry, float]] = {}  # by id, with the time of the latest announcement

    def unsettled(self, now: float) -> float:
        """Seconds until it can be asked: before, it may lack what is there."""
        return max(0.0, self._settled_at - now)

    def announce(self, entry: Entry, now: float) -> None:
        """It is there."""
        known = self._heard.get(entry.id)
        self._heard[entry.id] = (entry, now)
        self.version += known is None or known[0] != entry

    def withdraw(self, id: str) -> None:
        """Nothing is to be begun there any more."""
        self.version += self._heard.pop(id, None) is not None

    def forget(self, now: float) -> None:
        """Those that have not been heard of for too long are not there."""
        silent = [id for id, (_, at) in self._heard.items() if now - at > FORGOTTEN_AFTER]
        for id in silent:
            self.withdraw(id)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All of them, in an order of their own."""
        found = [entry for entry, _ in self._heard.values()]
        return tuple(sorted(found, key=lambda one: (one.model, one.role, one.name, one.node, one.process)))

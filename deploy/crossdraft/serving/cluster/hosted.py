"""What an actor can host."""

from typing import Protocol

from crossdraft.serving.cluster.directory import Role
from crossdraft.serving.configuration import Resources
from crossdraft.serving.logs import LogFormat


class Hosting(Protocol):
    """A server."""

    @property
    def address(self) -> str:
        """host:port, once it serves."""
        ...

    @property
    def metrics(self) -> str:
        """host:port where Prometheus reads; empty: nowhere."""
        ...

    async def start(self) -> str:
        """Begins to serve; returns the address; raises CannotListen, and may be called again then."""
        ...

    async def drain(self) -> None:
        """Takes nothing new, lets what is open go on for the grace period, and ends."""
        ...


class Hosted(Protocol):
    """What an actor serves; a value that can be pickled, and shown in full by `repr`."""

    @property
    def role(self) -> Role:
        """What it does."""
        ...

    @property
    def model(self) -> str:
        """Name of the served model; empty for a front."""
        ...

    @property
    def name(self) -> str:
        """Of a drafter, else empty."""
        ...

    @property
    def port(self) -> int:
        """Where it listens; 0: any free port."""
        ...

    @property
    def resources(self) -> Resources:
        """What it takes of its node."""
        ...

    @property
    def log_format(self) -> LogFormat:
        """Of its process."""
        ...

    @property
    def digest(self) -> str:
        """Differs when what it hosts does, contents of files and the installed package included."""
        ...

    async def server(self, host: str) -> Hosting:
        """Made in the process that serves; `host` is its node's address.

        Raises:
            ValueError: it cannot be served with these options.
        """
        ...

"""The steps of a session, as whoever watches it is told of them."""

from dataclasses import dataclass
from typing import Protocol

from crossdraft.session.events import Command, Event


@dataclass(frozen=True, eq=False)
class Step:
    """One call of the session's state machine."""

    now: float  # seconds of the monotonic clock
    event: Event | None  # None: the start
    commands: tuple[Command, ...]
    seconds: float = 0.0  # duration of the call
    row_misses: int = 0  # so far


class Recorder(Protocol):
    """Is told every step of a session."""

    def record(self, step: Step) -> None:
        """Called after each step; does not block and does not raise."""
        ...

    def close(self) -> None:
        """The session is over."""
        ...

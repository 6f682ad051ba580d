"""A target that stands idle for proposals, and for how long."""

from crossdraft.pipeline.events import Command, SetTimer, Timer


class Stalling:
    """Whether the target waits for proposals, and whether it has waited long enough."""

    def __init__(self) -> None:
        self.impatient = False  # a stall has run out, and the drafter has said nothing since
        self._number = 0  # of the latest stall's timer
        self._since: float | None = None  # seconds

    def begin(self, patience: float, now: float) -> list[Command]:
        """It stands idle from now on, for so many seconds; where it does already nothing changes."""
        if self._since is not None:
            return []
        self._since = now
        self._number += 1
        return [SetTimer(Timer.STALL, self._number, patience)]

    def over(self) -> None:
        """It goes on."""
        self._since = None

    def expired(self, number: int, now: float) -> float | None:
        """How long the stall of this timer has lasted; None if it is over."""
        if number != self._number or self._since is None:
            return None
        waited, self._since, self.impatient = now - self._since, None, True
        return waited

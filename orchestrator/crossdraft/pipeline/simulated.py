"""What the simulator is made of besides the session: a queue of events in time, and a drafter."""

import heapq
from collections.abc import Callable
from math import isinf
from typing import Any, Protocol

from crossdraft.pipeline.governing import PLAIN, Choice
from crossdraft.pipeline.workload import Workload


class Agenda:
    """What will happen, and the time of what happens now, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._order = 0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []

    def after(self, seconds: float, what: Callable[..., None], *given: Any) -> None:
        """Calls `what` after a time; never if that is infinite."""
        if not isinf(seconds):
            self._order += 1
            heapq.heappush(self._events, (self.now + seconds, self._order, what, given))

    def step(self) -> None:
        """Lets the next event happen. Raises IndexError if there is none."""
        self.now, _, what, given = heapq.heappop(self._events)
        what(*given)


class Listener(Protocol):
    """The session, as its drafter sees it."""

    workload: Workload

    def noisy(self, seconds: float) -> float:
        """What a forward takes this time."""
        ...

    def arrived(self, epoch: int, first: int, count: int, seconds: float) -> None:
        """A reply is there: proposals from the place `first` on, after `seconds` in the model."""
        ...

    def branched(self, epoch: int, place: int) -> None:
        """The branches for the proposal at this place are there."""
        ...


class SimulatedDrafter:
    """Forwards one after the other, for the newest epoch that it has heard of, within its window."""

    def __init__(self, agenda: Agenda, listener: Listener) -> None:
        self._agenda, self._listener = agenda, listener
        self._epoch, self._asked, self._made = 0, 0, 0
        self._choice = PLAIN
        self._forward = 0  # number of the one under way
        self._busy = False
        self._owed = 0.0  # seconds in the model since the reply before
        self.seconds = 0.0  # in the model, for nothing included

    def told(self, epoch: int, asked: int, made: int, choice: Choice) -> None:
        """Hears of an epoch that has `made` proposals already, or that `asked` are wanted now."""
        if epoch > self._epoch:
            self._epoch, self._asked, self._made, self._choice, self._owed = epoch, asked, made, choice, 0.0
        elif epoch == self._epoch:
            self._asked = max(self._asked, asked)
        self._go_on()

    def restart(self) -> None:
        """What a forward costs has changed: the one under way begins again."""
        self._forward += 1
        self._busy = False
        self._go_on()

    def _go_on(self) -> None:
        if not self._busy and self._made < self._asked:
            self._busy = True
            self._forward += 1
            seconds = self._listener.noisy(self._listener.workload.forward(self._choice))
            self._agenda.after(seconds, self._done, self._forward, self._epoch, seconds)

    def _done(self, forward: int, epoch: int, seconds: float) -> None:
        if forward != self._forward:
            return
        self._busy = False
        self.seconds += seconds
        if epoch == self._epoch:
            self._made += 1
            self._owed += seconds
            self._reply()
        self._go_on()

    def _reply(self) -> None:
        """Sends what it has, half a round trip away; each branch follows its proposal by its steps."""
        choice, half = self._choice, self._listener.workload.drafter_trip / 2
        if not choice.overlap and self._made < self._asked:
            return
        count = 1 if choice.overlap else self._made
        self._agenda.after(half, self._listener.arrived, self._epoch, self._made - count, count, self._owed)
        self._owed = 0.0
        if choice.branch_depth and choice.overlap:
            steps = choice.branch_depth * self._listener.workload.forward(choice)
            self._agenda.after(half + steps, self._listener.branched, self._epoch, self._made - 1)

"""What the simulator is made of besides the session: a queue of events in time, a drafter, targets."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from math import isinf
from typing import Any, Protocol

from crossdraft.pipeline.governing import PLAIN, Choice, Judged, PassSeen
from crossdraft.pipeline.workload import Workload

NOTHING = 1e-3  # of a pass: a delay that is not simulated


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
    """The session, as its drafter and its targets see it."""

    workload: Workload
    drafter: "SimulatedDrafter"

    def noisy(self, seconds: float) -> float:
        """What a forward takes this time."""
        ...

    def arrived(self, epoch: int, first: int, count: int, seconds: float) -> None:
        """A reply is there: proposals from the place `first` on, after `seconds` in the model."""
        ...

    def branched(self, epoch: int, place: int) -> None:
        """The branches for the proposal at this place are there."""
        ...

    def passed(self, flight: "Flight", seen: PassSeen) -> None:
        """A pass has returned."""
        ...


class SimulatedDrafter:
    """Forwards one after the other, for the newest epoch that it has heard of, within its window."""

    def __init__(self, agenda: Agenda, listener: Listener) -> None:
        self._agenda, self._listener = agenda, listener
        self._epoch, self._asked, self._made, self._sent = 0, 0, 0, 0
        self._choice = PLAIN
        self._forward = 0  # number of the one under way
        self._busy = False
        self._owed = 0.0  # seconds in the model since the reply before
        self._began = 0.0  # seconds: when the forward under way did
        self.seconds = 0.0  # in the model, for nothing included

    @property
    def worked(self) -> float:
        """Seconds in the model so far, those of the forward under way included."""
        return self.seconds + (self._agenda.now - self._began if self._busy else 0.0)

    def told(self, epoch: int, asked: int, made: int, choice: Choice) -> None:
        """Hears of an epoch that has `made` proposals already, or that `asked` are wanted now."""
        if epoch > self._epoch:
            self._epoch, self._asked, self._made, self._choice, self._owed = epoch, asked, made, choice, 0.0
            self._sent = made
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
            self._busy, self._began = True, self._agenda.now
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
        """Sends what it has once a reply is full, half a round trip away; finished branches go with it, or alone."""
        choice, half, sent = self._choice, self._listener.workload.drafter_trip / 2, self._sent
        if self._made < self._asked and self._made - sent < choice.reply(sent):
            return
        self._agenda.after(half, self._listener.arrived, self._epoch, sent, self._made - sent, self._owed)
        self._sent, self._owed = self._made, 0.0
        if choice.branch_depth and choice.overlap:
            finished = self._made - 1 - choice.branch_depth  # place of the newest whose branches are
            alone = choice.branch_depth if self._made == self._asked else 0
            for steps in range(alone + 1):
                seconds = half + steps * self._listener.workload.forward(choice)
                self._agenda.after(seconds, self._listener.branched, self._epoch, finished + steps)


@dataclass
class Flight:
    """A pass under way: it brings the rows before the proposals at the places `first` to `last`."""

    first: int
    last: int
    proposals: int  # that its tree covers
    began: float  # seconds
    idle: float  # seconds without a pass before
    worked: float  # seconds that the drafter had worked when the pass was last looked at
    in_model: float  # seconds, as far as is known
    plain: bool  # the drafter is not asked
    counts: bool = True  # false: its text is not the output's any more


class SimulatedTargets:
    """As many passes at once as there are targets."""

    def __init__(self, agenda: Agenda, listener: Listener) -> None:
        self._agenda, self._listener = agenda, listener
        self._flights: list[Flight] = []
        self._free_since = 0.0
        self.passes = 0
        self.seconds = 0.0  # with a pass, its round trip included; of all together

    @property
    def free(self) -> bool:
        """Whether one of them has no pass."""
        return len(self._flights) < self._listener.workload.targets

    @property
    def coming(self) -> int | None:
        """The last place whose row is under way; None: there is none of any use."""
        return max((flight.last for flight in self._flights if flight.counts), default=None)

    def rebase(self, frontier: int) -> None:
        """A new epoch begins at this place of the old one: only a pass that began there still counts."""
        for flight in self._flights:
            flight.counts = flight.counts and flight.first == frontier
            flight.first = flight.last = 0

    def send(self, first: int, last: int, proposals: int, plain: bool) -> None:
        """A pass over so many proposals, for the rows at these places; `plain`: the drafter is not asked."""
        workload, now = self._listener.workload, self._agenda.now
        seconds = workload.plain_seconds if plain else workload.pass_seconds(proposals)
        # Plain passes are timed apart from the round trip, which may then seem to be the longer of the two.
        trip = min(workload.target_trip, (1 - NOTHING) * seconds)
        in_model = self._listener.noisy(seconds - trip)
        worked = self._listener.drafter.worked
        flight = Flight(first, last, proposals, now, now - self._free_since, worked, in_model, plain)
        self._flights.append(flight)
        self.passes += 1
        self._agenda.after(trip + in_model, self._returned, flight)

    def _returned(self, flight: Flight) -> None:
        """It ends here unless the drafter's work has held it up."""
        now, worked = self._agenda.now, self._listener.drafter.worked
        lost = (worked - flight.worked) * self._listener.workload.slowed
        flight.worked, flight.in_model = worked, flight.in_model + lost
        if lost > NOTHING * flight.in_model:
            self._agenda.after(lost, self._returned, flight)
            return
        self._flights.remove(flight)
        self._free_since = now
        self.seconds += now - flight.began
        tokens = 1 + round(flight.proposals * self._listener.workload.nodes_per_proposal)
        waited = now - flight.began
        # A plain pass stands for a token of a run that goes on: none has a round trip of its own.
        in_model = waited if flight.plain else flight.in_model
        seen = PassSeen(tokens, waited, in_model, flight.idle, flight.proposals, asked=not flight.plain)
        self._listener.passed(flight, seen)


class Tally:
    """What a walk has judged since it was last told."""

    def __init__(self) -> None:
        self._judged: Judged | None = None

    @property
    def caught_up(self) -> bool:
        """Whether it counts comparisons with tokens that had been settled."""
        return self._judged is not None and self._judged.caught_up

    def add(self, place: int, accepted: int, refused: bool, tokens: int, settled: int, caught_up: bool) -> None:
        """More of the same kind, beginning at this place."""
        seen = self._judged or Judged(place, 0, refused=False, tokens=0, settled=0)
        self._judged = Judged(
            seen.first, seen.accepted + accepted, refused, seen.tokens + tokens, seen.settled + settled, caught_up
        )

    def take(self) -> Judged | None:
        """All of it; None if there is nothing."""
        seen, self._judged = self._judged, None
        return seen

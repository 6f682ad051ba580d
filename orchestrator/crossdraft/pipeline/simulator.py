"""The pipeline as events in time, without models: how fast a way of running it would be.

Drafter, wire, target and walk do what `pipeline.session` and the services do, with coins for acceptance and given
times for forwards. A governor can be tried on it: it is asked for its choice at each epoch and sees the observations
that a session would give it. `forecast` computes the same speeds without chance.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from crossdraft.pipeline.governing import (
    PLAIN,
    BranchSeen,
    Choice,
    DraftSeen,
    Fixed,
    Governor,
    Judged,
    PassSeen,
    StallSeen,
)
from crossdraft.pipeline.simulated import Agenda, SimulatedDrafter
from crossdraft.pipeline.workload import Workload

NOTHING_JUDGED = Judged(0, 0, refused=False, tokens=0, settled=0)


@dataclass(frozen=True)
class Run:
    """What a simulated generation took."""

    tokens: float  # emitted
    seconds: float
    passes: int
    epochs: int
    target_seconds: float  # with a pass in flight, its round trip included; of all targets together
    drafter_seconds: float  # in its forwards, those for nothing included
    tried: int  # refusals that met branches
    hits: int  # ... and were continued by one

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds

    @property
    def idle(self) -> float:
        """Share of the time in which no pass was in flight (with one target)."""
        return max(0.0, 1 - self.target_seconds / self.seconds)

    @property
    def passes_per_token(self) -> float:
        return self.passes / self.tokens

    @property
    def drafter_busy(self) -> float:
        """Share of the time in which the drafter ran a forward."""
        return self.drafter_seconds / self.seconds


def simulate(
    workload: Workload,
    choice: Choice | Governor,
    tokens: int,
    rng: np.random.Generator,
    jitter: float = 0.0,
    changes: Sequence[tuple[float, Workload]] = (),
) -> Run:
    """Runs one generation.

    Args:
        choice: how every epoch is run, or who decides it.
        tokens: target tokens to emit.
        rng: of acceptance and of jitter.
        jitter: standard deviation of a forward's time, as a share of it (log-normal).
        changes: (seconds since the beginning, what holds from then on), ascending.
    """
    governor = Fixed(choice) if isinstance(choice, Choice) else choice
    return _Generation(workload, governor, tokens, rng, jitter).run(changes)


@dataclass
class _Flight:
    """A pass under way: it brings the rows before the proposals at the places `first` to `last`."""

    first: int
    last: int
    proposals: int
    began: float
    idle: float  # seconds that its target had stood idle before
    counts: bool = True  # false: its text is not the output's any more


class _Generation:
    """The session and its targets. Places count the epoch's proposals from 0; the row at a place judges it."""

    def __init__(
        self, workload: Workload, governor: Governor, goal: int, rng: np.random.Generator, jitter: float
    ) -> None:
        self.workload, self._governor, self._goal, self._rng, self._jitter = workload, governor, goal, rng, jitter
        self._agenda = Agenda()
        self._drafter = SimulatedDrafter(self._agenda, self)
        self._flights: list[_Flight] = []
        self._rows: set[int] = set()  # places whose rows are at hand
        self._choice = PLAIN
        self._epoch = self._known = self._judged = self._asked = 0
        self._ahead = 0  # proposals that the draft is behind the output
        self._branched = -1  # the last place whose branches have come
        self._begun = False  # the epoch has emitted something
        self._stalled = False  # patience has ended, and nothing has come since
        self._wait = 0  # number of the latest wait for proposals
        self._waits_since: float | None = None
        self._usable = 0.0  # when the rows of adopted proposals are there
        self._asked_at: float | None = None  # when the epoch's draft was asked for; None: it has replied
        self._replied_at = 0.0
        self._free_since = 0.0
        self._verdict = NOTHING_JUDGED
        self._tokens = 0.0
        self._target_seconds = 0.0
        self._passes = self._tried = self._hits = 0

    def run(self, changes: Sequence[tuple[float, Workload]]) -> Run:
        for seconds, workload in changes:
            self._agenda.after(seconds, self._change, workload)
        self._begin(0)
        self._walk()
        while self._tokens < self._goal:
            self._agenda.step()
        return Run(
            self._tokens,
            self._agenda.now,
            self._passes,
            self._epoch,
            self._target_seconds,
            self._drafter.seconds,
            self._tried,
            self._hits,
        )

    def noisy(self, seconds: float) -> float:
        """A forward's time, with its jitter."""
        if not self._jitter:
            return seconds
        return seconds * float(np.exp(self._jitter * self._rng.standard_normal() - self._jitter**2 / 2))

    def arrived(self, epoch: int, first: int, count: int, seconds: float) -> None:
        """A reply of the drafter is there."""
        if epoch != self._epoch:
            return
        now, asked = self._agenda.now, self._asked_at
        waited, gap = (None, now - self._replied_at) if asked is None else (now - asked, None)
        branches = self._choice.branch_depth * self._choice.branch_width
        self._asked_at, self._replied_at = None, now
        self._governor.observe(DraftSeen(count, first, waited, gap, seconds, branches), now)
        self._known += count
        self._stalled = False
        self._walk()

    def branched(self, epoch: int, place: int) -> None:
        """Branches are there."""
        if epoch == self._epoch:
            self._branched = place

    def _change(self, workload: Workload) -> None:
        self.workload = workload
        self._drafter.restart()

    def _begin(self, adopted: int) -> None:
        """A new epoch, which may begin with adopted proposals. A plain pass in flight for the frontier still counts."""
        frontier = self._judged + self._ahead
        for flight in self._flights:
            flight.counts = flight.counts and flight.first == frontier
            flight.first = flight.last = 0
        self._epoch += 1
        self._rows.clear()
        self._judged, self._ahead, self._known, self._branched = 0, 0, adopted, -1
        self._begun, self._waits_since = False, None
        now = self._agenda.now
        self._choice = self._governor.choose(now)
        self._asked, self._asked_at = self._choice.window, now
        self._usable = now + self.workload.drafter_trip if adopted and not self.workload.samples else now
        if self._choice.drafts:
            self._tell(adopted)

    def _tell(self, made: int = 0) -> None:
        half = self.workload.drafter_trip / 2
        self._agenda.after(half, self._drafter.told, self._epoch, self._asked, made, self._choice)

    @property
    def _due(self) -> bool:
        """Whether the drafter owes proposals."""
        return self._known < self._asked

    def _walk(self) -> None:
        """Goes on with what is at hand."""
        while self._step():
            pass
        self._flush()
        self._pass()

    def _step(self) -> bool:
        """One step of the walk; false if it needs something that is not at hand."""
        if self._ahead and self._known > self._judged:
            self._compare()
        elif self._judged + self._ahead not in self._rows:
            if self._due or self._known > self._judged or not self._begun:
                return False
            self._flush()
            self._begin(0)
        elif self._known > self._judged:
            if self._agenda.now < self._usable:
                self._agenda.after(self._usable - self._agenda.now, self._walk)
                return False
            self._judge()
        elif self._due and self._patient and not self.workload.samples:
            self._stand_idle()
            return False
        else:
            self._settle()
        return True

    def _judge(self) -> None:
        """The row at the frontier on the next proposal."""
        place = self._judged
        if self._rng.random() < self.workload.accepted(place):
            self._emit(self.workload.tokens_per_proposal, place, accepted=1)
            self._reveal()
        else:
            self._emit(1, place, refused=True)
            self._refuse(place)

    def _compare(self) -> None:
        """The next proposal with what the target has drawn by itself."""
        place, needed = self._judged, self.workload.proposals_per_token
        last = self._ahead % needed == 1 or needed == 1
        self._ahead -= 1
        if not last or self._rng.random() < self.workload.match:
            self._emit(0, place, accepted=1, caught_up=True)
            self._reveal()
        else:
            self._emit(0, place, refused=True, caught_up=True)
            self._ahead += 1
            self._refuse(place)

    def _settle(self) -> None:
        """The target's own token, with no proposal at hand."""
        self._emit(1, self._judged, settled=1)
        if self._choice.overlap:
            self._ahead += self.workload.proposals_per_token
        else:
            self._rows.clear()

    def _reveal(self) -> None:
        self._judged += 1
        if self._choice.overlap:
            self._asked = self._judged + self._choice.window
            self._tell()

    def _refuse(self, place: int) -> None:
        """The epoch is over; a branch may be the next one."""
        self._flush()
        hit = False
        if self._branched >= place:
            hit = bool(self._rng.random() < self.workload.hit(self._choice.branch_width))
            self._tried += 1
            self._hits += hit
            self._governor.observe(BranchSeen(hit), self._agenda.now)
        self._begin(self._choice.branch_depth if hit else 0)

    def _emit(
        self,
        tokens: float,
        place: int,
        accepted: int = 0,
        refused: bool = False,
        settled: int = 0,
        caught_up: bool = False,
    ) -> None:
        """Counts tokens, and what became of a proposal."""
        if caught_up != self._verdict.caught_up:
            self._flush()
        before = self._verdict
        whole = int(self._tokens + tokens) - int(self._tokens)
        self._tokens += tokens
        self._begun = True
        self._verdict = Judged(
            before.first if before is not NOTHING_JUDGED else place,
            before.accepted + accepted,
            refused,
            before.tokens + whole,
            before.settled + settled,
            caught_up,
        )

    def _flush(self) -> None:
        """Tells the governor what the walk has judged."""
        if self._verdict is not NOTHING_JUDGED:
            self._governor.observe(self._verdict, self._agenda.now)
            self._verdict = NOTHING_JUDGED

    @property
    def _patient(self) -> bool:
        return self._choice.patience > 0 and not self._stalled

    def _stand_idle(self) -> None:
        """The target waits for proposals, for as long as patience lasts."""
        if self._waits_since is None:
            self._waits_since = self._agenda.now
            self._wait += 1
            self._agenda.after(self._choice.patience, self._impatient, self._wait)

    def _impatient(self, wait: int) -> None:
        if wait == self._wait and self._waits_since is not None:
            self._governor.observe(StallSeen(self._agenda.now - self._waits_since), self._agenda.now)
            self._stalled, self._waits_since = True, None
            self._walk()

    def _pass(self) -> None:
        """Begins a pass if a target is free and it is time."""
        frontier, proposals = self._judged + self._ahead, max(0, self._known - self._judged)
        if frontier in self._rows or len(self._flights) >= self.workload.targets:
            return
        coming = [flight.last for flight in self._flights if flight.counts]
        if not coming:
            if proposals < self._choice.wait and self._due and self._patient:
                self._stand_idle()
            else:
                self._fly(frontier, frontier + proposals, proposals)
        elif self._choice.speculate and self._known - max(coming) >= max(1, self._choice.wait):
            self._fly(max(coming) + 1, self._known, proposals)

    def _fly(self, first: int, last: int, proposals: int) -> None:
        now = self._agenda.now
        flight = _Flight(first, last, proposals, now, now - self._free_since)
        self._flights.append(flight)
        self._waits_since = None
        self._passes += 1
        workload = self.workload
        in_model = self.noisy(workload.pass_seconds(proposals) - workload.target_trip)
        self._agenda.after(workload.target_trip + in_model, self._returned, flight, in_model)

    def _returned(self, flight: _Flight, in_model: float) -> None:
        now = self._agenda.now
        self._flights.remove(flight)
        self._free_since = now
        self._target_seconds += now - flight.began
        nodes = round(flight.proposals * self.workload.nodes_per_proposal)
        self._governor.observe(PassSeen(1 + nodes, now - flight.began, in_model, flight.idle, flight.proposals), now)
        if flight.counts:
            self._rows.update(range(flight.first, flight.last + 1))
        self._walk()

"""The simulator's session: a walk with coins instead of rows, one governor, one drafter, some targets."""

from collections.abc import Sequence

import numpy as np

from crossdraft.pipeline.governing import (
    PLAIN,
    BranchSeen,
    DraftSeen,
    Governor,
    PassSeen,
    StallSeen,
)
from crossdraft.pipeline.simulated import Agenda, Flight, SimulatedDrafter, SimulatedTargets, Tally
from crossdraft.pipeline.workload import Workload


class SimulatedSession:
    """The session and its targets. Places count the epoch's proposals from 0; the row at a place judges it."""

    def __init__(
        self, workload: Workload, governor: Governor, goal: int, rng: np.random.Generator, jitter: float
    ) -> None:
        self.workload, self._governor, self._goal, self._rng, self._jitter = workload, governor, goal, rng, jitter
        self.agenda = Agenda()
        self.drafter = SimulatedDrafter(self.agenda, self)
        self.targets = SimulatedTargets(self.agenda, self)
        self._tally = Tally()
        self._rows: set[int] = set()  # places whose rows are at hand
        self._choice = PLAIN
        self.epoch = self._known = self._judged = self._asked = 0
        self._ahead = 0  # proposals that the draft is behind the output
        self._branched = -1  # the last place whose branches have come
        self._begun = False  # the epoch has emitted something
        self._stalled = False  # patience has ended, and nothing has come since
        self._wait = 0  # number of the latest wait for proposals
        self._waits_since: float | None = None
        self._usable = 0.0  # when the rows of adopted proposals are there
        self._asked_at: float | None = None  # when the epoch's draft was asked for; None: it has replied
        self._replied_at = 0.0
        self.tokens = 0.0
        self.tried = self.hits = 0

    def run(self, changes: Sequence[tuple[float, Workload]]) -> None:
        """To the last token; `changes` as in `simulator.simulate`."""
        for seconds, workload in changes:
            self.agenda.after(seconds, self._change, workload)
        self._begin(0)
        self._walk()
        while self.tokens < self._goal:
            self.agenda.step()

    def noisy(self, seconds: float) -> float:
        """A forward's time, with its jitter."""
        if not self._jitter:
            return seconds
        return seconds * float(np.exp(self._jitter * self._rng.standard_normal() - self._jitter**2 / 2))

    def arrived(self, epoch: int, first: int, count: int, seconds: float) -> None:
        """A reply of the drafter is there."""
        if epoch != self.epoch:
            return
        now, asked = self.agenda.now, self._asked_at
        waited, gap = (None, now - self._replied_at) if asked is None else (now - asked, None)
        branches = self._choice.branch_depth * self._choice.branch_width
        self._asked_at, self._replied_at = None, now
        self._governor.observe(DraftSeen(count, first, waited, gap, seconds, branches), now)
        self._known += count
        self._stalled = False
        self._walk()

    def branched(self, epoch: int, place: int) -> None:
        """Branches are there."""
        if epoch == self.epoch:
            self._branched = max(self._branched, place)

    def _change(self, workload: Workload) -> None:
        self.workload = workload
        self.drafter.restart()

    def _begin(self, adopted: int) -> None:
        """A new epoch, which may begin with adopted proposals. A plain pass in flight for the frontier still counts."""
        self.targets.rebase(self._judged + self._ahead)
        self.epoch += 1
        self._rows.clear()
        self._judged, self._ahead, self._known, self._branched = 0, 0, adopted, -1
        self._begun, self._waits_since = False, None
        now = self.agenda.now
        self._choice = self._governor.choose(now)
        self._asked, self._asked_at = self._choice.window, now
        self._usable = now + self.workload.drafter_trip if adopted and not self.workload.samples else now
        if self._choice.drafts:
            self._tell(adopted)

    def _tell(self, made: int = 0) -> None:
        half = self.workload.drafter_trip / 2
        self.agenda.after(half, self.drafter.told, self.epoch, self._asked, made, self._choice)

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
            if self.agenda.now < self._usable:
                self.agenda.after(self._usable - self.agenda.now, self._walk)
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
        wanted = self._judged + self._choice.window
        if self._choice.overlap and wanted >= self._asked + (self._choice.chunk if self._due else 1):
            self._asked = wanted
            self._tell()

    def _refuse(self, place: int) -> None:
        """The epoch is over; a branch may be the next one."""
        self._flush()
        hit = False
        if self._branched >= place:
            hit = bool(self._rng.random() < self.workload.hit(self._choice.branch_width))
            self.tried += 1
            self.hits += hit
            self._governor.observe(BranchSeen(hit), self.agenda.now)
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
        if caught_up != self._tally.caught_up:
            self._flush()
        whole = int(self.tokens + tokens) - int(self.tokens)
        self.tokens += tokens
        self._begun = True
        self._tally.add(place, accepted, refused, whole, settled, caught_up)

    def _flush(self) -> None:
        """Tells the governor what the walk has judged."""
        seen = self._tally.take()
        if seen is not None:
            self._governor.observe(seen, self.agenda.now)

    @property
    def _patient(self) -> bool:
        return self._choice.patience > 0 and not self._stalled

    def _stand_idle(self) -> None:
        """The target waits for proposals, for as long as patience lasts."""
        if self._waits_since is None:
            self._waits_since = self.agenda.now
            self._wait += 1
            self.agenda.after(self._choice.patience, self._impatient, self._wait)

    def _impatient(self, wait: int) -> None:
        if wait == self._wait and self._waits_since is not None:
            self._governor.observe(StallSeen(self.agenda.now - self._waits_since), self.agenda.now)
            self._stalled, self._waits_since = True, None
            self._walk()

    def _pass(self) -> None:
        """Begins a pass if a target is free and it is time."""
        frontier, proposals = self._judged + self._ahead, max(0, self._known - self._judged)
        if frontier in self._rows or not self.targets.free or self.tokens >= self._goal:
            return
        coming = self.targets.coming
        if coming is None:
            if proposals < self._choice.wait and self._due and self._patient:
                self._stand_idle()
            else:
                self._waits_since = None
                self.targets.send(frontier, frontier + proposals, proposals, not self._choice.drafts)
        elif self._choice.speculate and self._known - coming >= max(1, self._choice.wait):
            self.targets.send(coming + 1, self._known, proposals, plain=False)

    def passed(self, flight: Flight, seen: PassSeen) -> None:
        """A pass has returned."""
        self._governor.observe(seen, self.agenda.now)
        if flight.counts:
            self._rows.update(range(flight.first, flight.last + 1))
        self._walk()

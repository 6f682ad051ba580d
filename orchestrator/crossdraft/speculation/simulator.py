"""A discrete-event simulation of the pipeline without models: how fast a choice or a controller would be.

Drafter, wire, target and walk behave like a session and its services, with given durations of forwards and random
acceptance. A controller under test is asked for its choice at each epoch, and sees the observations that a session
would give it. `cost_model.forecast` computes the same speeds without randomness.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isinf
from typing import Any

import numpy as np

from crossdraft.speculation.choice import (
    PLAIN,
    BranchSeen,
    Choice,
    Controller,
    DraftSeen,
    Fixed,
    Judged,
    PassSeen,
    StallSeen,
    Workload,
)


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


def simulate(
    workload: Workload,
    choice: Choice | Controller,
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
    controller = Fixed(choice) if isinstance(choice, Choice) else choice
    session = SimulatedSession(workload, controller, tokens, rng, jitter)
    session.run(changes)
    return Run(
        session.tokens,
        session.agenda.now,
        session.targets.passes,
        session.epoch,
        session.targets.seconds,
        session.drafter.seconds,
        session.tried,
        session.hits,
    )


NOTHING = 1e-3  # share of a pass below which a delay is not simulated


class Agenda:
    """A queue of future calls, and the simulated time in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._order = 0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []

    def after(self, seconds: float, what: Callable[..., None], *given: Any) -> None:
        """Call `what` after some seconds; never if that is infinite."""
        if not isinf(seconds):
            self._order += 1
            heapq.heappush(self._events, (self.now + seconds, self._order, what, given))

    def step(self) -> None:
        """Make the next call. Raises IndexError if there is none."""
        self.now, _, what, given = heapq.heappop(self._events)
        what(*given)


class SimulatedDrafter:
    """Runs forwards one after the other, for the newest epoch that it was told of, up to what was asked."""

    def __init__(self, agenda: Agenda, session: "SimulatedSession") -> None:
        self._agenda, self._session = agenda, session
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
        """Told of an epoch with `made` adopted draft tokens, or that `asked` draft tokens are wanted now."""
        if epoch > self._epoch:
            self._epoch, self._asked, self._made, self._choice, self._owed = epoch, asked, made, choice, 0.0
            self._sent = made
        elif epoch == self._epoch:
            self._asked = max(self._asked, asked)
        self._go_on()

    def restart(self) -> None:
        """The duration of forwards has changed: begin the one under way again."""
        self._forward += 1
        self._busy = False
        self._go_on()

    def _go_on(self) -> None:
        if not self._busy and self._made < self._asked:
            self._busy, self._began = True, self._agenda.now
            self._forward += 1
            seconds = self._session.noisy(self._session.workload.forward(self._choice))
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
        """Send what it has once a reply is full, half a round trip away; finished branches go with it, or alone."""
        choice, half, sent = self._choice, self._session.workload.drafter_trip / 2, self._sent
        if self._made < self._asked and self._made - sent < choice.reply(sent):
            return
        self._agenda.after(half, self._session.arrived, self._epoch, sent, self._made - sent, self._owed)
        self._sent, self._owed = self._made, 0.0
        if choice.branch_depth and choice.overlap:
            finished = self._made - 1 - choice.branch_depth  # place of the newest whose branches are
            alone = choice.branch_depth if self._made == self._asked else 0
            for steps in range(alone + 1):
                seconds = half + steps * self._session.workload.forward(choice)
                self._agenda.after(seconds, self._session.branched, self._epoch, finished + steps)


@dataclass
class SimulatedPass:
    """A pass under way: it brings the rows before the draft tokens at the places `first` to `last`."""

    first: int
    last: int
    draft_tokens: int  # that its tree covers
    began: float  # seconds
    idle: float  # seconds without a pass before
    worked: float  # seconds that the drafter had worked when the pass was last looked at
    in_model: float  # seconds, as far as is known
    plain: bool  # the drafter is not asked
    counts: bool = True  # false: its text is not the output's any more


class SimulatedTargets:
    """As many passes at once as there are targets."""

    def __init__(self, agenda: Agenda, session: "SimulatedSession") -> None:
        self._agenda, self._session = agenda, session
        self._flights: list[SimulatedPass] = []
        self._free_since = 0.0
        self.passes = 0
        self.seconds = 0.0  # with a pass, its round trip included; of all together

    @property
    def free(self) -> bool:
        """Whether one of them has no pass."""
        return len(self._flights) < self._session.workload.targets

    @property
    def coming(self) -> int | None:
        """The last place whose row is under way; None: there is none of any use."""
        return max((flight.last for flight in self._flights if flight.counts), default=None)

    def rebase(self, frontier: int) -> None:
        """A new epoch begins at this place of the old one: only a pass that began there still counts."""
        for flight in self._flights:
            flight.counts = flight.counts and flight.first == frontier
            flight.first = flight.last = 0

    def send(self, first: int, last: int, draft_tokens: int, plain: bool) -> None:
        """A pass over so many draft tokens, for the rows at these places; `plain`: the drafter is not asked."""
        workload, now = self._session.workload, self._agenda.now
        seconds = workload.plain_seconds if plain else workload.pass_seconds(draft_tokens)
        # Plain passes are timed apart from the round trip, which may then seem to be the longer of the two.
        trip = min(workload.target_trip, (1 - NOTHING) * seconds)
        in_model = self._session.noisy(seconds - trip)
        worked = self._session.drafter.worked
        flight = SimulatedPass(first, last, draft_tokens, now, now - self._free_since, worked, in_model, plain)
        self._flights.append(flight)
        self.passes += 1
        self._agenda.after(trip + in_model, self._returned, flight)

    def _returned(self, flight: SimulatedPass) -> None:
        """The pass ends now unless the drafter's work has held it up."""
        now, worked = self._agenda.now, self._session.drafter.worked
        lost = (worked - flight.worked) * self._session.workload.slowed
        flight.worked, flight.in_model = worked, flight.in_model + lost
        if lost > NOTHING * flight.in_model:
            self._agenda.after(lost, self._returned, flight)
            return
        self._flights.remove(flight)
        self._free_since = now
        self.seconds += now - flight.began
        tokens = 1 + round(flight.draft_tokens * self._session.workload.nodes_per_draft_token)
        waited = now - flight.began
        # A plain pass stands for a token of a run that goes on: none has a round trip of its own.
        in_model = waited if flight.plain else flight.in_model
        seen = PassSeen(tokens, waited, in_model, flight.idle, flight.draft_tokens, asked=not flight.plain)
        self._session.passed(flight, seen)


class Tally:
    """What a walk has judged since the last report."""

    def __init__(self) -> None:
        self._judged: Judged | None = None

    @property
    def caught_up(self) -> bool:
        """Whether it counts comparisons with settled tokens."""
        return self._judged is not None and self._judged.caught_up

    def add(self, place: int, accepted: int, refused: bool, tokens: int, settled: int, caught_up: bool) -> None:
        """Add draft tokens of the same kind that begin at this place."""
        seen = self._judged or Judged(place, 0, refused=False, tokens=0, settled=0)
        self._judged = Judged(
            seen.first, seen.accepted + accepted, refused, seen.tokens + tokens, seen.settled + settled, caught_up
        )

    def take(self) -> Judged | None:
        """All of it; None if there is nothing."""
        seen, self._judged = self._judged, None
        return seen


class SimulatedSession:
    """A session whose walk decides at random. Places count the epoch's draft tokens from 0; the row at a place
    judges it."""

    def __init__(
        self, workload: Workload, controller: Controller, goal: int, rng: np.random.Generator, jitter: float
    ) -> None:
        self.workload, self._controller, self._goal, self._rng, self._jitter = workload, controller, goal, rng, jitter
        self.agenda = Agenda()
        self.drafter = SimulatedDrafter(self.agenda, self)
        self.targets = SimulatedTargets(self.agenda, self)
        self._tally = Tally()
        self._rows: set[int] = set()  # places whose rows are at hand
        self._choice = PLAIN
        self.epoch = self._known = self._judged = self._asked = 0
        self._ahead = 0  # draft tokens that the draft is behind the output
        self._branched = -1  # the last place whose branches have come
        self._begun = False  # the epoch has emitted something
        self._stalled = False  # patience has ended, and nothing has come since
        self._wait = 0  # number of the latest wait for draft tokens
        self._waits_since: float | None = None
        self._usable = 0.0  # when the rows of adopted draft tokens are there
        self._asked_at: float | None = None  # when the epoch's draft was asked for; None: it has replied
        self._replied_at = 0.0
        self.tokens = 0.0
        self.tried = self.hits = 0

    def run(self, changes: Sequence[tuple[float, Workload]]) -> None:
        """Run to the last token; `changes` as in `simulate`."""
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
        self._controller.observe(DraftSeen(count, first, waited, gap, seconds, branches), now)
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
        """A new epoch, which may begin with adopted draft tokens. A plain pass in flight for the frontier still
        counts.
        """
        self.targets.rebase(self._judged + self._ahead)
        self.epoch += 1
        self._rows.clear()
        self._judged, self._ahead, self._known, self._branched = 0, 0, adopted, -1
        self._begun, self._waits_since = False, None
        now = self.agenda.now
        self._choice = self._controller.choose(now)
        self._asked, self._asked_at = self._choice.max_draft_tokens, now
        self._usable = now + self.workload.drafter_trip if adopted and not self.workload.samples else now
        if self._choice.drafts:
            self._tell(adopted)

    def _tell(self, made: int = 0) -> None:
        half = self.workload.drafter_trip / 2
        self.agenda.after(half, self.drafter.told, self.epoch, self._asked, made, self._choice)

    @property
    def _due(self) -> bool:
        """Whether the drafter owes draft tokens."""
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
        """The row at the frontier on the next draft token."""
        place = self._judged
        if self._rng.random() < self.workload.accepted(place):
            self._emit(self.workload.tokens_per_draft_token, place, accepted=1)
            self._reveal()
        else:
            self._emit(1, place, refused=True)
            self._refuse(place)

    def _compare(self) -> None:
        """The next draft token with what the target has drawn by itself."""
        place, needed = self._judged, self.workload.draft_tokens_per_token
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
        """The target's own token, with no draft token at hand."""
        self._emit(1, self._judged, settled=1)
        if self._choice.overlap:
            self._ahead += self.workload.draft_tokens_per_token
        else:
            self._rows.clear()

    def _reveal(self) -> None:
        self._judged += 1
        wanted = self._judged + self._choice.max_draft_tokens
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
            self._controller.observe(BranchSeen(hit), self.agenda.now)
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
        """Counts tokens, and what became of a draft token."""
        if caught_up != self._tally.caught_up:
            self._flush()
        whole = int(self.tokens + tokens) - int(self.tokens)
        self.tokens += tokens
        self._begun = True
        self._tally.add(place, accepted, refused, whole, settled, caught_up)

    def _flush(self) -> None:
        """Tells the controller what the walk has judged."""
        seen = self._tally.take()
        if seen is not None:
            self._controller.observe(seen, self.agenda.now)

    @property
    def _patient(self) -> bool:
        return self._choice.patience > 0 and not self._stalled

    def _stand_idle(self) -> None:
        """The target waits for draft tokens, for as long as patience lasts."""
        if self._waits_since is None:
            self._waits_since = self.agenda.now
            self._wait += 1
            self.agenda.after(self._choice.patience, self._impatient, self._wait)

    def _impatient(self, wait: int) -> None:
        if wait == self._wait and self._waits_since is not None:
            self._controller.observe(StallSeen(self.agenda.now - self._waits_since), self.agenda.now)
            self._stalled, self._waits_since = True, None
            self._walk()

    def _pass(self) -> None:
        """Begins a pass if a target is free and it is time."""
        frontier, draft_tokens = self._judged + self._ahead, max(0, self._known - self._judged)
        if frontier in self._rows or not self.targets.free or self.tokens >= self._goal:
            return
        coming = self.targets.coming
        if coming is None:
            if draft_tokens < self._choice.min_draft_tokens and self._due and self._patient:
                self._stand_idle()
            else:
                self._waits_since = None
                self.targets.send(frontier, frontier + draft_tokens, draft_tokens, not self._choice.drafts)
        elif self._choice.speculate and self._known - coming >= max(1, self._choice.min_draft_tokens):
            self.targets.send(coming + 1, self._known, draft_tokens, plain=False)

    def passed(self, flight: SimulatedPass, seen: PassSeen) -> None:
        """A pass has returned."""
        self._controller.observe(seen, self.agenda.now)
        if flight.counts:
            self._rows.update(range(flight.first, flight.last + 1))
        self._walk()

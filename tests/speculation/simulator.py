"""Many outputs on one target and one drafter in virtual time, without models: how fast choices and controllers are.

Services put steps off as the real ones do (`engine.scheduler`), messages travel, acceptance is random. Each output
behaves like a session: it asks its controller for a choice at each epoch, and tells it what a session would.
"""

import heapq
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from math import inf

import numpy as np

from crossdraft.engine.requests import ForwardRequest
from crossdraft.engine.scheduler import Pause, Scheduler
from crossdraft.speculation import choice as choices
from crossdraft.speculation.choice import PLAIN, TREES, Choice, Controller, DraftSeen, Fixed, Lifecycle, arms_for
from crossdraft.speculation.controller import Arms, Kind, TargetController
from crossdraft.speculation.estimates import BRANCHED

CHUNK = 1 << 20  # tokens of a step: no prompt is simulated
TURN = 0.0002  # seconds that a process takes for a message, on average
MOMENT = 1e-12  # seconds
TICK = 0.0001  # seconds that times of messages are rounded to, so that what comes together is handled together
KIND = ("coupled", 1.0, None)  # of all simulated requests
TOKENS = 256  # of an output
CHAINS = arms_for()
WITH_TREES = arms_for(trees=tuple(nodes for _, nodes in TREES))


@dataclass(frozen=True)
class World:
    """Costs and acceptance. A pass takes base + each * (tokens of all outputs in it), a draft step likewise."""

    acceptance: float = 0.8  # probability that a draft token holds, given that all before it did
    pass_base: float = 0.008  # seconds
    pass_each: float = 0.00002  # seconds
    step_base: float = 0.001  # seconds; infinite: the drafter never answers
    step_each: float = 0.00001  # seconds
    drafter_trip: float = 0.0  # seconds of a round trip
    target_trip: float = 0.0005  # seconds
    match: float = 0.7  # share of acceptable draft tokens that equal one drawn by the target
    samples: bool = False  # the target draws by itself, and what it drew is compared (`slem`, `seeded`)
    machinery: float = 0.0  # seconds of the orchestrator for each message, one after the other
    noise: float = 0.0  # standard deviation of the logarithm of a step's seconds
    stall: float = 0.0  # seconds more that a step takes whose size, within an octave, is new
    pause: float = 0.0  # seconds more that each twelfth step of the drafter takes
    shared: bool = False  # both services compute on one processor, each at half speed while both do
    prompt: int = 0  # tokens that each service reads before its first step of an output
    reply: int = 0  # tokens more that a step costs which begins a reply: a GPU makes the others of it without the host


class Agenda:
    """Calls in the order of their times; those of one time in that of `late`, then of their making."""

    def __init__(self) -> None:
        self.now = 0.0  # seconds
        self._order = 0
        self._calls: list[tuple[float, bool, int, Callable[[], None]]] = []

    def after(self, seconds: float, call: Callable[[], None], late: bool = False) -> None:
        """Call it after so many seconds; never if they are infinite."""
        if seconds < inf:
            self._order += 1
            heapq.heappush(self._calls, (self.now + seconds, late, self._order, call))

    def run(self, until: float) -> None:
        """Make all calls up to a time."""
        while self._calls and self._calls[0][0] <= until:
            self.now, _, _, call = heapq.heappop(self._calls)
            call()
        self.now = max(self.now, until) if until < inf else self.now


class Processor:
    """What services compute on: of several steps at once each is as much slower."""

    def __init__(self, agenda: Agenda) -> None:
        self._agenda, self._since, self._planned = agenda, 0.0, 0
        self._running: list[tuple[float, int, Callable[[], None]]] = []  # seconds left of each alone, and what follows

    def compute(self, seconds: float, done: Callable[[], None]) -> None:
        self._plan((seconds, self._planned, done))

    def _plan(self, *new: tuple[float, int, Callable[[], None]]) -> None:
        passed = (self._agenda.now - self._since) / max(1, len(self._running))
        left = [(seconds - passed, *one) for seconds, *one in self._running]
        self._since, self._planned, planned = self._agenda.now, self._planned + 1, self._planned + 1
        self._running = sorted([*left, *new], key=lambda one: one[:2])  # type: ignore[list-item]
        if self._running:
            least = max(0.0, self._running[0][0]) * len(self._running)
            self._agenda.after(least, lambda: self._finish() if planned == self._planned else None)

    def _finish(self) -> None:
        self._plan()
        _, _, done = self._running.pop(0)
        self._plan()
        done()


@dataclass(frozen=True)
class StepDone:
    """What a service says of a step."""

    seconds: float
    queued: float
    sessions: int
    fed: int


@dataclass(frozen=True)
class Wanted:
    """A request that waits for a step."""

    session: Hashable
    tokens: int
    since: float  # seconds
    done: Callable[[StepDone], None]


class Service:
    """Computes steps of all that is ready, one after the other."""

    def __init__(
        self, agenda: Agenda, cost: Callable[[int], float], stall: float = 0.0, processor: Processor | None = None
    ) -> None:
        self._compute = agenda.after if processor is None else processor.compute
        self.cost = cost  # seconds of a step of so many tokens
        self.steps = 0
        self.stalled = 0.0  # seconds, in steps of new sizes
        self._stall, self._sizes = stall, {0}
        self._agenda, self._scheduler = agenda, Scheduler(CHUNK)
        self._waiting: list[Wanted] = []
        self._busy = self._looking = False
        self._look_at = 0.0
        self._over: set[Hashable] = set()  # sessions

    def submit(self, session: Hashable, tokens: int, done: Callable[[StepDone], None]) -> None:
        if session in self._over:
            return
        self._scheduler.returns.asked(session, self._agenda.now)
        self._waiting.append(Wanted(session, tokens, self._agenda.now, done))
        self._look(0.0)

    def over(self, session: Hashable) -> None:
        self._over.add(session)
        self._waiting = [one for one in self._waiting if one.session is not session]
        self._scheduler.returns.over(session)

    def _look(self, seconds: float) -> None:
        at = self._agenda.now + seconds
        if not self._busy and not (self._looking and self._look_at <= at):
            self._looking, self._look_at = True, at
            self._agenda.after(seconds, lambda: self._start(at), late=True)

    def _start(self, at: float) -> None:
        if self._busy or not self._looking or at != self._look_at:
            return
        self._looking = False
        now = self._agenda.now
        ready = [ForwardRequest(one.session, (0,), asked=one.since, due=one.tokens) for one in self._waiting]
        found = self._scheduler.next(ready, now)
        if isinstance(found, Pause):
            if found.seconds is not None:
                self._look(found.seconds)
            return
        chosen, self._waiting = self._waiting, []
        fed = sum(one.tokens for one in chosen)
        seconds = self.cost(fed)
        if self._stall and fed.bit_length() not in self._sizes:
            self._sizes.add(fed.bit_length())
            self.stalled += self._stall
            seconds += self._stall
        if seconds < inf:
            self._busy = True
            self._compute(seconds, lambda: self._done(chosen, fed, now))

    def _done(self, chosen: list[Wanted], fed: int, began: float) -> None:
        self._busy = False
        seconds = self._agenda.now - began + MOMENT * self.steps  # no two steps take the same time
        self.steps += 1
        self._scheduler.stepped(fed, seconds)
        sessions, chosen = len(chosen), [one for one in chosen if one.session not in self._over]
        for one in chosen:
            self._scheduler.returns.answered(one.session, self._agenda.now)
        for one in chosen:
            one.done(StepDone(seconds, began - one.since, sessions, fed))
        self._look(0.0)


class Simulation:
    """Outputs of so many tokens one after another in each of some slots; for each of them a controller is made."""

    def __init__(self, world: World, make: Callable[[], Controller], tokens: int, slots: int, seed: int = 0) -> None:
        self.world, self.agenda = world, Agenda()
        self.emitted = 0  # tokens of all outputs
        self.ended: list[float] = []  # when outputs were over, in seconds
        self.rng = np.random.default_rng(seed)
        processor = Processor(self.agenda) if world.shared else None
        self.target, self.drafter = (
            Service(self.agenda, cost, world.stall, processor) for cost in (self._pass_seconds, self._step_seconds)
        )
        self._free = 0.0  # seconds: when the orchestrator has handled what came before
        self.live = 0  # outputs
        self._make, self._tokens, self._slots = make, tokens, 0
        self.resize(slots)

    def resize(self, slots: int) -> None:
        """More slots, or fewer, which are left when their outputs end."""
        self._slots = slots
        while self.live < slots:
            self._begin()

    def speed(self, seconds: float) -> float:
        """Tokens a second of all outputs together over the next seconds."""
        before, began = self.emitted, self.agenda.now
        self.agenda.run(began + seconds)
        return (self.emitted - before) / (self.agenda.now - began)

    def until_ended(self, outputs: int) -> float:
        """Seconds until so many outputs are over, from the beginning."""
        while len(self.ended) < outputs:
            self.agenda.run(self.agenda.now + 0.01)
        return self.ended[outputs - 1]

    def _begin(self) -> None:
        self.live += 1
        output = Output(self, self._make(), self._tokens)
        self.agenda.after(self.delay(self.world.target_trip), output.start)

    def over(self, output: "Output") -> None:
        self.ended.append(self.agenda.now)
        self.target.over(output)
        self.drafter.over(output.draft)
        self.live -= 1
        if self.live < self._slots:
            self._begin()

    def _pass_seconds(self, fed: int) -> float:
        return self._noise() * (self.world.pass_base + self.world.pass_each * fed)

    def _step_seconds(self, fed: int) -> float:
        pause = self.world.pause * (self.drafter.steps % 12 == 0)
        return self._noise() * (self.world.step_base + self.world.step_each * fed) + pause

    def _noise(self) -> float:
        return float(np.exp(self.rng.normal(0, self.world.noise))) if self.world.noise else 1.0

    def handle(self, trip: float, call: Callable[[], None], light: bool = False) -> None:
        """Let the orchestrator handle a message, which travels first; those of runs are next to no work."""
        work = self.world.machinery and not light
        self.agenda.after(self.delay(trip), lambda: self._handle(call) if work else call())

    def _handle(self, call: Callable[[], None]) -> None:
        self._free = max(self._free, self.agenda.now) + self.world.machinery
        self.agenda.after(self._free - self.agenda.now, call)

    def delay(self, trip: float) -> float:
        """Seconds of a message, of a round trip of so many."""
        return trip / 2 + TICK * round(TURN * self.rng.exponential() / TICK)


class SimulatedDraft:
    """What the drafter does for an output."""

    def __init__(self, simulation: Simulation, output: "Output") -> None:
        self._simulation, self._output = simulation, output
        self._epoch = self._asked = self._made = self._sent = 0
        self._choice = PLAIN
        self._busy = False
        self._unread = simulation.world.prompt
        self._seconds = self._queued = 0.0  # since the latest reply

    def told(self, epoch: int, asked: int, choice: Choice) -> None:
        """Of an epoch, or that more is wanted."""
        if epoch > self._epoch:
            self._epoch, self._asked, self._choice, self._made, self._sent = epoch, asked, choice, 0, 0
            self._seconds = self._queued = 0.0
        elif epoch == self._epoch:
            self._asked = max(asked, self._asked)
        self._go_on()

    def _go_on(self) -> None:
        if not self._busy and self._made < self._asked:
            self._busy, epoch = True, self._epoch
            begins = self._simulation.world.reply * (self._made == self._sent)
            fed, self._unread = self._choice.width + self._unread + begins, 0
            self._simulation.drafter.submit(self, fed, lambda done: self._drafted(epoch, done))

    @property
    def _reply(self) -> int:
        """Draft tokens in the next reply."""
        first = self._choice.first
        return first - self._sent if self._sent < first else self._choice.chunk

    def _drafted(self, epoch: int, done: StepDone) -> None:
        self._busy = False
        if epoch == self._epoch:
            self._made += 1
            self._seconds, self._queued = self._seconds + done.seconds, self._queued + done.queued
            count = self._made - self._sent
            if self._made == self._asked or count >= self._reply:
                seconds, queued, output = self._seconds, self._queued, self._output
                self._seconds, self._queued, self._sent = 0.0, 0.0, self._made
                trip = self._simulation.world.drafter_trip
                self._simulation.handle(trip, lambda: output.drafted(epoch, count, seconds, queued))
        self._go_on()


@dataclass
class Flight:
    """A pass under way, which brings rows at the places from `first` to `last`."""

    first: int
    last: int
    run: int = 0  # tokens that the target still draws by itself; 0: it is no run
    half: int = 0  # tokens left at which more of the run is asked for
    following: Choice | None = field(default=None)  # what follows the run, once that is decided

    def end(self) -> None:
        """The run ends with the token that is being drawn."""
        self.run = min(1, self.run)


class Output:
    """A session whose walk decides at random. Places count the draft tokens of the epoch from 0."""

    def __init__(self, simulation: Simulation, controller: Controller, tokens: int) -> None:
        self._simulation, self._controller, self._left = simulation, controller, tokens
        self.draft = SimulatedDraft(simulation, self)
        self._choice = PLAIN
        self._epoch = self._known = self._asked = self._judged = self._ahead = 0
        self._rows = -1  # the last place that has a row
        self._begun = self._impatient = False
        self._flight: Flight | None = None
        self._drafting = False  # the drafter was asked for the latest epoch
        self._unread = simulation.world.prompt
        self._stalled: float | None = None
        self._stall = 0  # number of the latest
        self._asked_at: float | None = None
        self._report = [0, 0, False, 0, 0]
        self._unreviewed = 0  # tokens since the choice was made

    def start(self) -> None:
        self._controller.observe(Lifecycle.STARTED, self._now)
        self._next()
        self._go_on()

    @property
    def _now(self) -> float:
        return self._simulation.agenda.now

    @property
    def _frontier(self) -> int:
        return self._judged + self._ahead

    @property
    def _acceptance(self) -> float:
        """As the world is now: a drafter may be replaced while outputs go on."""
        found, nodes = self._simulation.world.acceptance, self._choice.tree_nodes
        return 1 - (1 - found) * (self._choice.max_draft_tokens / nodes) ** BRANCHED if nodes else found

    @property
    def _due(self) -> bool:
        return self._known < self._asked

    def drafted(self, epoch: int, count: int, seconds: float, queued: float) -> None:
        if epoch != self._epoch or self._left <= 0:
            return
        waited = None if self._asked_at is None else self._now - self._asked_at
        self._asked_at, self._impatient = None, False
        self._controller.observe(DraftSeen(count, waited, seconds, queued), self._now)
        self._known += count
        self._go_on()

    # Epochs.

    def _next(self, choice: Choice | None = None) -> None:
        self._flush()
        flight = self._flight
        if flight is not None and flight.first == self._frontier:
            flight.first = flight.last = 0
        elif flight is not None:
            flight.first, flight.last = 1, -1  # of no use
        self._epoch += 1
        self._known = self._judged = self._ahead = 0
        self._rows, self._begun = -1, False
        self._choice, self._unreviewed = choice or self._controller.choose(self._now), 0
        self._asked, self._asked_at = self._choice.max_draft_tokens, self._now
        if self._choice.drafts or self._drafting:
            self._tell()
        self._drafting = self._choice.drafts

    def _tell(self) -> None:
        epoch, asked, choice = self._epoch, self._asked, self._choice
        delay = self._simulation.delay(self._simulation.world.drafter_trip)
        self._simulation.agenda.after(delay, lambda: self.draft.told(epoch, asked, choice))

    def _go_on(self) -> None:
        while self._left > 0 and self._step():
            pass
        self._flush()
        if self._left > 0:
            self._pass()
        elif self._left > -1000:
            self._left = -1000
            self._controller.observe(Lifecycle.ENDED, self._now)
            self._simulation.over(self)

    def _step(self) -> bool:
        """One step of the walk; false: something is missing."""
        if 0 < self._choice.review_after <= self._unreviewed and self._flight is None and self._frontier > self._rows:
            self._review()
        elif self._ahead and self._known > self._judged:
            self._judge(compared=True)
        elif self._frontier <= self._rows:
            if self._known > self._judged:
                self._judge()
            elif self._due and not self._hurried and not self._simulation.world.samples:
                self._stand_idle()
                return False
            else:
                self._settle()
        elif self._known > self._judged or not self._begun or self._flight is not None or self._awaits:
            return False
        else:
            self._next()
        return True

    @property
    def _awaits(self) -> bool:
        """Whether draft tokens will come that the output is not past already."""
        return self._due and self._ahead <= self._choice.max_draft_tokens

    def _judge(self, compared: bool = False) -> None:
        """A draft token, by a row; or beside a token that the target has drawn already."""
        world = self._simulation.world
        chance = world.match if compared and not world.samples else 1.0
        held = self._simulation.rng.random() < self._acceptance * chance
        self._emit(int(not compared), accepted=int(held), refused=not held)
        if held:
            self._ahead -= compared
            self._held()
        else:
            self._next()

    def _review(self) -> None:
        self._flush()
        choice = self._controller.review(self._now)
        if choice.drafts and choice.overlap:
            self._choice, self._unreviewed = choice, 0
        else:
            self._next(choice)

    def _held(self) -> None:
        self._judged += 1
        if self._choice.overlap:
            wanted = self._judged + self._choice.max_draft_tokens
            if wanted >= self._asked + (self._choice.chunk if self._due else 1):
                self._asked = wanted
                self._tell()

    def _settle(self) -> None:
        self._emit(1, settled=1)
        self._ahead += 1
        if not self._choice.drafts:
            self._judged, self._ahead = self._judged + 1, 0

    def _emit(self, tokens: int, accepted: int = 0, refused: bool = False, settled: int = 0) -> None:
        tokens = min(tokens, self._left)
        self._simulation.emitted += tokens
        self._left -= tokens
        self._unreviewed += tokens
        self._begun = True
        seen = self._report
        if not (seen[1] or seen[3]):
            seen[0] = self._judged
        self._report = [seen[0], seen[1] + accepted, refused, seen[3] + tokens, seen[4] + settled]
        if settled:
            self._flush()

    def _flush(self) -> None:
        _, accepted, refused, tokens, settled = self._report
        if accepted or refused or tokens:
            self._controller.observe(choices.Judged(accepted, bool(refused), tokens, settled), self._now)
        self._report = [0, 0, False, 0, 0]

    # Waiting for draft tokens.

    @property
    def _hurried(self) -> bool:
        return self._impatient or self._choice.patience == 0

    def _stand_idle(self) -> None:
        if self._stalled is None:
            self._stalled = self._now
            self._stall += 1
            number = self._stall
            self._simulation.agenda.after(self._choice.patience, lambda: self._expired(number))

    def _expired(self, number: int) -> None:
        if number == self._stall and self._stalled is not None and self._left > 0:
            self._stalled, self._impatient = None, True
            self._go_on()

    # Passes.

    def _pass(self) -> None:
        if self._flight is not None or self._frontier <= self._rows:
            return
        known = max(0, self._known - self._frontier)
        if self._choice.drafts and known < self._choice.min_draft_tokens and self._due and not self._hurried:
            self._stand_idle()
            return
        self._stalled = None
        flight = Flight(self._frontier, self._frontier + known)
        if not self._choice.drafts:
            flight.run = min(self._choice.run, self._left)
            flight.half = flight.run // 2
        self._flight = flight
        delay = self._simulation.delay(self._simulation.world.target_trip)
        fed = self._unread + (1 + (self._choice.tree_nodes or known) if known else 1)
        self._unread = 0
        self._simulation.agenda.after(delay, lambda: self._forward(flight, fed))

    def _forward(self, flight: Flight, tokens: int) -> None:
        self._simulation.target.submit(self, tokens, lambda done: self._forwarded(flight, done))

    def _forwarded(self, flight: Flight, done: StepDone) -> None:
        if flight.run:
            flight.run -= 1
            if flight.run and self._left > 0:
                self._forward(flight, 1)
        over = not flight.run
        trip = self._simulation.world.target_trip
        self._simulation.handle(trip, lambda: self._returned(flight, done, over), flight.half > 0)

    def _returned(self, flight: Flight, done: StepDone, over: bool) -> None:
        if self._left <= 0:
            return
        plain = flight.half > 0 or not self._choice.drafts
        self._controller.observe(choices.PassSeen(done.seconds, 1, done.sessions, done.fed), self._now)
        if over:
            self._flight = None
        if plain:
            self._emit(1, settled=1)
            if over and self._left > 0:
                self._next(flight.following)
            elif flight.following is None and self._left > 0:
                self._go_on_with_run(flight)
        elif flight.last >= flight.first:
            self._rows = flight.last
        self._go_on()

    def _go_on_with_run(self, flight: Flight) -> None:
        """The run ends once drafts are wanted; half of it is drawn: more of it."""
        ends_soon = flight.run <= flight.half and self._left > flight.run
        if ends_soon or self._controller.wants_drafter(self._now):
            choice = self._controller.choose(self._now)
            if choice.drafts:
                flight.following = choice
                self._simulation.agenda.after(self._simulation.delay(self._simulation.world.target_trip), flight.end)
            elif ends_soon:
                flight.run, flight.half = flight.run + min(choice.run, self._left), choice.run // 2


def choice_of(arm: Choice) -> Choice:
    """As a fixed one."""
    return replace(arm, chunk=2) if arm.overlap else arm


def fixed_speed(world: World, choice: Choice, tokens: int, slots: int, seconds: float, seed: int = 0) -> float:
    """Tokens a second of all outputs, if all epochs are run alike."""
    return Simulation(world, lambda: Fixed(choice), tokens, slots, seed).speed(seconds)


def arms_of(world: World) -> Arms:
    """Of requests of a method whose target draws by itself, or of another one."""
    return WITH_TREES if world.samples else CHAINS


def controllers(arms: Arms = CHAINS, kind: Kind = KIND) -> Callable[[], Controller]:
    """Makes controllers of outputs that share a new one."""
    shared = TargetController()
    return lambda: shared.output(kind, arms)


@cache
def arm_speeds(world: World, outputs: int) -> dict[Choice, float]:
    """Tokens a second of all outputs with each arm."""
    seconds = max(1.0, 150 * world.pass_base)
    return {arm: fixed_speed(world, choice_of(arm), TOKENS, outputs, seconds) for arm in arms_of(world)}


@dataclass(frozen=True)
class Shares:
    """The speed of the controller's outputs."""

    of_best: float  # ... of the fastest arm
    of_plain: float
    gain: float  # of the fastest arm beside no drafter


def measured(world: World, outputs: int, seed: int = 1, first: int = 300, then: int = 500) -> Shares:
    """In a number of passes, after others in which the controller begins to learn, as benchmarks measure it."""
    speeds = arm_speeds(world, outputs)
    simulation = Simulation(world, controllers(arms_of(world)), TOKENS, outputs, seed)
    simulation.speed(first * world.pass_base)
    found = simulation.speed(then * world.pass_base)
    best, plain = max(speeds.values()), speeds[PLAIN]
    return Shares(found / best, found / plain, best / plain)


def cold(world: World, outputs: int = 5, tokens: int = 96, seed: int = 1) -> Shares:
    """Outputs one after another from the first token on; what stalls in first uses take is left out."""
    speeds = arm_speeds(replace(world, stall=0.0), 1)
    best = max(speeds, key=lambda arm: speeds[arm])

    def seconds(world: World, make: Callable[[], Controller]) -> float:
        simulation = Simulation(world, make, tokens, 1, seed)
        return simulation.until_ended(outputs) - simulation.target.stalled - simulation.drafter.stalled

    auto = seconds(world, controllers(arms_of(world)))
    fastest, plain = (seconds(replace(world, stall=0.0), partial(Fixed, choice_of(arm))) for arm in (best, PLAIN))
    return Shares(fastest / auto, plain / auto, plain / fastest)


def in_batches(world: World, outputs: int, tokens: int, batches: int, seed: int = 1) -> float:
    """Outputs that begin together, and again when all have ended; of the fastest arm, the first batch left out."""

    def speed(make: Callable[[], Controller]) -> float:
        simulation = Simulation(world, make, tokens, 0, seed)
        began = 0.0
        for batch in range(1 + batches):
            began = simulation.ended[-1] if batch == 1 else began
            simulation.resize(outputs)
            simulation.resize(0)
            simulation.until_ended((1 + batch) * outputs)
        return outputs * tokens * batches / (simulation.ended[-1] - began)

    return speed(controllers(arms_of(world))) / max(speed(partial(Fixed, choice_of(arm))) for arm in arms_of(world))

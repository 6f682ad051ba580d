"""Whole sessions whose messages come when a schedule says so.

A schedule knows how many steps have been made, nothing else: neither what was drawn nor what was revealed.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from itertools import count

from crossdraft.session.events import Timer
from crossdraft.session.session import Session
from crossdraft.speculation.choice import Choice, Observation
from crossdraft.verification.chooser import Chooser
from crossdraft.verification.methods import Method
from tests.clock import Stage
from tests.ports import OPEN_TARGET, assignment
from tests.tables import ToyDrafter, ToyTarget
from tests.verification.toys import Toy, drafter_of
from tests.vocabularies import pair_of

MOST_STEPS = 300


class Act(Enum):
    """What can happen in a step."""

    DRAFT = "D"  # the drafter's next reply
    TARGET = "T"  # the next reply of the target that has owed one for longest
    OTHER = "O"  # ... of the one after it
    STALL = "S"  # the wait for draft tokens has lasted long enough
    LOSE_DRAFTER = "d"
    LOSE_TARGET = "t"


@dataclass(frozen=True)
class Schedule:
    """One act a step, again and again; what cannot happen gives way to what can."""

    pattern: str  # of acts
    opens: int = 0  # the step from which on drafters can be reached
    losses: tuple[tuple[int, str], ...] = ()  # steps with a loss instead

    def play(self, stage: Stage) -> None:
        """From the first command to the last."""
        stage.start()
        for step in count():
            if stage.finished is not None:
                return
            assert step < MOST_STEPS, "the session does not end"
            for lane, target in list(stage.opening.items()):
                if target or step >= self.opens:
                    stage.open(lane)
            self.step(stage, Act(dict(self.losses).get(step, self.pattern[step % len(self.pattern)])))

    def step(self, stage: Stage, act: Act) -> None:
        """The act, or the first one that is possible."""
        for one in (act, Act.TARGET, Act.DRAFT, Act.STALL):
            if self.possible(stage, one):
                return
        assert stage.opening, "nothing will ever happen again"

    def possible(self, stage: Stage, act: Act) -> bool:
        """Do it, if it is."""
        targets = [lane for lane in stage.owing if lane in stage.targets]
        match act:
            case Act.DRAFT:
                return any(stage.reply(lane) is not None for lane in stage.owing if lane in stage.drafters)
            case Act.TARGET | Act.OTHER:
                place = int(act is Act.OTHER)
                return any(stage.reply(lane) is not None for lane in targets[place : place + 1])
            case Act.STALL if Timer.STALL in stage.timers:
                stage.expire(Timer.STALL)
                return True
            case Act.LOSE_DRAFTER if stage.drafters:
                stage.lose(next(iter(stage.drafters)))
                return True
            case Act.LOSE_TARGET if stage.targets:
                stage.lose(next(iter(stage.targets)))
                return True
        return False


@dataclass(frozen=True)
class InTurn:
    """Choices one after the other, whatever is observed."""

    choices: tuple[Choice, ...]
    waits_for_drafter: bool = False
    unwanted: int = 0  # times that it is asked for a drafter and wants none

    def fresh(self) -> "Turns":
        """A controller that begins with the first."""
        return Turns(self)


class Turns:
    """A controller that keeps what it was told."""

    def __init__(self, given: InTurn) -> None:
        self._given = given
        self._chosen = self._asked = 0
        self.seen: list[Observation] = []

    @property
    def waits_for_drafter(self) -> bool:
        return self._given.waits_for_drafter

    def observe(self, seen: Observation, now: float) -> None:
        self.seen.append(seen)

    def wants_drafter(self, now: float) -> bool:
        self._asked += 1
        return self._asked > self._given.unwanted

    def choose(self, now: float) -> Choice:
        self._chosen += 1
        return self._given.choices[(self._chosen - 1) % len(self._given.choices)]

    def review(self, now: float) -> Choice:
        return self.choose(now)


@dataclass(frozen=True)
class Overlapped:
    """How a session over toys is run."""

    toy: Toy
    method: Method
    choices: tuple[Choice, ...]
    schedule: Schedule
    length: int = 2  # tokens
    head: int = 99  # ids of a row that are sent unasked
    targets: int = 1
    tree_budget: int = 16
    paths: int = 2
    salt: str = "target"  # of the target's distributions
    committed: tuple[int, ...] = ()  # the output's first tokens, from an earlier session
    unwanted: int = 0  # times that the controller wants no drafter when it is asked
    play: Callable[[Schedule, Stage], None] = Schedule.play

    @property
    def stops(self) -> frozenset[int]:
        return self.toy.stops

    def run(self, chooser: Chooser) -> tuple[int, ...]:
        """The output of one session, all of whose random choices are the chooser's."""
        stage = self.stage(chooser)
        self.play(self.schedule, stage)
        return tuple(one.token for one in stage.emitted)

    def stage(self, chooser: Chooser) -> Stage:
        """The session and its services, before anything has happened."""
        pair = pair_of(self.toy.target, self.toy.drafter, self.toy.stops)
        given = assignment(
            self.method,
            pair=pair,
            chooser=chooser,
            open_target=replace(OPEN_TARGET, prompt=(0,), head=min(self.head, 64)),
            controller=InTurn(self.choices, unwanted=self.unwanted).fresh(),
            max_tokens=self.length,
            targets=self.targets,
            tree_budget=self.tree_budget,
            paths=self.paths,
            committed=self.committed,
        )

        def drafter() -> ToyDrafter:
            return drafter_of(self.method, pair, chooser)

        committed = self.committed, pair.target.letters_of(self.committed)
        return Stage(Session(given), self.target(chooser), drafter, self.method.drafter_rows, committed)

    def target(self, chooser: Chooser | None) -> ToyTarget:
        """The target; its own draws are the chooser's."""
        return ToyTarget(len(self.toy.target), self.head, chooser, salt=self.salt)

"""Pairs of small vocabularies that have been trouble, and whole sessions over them: in lock-step, or by a schedule,
which knows how many steps have been made, and neither what was drawn nor what was revealed."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import lru_cache, partial
from itertools import count, cycle

import numpy as np
import torch

from crossdraft.engine.sampling.distributions import History, LogitsProcessor, Nodes, distributions
from crossdraft.session.events import Timer
from crossdraft.session.session import Session
from crossdraft.speculation.choice import Choice, Observation, lock_step
from crossdraft.text.letters import ControlRole, Side
from crossdraft.text.pairs import Pair
from crossdraft.types.messages import SamplingOptions
from crossdraft.types.rows import Ids, Probabilities, Row
from crossdraft.verification.chooser import Chooser
from crossdraft.verification.methods import COUPLED, COUPLED_SHARED, RDK, SLEM, STANDARD, TLI, UNION, Method
from tests import tables
from tests.clock import Stage, run_session
from tests.ports import OPEN_TARGET, assignment
from tests.tables import RedistributingDrafter, ToyDrafter, ToyTarget, autoregressive_distribution, pair_of
from tests.verification.enumerating import distance, distribution_of, total_variation

END = ControlRole.END_OF_SEQUENCE.letter
TURN = ControlRole.END_OF_TURN.letter
EXACT = 1e-12
ROWS = (STANDARD, UNION, TLI, RDK, COUPLED, COUPLED_SHARED)  # methods that judge rows
METHODS = (*ROWS[:4], SLEM, *ROWS[4:])  # that draft on
MOST_STEPS = 300


@dataclass(frozen=True)
class Toy:
    """Two vocabularies; the target's end symbols are its stop ids."""

    name: str
    target: tuple[str, ...]
    drafter: tuple[str, ...]

    @property
    def stops(self) -> frozenset[int]:
        return frozenset(token for token, letters in enumerate(self.target) if letters in (END, TURN))

    def with_itself(self) -> "Toy":
        """The target's vocabulary on both sides, which `standard` requires."""
        return Toy(self.name, self.target, self.target)


TOYS = (
    Toy("same", ("a", "b", "c"), ("a", "b", "c")),
    Toy("nested prefixes", ("a", "b", "ab"), ("a", "ba", "b")),
    Toy("prefixes of one another", ("a", "aa"), ("a", "aaa")),
    Toy("duplicates", ("a", "a", "b"), ("a", "b", "b")),
    Toy("end symbol", ("a", "b", END), ("a", END, "ab")),
    Toy("end symbol in the drafter only", ("a", "ab"), ("a", END)),
    Toy("one inside the other", ("a", "b", "ab"), ("a", "b")),
    Toy("nothing shared", ("ab", "b"), ("a", "bb")),
)
NAMED = {toy.name: toy for toy in TOYS}
SAME, NESTED, TWO, _, ENDING, *_ = TOYS
# More of them, for methods that compare letters one by one.
TEXTS = (
    Toy("the target inside the drafter", ("a", "b"), ("a", "b", "ab")),
    Toy("several tokens over one", ("a", "aba", "b"), ("ab", "a", "ba")),
    Toy("a token over several", ("abab", "b", "aba"), ("a", "b", "abb")),
    Toy("symbols without a role", ("a", *map(Side.TARGET.control, (0, 1))), ("aa", Side.DRAFTER.control(0))),
)
# The same vocabulary, but for rows that only one side has, or for the roles of control symbols.
ALIKE = (
    Toy("more rows in the target", ("a", "b", Side.TARGET.control(0)), ("a", "b")),
    Toy("more rows in the drafter", ("a", END), ("a", END, Side.DRAFTER.control(0), Side.DRAFTER.control(1))),
    Toy("other ends", ("a", END, Side.TARGET.control(0)), ("a", Side.DRAFTER.control(0), END)),
    Toy("an end more", ("a", TURN, END), ("a", Side.DRAFTER.control(0), END)),
)


@lru_cache(maxsize=2**14)
def with_options(options: SamplingOptions, target: tuple[str, int, float], path: tuple[int, ...]) -> np.ndarray:
    """The distribution of a toy target (its salt, size and temperature), processed as the engine does."""
    salt, size, temperature = target
    logits = torch.from_numpy(np.log(tables.tempered(tables.pseudo_distribution(salt, path, size), temperature)))[None]
    processor = LogitsProcessor(options, logits.shape[-1], logits.device)
    return distributions([Nodes(logits, processor, History(path, ((),)))])[0].numpy()


@dataclass
class OptionedTarget(ToyTarget):
    """A toy target with penalties and bans, which the engine applies by the tokens before each row."""

    options: SamplingOptions = field(default_factory=SamplingOptions)

    def distribution(self, path: tuple[int, ...]) -> np.ndarray:
        return with_options(self.options, (self.salt, self.size, self.temperature), path)


class Enumerable:
    """A session over a toy, all of whose random choices are a chooser's."""

    toy: Toy
    length: int  # tokens
    target: Callable[[Chooser | None], ToyTarget]
    played: Callable[[Chooser], Stage]

    @property
    def stops(self) -> frozenset[int]:
        return self.toy.stops

    def run(self, chooser: Chooser) -> tuple[int, ...]:
        """The output of one session."""
        return tuple(one.token for one in self.played(chooser).emitted)


def wanted(given: Enumerable) -> dict[tuple[int, ...], float]:
    """The distribution of the target's own output."""
    return autoregressive_distribution(given.target(None), given.stops, given.length)


def error(given: Enumerable) -> float:
    """The largest error of the probability of an output; a session is exact if it is below EXACT."""
    return distance(distribution_of(given.run), wanted(given))


def bias(given: Enumerable) -> float:
    """The total variation from the target's own output."""
    return total_variation(distribution_of(given.run), wanted(given))


def mean(given: Enumerable, name: str) -> float:
    """The expectation of one of the session's counts."""
    found = distribution_of(lambda chooser: getattr(given.played(chooser).session.counts, name))
    return sum(count * chance for count, chance in found.items())


@dataclass(frozen=True)
class Setup(Enumerable):
    """How a session over toys is run."""

    toy: Toy
    method: Method
    draft_tokens: int  # K
    length: int  # tokens
    head: int = 99  # ids of a row that are sent unasked
    temperature: float = 1.0
    ignore_end: bool = False
    nodes: int = 0  # of a draft tree; 0: a chain
    options: SamplingOptions | None = None  # set: what the target applies to its logits, besides the temperature
    states: bool = False  # the drafter reads the target's hidden states

    def target(self, chooser: Chooser | None) -> ToyTarget:
        made = ToyTarget if self.options is None else partial(OptionedTarget, options=self.options)
        return made(len(self.toy.target), self.head, chooser, self.temperature, states=self.states)

    def played(self, chooser: Chooser) -> Stage:
        pair = pair_of(self.toy.target, self.toy.drafter, self.toy.stops)
        controller = lock_step(self.draft_tokens, self.nodes)
        asked = {"max_tokens": self.length, "ignore_eos": self.ignore_end}
        given = assignment(self.method, pair=pair, chooser=chooser, controller=controller, **asked)
        drafter = drafter_of(self.method, pair, chooser, self.temperature) if given.open_drafter else None
        return run_session(Session(given), self.target(chooser), drafter)

    @property
    def stops(self) -> frozenset[int]:
        return frozenset() if self.ignore_end else self.toy.stops


def drafter_of(method: Method, pair: Pair, chooser: Chooser, temperature: float = 1.0) -> ToyDrafter:
    """A drafter that proposes what the method asks for."""
    allowed = pair.shared_drafter_ids if method.shared_only else None
    if method.redistributed:
        given = pair.drafter.letters, chooser, allowed, temperature
        return RedistributingDrafter(*given, target_letters=pair.target.letters)
    return ToyDrafter(pair.drafter.letters, chooser, allowed, temperature)


def as_ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int64)


def row_of(ids: Ids | list[int], weights: Probabilities | list[float], total: float | None = None) -> Row:
    """A normalized row from weights. Without `total` it is whole; else the rest to `total` is the tail."""
    values = np.asarray(weights, dtype=np.float64)
    listed = float(values.sum())
    scale = listed if total is None else max(total, listed)
    return Row(np.asarray(ids, dtype=np.int64), values / scale, max(0.0, 1.0 - listed / scale))


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


@dataclass
class Turns:
    """A controller that makes choices one after the other, whatever is observed, and keeps what it was told."""

    choices: tuple[Choice, ...]
    waits_for_drafter: bool = False
    unwanted: int = 0  # times that it is asked for a drafter and wants none
    interrupts: bool = False  # it wants one while the target draws by itself, too
    seen: list[Observation] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._left, self._chosen = cycle(self.choices), 0

    def observe(self, seen: Observation, now: float) -> None:
        self.seen.append(seen)

    def wants_drafter(self, now: float) -> bool:
        self.unwanted -= 1
        return self.unwanted < 0 and (self.interrupts or not self._chosen)

    def choose(self, now: float) -> Choice:
        self._chosen += 1
        return next(self._left)

    review = choose


@dataclass(frozen=True)
class Overlapped(Enumerable):
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
    interrupts: bool = False  # it wants one while the target draws by itself, too
    play: Callable[[Schedule, Stage], None] = Schedule.play

    def played(self, chooser: Chooser) -> Stage:
        stage = self.stage(chooser)
        self.play(self.schedule, stage)
        return stage

    def stage(self, chooser: Chooser) -> Stage:
        """The session and its services, before anything has happened."""
        pair = pair_of(self.toy.target, self.toy.drafter, self.toy.stops)
        opening = replace(OPEN_TARGET, prompt=(0,), head=min(self.head, 64))
        controller = Turns(self.choices, unwanted=self.unwanted, interrupts=self.interrupts)
        asked = {name: getattr(self, name) for name in ("targets", "tree_budget", "paths", "committed")}
        asked |= {"pair": pair, "chooser": chooser, "max_tokens": self.length}
        given = assignment(self.method, open_target=opening, controller=controller, **asked)
        drafter = partial(drafter_of, self.method, pair, chooser)
        committed = self.committed, pair.target.letters_of(self.committed)
        return Stage(Session(given), self.target(chooser), drafter, self.method.drafter_rows, committed)

    def target(self, chooser: Chooser | None) -> ToyTarget:
        """The target; its own draws are the chooser's."""
        return ToyTarget(len(self.toy.target), self.head, chooser, salt=self.salt)

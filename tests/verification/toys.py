"""Pairs of small vocabularies that have been trouble, and whole sessions over them."""

from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Protocol

import numpy as np
import torch

from crossdraft.engine.distributions import History, LogitsProcessor, Nodes, distributions
from crossdraft.session.events import Emitted
from crossdraft.session.session import Session
from crossdraft.speculation.choice import lock_step
from crossdraft.text.letters import ControlRole, Side
from crossdraft.text.pairs import Pair
from crossdraft.types.messages import SamplingOptions
from crossdraft.types.rows import Ids, Probabilities, Row
from crossdraft.verification.chooser import Chooser
from crossdraft.verification.methods import Method
from tests.clock import run_session
from tests.ports import assignment
from tests.tables import (
    RedistributingDrafter,
    ToyDrafter,
    ToyTarget,
    autoregressive_distribution,
    pseudo_distribution,
    tempered,
)
from tests.verification.enumerating import EnumeratingChooser, distance, distribution_of, total_variation
from tests.vocabularies import pair_of

END = ControlRole.END_OF_SEQUENCE.letter
TURN = ControlRole.END_OF_TURN.letter
EXACT = 1e-12


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
SAME, NESTED, TWO, ENDING = (
    NAMED[name] for name in ("same", "nested prefixes", "prefixes of one another", "end symbol")
)
# More of them, for methods that compare letters one by one.
TEXTS = (
    Toy("the target inside the drafter", ("a", "b"), ("a", "b", "ab")),
    Toy("several tokens over one", ("a", "aba", "b"), ("ab", "a", "ba")),
    Toy("a token over several", ("abab", "b", "aba"), ("a", "b", "abb")),
    Toy(
        "symbols without a role", ("a", Side.TARGET.control(0), Side.TARGET.control(1)), ("aa", Side.DRAFTER.control(0))
    ),
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
    logits = torch.from_numpy(np.log(tempered(pseudo_distribution(salt, path, size), temperature)))[None]
    processor = LogitsProcessor(options, logits.shape[-1], logits.device)
    return distributions([Nodes(logits, processor, History(path, ((),)))])[0].numpy()


@dataclass
class OptionedTarget(ToyTarget):
    """A toy target with penalties and bans, which the engine applies by the tokens before each row."""

    options: SamplingOptions = field(default_factory=SamplingOptions)

    def distribution(self, path: tuple[int, ...]) -> np.ndarray:
        return with_options(self.options, (self.salt, self.size, self.temperature), path)


class Enumerable(Protocol):
    """A session over a toy, all of whose random choices are a chooser's."""

    @property
    def length(self) -> int: ...

    @property
    def stops(self) -> frozenset[int]: ...

    def target(self, chooser: EnumeratingChooser | None) -> ToyTarget: ...

    def run(self, chooser: EnumeratingChooser) -> tuple[int, ...]: ...


def wanted(given: Enumerable) -> dict[tuple[int, ...], float]:
    """The distribution of the target's own output."""
    return autoregressive_distribution(given.target(None), given.stops, given.length)


def error(given: Enumerable) -> float:
    """The largest error of the probability of an output; a session is exact if it is below EXACT."""
    return distance(distribution_of(given.run), wanted(given))


def bias(given: Enumerable) -> float:
    """The total variation from the target's own output."""
    return total_variation(distribution_of(given.run), wanted(given))


@dataclass(frozen=True)
class Setup:
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

    def target(self, chooser: EnumeratingChooser | None) -> ToyTarget:
        made = ToyTarget if self.options is None else partial(OptionedTarget, options=self.options)
        return made(len(self.toy.target), self.head, chooser, self.temperature, states=self.states)

    def run(self, chooser: EnumeratingChooser) -> tuple[int, ...]:
        """The output of one session, all of whose random choices are the chooser's."""
        return tuple(command.token for command in self.emitted(chooser))

    def emitted(self, chooser: EnumeratingChooser) -> tuple[Emitted, ...]:
        """The same with what is known of each token."""
        pair = pair_of(self.toy.target, self.toy.drafter, self.toy.stops)
        given = assignment(
            self.method,
            pair=pair,
            chooser=chooser,
            controller=lock_step(self.draft_tokens, self.nodes),
            max_tokens=self.length,
            ignore_eos=self.ignore_end,
        )
        drafter = drafter_of(self.method, pair, chooser, self.temperature) if given.open_drafter else None
        return tuple(run_session(Session(given), self.target(chooser), drafter).emitted)

    @property
    def stops(self) -> frozenset[int]:
        return frozenset() if self.ignore_end else self.toy.stops


def drafter_of(method: Method, pair: Pair, chooser: Chooser, temperature: float = 1.0) -> ToyDrafter:
    """A drafter that proposes what the method asks for."""
    allowed = pair.shared_drafter_ids if method.shared_only else None
    if method.redistributed:
        return RedistributingDrafter(
            pair.drafter.letters, chooser, allowed, temperature, target_letters=pair.target.letters
        )
    return ToyDrafter(pair.drafter.letters, chooser, allowed, temperature)


def as_ids(*tokens: int) -> np.ndarray:
    """Ids as an int64 array."""
    return np.array(tokens, dtype=np.int64)


def row_of(ids: Ids | list[int], weights: Probabilities | list[float], total: float | None = None) -> Row:
    """A normalized row from weights. Without `total` it is whole; else the rest to `total` is the tail."""
    values = np.asarray(weights, dtype=np.float64)
    listed = float(values.sum())
    scale = listed if total is None else max(total, listed)
    return Row(np.asarray(ids, dtype=np.int64), values / scale, max(0.0, 1.0 - listed / scale))

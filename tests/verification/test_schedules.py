"""Exact distributions when draft tokens come late: the walk settles, the draft catches up ("ahead").

A schedule says at each NeedDraftToken whether the next one is known. It may depend on what is revealed,
never on what is drawn but hidden (test_peeking has schedules that do, and are seen).
"""

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from crossdraft.text.letters import Letters
from crossdraft.types.rows import DraftToken, Row
from crossdraft.verification.methods import COUPLED, COUPLED_SHARED, RDK, SLEM, STANDARD, TLI, UNION, Method
from crossdraft.verification.walk import Emit, Ground, NeedDraftToken, NeedRow, NeedSample, Refused
from tests.tables import ToyTarget, autoregressive_distribution
from tests.verification.enumerating import EnumeratingChooser, distance, distribution_of, full
from tests.verification.toys import EXACT, NESTED, TEXTS, TOYS, Toy, as_ids, drafter_of
from tests.vocabularies import pair_of

LENGTH = 3
Known = Callable[[int, DraftToken], bool]  # (how many were asked for before, the hidden next one) -> is it known?


def row_for(need: NeedRow, distribution: np.ndarray) -> Row:
    """What a pass that knew the need would bring: the likeliest id and the listed ones."""
    ids = as_ids(*range(len(distribution))) if need.whole else np.union1d([int(distribution.argmax())], need.listed)
    return Row(ids, distribution[ids], 0.0 if len(ids) == len(distribution) else 1.0 - float(distribution[ids].sum()))


def walk_output(chooser: EnumeratingChooser, toy: Toy, method: Method, known: Known) -> tuple[int, ...]:
    """LENGTH tokens from walks over never-ending drafts, revealed by the schedule."""
    pair = pair_of(toy.target, toy.drafter, toy.stops)
    target = ToyTarget(len(toy.target), 99)
    output: list[int] = []
    asked = 0
    while True:
        text = pair.target.letters_of(output)
        drafter = drafter_of(method, pair, chooser)
        drafter.text = Letters(text)
        walk = method.walk(Ground(pair, chooser, len(text)))
        hidden: list[DraftToken] = []
        step = next(walk)
        while not isinstance(step, Refused):
            answer: DraftToken | Row | int | None = None
            match step:
                case NeedDraftToken():
                    hidden = hidden or [drafter.propose()]
                    answer = hidden.pop() if known(asked, hidden[0]) else None
                    asked += 1
                case NeedRow() as need:
                    answer = row_for(need, target.distribution(tuple(output)))
                case NeedSample():
                    answer = chooser.categorical(target.distribution(tuple(output)))
                case Emit(token):
                    output.append(token)
                    if len(output) == LENGTH or token in toy.stops:
                        return tuple(output)
            step = walk.send(answer)


def wanted(toy: Toy) -> dict[tuple[int, ...], float]:
    return autoregressive_distribution(ToyTarget(len(toy.target), 99), toy.stops, LENGTH)


def named(value: object) -> str:
    return str(getattr(value, "name", value))


def cells() -> list[tuple[Method, Toy]]:
    own = (UNION, SLEM, COUPLED)
    shared = [toy for toy in TOYS if toy.name != "nothing shared"]
    found = [(STANDARD, TOYS[0])] + [(method, toy) for method in (*own, TLI, RDK, COUPLED_SHARED) for toy in shared]
    return found + [(method, TOYS[-1]) for method in own] + [(COUPLED, toy) for toy in TEXTS]


PATTERNS = list(itertools.product((True, False), repeat=2))
GRID = [(method, toy, pattern) for method, toy in cells() for pattern in PATTERNS]


def usual(cell: tuple[Method, Toy, tuple[bool, ...]]) -> bool:
    """Each method over each pair with one that mixes both, and over the pair of most quirks with all."""
    method, toy, pattern = cell
    return toy is NESTED or pattern == PATTERNS[1 + (len(method.name) + TOYS.index(toy) if toy in TOYS else 0) % 2]


@pytest.mark.parametrize(
    ("method", "toy", "pattern"), [cell if usual(cell) else full(*cell) for cell in GRID], ids=named
)
def test_any_schedule_that_sees_only_what_is_revealed(method: Method, toy: Toy, pattern: tuple[bool, ...]) -> None:
    def delayed(chooser: EnumeratingChooser) -> tuple[int, ...]:
        return walk_output(chooser, toy, method, lambda asked, _: pattern[asked % len(pattern)])

    assert distance(distribution_of(delayed), wanted(toy)) < EXACT

"""String-level rejection sampling: its output law by enumeration, the law of pieces, residuals in blocks."""

import pytest

from crossdraft.verification.methods import SLRS
from tests.fakes import autoregressive_law
from tests.verification.enumerating import distance, law_of
from tests.verification.toys import TOYS, Setup

EXACT = 1e-12


def cells() -> list[Setup]:
    out = []
    for toy in TOYS:
        shapes = [(1, 3), (2, 3), (3, 2)]
        if len(toy.target) == len(toy.drafter) == 2:
            shapes.append((3, 4))
        out += [Setup(toy, SLRS, proposals, length) for proposals, length in shapes]
    return out


def error(setup: Setup) -> float:
    wanted = autoregressive_law(setup.target(None), setup.stops, setup.length)
    return distance(law_of(setup.run), wanted)


@pytest.mark.parametrize("setup", cells(), ids=lambda setup: f"{setup.toy.name}-K{setup.proposals}")
def test_output_law_is_the_targets(setup: Setup) -> None:
    assert error(setup) < EXACT

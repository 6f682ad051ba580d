"""The output law of whole sessions, by enumeration of every random choice, against the target's own."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from crossdraft.verification import rejection
from crossdraft.verification.methods import SLEM, STANDARD, TLI, Guess, Method
from crossdraft.verification.walk import Emit, Ground, Kind, Refused, Walk, next_proposal, target_row
from tests.fakes import autoregressive_law
from tests.verification.enumerating import distance, law_of, total_variation
from tests.verification.toys import TOYS, Setup, Toy

EXACT = 1e-12


def with_itself(toy: Toy) -> Toy:
    """The target's vocabulary on both sides, which `standard` asks for."""
    return Toy(toy.name, toy.target, toy.target)


def suitable(method: Method) -> list[Toy]:
    return [with_itself(toy) for toy in TOYS] if method.same_vocabulary else list(TOYS)


def cells() -> list[Setup]:
    """K = 1 to 3; with two letters on a side also a round whose third proposal is judged, and one after it."""
    out = []
    for method in (STANDARD, TLI, SLEM):
        for toy in suitable(method):
            shapes = [(1, 3), (2, 3), (3, 2)]
            if len(toy.target) == len(toy.drafter) == 2:
                shapes.append((3, 4))
            out += [Setup(toy, method, proposals, length) for proposals, length in shapes]
    return out


def named(setup: Setup) -> str:
    return f"{setup.method.name}-{setup.toy.name}-K{setup.proposals}"


def error(setup: Setup) -> float:
    wanted = autoregressive_law(setup.target(None), setup.stops, setup.length)
    return distance(law_of(setup.run), wanted)


@pytest.mark.parametrize("setup", cells(), ids=named)
def test_output_law_is_the_targets(setup: Setup) -> None:
    assert error(setup) < EXACT


@pytest.mark.parametrize("head", [1, 2])
@pytest.mark.parametrize("method", [STANDARD, TLI], ids=lambda method: method.name)
def test_truncated_rows_have_the_same_law(method: Method, head: int) -> None:
    for toy in suitable(method):
        assert error(Setup(toy, method, 2, 2, head=head)) < EXACT, toy.name


@pytest.mark.parametrize("method", [STANDARD, TLI, SLEM], ids=lambda method: method.name)
@pytest.mark.parametrize(("proposals", "length"), [(1, 3), (2, 3), (3, 2)])
def test_ignoring_the_end_symbol(method: Method, proposals: int, length: int) -> None:
    toy = next(toy for toy in suitable(method) if toy.name == "end symbol")
    assert error(Setup(toy, method, proposals, length, ignore_end=True)) < EXACT


@pytest.mark.parametrize("method", [STANDARD, TLI, SLEM], ids=lambda method: method.name)
def test_temperature_zero_is_the_greedy_text(method: Method) -> None:
    for toy in suitable(method):
        setup = Setup(toy, method, 3, 6, temperature=0)
        law = law_of(setup.run)
        assert law == autoregressive_law(setup.target(None), setup.stops, 6), toy.name
        assert len(law) == 1


def test_a_broken_acceptance_rule_is_seen() -> None:
    """Accepting with p instead of p / q, and drawing corrections from p instead of (p - q)+."""
    toy = next(toy for toy in TOYS if toy.name == "same")
    for broken in (accept_with_p, correct_from_p):
        method = Method("broken", broken, "", (Guess.OWN,), shared_only=True)
        setup = Setup(toy, method, 2, 2)
        wanted = autoregressive_law(setup.target(None), setup.stops, setup.length)
        assert total_variation(law_of(setup.run), wanted) > 0.01


def accept_with_p(ground: Ground) -> Walk:
    return _broken(ground, lambda p, q: p, residual=True)


def correct_from_p(ground: Ground) -> Walk:
    return _broken(ground, lambda p, q: p / q, residual=False)


def _broken(ground: Ground, acceptance: Callable[[float, float], float], *, residual: bool) -> Walk:
    """Rejection sampling with the wrong acceptance or the wrong correction."""
    offset = ground.offset
    while (proposal := (yield from next_proposal())) is not None:
        token, q = rejection.in_target_ids(ground.pair, proposal)
        row = yield from target_row(listed=q.ids, judging=True)
        if not ground.chooser.bernoulli(acceptance(row.probability(token), q.probability(token))):
            token = yield from rejection.draw_residual(ground.chooser, row, q if residual else None)
            yield Emit(token, Kind.CORRECTED)
            yield Refused(offset)
            return
        yield Emit(token, Kind.ACCEPTED)
        offset += len(ground.pair.target.letters[token])
    yield from rejection.walk(replace(ground, offset=offset))

"""The output law of whole sessions, by enumeration of every random choice, against the target's own."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from crossdraft.verification import rejection
from crossdraft.verification.methods import SLEM, STANDARD, TLI, Method
from crossdraft.verification.walk import Emit, Ground, Kind, Refused, Walk, next_proposal, target_row
from tests.fakes import autoregressive_law
from tests.verification.enumerating import distance, law_of, total_variation
from tests.verification.toys import TOYS, Setup

EXACT = 1e-12


def cells() -> list[Setup]:
    out = []
    for toy in TOYS:
        for method in (STANDARD, TLI, SLEM):
            if method.same_vocabulary and toy.target != toy.drafter:
                continue
            for proposals, length in ((1, 3), (2, 3), (3, 2)):
                out.append(Setup(toy, method, proposals, length))
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
    toys = [toy for toy in TOYS if not method.same_vocabulary or toy.target == toy.drafter]
    for toy in toys:
        assert error(Setup(toy, method, 2, 2, head=head)) < EXACT, toy.name


@pytest.mark.parametrize("method", [TLI, SLEM], ids=lambda method: method.name)
def test_ignoring_the_end_symbol(method: Method) -> None:
    toy = next(toy for toy in TOYS if toy.name == "end symbol")
    assert error(Setup(toy, method, 2, 3, ignore_end=True)) < EXACT


@pytest.mark.parametrize("method", [STANDARD, TLI, SLEM], ids=lambda method: method.name)
def test_temperature_zero_is_the_greedy_text(method: Method) -> None:
    for toy in TOYS:
        if not method.same_vocabulary or toy.target == toy.drafter:
            setup = Setup(toy, method, 3, 6, temperature=0)
            law = law_of(setup.run)
            assert law == autoregressive_law(setup.target(None), setup.stops, 6), toy.name
            assert len(law) == 1


def test_a_broken_acceptance_rule_is_seen() -> None:
    """Accepting with p instead of p / q, and drawing corrections from p instead of (p - q)+."""
    toy = next(toy for toy in TOYS if toy.name == "same")
    for broken in (accept_with_p, correct_from_p):
        method = Method("broken", broken, False, False, True, False, False, "")
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

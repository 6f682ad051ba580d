"""Audits: honest drafters pass, one that lies about its rows is caught."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossdraft.client import Generation, Overlap, Pipeline, SamplingOptions
from crossdraft.engine.sampler import Clocks
from crossdraft.session.assignment import Audit
from crossdraft.types.messages import Drafted, NoiseKey
from crossdraft.types.rows import DraftToken, Probabilities, Row, Whose
from crossdraft.verification.methods import SLEM
from crossdraft.verification.noise import KeyedNoise
from tests.client.together import ended
from tests.ports import assignment
from tests.tables import pseudo_distribution
from tests.vocabularies import pair_of

PAIR = pair_of(("a", "b", "ab", "ba", "c"), ("a", "b", "bc", "cab", "a", "aa"))
SMALL = pair_of(("a", "b", "ab"), ("a", "b", "ba"))
NOISES = KeyedNoise.of(PAIR.drafter), KeyedNoise.of(PAIR.target)
SHARPNESS = 3.0  # of the toys' rows: a lie about a flat row is small
PEAKED = 0.2  # temperature of the tiny drafter, whose rows are flat at 1
GREEDY = SamplingOptions(temperature=0)  # the tiny target's likeliest tokens are text that the drafter can read
Distribution = Callable[[Probabilities], Probabilities]


def audit(seed: int, each_epoch: bool = True) -> Audit:
    return Audit(NoiseKey(seed, 5), each_epoch, *NOISES)


def drafted(given: Audit, epoch: int, offset: int, drawn_from: Distribution, whose: Whose, count: int = 5) -> Drafted:
    """A draft whose rows are the toys' distributions, and whose draws are from `drawn_from` of them."""
    key = NoiseKey(given.key.seed, epoch) if given.each_epoch else given.key
    vocabulary, noise = (PAIR.drafter, NOISES[0]) if whose is Whose.DRAFTER else (PAIR.target, NOISES[1])
    draft_tokens = []
    for place in range(count):
        distribution = pseudo_distribution("toy", (epoch, offset, place), vocabulary.size) ** SHARPNESS
        row = Row(np.arange(vocabulary.size), distribution / distribution.sum())
        token = noise.draw(row.ids, drawn_from(row.probabilities), key, offset)
        draft_tokens.append(DraftToken(token, row, whose))
        offset += len(vocabulary.letters[token])
    return Drafted(epoch, tuple(draft_tokens), 0.0)


def honest(probabilities: Probabilities) -> Probabilities:
    return probabilities


def flattened(probabilities: Probabilities) -> Probabilities:
    return np.sqrt(probabilities)


OFFSETS = st.integers(0, 10**6)
FEW = 12  # examples, of a hundred draws each


@given(st.integers(0, 2**64 - 1), st.integers(1, 10**6), OFFSETS, st.booleans(), st.sampled_from(Whose))
def test_an_honest_draft_is_never_blamed(seed: int, epoch: int, offset: int, each: bool, whose: Whose) -> None:
    given = audit(seed, each)
    assert given.fault_of(drafted(given, epoch, offset, honest, whose), offset, PAIR) == ""


@settings(max_examples=FEW)
@given(st.integers(0, 2**64 - 1), st.sampled_from(Whose))
def test_a_lie_about_the_row_is_found_within_a_few_tens_of_draft_tokens(seed: int, whose: Whose) -> None:
    given = audit(seed)
    drafts = (drafted(given, epoch, 7 * epoch, flattened, whose) for epoch in range(1, 21))
    faults = [given.fault_of(draft, 7 * draft.epoch, PAIR) for draft in drafts]
    assert any("was not drawn from its row" in fault for fault in faults)


@settings(max_examples=FEW)
@given(st.integers(0, 2**64 - 1), OFFSETS)
def test_draws_of_another_epoch_or_place_are_blamed_in_the_end(seed: int, offset: int) -> None:
    given = audit(seed)
    drafts = [drafted(given, epoch, offset, honest, Whose.DRAFTER) for epoch in range(1, 21)]
    assert any(given.fault_of(draft, offset + 1, PAIR) for draft in drafts)
    renamed = [Drafted(draft.epoch + 1, draft.draft_tokens, 0.0) for draft in drafts]
    assert any(given.fault_of(draft, offset, PAIR) for draft in renamed)


def test_a_draft_token_without_its_row_is_blamed() -> None:
    assert "without the row" in audit(1).fault_of(Drafted(1, (DraftToken(0),), 0.0), 0, PAIR)


def test_rows_are_checked_before_draws_are_whatever_the_method_needs() -> None:
    given = replace(
        assignment(SLEM), audit=Audit(NoiseKey(1), True, *map(KeyedNoise.of, (SMALL.drafter, SMALL.target)))
    )
    rows = (None, Row(np.array([99]), np.ones(1)), Row(np.array([1]), np.ones(1)))
    faults = [given.fault_of(Drafted(1, (DraftToken(0, row),), 0.0), 0, 1) for row in rows]
    wanted = ("without the whole row", "has ids beyond 2", "cannot give it")
    assert all(text in fault for text, fault in zip(wanted, faults, strict=True)), faults


async def finished(
    pipeline: Pipeline, method: str, audit: bool = True, overlap: Overlap = Overlap.OFF, tokens: int = 24
) -> Generation:
    asked = {"method": method, "audit": audit, "allow_inexact": True, "drafter_temperature": PEAKED}
    prompt = "def main(argument):"
    return await ended(pipeline.generate(prompt, max_tokens=tokens, options=GREEDY, overlap=overlap, **asked))


# Tokens that both have, scores; a key for each epoch, and the target's. The others draw like one of them.
CASES = [("coupled-shared", Overlap.OFF), ("slrs", Overlap.OFF), ("coupled", Overlap.ON), ("seeded", Overlap.ON)]


@pytest.mark.usefixtures("drafter_first")
@pytest.mark.parametrize(("method", "overlap"), CASES)
async def test_a_real_drafter_passes_and_changes_nothing(pipeline: Pipeline, method: str, overlap: Overlap) -> None:
    audited, plain = [await finished(pipeline, method, audit, overlap, 12) for audit in (True, False)]
    assert audited.statistics.drafter_lost == ""
    assert audited.statistics.audited == audited.statistics.draft_tokens > 0
    assert audited.ids == plain.ids


@pytest.mark.parametrize("method", ["coupled", "seeded"])
async def test_a_real_drafter_that_lies_is_given_up(pipeline: Pipeline, method: str, monkeypatch: pytest.MonkeyPatch):
    """It draws from q^0.5, and says q."""
    draw = Clocks.draw
    monkeypatch.setattr(Clocks, "draw", lambda clocks, rows, *given: draw(clocks, rows.sqrt(), *given))
    generation = await finished(pipeline, method)
    assert "was not drawn from its row" in generation.statistics.drafter_lost
    assert generation.statistics.draft_tokens < 60
    assert len(generation.ids) == generation.statistics.tokens > 0  # the target goes on alone

"""Acceptance by place in a round."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossdraft.session.epoch import Epoch, Verdict
from crossdraft.speculation.choice import PLAIN
from crossdraft.text.letters import Letters
from crossdraft.types.rows import DraftToken
from crossdraft.types.statistics import Counts, Kind, Statistics, Times, statistics_of
from crossdraft.verification.chooser import RandomChooser
from crossdraft.verification.walk import Emit, Ground, Refused, Walk
from tests.vocabularies import pair_of

PAIR = pair_of(("a", "b", "ab", "abc"), ("a", "b", "bc"))
NO_TIMES = Times(0.0, 0.0, 0.0, 0.0, 0, 0)


def figures(counts: Counts) -> Statistics:
    return statistics_of("slem", 3, 1, counts, NO_TIMES)


def test_each_place_has_its_own_share() -> None:
    counts = Counts()
    counts.round(3, 3, False)
    counts.round(3, 1, True)
    counts.round(2, 0, True)
    counts.round(3, 1, False)  # the end came before the second was judged
    counts.round(0, 0, False)  # nothing was proposed
    found = figures(counts)
    assert (found.drafted_at, found.judged_at, found.accepted_at) == ((4, 4, 3), (4, 2, 1), (3, 1, 1))
    assert found.acceptance_at == (0.75, 0.5, 1.0)
    assert found.accepted_length == pytest.approx(5 / 4)


def test_without_a_drafter_there_is_nothing_to_say() -> None:
    found = figures(Counts())
    assert (found.acceptance_at, found.accepted_length) == ((), 0.0)


ROUNDS = st.lists(
    st.integers(0, 5).flatmap(lambda k: st.tuples(st.just(k), st.integers(0, k), st.booleans())), max_size=20
)


@given(ROUNDS)
def test_judged_are_those_after_accepted_ones_only(rounds: list[tuple[int, int, bool]]) -> None:
    counts = Counts()
    for proposed, accepted, refused in rounds:
        counts.round(proposed, accepted, refused)
    places = range(len(counts.drafted_at))
    assert len(counts.judged_at) == len(counts.accepted_at) == len(places)
    assert all(counts.accepted_at[at] <= counts.judged_at[at] <= counts.drafted_at[at] for at in places)
    assert all(counts.judged_at[at] <= counts.accepted_at[at - 1] for at in places if at)
    assert sum(counts.accepted_at) == sum(accepted for _, accepted, _ in rounds)
    assert sum(counts.drafted_at) == sum(proposed for proposed, _, _ in rounds)


def epoch(step: Refused | Emit, start: int = 2) -> Epoch:
    """A draft `a`, `bc`, `a` that begins at a letter, whose walk stands at a step."""

    def walk(ground: Ground) -> Walk:
        yield step

    made = Epoch(1, PLAIN, PAIR, start, start)
    made.extend((DraftToken(0), DraftToken(2), DraftToken(0)))
    made.begin(walk(Ground(PAIR, RandomChooser(np.random.default_rng(0)), start)))
    return made


GOING_ON = Emit(0, Kind.ACCEPTED)


@pytest.mark.parametrize(
    ("step", "text", "verdict"),
    [
        (GOING_ON, "--", (0, False)),
        (GOING_ON, "--ab", (1, False)),  # in the middle of the second
        (GOING_ON, "--abca", (3, False)),
        (GOING_ON, "--abcabb", (3, False)),  # a bonus token goes beyond the draft
        (GOING_ON, "--ab-", (1, True)),  # a corrected token ended the output
        (Refused(2), "--abc", (0, True)),  # the first was refused, and what replaced it begins like it
        (Refused(3), "--ac", (1, True)),
        (Refused(4), "--abb", (1, True)),
        (Refused(5), "--abc", (2, True)),
    ],
)
def test_draft_tokens_are_compared_with_the_output_as_letters(
    step: Refused | Emit, text: str, verdict: tuple[int, bool]
) -> None:
    assert epoch(step).verdict(Letters(text)) == Verdict(*verdict)

"""What a round costs, and acceptance by place in it."""

import sys
from types import FrameType

import numpy as np
import pytest

from crossdraft.session.epoch import Epoch, Verdict
from crossdraft.session.session import Session
from crossdraft.speculation.choice import PLAIN, lock_step
from crossdraft.text.letters import Letters
from crossdraft.types.rows import DraftToken
from crossdraft.types.statistics import Counts, Kind, Times, statistics_of
from crossdraft.verification.chooser import RandomChooser
from crossdraft.verification.methods import SLEM
from crossdraft.verification.walk import Emit, Ground, Refused, Walk
from tests.clock import run_session
from tests.ports import assignment, toys
from tests.vocabularies import pair_of

PAIR = pair_of(("a", "b", "ab", "abc"), ("a", "b", "bc"))


def test_each_place_has_its_own_share() -> None:
    counts = Counts()
    counts.rounds(3, 3, False, 1)
    counts.rounds(3, 1, True, 1)
    counts.rounds(2, 0, True, 1)
    counts.rounds(3, 1, False, 1)  # the end came before the second was judged
    counts.rounds(0, 0, False, 2)  # nothing was proposed
    found, none = (statistics_of("slem", 3, 1, one, Times(0.0, 0.0, 0.0, 0.0, 0, 0)) for one in (counts, Counts()))
    assert (none.acceptance_at, none.accepted_length) == ((), 0.0)
    assert (found.drafted_at, found.judged_at, found.accepted_at) == ((4, 4, 3), (4, 2, 1), (3, 1, 1))
    assert found.acceptance_at == (0.75, 0.5, 1.0)
    assert found.accepted_length == pytest.approx(5 / 4)


def test_a_lock_step_round_is_few_calls() -> None:
    """Each is some of the event loop's time, which bounds many outputs on a GPU. 300 before they were reduced."""
    session, calls = Session(assignment(SLEM, controller=lock_step(5), max_tokens=60)), 0

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        calls += event == "call" and "crossdraft" in frame.f_code.co_filename

    sys.setprofile(count)
    try:
        run_session(session, *toys())
    finally:
        sys.setprofile(None)
    assert session.counts.epochs > 20
    assert calls < 240 * session.counts.epochs


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
def test_draft_tokens_are_compared_with_the_output_as_letters(step, text, verdict):
    assert epoch(step).verdict(Letters(text)) == Verdict(*verdict)

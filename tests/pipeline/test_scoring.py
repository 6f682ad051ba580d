"""A session that asks its drafter for probabilities of prefixes (`slrs`)."""

import numpy as np
import pytest

from crossdraft.pipeline.events import (
    DrafterLost,
    Emitted,
    Event,
    Expired,
    Finished,
    SetTimer,
)
from crossdraft.pipeline.rules import IllegalEventError, State
from crossdraft.pipeline.session import Session
from crossdraft.verification.exchange import Draft, Pass, PassDone, Score, Scored
from crossdraft.verification.methods import SLRS
from crossdraft.verification.walk import Kind
from tests.fakes import ToyTarget
from tests.pipeline.sessions import assignment, emitted, end, scoring, toys
from tests.running import run_session


def test_it_asks_for_the_draft_that_the_walk_is_at() -> None:
    session, score = scoring()
    assert session.state is State.SCORING
    assert score == Score(epoch=1, offset=0, strings=("b",), tokens=2)
    out = session.handle(Scored(1, np.array([0.25]), 0.5))
    assert isinstance(out[0], Emitted)
    assert (out[0].token, out[0].kind) == (1, Kind.ACCEPTED)  # p = 0.5 is above ψ
    assert session.counts.drafter_seconds == 0.5
    assert session.counts.scores == 1


def test_it_emits_what_was_asked_for() -> None:
    target, drafter = toys(SLRS)
    asked: list[Score] = []
    original = drafter.score

    def watched(wanted: Score) -> Scored:
        asked.append(wanted)
        return original(wanted)

    drafter.score = watched  # type: ignore[method-assign]
    out = run_session(Session(assignment(SLRS, max_tokens=40)), target, drafter)
    counts = end(out).counts
    assert counts.tokens == len(emitted(out)) == 40
    assert counts.kinds[Kind.ACCEPTED] > 0
    assert counts.kinds[Kind.CORRECTED] > 0
    assert counts.scores == sum(len(score.strings) for score in asked)
    starts = {command.offset for command in emitted(out)}
    assert {score.offset for score in asked} <= starts  # drafts begin where a token of the output does
    assert {score.tokens for score in asked} == {3}


def after_scoring(session: Session, first: Event) -> tuple[list[object], Finished]:
    """Plays on without a drafter after an event in SCORING."""
    target = ToyTarget(3, 99)
    waiting: list[object] = list(session.handle(first))
    out: list[object] = []
    while waiting:
        command = waiting.pop(0)
        assert not isinstance(command, Draft | Score | SetTimer)
        if isinstance(command, Pass):
            waiting += session.handle(target.run(command))
        else:
            out.append(command)
    return out, end(out)


FAULTS: list[tuple[Event, str]] = [
    (DrafterLost("gone"), "gone"),
    (Expired(2), "no answer within 30.0 s"),
    (Scored(1, np.array([0.5, 0.5]), 0.0), "scored 2 prefixes, asked for 1"),
    (Scored(1, np.array([1.1]), 0.0), "not between 0 and 1"),
    (Scored(1, np.array([-0.1]), 0.0), "not between 0 and 1"),
    (Scored(1, np.array([np.nan]), 0.0), "not between 0 and 1"),
]


@pytest.mark.parametrize(("event", "reason"), FAULTS, ids=lambda value: value if isinstance(value, str) else "")
def test_without_its_drafter_the_epoch_ends_and_it_decodes_plainly(event: Event, reason: str) -> None:
    session, _ = scoring()
    out, finish = after_scoring(session, event)
    assert reason in finish.counts.drafter_lost
    assert len(emitted(out)) == 12
    assert {command.kind for command in emitted(out)} == {Kind.BONUS}
    assert {command.epoch for command in emitted(out)}.isdisjoint({1})


def test_a_score_a_little_above_one_is_rounding() -> None:
    session, _ = scoring()
    session.handle(Scored(1, np.array([1 + 1e-7]), 0.0))
    assert session.counts.drafter_lost == ""


def test_a_drafter_lost_before_it_was_asked_is_not_asked() -> None:
    session = Session(assignment(SLRS))
    target, drafter = toys(SLRS)
    original = target.run

    def losing(sent: Pass) -> PassDone:
        if sent.number == 1:
            assert session.handle(DrafterLost("gone")) == []
        return original(sent)

    def never(wanted: Score) -> Scored:
        raise AssertionError(wanted)

    target.run = losing  # type: ignore[method-assign]
    drafter.score = never  # type: ignore[method-assign]
    out = run_session(session, target, drafter)
    assert len(emitted(out)) == 12
    assert {command.kind for command in emitted(out)} == {Kind.BONUS}


def test_scores_of_another_epoch() -> None:
    """Of an older one they are dropped, of a newer one illegal; both change nothing."""
    session, score = scoring()
    assert session.handle(Scored(score.epoch - 1, np.array([0.5]), 0.0)) == []
    with pytest.raises(IllegalEventError):
        session.handle(Scored(score.epoch + 1, np.array([0.5]), 0.0))
    assert session.state is State.SCORING
    assert session.counts.scores == 0
    assert session.handle(Scored(score.epoch, np.array([0.5]), 0.0))


def test_the_timer_of_the_draft_does_not_end_the_wait_for_scores() -> None:
    session, _ = scoring()
    assert session.handle(Expired(1)) == []
    assert session.state is State.SCORING
    with pytest.raises(IllegalEventError):
        session.handle(Expired(3))


def test_late_scores_of_a_drafter_that_was_given_up_are_dropped() -> None:
    session, score = scoring()
    session.handle(Expired(2))
    assert session.handle(Scored(score.epoch, np.array([0.5]), 0.0)) == []
    assert session.state is State.PASSING

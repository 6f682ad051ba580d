"""A session that asks its drafter for probabilities of prefixes (`slrs`)."""

import numpy as np
import pytest

from crossdraft.session.events import Event, Expired, Finished, Lost, Ready, Replied, SetTimer, Timer
from crossdraft.session.session import Session
from crossdraft.types.messages import Draft, Pass, Score, Scored
from crossdraft.types.statistics import Kind
from crossdraft.verification.methods import SLRS
from tests.clock import GONE
from tests.session.sessions import DRAFTER, TARGET, assignment, emitted, end, only, played, requests, scoring, toys
from tests.tables import DrafterLane


def scored(epoch: int, *probabilities: float) -> Replied:
    return Replied(DRAFTER, Scored(epoch, np.array(probabilities), 0.5))


def test_it_asks_for_the_draft_that_the_walk_is_at() -> None:
    session, score = scoring()
    assert score == Score(epoch=1, offset=0, strings=("b",), tokens=2)
    first = emitted(session.handle(scored(1, 0.25), 1.0))[0]
    assert (first.token, first.kind) == (1, Kind.ACCEPTED)  # p = 0.5 is above ψ
    assert session.counts.drafter_seconds == 0.5
    assert session.counts.scores == 1


def after_scoring(session: Session, first: Event) -> tuple[list[object], Finished]:
    """Plays on without a drafter after an event that came instead of scores."""
    out = played(session, session.handle(first, 31.0), toys(SLRS)[0])
    return list(out), end(out)


FAULTS: list[tuple[Event, str]] = [
    (Lost(DRAFTER, GONE), "gone"),
    (Expired(Timer.DRAFTER, 1), "no answer within 30 s"),
    (scored(1, 0.5, 0.5), "scored 2 prefixes, asked for 1"),
    (scored(1, 1.1), "not between 0 and 1"),
    (scored(1, -0.1), "not between 0 and 1"),
    (scored(1, np.nan), "not between 0 and 1"),
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
    session.handle(scored(1, 1 + 1e-7), 1.0)
    assert session.counts.drafter_lost == ""


def test_another_drafter_is_not_asked_about_the_draft_of_one_that_was_lost() -> None:
    """It knows nothing of that epoch, and would be lost over the question."""
    session = Session(assignment(SLRS))
    target, drafter = toys(SLRS)
    session.start(0.0)
    session.handle(Ready(TARGET), 0.0)
    draft = only(Draft, session.handle(Ready(DRAFTER), 0.0))
    sent = only(Pass, session.handle(Replied(DRAFTER, DrafterLane(drafter, rows=True).answer(draft)), 0.0))
    session.handle(Lost(DRAFTER, GONE), 1.0)
    session.handle(Ready(DRAFTER + 1), 2.0)
    asked = requests(session.handle(Replied(TARGET, target.run(sent)), 3.0))
    assert not any(isinstance(one, Score) for one in asked)
    assert any(isinstance(one, Draft) and one.epoch > draft.epoch for one in asked)


def test_an_older_timer_does_not_end_the_wait_for_scores() -> None:
    """The deadline is looked at when the timer expires: what came since counts."""
    session, score = scoring()
    assert session.handle(Expired(Timer.DRAFTER, 0), 31.0) == []
    (timer,) = session.handle(Expired(Timer.DRAFTER, 1), 29.0)
    assert timer == SetTimer(Timer.DRAFTER, 2, 1.0)
    assert emitted(session.handle(scored(score.epoch, 0.5), 29.5))

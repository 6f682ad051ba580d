"""The session's state machine: every transition, with toys instead of services."""

import copy
from collections import deque
from dataclasses import replace
from itertools import count

import numpy as np
import pytest

from crossdraft.session.events import Close, Command, Event, Expired, Lost, Open, Ready, Reason, Replied, Send, Timer
from crossdraft.session.rules import State
from crossdraft.session.session import Session
from crossdraft.speculation.choice import PLAIN, Choice, Controller, Fixed, arms_for, lock_step
from crossdraft.speculation.controller import TargetController
from crossdraft.types.messages import Draft, Drafted, Pass, RowFetched
from crossdraft.types.rows import Row
from crossdraft.types.statistics import Kind
from tests.clock import GONE, Stage, run_session
from tests.session.sessions import (
    DRAFTER,
    TARGET,
    assignment,
    drafting,
    emitted,
    end,
    fetching,
    only,
    opened,
    passing,
    played,
    requests,
    started,
    toys,
)


def test_a_whole_row_is_fetched_when_the_head_lacks_an_id() -> None:
    session = fetching()
    out = session.handle(Replied(TARGET, RowFetched(1, 0, Row(np.array([0, 1, 2]), np.array([0.0, 0.5, 0.5])))), 1.0)
    assert session.counts.rows_completed == 1
    assert out[0].kind is Kind.CORRECTED


@pytest.mark.parametrize("lost", [Lost(DRAFTER, GONE), Expired(Timer.DRAFTER, 1)], ids=["lost", "late"])
def test_without_its_drafter_the_session_decodes_plainly(lost: Event) -> None:
    session, _ = drafting()
    out = session.handle(lost, 31.0)
    sent = only(Pass, out)
    assert len(sent.tree) == 0
    assert session.counts.drafter_lost
    assert session.counts.drafters_lost == 1
    assert isinstance(lost, Lost) or out[0] == Close(DRAFTER, "no answer within 30 s")
    assert [command.lane for command in out if isinstance(command, Open)] == [DRAFTER + 1]  # it is tried again
    assert len(emitted(played(session, out, toys()[0]))) == 12
    assert session.handle(Replied(DRAFTER, Drafted(1, (), 0.0)), 33.0) == []


def test_a_drafter_lost_while_opening_is_not_waited_for() -> None:
    session = started()
    session.handle(Ready(TARGET), 0.0)
    assert isinstance(requests(session.handle(Lost(DRAFTER, GONE), 1.0))[0], Pass)
    assert session.counts.drafter_lost == f"no drafter: {GONE}"
    assert session.counts.drafters_lost == 0


@pytest.mark.parametrize(
    ("controller", "reason"),
    [
        (lock_step(3), "nothing rhymes"),
        (Fixed(Choice(4, 2)), "nothing rhymes"),
        (TargetController().output(("slem", 1.0, None), arms_for()), "nothing rhymes"),
        (Fixed(PLAIN), "plain decoding: no draft token raises the speed"),
    ],
    ids=["lock-step", "overlapped", "auto", "plain"],
)
def test_an_output_for_which_nothing_was_drafted_says_why_in_every_mode(controller: Controller, reason: str) -> None:
    session, (target, _) = Session(assignment(controller=controller, explain=True)), toys()
    waiting: deque[Command] = deque(session.start(0.0))
    for now in count(1):
        if session.state is State.DONE:
            break
        match waiting.popleft():
            case Open(lane):
                waiting += session.handle(Ready(lane), now)
            case Send(lane, Pass() as sent):
                waiting += session.handle(Replied(lane, target.run(sent)), now)
            case Send(lane, Draft(epoch)):
                waiting += session.handle(Replied(lane, Drafted(epoch, (), 0.0, "nothing rhymes")), now)
    assert (session.counts.draft_tokens, session.counts.undrafted) == (0, reason)
    assert session.counts.stood_aside == (0 if reason != "nothing rhymes" else session.counts.rewinds)


def test_a_target_that_refuses_the_request_ends_the_session_with_its_error() -> None:
    session, _ = passing()
    finish = end(session.handle(Lost(TARGET, GONE, elsewhere=False), 1.0))
    assert finish.reason is Reason.FAILED
    assert finish.error is GONE


def test_without_any_target_for_too_long_the_session_fails() -> None:
    session, _ = passing()
    (opened_again, timer) = session.handle(Lost(TARGET, GONE), 2.0)
    assert isinstance(opened_again, Open)
    assert session.handle(Expired(Timer.TARGET, timer.number - 1), 3.0) == []  # of the opening, long ago
    finish = end(session.handle(Expired(Timer.TARGET, timer.number), 32.0))
    assert finish.reason is Reason.FAILED
    assert finish.error is GONE


def test_the_first_target_has_a_deadline_too() -> None:
    finish = end(started().handle(Expired(Timer.TARGET, 1), 30.0))
    assert finish.reason is Reason.FAILED
    assert isinstance(finish.error, TimeoutError)


def test_the_context_bounds_output_and_trees() -> None:
    stage = run_session(Session(assignment(max_tokens=50, context=20)), *toys())
    assert len(stage.emitted) == 18
    assert stage.finished.reason is Reason.LENGTH
    committed = 2
    for request in (one for one in stage.requests if isinstance(one, Pass)):
        committed += len(request.committed)
        assert committed + len(request.tree) <= 20


def test_a_drafter_that_stood_aside_is_told_the_text_from_where_it_is() -> None:
    """Nothing that it drafted before counts any more, even if the output grows to be the same."""
    session = Session(assignment(explain=True))
    target, drafter = toys()
    stage = Stage(session, target, lambda: copy.copy(drafter), rows=False)
    stage.start()
    while stage.opening:
        stage.open(next(iter(stage.opening)))
    drafts = 0
    while stage.finished is None:
        lane = stage.owing[0]
        if lane in stage.drafters:
            draft = stage.drafters[lane].draft
            stage.drafters[lane].wanted = 0
            drafts += 1
            stage.tell(Replied(lane, Drafted(draft.epoch, (), 0.0, "it stands aside")))
        else:
            stage.reply(lane)
    assert drafts > 2
    assert session.counts.stood_aside == drafts
    assert len(stage.emitted) == 12
    *reasons, (last, _) = ((decision.choice.reason, decision.epochs) for decision in session.decisions)
    assert reasons == [("the drafter cannot go on with this text: it stands aside", drafts)]
    assert last == "one token is left"


def test_an_explanation_says_why_there_is_no_drafter() -> None:
    assert Session(assignment(drafts=False)).drafter.fault == "there is no drafter"
    for given, reason in (
        (assignment(explain=True), "the drafter has not opened yet"),
        (assignment(explain=True, drafts=False, no_drafter="the drafter is lost"), "the drafter is lost"),
    ):
        session = Session(replace(given, controller=Fixed(Choice(3))))
        session.start(0.0)
        session.handle(Ready(TARGET), 0.0)
        assert [decision.choice.reason for decision in session.decisions] == [reason]
    session = Session(assignment(explain=True))
    opened(session)
    target, _ = toys()
    sent = only(Pass, session.handle(Lost(DRAFTER, GONE), 1.0))
    session.handle(Replied(TARGET, target.run(sent)), 2.0)
    assert session.decisions[-1].choice.reason == f"the drafter was lost: {GONE}"

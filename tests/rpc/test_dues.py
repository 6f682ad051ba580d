"""What is owed to a session, and when the wait for it begins."""

import numpy as np

from crossdraft.rpc.streams import DrafterOutstanding, TargetOutstanding
from crossdraft.text.letters import NOTHING, Letters
from crossdraft.types.messages import (
    Advance,
    Branch,
    Draft,
    Drafted,
    FetchRow,
    OpenDrafter,
    Opened,
    OpenTarget,
    Pass,
    PassDone,
    RunTo,
    SamplingOptions,
    Score,
    Scored,
)
from crossdraft.types.trees import TokenTree

OPENED = Opened("f1")


def draft(epoch: int) -> Draft:
    return Draft(epoch, 0, NOTHING, 4, chunk=1)


def score(epoch: int) -> Score:
    return Score(epoch, 0, (Letters("a"),), 1)


def scored(epoch: int) -> Scored:
    return Scored(epoch, np.ones(1), 0.0)


def drafted(epoch: int) -> Drafted:
    return Drafted(epoch, (), 0.0, branches=(Branch(1, 0, Letters("a"), (1,)),))


def drafting() -> DrafterOutstanding:
    """Of a session that is open."""
    outstanding = DrafterOutstanding()
    assert outstanding.sent(OpenDrafter(NOTHING, SamplingOptions(), None, 0))
    assert outstanding.due
    outstanding.received(OPENED)
    assert not outstanding.due
    return outstanding


def test_a_target_owes_each_request_a_reply_and_the_oldest_begins_the_wait():
    outstanding = TargetOutstanding()
    requests = (OpenTarget((1,), SamplingOptions(), None), Pass(1, (), TokenTree()), FetchRow(1, 0))
    assert [outstanding.sent(request) for request in requests] == [True, False, False]
    due = []
    for reply in (OPENED, PassDone(1, (), 0.0), PassDone(1, (), 0.0)):
        due.append(outstanding.due)
        outstanding.received(reply)
    assert due == [True] * 3
    assert not outstanding.due
    assert outstanding.sent(requests[1])


def test_a_run_is_owed_more_until_its_last_reply_and_its_end_nothing():
    outstanding = TargetOutstanding()
    assert outstanding.sent(Pass(1, (), TokenTree(), draws=True, run=8))
    for _ in range(2):
        outstanding.received(PassDone(1, (), 0.0, more=True))
        assert outstanding.due
    assert not outstanding.sent(RunTo(1, 0))
    outstanding.received(PassDone(1, (), 0.0))
    assert not outstanding.due


def test_a_reply_too_many_does_not_pay_for_what_is_asked_later():
    outstanding = TargetOutstanding()
    outstanding.received(PassDone(1, (), 0.0))
    outstanding.sent(Pass(1, (), TokenTree()))
    assert outstanding.due


def test_a_draft_is_owed_one_reply_and_more_may_come():
    outstanding = drafting()
    assert outstanding.sent(draft(1))
    assert outstanding.due
    for _ in range(3):
        outstanding.received(drafted(1))
        assert not outstanding.due


def test_nothing_is_owed_for_an_advance():
    outstanding = drafting()
    assert not outstanding.sent(Advance(1, 8))
    assert not outstanding.due
    outstanding.sent(draft(2))
    assert not outstanding.sent(Advance(2, 8))
    outstanding.received(drafted(2))
    assert not outstanding.due


def test_a_newer_draft_begins_the_wait_anew_and_older_replies_do_not_end_it():
    outstanding = drafting()
    assert outstanding.sent(draft(1))
    assert outstanding.sent(draft(2))
    outstanding.received(drafted(1))
    assert outstanding.due
    outstanding.received(drafted(2))
    assert not outstanding.due


def test_each_score_is_owed_a_reply_until_a_newer_draft():
    outstanding = drafting()
    outstanding.sent(draft(1))
    outstanding.received(drafted(1))
    assert [outstanding.sent(score(1)) for _ in range(2)] == [True, False]
    outstanding.received(scored(1))
    assert outstanding.due
    outstanding.sent(draft(2))
    outstanding.received(scored(1))
    outstanding.received(drafted(2))
    assert not outstanding.due

"""What is owed to a session, and when the wait for it begins."""

import numpy as np

from crossdraft.rpc.codec import Opened
from crossdraft.rpc.streams import DrafterDues, TargetDues
from crossdraft.text.letters import NOTHING, Letters
from crossdraft.types.messages import (
    Advance,
    Branch,
    Draft,
    Drafted,
    FetchRow,
    OpenDrafter,
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


def drafting() -> DrafterDues:
    """Of a session that is open."""
    dues = DrafterDues()
    assert dues.sent(OpenDrafter(NOTHING, SamplingOptions(), None, 0))
    assert dues.owed
    dues.came(OPENED)
    assert not dues.owed
    return dues


def test_a_target_owes_each_request_a_reply_and_the_oldest_begins_the_wait():
    dues = TargetDues()
    requests = (OpenTarget((1,), SamplingOptions(), None), Pass(1, (), TokenTree()), FetchRow(1, 0))
    assert [dues.sent(request) for request in requests] == [True, False, False]
    owed = []
    for reply in (OPENED, PassDone(1, (), 0.0), PassDone(1, (), 0.0)):
        owed.append(dues.owed)
        dues.came(reply)
    assert owed == [True] * 3
    assert not dues.owed
    assert dues.sent(requests[1])


def test_a_run_is_owed_more_until_its_last_reply_and_its_end_nothing():
    dues = TargetDues()
    assert dues.sent(Pass(1, (), TokenTree(), draws=True, run=8))
    for _ in range(2):
        dues.came(PassDone(1, (), 0.0, more=True))
        assert dues.owed
    assert not dues.sent(RunTo(1, 0))
    dues.came(PassDone(1, (), 0.0))
    assert not dues.owed


def test_a_reply_too_many_does_not_pay_for_what_is_asked_later():
    dues = TargetDues()
    dues.came(PassDone(1, (), 0.0))
    dues.sent(Pass(1, (), TokenTree()))
    assert dues.owed


def test_a_draft_is_owed_one_reply_and_more_may_come():
    dues = drafting()
    assert dues.sent(draft(1))
    assert dues.owed
    for _ in range(3):
        dues.came(drafted(1))
        assert not dues.owed


def test_nothing_is_owed_for_an_advance():
    dues = drafting()
    assert not dues.sent(Advance(1, 8))
    assert not dues.owed
    dues.sent(draft(2))
    assert not dues.sent(Advance(2, 8))
    dues.came(drafted(2))
    assert not dues.owed


def test_a_newer_draft_begins_the_wait_anew_and_older_replies_do_not_end_it():
    dues = drafting()
    assert dues.sent(draft(1))
    assert dues.sent(draft(2))
    dues.came(drafted(1))
    assert dues.owed
    dues.came(drafted(2))
    assert not dues.owed


def test_each_score_is_owed_a_reply_until_a_newer_draft():
    dues = drafting()
    dues.sent(draft(1))
    dues.came(drafted(1))
    assert [dues.sent(score(1)) for _ in range(2)] == [True, False]
    dues.came(scored(1))
    assert dues.owed
    dues.sent(draft(2))
    dues.came(scored(1))
    dues.came(drafted(2))
    assert not dues.owed

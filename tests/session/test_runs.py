"""Plain epochs as runs: the target draws token after token, and the session commits them as they are told."""

import numpy as np
import pytest

from crossdraft.session.events import Cancelled, Finished, IllegalEventError, Lost, Open, Ready, Reason, Replied
from crossdraft.session.session import Session
from crossdraft.speculation.choice import LONG_RUN
from crossdraft.text.letters import Letters
from crossdraft.types.messages import OpenTarget, Pass, PassDone, Sample, SamplingOptions
from crossdraft.types.rows import Row
from crossdraft.verification.methods import SLEM, TLI, Method
from tests.clock import GONE
from tests.ports import LETTERS, assignment
from tests.session.sessions import TARGET, alone, emitted, end, requests, tokens_of, told
from tests.vocabularies import pair_of

OTHER = TARGET + 1  # the second lane where no drafter is wanted


@pytest.mark.parametrize("method", [TLI, SLEM], ids=lambda method: method.name)
def test_tokens_are_emitted_as_they_come_and_the_next_pass_leaves_when_the_run_is_over(method: Method) -> None:
    session, sent = alone(method, max_tokens=100)
    assert (sent.run, sent.draws, sent.committed, len(sent.tree)) == (LONG_RUN, True, (), 0)
    first = session.handle(told(1, 0), 1.0)
    assert (tokens_of(first), requests(first)) == ([1, 0], [])
    second = session.handle(told(2, first=2), 2.0)
    assert (tokens_of(second), requests(second)) == ([2], [])
    last = session.handle(told(0, 1, first=3, more=False), 3.0)
    assert tokens_of(last) == [0, 1]
    (following,) = requests(last)
    assert isinstance(following, Pass)
    assert (following.number, following.committed, following.run) == (2, (1, 0, 2, 0, 1), LONG_RUN)
    assert (session.counts.tokens, session.counts.passes, session.counts.runs) == (5, 6, 2)
    assert {one.log_probability for one in emitted(first + second + last)} == {-0.5}


def test_a_run_asks_for_no_more_than_may_be_emitted_and_the_last_one_ends_the_output() -> None:
    session, sent = alone(max_tokens=3)
    assert sent.run == 3
    out = session.handle(told(1, 1, 1, more=False), 1.0)
    assert end(out).reason is Reason.LENGTH
    assert (tokens_of(out), requests(out)) == ([1, 1, 1], [])


def test_a_run_fits_into_the_context() -> None:
    _, sent = alone(max_tokens=50, context=10)  # the prompt has 2
    assert sent.run == 8


def test_the_last_token_alone_is_no_run() -> None:
    _, sent = alone(max_tokens=1)
    assert sent.run == 1


@pytest.mark.parametrize("grouped", [True, False])
def test_nothing_after_a_stop_string_is_committed_or_counted(grouped: bool) -> None:
    session, _ = alone(stop=(Letters("ba"),), max_tokens=50)  # letters of 0, 1, 2: a, b, ab
    if grouped:
        out = session.handle(told(0, 1, 0, 1, 2), 1.0)
    else:
        out = [*session.handle(told(0, 1), 1.0), *session.handle(told(0, first=2), 2.0)]
        assert session.handle(told(1, 2, more=False), 3.0) == []  # the session is over
    finish = end(out)
    assert (finish.reason, tokens_of(out)) == (Reason.STOP, [0, 1, 0])
    assert emitted(out)[-1].kept == 1
    assert (finish.counts.tokens, sum(finish.counts.kinds.values())) == (3, 3)


@pytest.mark.parametrize("ignored", [False, True])
def test_a_run_that_ended_at_a_stop_id(ignored: bool) -> None:
    session, _ = alone(pair=pair_of(LETTERS, LETTERS, stops=(2,)), ignore_end=ignored, max_tokens=50)
    out = session.handle(told(0, 2, more=False), 1.0)
    assert tokens_of(out) == [0, 2]
    if ignored:
        (following,) = requests(out)
        assert isinstance(following, Pass)
        assert following.committed == (0, 2)
    else:
        assert end(out).reason is Reason.STOP


def test_cancelling_in_mid_run_ends_the_session_with_what_was_told() -> None:
    session, _ = alone()
    session.handle(told(1, 0), 1.0)
    out = session.handle(Cancelled(), 2.0)
    assert (end(out).reason, session.counts.tokens) == (Reason.CANCELLED, 2)
    assert session.handle(told(1), 3.0) == []


def test_a_target_that_dies_in_mid_run_is_replaced_and_no_token_comes_twice() -> None:
    session, _ = alone()
    out = session.handle(told(1, 0), 1.0)
    out += session.handle(Lost(TARGET, GONE), 2.0)
    (lane,) = [command.lane for command in out if isinstance(command, Open)]
    again = session.handle(Ready(lane), 3.0)
    (sent,) = requests(again)
    assert isinstance(sent, Pass)
    assert (sent.number, sent.committed, sent.run) == (1, (1, 0), 10)
    out += session.handle(told(2, 2, lane=lane), 4.0)
    assert tokens_of(out) == [1, 0, 2, 2]
    assert session.handle(told(0, more=False), 5.0) == []  # of the lane that is lost


def test_another_target_that_is_open_goes_on_at_once() -> None:
    session = Session(assignment(TLI, drafts=False, targets=2))
    session.start(0.0)
    (sent,) = requests(session.handle(Ready(TARGET), 0.0))
    assert requests(session.handle(Ready(OTHER), 0.0)) == []  # the run brings what it could draw
    assert isinstance(sent, Pass)
    session.handle(told(1), 1.0)
    (other,) = requests(session.handle(Lost(TARGET, GONE), 2.0))
    assert isinstance(other, Pass)
    assert (other.number, other.committed, other.run) == (1, (1,), 11)


@pytest.mark.parametrize(
    "wrong",
    [
        PassDone(1, (), 0.0, more=True),
        PassDone(1, (Sample(0, 0.0),) * 13, 0.0),  # twelve were asked for
        PassDone(1, (Sample(0, 0.0),) * 12, 0.0, more=True),  # none can follow
        PassDone(1, (Row(np.array([0, 1, 2]), np.array([0.2, 0.5, 0.3])),), 0.0, more=True),
        PassDone(2, (Sample(0, 0.0),), 0.0, more=True),
        PassDone(1, (Sample(0, 0.0),), 0.0, more=True, first=1),
    ],
    ids=["nothing", "too many", "more than all", "a row", "of another pass", "of later tokens"],
)
def test_answers_that_no_run_has(wrong: PassDone) -> None:
    session, sent = alone()
    assert sent.run == 12
    with pytest.raises(IllegalEventError):
        session.handle(Replied(TARGET, wrong), 1.0)
    assert tokens_of(session.handle(told(1), 2.0)) == [1]


def test_an_answer_that_comes_twice_is_illegal() -> None:
    session, _ = alone()
    session.handle(told(1), 1.0)
    with pytest.raises(IllegalEventError):
        session.handle(told(1), 2.0)


def test_a_pass_that_is_no_run_has_one_answer() -> None:
    session, _ = alone(max_tokens=1)
    with pytest.raises(IllegalEventError):
        session.handle(told(1, more=True), 1.0)


def test_an_output_ends_though_its_run_goes_on() -> None:
    session, _ = alone(open_target=OpenTarget((0,), SamplingOptions(), None), stop=(Letters("b"),))
    (finish,) = [command for command in session.handle(told(1), 1.0) if isinstance(command, Finished)]
    assert finish.reason is Reason.STOP

"""Plain epochs: the target draws token after token in runs, and the session commits them as they are told."""

from dataclasses import replace

import pytest

from crossdraft.session.events import IllegalEventError, Lost, Open, Ready, Reason, Replied
from crossdraft.session.session import Session
from crossdraft.speculation.choice import LONG_RUN, PLAIN, Choice, PassSeen
from crossdraft.text.letters import Letters
from crossdraft.types.messages import Draft, OpenDrafter, OpenTarget, Pass, PassDone, RunTo, Sample
from crossdraft.verification.methods import TLI
from tests.clock import GONE
from tests.ports import LETTERS, assignment
from tests.session.sessions import DRAFTER, TARGET, WHOLE, alone, begun, emitted, end, only, requests, tokens_of, told
from tests.verification.scheduling import InTurn, Turns
from tests.vocabularies import pair_of


def test_before_its_first_drafter_has_opened_a_session_asks_for_rows() -> None:
    """A drafter that opens meanwhile needs the row that follows its first draft token."""
    session, *_ = begun(Choice(2, 1), method=TLI)
    sent = only(Pass, session.handle(Ready(TARGET), 0.0))
    assert not sent.draws
    with pytest.raises(IllegalEventError, match="pass 1 with 1 answers"):
        session.handle(told(1), 1.0)  # a draw


OTHER = TARGET + 1  # the second lane where no drafter is wanted


@pytest.mark.parametrize(
    ("changes", "run"),
    [({"max_tokens": 3}, 3), ({"max_tokens": 1}, 1), ({"max_tokens": 50, "context": 10}, 8)],  # the prompt has 2
)
def test_a_run_asks_for_no_more_than_may_be_emitted_and_its_last_token_ends_the_output(changes, run):
    session, sent = alone(**changes)
    assert sent.run == run
    out = session.handle(told(*[1] * run, more=False), 1.0)
    assert end(out).reason is Reason.LENGTH
    assert (tokens_of(out), requests(out)) == ([1] * run, [])


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
    counts = finish.counts
    assert counts.tokens == counts.accepted + counts.corrected + counts.bonus == 3


def test_a_long_run_keeps_nothing_of_what_is_in_the_output() -> None:
    session, _ = alone(max_tokens=1000, context=1100)
    for first in range(0, 640, 4):
        session.handle(told(*[1] * 4, first=first), 1.0)
    assert session.counts.tokens == 640
    assert sum(map(len, session.target.answers._held)) <= 10


@pytest.mark.parametrize("ignored", [False, True])
def test_a_run_that_ended_at_a_stop_id(ignored: bool) -> None:
    session, _ = alone(pair=pair_of(LETTERS, LETTERS, stops=(2,)), ignore_eos=ignored, max_tokens=50)
    out = session.handle(told(0, 2, more=False), 1.0)
    assert tokens_of(out) == [0, 2]
    if ignored:
        following = only(Pass, out)
        assert following.committed == (0, 2)
    else:
        assert end(out).reason is Reason.STOP


def test_a_target_that_dies_in_mid_run_is_replaced_and_no_token_comes_twice() -> None:
    session, _ = alone()
    out = session.handle(told(1, 0), 1.0)
    out += session.handle(Lost(TARGET, GONE), 2.0)
    (lane,) = [command.lane for command in out if isinstance(command, Open)]
    again = session.handle(Ready(lane), 3.0)
    sent = only(Pass, again)
    assert (sent.number, sent.committed, sent.run) == (1, (1, 0), 10)
    out += session.handle(told(2, 2, lane=lane), 4.0)
    assert tokens_of(out) == [1, 0, 2, 2]
    assert session.handle(told(0, more=False), 5.0) == []  # of the lane that is lost


def test_another_target_that_is_open_goes_on_at_once() -> None:
    session = Session(assignment(TLI, drafts=False, targets=2))
    session.start(0.0)
    only(Pass, session.handle(Ready(TARGET), 0.0))
    assert requests(session.handle(Ready(OTHER), 0.0)) == []  # the run brings what it could draw
    session.handle(told(1), 1.0)
    other = only(Pass, session.handle(Lost(TARGET, GONE), 2.0))
    assert (other.number, other.committed, other.run) == (1, (1,), 11)


@pytest.mark.parametrize(
    "wrong",
    [
        PassDone(1, (), 0.0, more=True),
        PassDone(1, (Sample(0, 0.0),) * 13, 0.0),  # twelve were asked for
        PassDone(1, (Sample(0, 0.0),) * 12, 0.0, more=True),  # none can follow
        PassDone(1, (WHOLE,), 0.0, more=True),
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
    with pytest.raises(IllegalEventError):
        session.handle(told(1), 2.0)  # it came already


def test_a_drafter_that_opens_leaves_a_run_alone_if_nothing_is_to_be_drafted() -> None:
    session, *_ = begun(PLAIN, max_tokens=90)
    session.handle(Lost(DRAFTER, GONE), 0.0)
    only(Pass, session.handle(Ready(TARGET), 0.0))
    assert requests(session.handle(Ready(DRAFTER + 1), 1.0)) == []
    assert requests(session.handle(told(*[1] * 16), 2.0)) == [RunTo(1, 64)]


def test_a_drafter_is_opened_once_the_controller_wants_one() -> None:
    session, _, first = begun(Choice(2, 2, overlap=False), unwanted=2, max_tokens=90)
    assert [type(one.request) for one in first if isinstance(one, Open)] == [OpenTarget]
    assert only(Pass, session.handle(Ready(TARGET), 0.0)).run == LONG_RUN
    out = session.handle(told(*[1] * 16), 1.0)
    assert requests(out) == [RunTo(1, 64)]
    (opening,) = [one for one in out if isinstance(one, Open)]
    assert isinstance(opening.request, OpenDrafter)
    assert requests(session.handle(told(1, first=16), 2.0)) == []  # it is opened once
    assert requests(session.handle(Ready(opening.lane), 3.0)) == [RunTo(1, 0)]
    (following,) = requests(session.handle(told(1, first=17, more=False), 4.0))
    assert isinstance(following, Draft)


def test_a_drafter_that_opens_ends_a_long_run_if_the_controller_wants_to_decide_sooner() -> None:
    session, *_ = begun(replace(PLAIN, run=2), max_tokens=90)
    assert only(Pass, session.handle(Ready(TARGET), 0.0)).run == LONG_RUN
    assert requests(session.handle(Ready(DRAFTER), 1.0)) == [RunTo(1, 0)]
    assert only(Pass, session.handle(told(1, more=False), 2.0)).run == 2


@pytest.mark.parametrize("lost", [False, True], ids=["the drafter is there", "it was lost"])
def test_a_run_is_the_last_where_a_draft_is_to_follow(lost: bool) -> None:
    """It is chosen once, and forgotten if there is no drafter any more."""
    session, *_ = begun(replace(PLAIN, run=4), Choice(3, 3, overlap=False), waits=True, max_tokens=50)
    session.handle(Ready(TARGET), 0.0)
    sent = only(Pass, session.handle(Ready(DRAFTER), 0.0))
    assert sent.run == 4
    assert requests(session.handle(told(1, 0), 1.0)) == []
    assert requests(session.handle(told(1, first=2), 2.0)) == []
    if lost:
        session.handle(Lost(DRAFTER, GONE), 2.0)
    (following,) = requests(session.handle(told(0, first=3, more=False), 3.0))
    if lost:
        assert isinstance(following, Pass)
    else:
        assert following.count == 3


def test_what_the_controller_is_told_of_a_run() -> None:
    """Not of the first forward, which reads the prompt; then of the time since the answer before."""
    controller = Turns(InTurn((PLAIN,)))
    session, _ = alone(controller=controller)
    session.handle(told(1), 5.0)
    session.handle(told(0, 2, first=1), 7.0)
    done = PassDone(1, (Sample(1, 0.0),), 0.5, 0.25, True, shared=3, fed=9, first=3)
    session.handle(Replied(TARGET, done), 8.0)
    seen = [one for one in controller.seen if isinstance(one, PassSeen)]
    assert [one.forwards for one in seen] == [2, 1]
    assert (seen[1].seconds, seen[1].sessions, seen[1].fed) == (0.5, 3, 9)


def test_a_run_goes_on_when_half_of_it_is_drawn() -> None:
    session, sent = alone(max_tokens=90)
    assert sent.run == LONG_RUN == 32
    assert requests(session.handle(told(*[1] * 15), 1.0)) == []
    assert requests(session.handle(told(1, first=15), 2.0)) == [RunTo(1, 64)]
    assert requests(session.handle(told(*[0] * 31, first=16), 3.0)) == []
    assert requests(session.handle(told(0, first=47), 4.0)) == [RunTo(1, 90)]  # no more than may be emitted
    out = session.handle(told(*[1] * 42, first=48, more=False), 5.0)
    assert end(out).reason is Reason.LENGTH
    assert (session.counts.tokens, session.counts.passes, session.counts.runs) == (90, 90, 1)


def test_a_run_that_ended_before_it_was_told_to_go_on_is_followed_by_a_pass() -> None:
    session, _ = alone(max_tokens=90)
    assert requests(session.handle(told(*[1] * 20), 1.0)) == [RunTo(1, 64)]
    following = only(Pass, session.handle(told(*[1] * 12, first=20, more=False), 2.0))
    assert (following.number, following.run, len(following.committed)) == (2, 32, 32)

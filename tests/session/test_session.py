"""The session's state machine, with toys instead of services: losses and ends, runs, scores of prefixes, rounds."""

import copy
import sys
from collections import deque
from dataclasses import replace
from itertools import count
from types import FrameType

import numpy as np
import pytest

from crossdraft.session import events
from crossdraft.session.epoch import Epoch, Verdict
from crossdraft.session.rules import State
from crossdraft.session.session import Session
from crossdraft.speculation import choice
from crossdraft.speculation.choice import LONG_RUN, PLAIN, Choice, Controller, Fixed, Lifecycle, PassSeen, lock_step
from crossdraft.speculation.controller import TargetController
from crossdraft.text.letters import Letters
from crossdraft.types import messages
from crossdraft.types.rows import DraftToken, Row
from crossdraft.types.statistics import Counts, Kind, Statistics, Times
from crossdraft.verification.chooser import RandomChooser
from crossdraft.verification.methods import SLEM, SLRS, TLI
from crossdraft.verification.walk import Emit, Ground, Refused, Walk
from tests.clock import GONE, Stage, run_session
from tests.ports import LETTERS, assignment, toys
from tests.session import sessions
from tests.tables import DrafterLane, pair_of
from tests.verification.toys import Turns

OTHER = sessions.TARGET + 1  # the second lane where no drafter is wanted
PAIR = pair_of(("a", "b", "ab", "abc"), ("a", "b", "bc"))
GOING_ON = Emit(0, Kind.ACCEPTED)


def test_a_whole_row_is_fetched_when_the_head_lacks_an_id() -> None:
    session = sessions.fetching()
    fetched = messages.RowFetched(1, 0, Row(np.array([0, 1, 2]), np.array([0.0, 0.5, 0.5])))
    out = session.handle(events.Replied(sessions.TARGET, fetched), 1.0)
    assert (session.counts.rows_completed, out[0].kind) == (1, Kind.CORRECTED)


def test_where_a_draft_leads_to_nothing_that_can_be_drawn_the_target_is_asked_again() -> None:
    """It is the request's fault only if the output goes there: then the target says so."""
    session, sent = sessions.passing()
    first, nothing = sent.tree.tokens[0], messages.Sample(0, messages.IMPOSSIBLE)
    done = messages.PassDone(1, (messages.Sample(first, -0.5), *[nothing] * len(sent.tree)), 0.01)
    out = session.handle(events.Replied(sessions.TARGET, done), 1.0)
    again = sessions.only(messages.Pass, out)
    assert (sessions.tokens_of(out), again.number, again.committed) == ([first], 2, (first,))


@pytest.mark.parametrize(
    "lost", [events.Lost(sessions.DRAFTER, GONE), events.Expired(events.Timer.DRAFTER, 1)], ids=["lost", "late"]
)
def test_without_its_drafter_the_session_decodes_plainly(lost: events.Event) -> None:
    session, _ = sessions.drafting()
    out = session.handle(lost, 31.0)
    sent = sessions.only(messages.Pass, out)
    assert len(sent.tree) == 0
    assert (session.counts.drafter_lost != "", session.counts.drafters_lost) == (True, 1)
    assert isinstance(lost, events.Lost) or out[0] == events.Close(sessions.DRAFTER, "no answer within 30 s")
    assert [command.lane for command in out if isinstance(command, events.Open)] == [sessions.DRAFTER + 1]
    assert len(sessions.emitted(sessions.played(session, out, toys()[0]))) == 12
    assert session.handle(events.Replied(sessions.DRAFTER, messages.Drafted(1, (), 0.0)), 33.0) == []


def test_a_drafter_lost_while_opening_is_not_waited_for() -> None:
    session = sessions.started()
    session.handle(events.Ready(sessions.TARGET), 0.0)
    assert isinstance(sessions.requests(session.handle(events.Lost(sessions.DRAFTER, GONE), 1.0))[0], messages.Pass)
    assert (session.counts.drafter_lost, session.counts.drafters_lost) == (f"no drafter: {GONE}", 0)
    counts = sessions.end(session.handle(events.Cancelled(), 2.0)).counts
    assert (counts.undrafted, counts.drafter_lost) == ("", f"no drafter: {GONE}")  # that says why nothing was drafted


@pytest.mark.parametrize(
    ("controller", "reason"),
    [
        (lock_step(3), "nothing rhymes"),
        (Fixed(Choice(4, 2)), "nothing rhymes"),
        (TargetController().output(("slem", 1.0, None), choice.arms_for()), "nothing rhymes"),
        (Fixed(PLAIN), "plain decoding: no draft token raises the speed"),
    ],
    ids=["lock-step", "overlapped", "auto", "plain"],
)
def test_an_output_for_which_nothing_was_drafted_says_why_in_every_mode(controller: Controller, reason: str) -> None:
    session, (target, _) = Session(assignment(controller=controller, explain=True)), toys()
    waiting: deque[events.Command] = deque(session.start(0.0))
    for now in count(1):
        if session.state is State.DONE:
            break
        match waiting.popleft():
            case events.Open(lane):
                waiting += session.handle(events.Ready(lane), now)
            case events.Send(lane, messages.Pass() as sent):
                waiting += session.handle(events.Replied(lane, target.run(sent)), now)
            case events.Send(lane, messages.Draft(epoch)):
                waiting += session.handle(events.Replied(lane, messages.Drafted(epoch, (), 0.0, "nothing rhymes")), now)
    assert (session.counts.draft_tokens, session.counts.undrafted) == (0, reason)
    assert session.counts.stood_aside == (0 if reason != "nothing rhymes" else session.counts.rewinds)


def test_the_controller_is_told_once_that_an_output_is_over_or_that_nobody_drives_it_any_more() -> None:
    for over in (True, False):
        session, controller, _ = sessions.begun(Choice(2, 1))
        if over:
            session.handle(events.Cancelled(), 1.0)
        session.abandon()
        assert controller.seen == [Lifecycle.STARTED, Lifecycle.ENDED]


def test_a_target_that_refuses_the_request_ends_the_session_with_its_error() -> None:
    session, _ = sessions.passing()
    finish = sessions.end(session.handle(events.Lost(sessions.TARGET, GONE, elsewhere=False), 1.0))
    assert (finish.reason, finish.error) == (events.Reason.FAILED, GONE)


def test_without_any_target_for_too_long_the_session_fails() -> None:
    session, _ = sessions.passing()
    (opened_again, timer) = session.handle(events.Lost(sessions.TARGET, GONE), 2.0)
    assert isinstance(opened_again, events.Open)
    assert session.handle(events.Expired(events.Timer.TARGET, timer.number - 1), 3.0) == []  # of the opening, long ago
    finish = sessions.end(session.handle(events.Expired(events.Timer.TARGET, timer.number), 32.0))
    assert (finish.reason, finish.error) == (events.Reason.FAILED, GONE)
    finish = sessions.end(sessions.started().handle(events.Expired(events.Timer.TARGET, 1), 30.0))
    assert (finish.reason, type(finish.error)) == (events.Reason.FAILED, TimeoutError)


def test_the_context_bounds_output_and_trees() -> None:
    stage = run_session(Session(assignment(max_tokens=50, context=20)), *toys())
    assert (len(stage.emitted), stage.finished.reason) == (18, events.Reason.LENGTH)
    assert stage.finished.counts.undrafted == ""
    committed = 2
    for request in (one for one in stage.requests if isinstance(one, messages.Pass)):
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
            stage.tell(events.Replied(lane, messages.Drafted(draft.epoch, (), 0.0, "it stands aside")))
        else:
            stage.reply(lane)
    assert (session.counts.stood_aside, len(stage.emitted)) == (drafts, 12)
    assert drafts > 2
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
        session.handle(events.Ready(sessions.TARGET), 0.0)
        assert [decision.choice.reason for decision in session.decisions] == [reason]
    session = Session(assignment(explain=True))
    sessions.opened(session)
    target, _ = toys()
    sent = sessions.only(messages.Pass, session.handle(events.Lost(sessions.DRAFTER, GONE), 1.0))
    session.handle(events.Replied(sessions.TARGET, target.run(sent)), 2.0)
    assert session.decisions[-1].choice.reason == f"the drafter was lost: {GONE}"


def test_before_its_first_drafter_has_opened_a_session_asks_for_rows() -> None:
    """A drafter that opens meanwhile needs the row that follows its first draft token."""
    session, *_ = sessions.begun(Choice(2, 1), method=TLI)
    sent = sessions.only(messages.Pass, session.handle(events.Ready(sessions.TARGET), 0.0))
    assert not sent.draws
    with pytest.raises(events.IllegalEventError, match=r"^PassDone \(number 1, .*\) was not asked for"):
        session.handle(sessions.told(1), 1.0)  # a draw


@pytest.mark.parametrize(
    ("changes", "run"),
    [({"max_tokens": 3}, 3), ({"max_tokens": 1}, 1), ({"max_tokens": 50, "context": 10}, 8)],  # the prompt has 2
)
def test_a_run_asks_for_no_more_than_may_be_emitted_and_its_last_token_ends_the_output(changes, run):
    session, sent = sessions.alone(**changes)
    assert sent.run == run
    out = session.handle(sessions.told(*[1] * run, more=False), 1.0)
    assert sessions.end(out).reason is events.Reason.LENGTH
    assert (sessions.tokens_of(out), sessions.requests(out)) == ([1] * run, [])


@pytest.mark.parametrize("grouped", [True, False])
def test_nothing_after_a_stop_string_is_committed_or_counted(grouped: bool) -> None:
    session, _ = sessions.alone(stop=(Letters("ba"),), max_tokens=50)  # letters of 0, 1, 2: a, b, ab
    if grouped:
        out = session.handle(sessions.told(0, 1, 0, 1, 2), 1.0)
    else:
        out = [*session.handle(sessions.told(0, 1), 1.0), *session.handle(sessions.told(0, first=2), 2.0)]
        assert session.handle(sessions.told(1, 2, more=False), 3.0) == []  # the session is over
    finish = sessions.end(out)
    assert (finish.reason, sessions.tokens_of(out)) == (events.Reason.STOP, [0, 1, 0])
    assert sessions.emitted(out)[-1].kept == 1
    counts = finish.counts
    assert counts.tokens == counts.accepted + counts.corrected + counts.bonus == 3


def test_a_long_run_keeps_nothing_of_what_is_in_the_output() -> None:
    session, _ = sessions.alone(max_tokens=1000, context=1100)
    for first in range(0, 640, 4):
        session.handle(sessions.told(*[1] * 4, first=first), 1.0)
    assert session.counts.tokens == 640
    assert sum(map(len, session.target.answers._held)) <= 10


@pytest.mark.parametrize("ignored", [False, True])
def test_a_run_that_ended_at_a_stop_id(ignored: bool) -> None:
    session, _ = sessions.alone(pair=pair_of(LETTERS, LETTERS, stops=(2,)), ignore_eos=ignored, max_tokens=50)
    out = session.handle(sessions.told(0, 2, more=False), 1.0)
    assert sessions.tokens_of(out) == [0, 2]
    if ignored:
        following = sessions.only(messages.Pass, out)
        assert following.committed == (0, 2)
    else:
        assert sessions.end(out).reason is events.Reason.STOP


def test_a_target_that_dies_in_mid_run_is_replaced_and_no_token_comes_twice() -> None:
    session, _ = sessions.alone()
    out = session.handle(sessions.told(1, 0), 1.0)
    out += session.handle(events.Lost(sessions.TARGET, GONE), 2.0)
    (lane,) = [command.lane for command in out if isinstance(command, events.Open)]
    again = session.handle(events.Ready(lane), 3.0)
    sent = sessions.only(messages.Pass, again)
    assert (sent.number, sent.committed, sent.run) == (1, (1, 0), 10)
    out += session.handle(sessions.told(2, 2, lane=lane), 4.0)
    assert sessions.tokens_of(out) == [1, 0, 2, 2]
    assert session.handle(sessions.told(0, more=False), 5.0) == []  # of the lane that is lost


def test_another_target_that_is_open_goes_on_at_once() -> None:
    session = Session(assignment(TLI, drafts=False, targets=2))
    session.start(0.0)
    sessions.only(messages.Pass, session.handle(events.Ready(sessions.TARGET), 0.0))
    assert sessions.requests(session.handle(events.Ready(OTHER), 0.0)) == []  # the run brings what it could draw
    session.handle(sessions.told(1), 1.0)
    other = sessions.only(messages.Pass, session.handle(events.Lost(sessions.TARGET, GONE), 2.0))
    assert (other.number, other.committed, other.run) == (1, (1,), 11)


@pytest.mark.parametrize(
    "wrong",
    [
        messages.PassDone(1, (), 0.0, more=True),
        messages.PassDone(1, (messages.Sample(0, 0.0),) * 13, 0.0),  # twelve were asked for
        messages.PassDone(1, (messages.Sample(0, 0.0),) * 12, 0.0, more=True),  # none can follow
        messages.PassDone(1, (sessions.WHOLE,), 0.0, more=True),
        messages.PassDone(2, (messages.Sample(0, 0.0),), 0.0, more=True),
        messages.PassDone(1, (messages.Sample(0, 0.0),), 0.0, more=True, first=1),
    ],
    ids=["nothing", "too many", "more than all", "a row", "of another pass", "of later tokens"],
)
def test_answers_that_no_run_has(wrong: messages.PassDone) -> None:
    session, sent = sessions.alone()
    assert sent.run == 12
    with pytest.raises(events.IllegalEventError):
        session.handle(events.Replied(sessions.TARGET, wrong), 1.0)
    assert sessions.tokens_of(session.handle(sessions.told(1), 2.0)) == [1]
    with pytest.raises(events.IllegalEventError):
        session.handle(sessions.told(1), 2.0)  # it came already


def test_a_drafter_that_opens_leaves_a_run_alone_if_nothing_is_to_be_drafted() -> None:
    session, *_ = sessions.begun(PLAIN, max_tokens=90)
    session.handle(events.Lost(sessions.DRAFTER, GONE), 0.0)
    sessions.only(messages.Pass, session.handle(events.Ready(sessions.TARGET), 0.0))
    assert sessions.requests(session.handle(events.Ready(sessions.DRAFTER + 1), 1.0)) == []
    assert sessions.requests(session.handle(sessions.told(*[1] * 16), 2.0)) == [messages.RunTo(1, 64)]


def test_a_drafter_is_opened_once_the_controller_wants_one() -> None:
    """Which is asked again with each token; the run ends for the draft, and what comes meanwhile is output."""
    session, _, first = sessions.begun(Choice(2, 2, overlap=False), unwanted=3, interrupts=True, max_tokens=90)
    assert [type(one.request) for one in first if isinstance(one, events.Open)] == [messages.OpenTarget]
    assert sessions.only(messages.Pass, session.handle(events.Ready(sessions.TARGET), 0.0)).run == LONG_RUN
    (opening,) = [one for one in session.handle(sessions.told(1), 1.0) if isinstance(one, events.Open)]
    assert isinstance(opening.request, messages.OpenDrafter)
    assert sessions.requests(session.handle(sessions.told(1, first=1), 2.0)) == []  # it is opened once
    assert sessions.requests(session.handle(events.Ready(opening.lane), 3.0)) == [messages.RunTo(1, 0)]
    assert sessions.requests(session.handle(sessions.told(1, first=2), 3.5)) == []  # it is told once
    (following,) = sessions.requests(session.handle(sessions.told(1, first=3, more=False), 4.0))
    assert isinstance(following, messages.Draft)


def test_a_run_that_takes_the_place_of_a_lost_one_ends_for_the_draft_that_was_decided_on() -> None:
    session, *_ = sessions.begun(Choice(2, 2, overlap=False), interrupts=True, max_tokens=90)
    session.handle(events.Ready(sessions.TARGET), 0.0)
    assert sessions.requests(session.handle(events.Ready(sessions.DRAFTER), 1.0)) == [messages.RunTo(1, 0)]
    (again,) = session.handle(events.Lost(sessions.TARGET, GONE, True), 2.0)[:1]
    assert sessions.only(messages.Pass, session.handle(events.Ready(again.lane), 3.0)).run == LONG_RUN
    assert sessions.requests(session.handle(sessions.told(1, lane=again.lane), 4.0)) == [messages.RunTo(1, 0)]


@pytest.mark.parametrize("lost", [False, True], ids=["the drafter is there", "it was lost"])
def test_a_run_ends_where_a_draft_is_to_follow(lost: bool) -> None:
    """It is chosen once, and forgotten if there is no drafter any more."""
    session, *_ = sessions.begun(replace(PLAIN, run=4), Choice(3, 3, overlap=False), waits=True, max_tokens=50)
    session.handle(events.Ready(sessions.TARGET), 0.0)
    assert sessions.only(messages.Pass, session.handle(events.Ready(sessions.DRAFTER), 0.0)).run == 4
    assert sessions.requests(session.handle(sessions.told(1, 0), 1.0)) == [messages.RunTo(1, 0)]
    if lost:
        session.handle(events.Lost(sessions.DRAFTER, GONE), 2.0)
    (following,) = sessions.requests(session.handle(sessions.told(0, first=2, more=False), 3.0))
    assert isinstance(following, messages.Pass if lost else messages.Draft)
    assert lost or following.count == 3


def test_what_the_controller_is_told_of_a_run() -> None:
    """Not of the first forward, which reads the prompt; then of the time since the answer before."""
    controller = Turns((PLAIN,))
    session, _ = sessions.alone(controller=controller)
    session.handle(sessions.told(1), 5.0)
    session.handle(sessions.told(0, 2, first=1), 7.0)
    done = messages.PassDone(1, (messages.Sample(1, 0.0),), 0.5, 0.25, True, shared=3, fed=9, first=3)
    session.handle(events.Replied(sessions.TARGET, done), 8.0)
    seen = [(one.forwards, one.seconds, one.sessions, one.fed) for one in controller.seen if isinstance(one, PassSeen)]
    assert ([one[0] for one in seen], seen[1]) == ([2, 1], (1, 0.5, 3, 9))


def test_a_run_goes_on_when_half_of_it_is_drawn() -> None:
    session, sent = sessions.alone(max_tokens=90)
    assert sent.run == LONG_RUN == 32
    assert sessions.requests(session.handle(sessions.told(*[1] * 15), 1.0)) == []
    assert sessions.requests(session.handle(sessions.told(1, first=15), 2.0)) == [messages.RunTo(1, 64)]
    assert sessions.requests(session.handle(sessions.told(*[0] * 31, first=16), 3.0)) == []
    further = sessions.requests(session.handle(sessions.told(0, first=47), 4.0))
    assert further == [messages.RunTo(1, 90)]  # no more than may be emitted
    out = session.handle(sessions.told(*[1] * 42, first=48, more=False), 5.0)
    assert sessions.end(out).reason is events.Reason.LENGTH
    assert (session.counts.tokens, session.counts.passes, session.counts.runs) == (90, 90, 1)


def test_a_run_that_ended_before_it_was_told_to_go_on_is_followed_by_a_pass() -> None:
    session, _ = sessions.alone(max_tokens=90)
    assert sessions.requests(session.handle(sessions.told(*[1] * 20), 1.0)) == [messages.RunTo(1, 64)]
    following = sessions.only(messages.Pass, session.handle(sessions.told(*[1] * 12, first=20, more=False), 2.0))
    assert (following.number, following.run, len(following.committed)) == (2, 32, 32)


def scored(epoch: int, *probabilities: float) -> events.Replied:
    return events.Replied(sessions.DRAFTER, messages.Scored(epoch, np.array(probabilities), 0.5))


def test_it_asks_for_the_draft_that_the_walk_is_at() -> None:
    session, score = sessions.scoring()
    assert score == messages.Score(epoch=1, offset=0, strings=("b",), tokens=2)
    first = sessions.emitted(session.handle(scored(1, 0.25), 1.0))[0]
    assert (first.token, first.kind) == (1, Kind.ACCEPTED)  # p = 0.5 is above ψ
    assert (session.counts.drafter_seconds, session.counts.scores) == (0.5, 1)


FAULTS: list[tuple[events.Event, str]] = [
    (events.Lost(sessions.DRAFTER, GONE), "gone"),
    (events.Expired(events.Timer.DRAFTER, 1), "no answer within 30 s"),
    (scored(1, 0.5, 0.5), "scored 2 prefixes, asked for 1"),
    (scored(1, 1.1), "not between 0 and 1"),
    (scored(1, -0.1), "not between 0 and 1"),
    (scored(1, np.nan), "not between 0 and 1"),
]


@pytest.mark.parametrize(("event", "reason"), FAULTS, ids=lambda value: value if isinstance(value, str) else "")
def test_without_its_drafter_the_epoch_ends_and_it_decodes_plainly(event: events.Event, reason: str) -> None:
    session, _ = sessions.scoring()
    out = sessions.played(session, session.handle(event, 31.0), toys(SLRS)[0])
    assert reason in sessions.end(out).counts.drafter_lost
    assert [command.kind for command in sessions.emitted(out)] == [Kind.BONUS] * 12
    assert {command.epoch for command in sessions.emitted(out)}.isdisjoint({1})


def test_a_score_a_little_above_one_is_rounding() -> None:
    session, _ = sessions.scoring()
    session.handle(scored(1, 1 + 1e-7), 1.0)
    assert session.counts.drafter_lost == ""


def test_another_drafter_is_not_asked_about_the_draft_of_one_that_was_lost() -> None:
    """It knows nothing of that epoch, and would be lost over the question."""
    session = Session(assignment(SLRS))
    target, drafter = toys(SLRS)
    session.start(0.0)
    session.handle(events.Ready(sessions.TARGET), 0.0)
    draft = sessions.only(messages.Draft, session.handle(events.Ready(sessions.DRAFTER), 0.0))
    reply = DrafterLane(drafter, rows=True).answer(draft)
    sent = sessions.only(messages.Pass, session.handle(events.Replied(sessions.DRAFTER, reply), 0.0))
    session.handle(events.Lost(sessions.DRAFTER, GONE), 1.0)
    session.handle(events.Ready(sessions.DRAFTER + 1), 2.0)
    asked = sessions.requests(session.handle(events.Replied(sessions.TARGET, target.run(sent)), 3.0))
    assert not any(isinstance(one, messages.Score) for one in asked)
    assert any(isinstance(one, messages.Draft) and one.epoch > draft.epoch for one in asked)


def test_an_older_timer_does_not_end_the_wait_for_scores() -> None:
    """The deadline is looked at when the timer expires: what came since counts."""
    session, score = sessions.scoring()
    assert session.handle(events.Expired(events.Timer.DRAFTER, 0), 31.0) == []
    (timer,) = session.handle(events.Expired(events.Timer.DRAFTER, 1), 29.0)
    assert timer == events.SetTimer(events.Timer.DRAFTER, 2, 1.0)
    assert sessions.emitted(session.handle(scored(score.epoch, 0.5), 29.5))


def test_each_place_has_its_own_share() -> None:
    counts = Counts()
    counts.rounds(3, 3, False, 1)
    counts.rounds(3, 1, True, 1)
    counts.rounds(2, 0, True, 1)
    counts.rounds(3, 1, False, 1)  # the end came before the second was judged
    counts.rounds(0, 0, False, 2)  # nothing was proposed
    facts = vars(Times(0.0, 0.0, 0.0, 0.0, 0, 0)) | {"method": "slem", "num_speculative_tokens": 3, "prompt_tokens": 1}
    found, none = (Statistics(**facts, **vars(one)) for one in (counts, Counts()))
    assert (none.acceptance_at, none.accepted_length) == ((), 0.0)
    assert (found.drafted_at, found.judged_at, found.accepted_at) == ((4, 4, 3), (4, 2, 1), (3, 1, 1))
    assert (found.acceptance_at, found.accepted_length) == ((0.75, 0.5, 1.0), pytest.approx(5 / 4))


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

"""How long a plain run is: what the controller says of it, and when it is told to end or to go on."""

from dataclasses import replace

import pytest

from crossdraft.session.events import Lost, Ready, Reason, Replied
from crossdraft.session.session import Session
from crossdraft.speculation.choice import LONG_RUN, PLAIN, Choice, PassSeen
from crossdraft.types.messages import Draft, Pass, PassDone, RunTo, Sample
from crossdraft.verification.methods import SLEM, TLI, Method
from tests.clock import GONE
from tests.session.sessions import DRAFTER, TARGET, alone, assignment, end, requests, tokens_of, told
from tests.verification.scheduling import InTurn, Turns


@pytest.mark.parametrize("method", [TLI, SLEM], ids=lambda method: method.name)
def test_a_drafter_that_opens_ends_the_run_and_is_asked_after_it(method: Method) -> None:
    session = Session(assignment(method, controller=InTurn((Choice(2, 2, overlap=False),)).fresh()))
    session.start(0.0)
    session.handle(Lost(DRAFTER, GONE), 0.0)
    (sent,) = requests(session.handle(Ready(TARGET), 0.0))
    assert isinstance(sent, Pass)
    session.handle(told(1), 1.0)
    assert requests(session.handle(Ready(DRAFTER + 1), 2.0)) == [RunTo(1, 0)]
    assert requests(session.handle(told(0, first=1), 3.0)) == []  # it had left already
    out = session.handle(told(2, first=2, more=False), 4.0)
    assert tokens_of(out) == [2]
    (draft,) = requests(out)
    assert isinstance(draft, Draft)
    assert (draft.offset, draft.letters) == (0, "baab")


def test_a_run_is_told_to_end_once() -> None:
    session = Session(assignment(SLEM, controller=InTurn((Choice(2, 1),)).fresh()))
    session.start(0.0)
    session.handle(Lost(DRAFTER, GONE), 0.0)
    session.handle(Ready(TARGET), 0.0)
    assert requests(session.handle(Ready(DRAFTER + 1), 1.0)) == [RunTo(1, 0)]
    session.handle(Lost(DRAFTER + 1, GONE), 2.0)
    assert requests(session.handle(Ready(DRAFTER + 2), 3.0)) == []


def test_a_drafter_that_opens_leaves_a_run_alone_if_nothing_is_to_be_drafted() -> None:
    controller = InTurn((PLAIN,)).fresh()
    session = Session(assignment(SLEM, controller=controller, max_tokens=90))
    session.start(0.0)
    session.handle(Lost(DRAFTER, GONE), 0.0)
    (sent,) = requests(session.handle(Ready(TARGET), 0.0))
    assert isinstance(sent, Pass)
    assert requests(session.handle(Ready(DRAFTER + 1), 1.0)) == []
    assert requests(session.handle(told(*[1] * 16), 2.0)) == [RunTo(1, 64)]


@pytest.mark.parametrize("lost", [False, True], ids=["the drafter is there", "it was lost"])
def test_a_run_is_the_last_where_a_draft_is_to_follow(lost: bool) -> None:
    """It is chosen once, and forgotten if there is no drafter any more."""
    controller = InTurn((replace(PLAIN, run=4), Choice(3, 3, overlap=False)), waits_for_drafter=True).fresh()
    session = Session(assignment(SLEM, controller=controller, max_tokens=50))
    session.start(0.0)
    session.handle(Ready(TARGET), 0.0)
    (sent,) = requests(session.handle(Ready(DRAFTER), 0.0))
    assert isinstance(sent, Pass)
    assert sent.run == 4
    assert requests(session.handle(told(1, 0), 1.0)) == []
    assert requests(session.handle(told(1, first=2), 2.0)) == []
    if lost:
        session.handle(Lost(DRAFTER, GONE), 2.0)
    (following,) = requests(session.handle(told(0, first=3, more=False), 3.0))
    if lost:
        assert isinstance(following, Pass)
    else:
        assert isinstance(following, Draft)
        assert following.count == 3


def test_the_controller_says_how_long_a_run_is_and_is_asked_after_each() -> None:
    controller = InTurn((replace(PLAIN, run=2), replace(PLAIN, run=5)), waits_for_drafter=True).fresh()
    session = Session(assignment(TLI, controller=controller))
    session.start(0.0)
    session.handle(Ready(TARGET), 0.0)
    (sent,) = requests(session.handle(Ready(DRAFTER), 0.0))
    assert isinstance(sent, Pass)
    assert sent.run == 2
    (sent,) = requests(session.handle(told(1, 1, more=False), 1.0))
    assert isinstance(sent, Pass)
    assert sent.run == 5


def test_what_the_controller_is_told_of_a_run() -> None:
    """Not of the first forward, which reads the prompt; then of the time since the answer before."""
    controller = Turns(InTurn((PLAIN,)))
    session, _ = alone(controller=controller)
    session.handle(told(1), 5.0)
    session.handle(told(0, 2, first=1), 7.0)
    done = PassDone(1, (Sample(1, 0.0),), 0.5, 0.25, True, shared=3, fed=9, first=3)
    session.handle(Replied(TARGET, done), 8.0)
    seen = [one for one in controller.seen if isinstance(one, PassSeen)]
    assert [(one.waited, one.forwards, one.asked) for one in seen] == [(2.0, 2, False), (1.0, 1, False)]
    assert (seen[1].seconds, seen[1].queued, seen[1].sessions, seen[1].fed) == (0.5, 0.25, 3, 9)


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
    (following,) = requests(session.handle(told(*[1] * 12, first=20, more=False), 2.0))
    assert isinstance(following, Pass)
    assert (following.number, following.run, len(following.committed)) == (2, 32, 32)

"""The drafter's window, its deadlines, and what a controller is told of it all."""

import numpy as np

from crossdraft.session.epoch import Epoch
from crossdraft.session.events import Expired, Lost, Replied, SetTimer, Timer
from crossdraft.session.session import Session
from crossdraft.speculation.choice import PLAIN, Choice, DraftSeen, Judged, Lifecycle, PassSeen
from crossdraft.text.letters import Letters
from crossdraft.types.messages import Advance, Draft, Drafted, Pass, PassDone, Sample
from crossdraft.types.rows import DraftToken, Row
from crossdraft.verification.chooser import RandomChooser
from crossdraft.verification.methods import TLI
from crossdraft.verification.walk import Ground
from tests.clock import GONE
from tests.ports import assignment
from tests.session.sessions import DRAFTER, TARGET, opened, requests, timers
from tests.session.test_target_side import ONES, drafted, passing
from tests.verification.scheduling import InTurn
from tests.vocabularies import pair_of

ZEROS = Row.certain(0)


def test_what_a_controller_is_told() -> None:
    session, controller, _ = passing(Choice(2, 1))
    session.handle(Replied(DRAFTER, drafted(1)), 3.0)
    out = session.handle(Replied(TARGET, PassDone(1, (ONES, ONES), 0.5)), 5.0)
    assert requests(out) == [Advance(1, 4)]  # the window is used up, and moves on
    session.handle(Replied(DRAFTER, drafted(2)), 6.0)
    session.handle(Replied(TARGET, PassDone(2, (ZEROS, ZEROS), 0.25)), 8.0)
    session.handle(Expired(Timer.STALL, 3), 38.0)
    session.handle(Lost(DRAFTER, GONE), 39.0)
    assert controller.seen == [
        Lifecycle.STARTED,
        Lifecycle.DRAFTER_CAME,
        DraftSeen(1, 1.0, 0.5),
        DraftSeen(1, None, 0.5),
        Judged(2, False, 2, 0),  # of the first pass nothing is told: it reads the prompt as well
        DraftSeen(1, None, 0.5),
        PassSeen(0.25, fed=2),
        Judged(0, True, 1, 0),
        Lifecycle.DRAFTER_WENT,
    ]


def test_settled_tokens_are_told_apart_and_what_is_compared_with_them_too() -> None:
    session, controller, _ = passing(Choice(3, 1, patience=3.0))
    out = session.handle(Replied(TARGET, PassDone(1, (ONES, ONES), 0.5)), 5.0)  # accepted, and a row to go on with
    (stall,) = (command for command in out if isinstance(command, SetTimer) and command.timer is Timer.STALL)
    session.handle(Expired(Timer.STALL, stall.number), 8.0)  # the target's own
    session.handle(Replied(DRAFTER, drafted(1)), 9.0)  # the same
    judged = [seen for seen in controller.seen if isinstance(seen, Judged)]
    assert judged == [Judged(1, False, 1, 0), Judged(0, False, 1, 1), Judged(1, False, 0, 0)]


def test_a_window_that_moves_has_a_deadline() -> None:
    """The drafter owed nothing when its timer ran out, and owes something again."""
    session, _, _ = passing(Choice(2, 1))
    assert session.handle(Expired(Timer.DRAFTER, 1), 31.0) == [SetTimer(Timer.DRAFTER, 2, 1.0)]
    session.handle(Replied(DRAFTER, drafted(1)), 31.5)
    assert session.handle(Expired(Timer.DRAFTER, 2), 32.0) == []
    out = session.handle(Replied(TARGET, PassDone(1, (ONES, ONES), 0.5)), 33.0)
    assert Advance(1, 4) in requests(out)
    assert Timer.DRAFTER in timers(out)
    gone = session.handle(Expired(Timer.DRAFTER, 3), 63.0)
    assert session.counts.drafters_lost == 1
    assert len(gone) >= 2


def test_a_drafter_that_is_told_again_knows_what_it_drafted() -> None:
    """Of its own letters those that were kept are not sent again."""
    session, _, _ = passing(Choice(3, 1))
    session.handle(Replied(DRAFTER, drafted(1)), 3.0)
    out = session.handle(Replied(TARGET, PassDone(1, (ONES, ZEROS), 0.5)), 5.0)
    (draft,) = (request for request in requests(out) if isinstance(request, Draft))
    assert (draft.epoch, draft.offset, draft.letters) == (2, 1, Letters("a"))


def test_an_empty_reply_puts_off_no_deadline() -> None:
    session, controller, _ = passing(Choice(3, 1))
    session.handle(Replied(DRAFTER, Drafted(1, (), 0.0, first=1)), 3.0)
    assert session.counts.drafter_lost == "it sent a reply without anything in it"
    assert controller.seen[-1] == Lifecycle.DRAFTER_WENT


def test_what_comes_twice_puts_off_no_deadline() -> None:
    session, _, _ = passing(Choice(3, 1))
    (again,) = session.handle(Expired(Timer.DRAFTER, 1), 31.0)
    session.handle(Replied(DRAFTER, drafted(0)), 31.5)
    assert (session.counts.draft_tokens, session.counts.drafters_lost) == (1, 0)
    session.handle(Expired(again.timer, again.number), 32.0)  # type: ignore[union-attr]
    assert session.counts.drafters_lost == 1


def test_an_epoch_keeps_no_rows_of_what_the_output_has_passed() -> None:
    """And of a long one a pass is planned from the frontier on."""
    pair = pair_of(("a", "b"), ("a", "b"))
    epoch = Epoch(1, Choice(3, 1), pair, 2, 2)
    epoch.extend((DraftToken(0, ZEROS), DraftToken(1, ONES), DraftToken(0, ZEROS)))
    epoch.begin(TLI.walk(Ground(pair, RandomChooser(np.random.default_rng(1)))))
    epoch.reveal()
    epoch.release(5)  # the output is ahead of what is revealed: that will still be judged
    assert [draft_token.row for draft_token in epoch.draft_tokens] == [None, ONES, ZEROS]
    assert epoch.passed(4) == 2
    assert [draft_token.row for draft_token in epoch.guessed(2)] == [ZEROS]
    assert (epoch.beyond(2), epoch.beyond(4)) == (3, 1)


def test_draft_tokens_that_nobody_could_verify_cost_the_drafter_its_session() -> None:
    session, _, _ = passing(Choice(3, 1))
    out = session.handle(Replied(DRAFTER, Drafted(1, (DraftToken(1, None),), 0.0, first=1)), 3.0)
    assert "without the whole row" in session.counts.drafter_lost
    assert not [request for request in requests(out) if isinstance(request, Pass)]


def test_a_drafter_that_is_heard_again_is_waited_for_again() -> None:
    """After a stall nothing is waited for until the drafter speaks."""
    session, _, _ = passing(Choice(3, 1, patience=3.0))
    out = session.handle(Replied(TARGET, PassDone(1, (ONES, ONES), 0.5)), 5.0)
    (stall,) = (command for command in out if isinstance(command, SetTimer) and command.timer is Timer.STALL)
    out = session.handle(Expired(Timer.STALL, stall.number), 8.0)
    assert Timer.STALL not in timers(out)
    session.handle(Replied(DRAFTER, drafted(1)), 9.0)
    out = session.handle(Replied(TARGET, PassDone(2, (ONES,), 0.5)), 10.0)
    assert Timer.STALL in timers(out)


def test_epochs_that_a_drafter_never_answers_put_off_no_deadline() -> None:
    controller = InTurn((Choice(2, patience=0.0),), waits_for_drafter=True).fresh()
    session = Session(assignment(TLI, controller=controller, max_tokens=9))
    (timer,) = (one for one in opened(session) if isinstance(one, SetTimer) and one.timer is Timer.DRAFTER)
    for number in range(1, 5):
        session.handle(Replied(TARGET, PassDone(number, (ONES,), 0.5)), 5.0 + number)
    assert session.counts.epochs > 1
    session.handle(Expired(timer.timer, timer.number), 30.5)
    assert session.counts.drafters_lost == 1


def test_a_drafter_is_told_when_its_draft_is_of_no_use_any_more() -> None:
    """And not if it owes nothing; the silence of one that was asked again goes on, its rest does not count."""
    controller = InTurn((Choice(2, patience=0.0), PLAIN), waits_for_drafter=True).fresh()
    session = Session(assignment(TLI, controller=controller, max_tokens=9))
    sent = requests(opened(session))
    for number in range(1, 4):
        sent += requests(session.handle(Replied(TARGET, PassDone(number, (ONES,), 0.5)), 5.0 + number))
    assert [one for one in sent if isinstance(one, Advance)] == [Advance(1, 0)]
    assert session.handle(Expired(Timer.DRAFTER, 1), 32.0) == []
    run = next(one for one in sent if isinstance(one, Pass) and one.draws)
    asked = session.handle(Replied(TARGET, drawn(run, 3)), 100.0)
    (again,) = (one for one in requests(asked) if isinstance(one, Draft))
    (timer,) = (one for one in asked if isinstance(one, SetTimer) and one.timer is Timer.DRAFTER)
    assert again.epoch == 3
    assert timer.seconds == 30.0 - 8.0


def drawn(run: Pass, token: int) -> PassDone:
    """A run that is over after one token."""
    return PassDone(run.number, (Sample(token % 2, 0.0),), 0.5)

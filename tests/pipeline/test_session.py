"""The session's state machine: every transition, with toys instead of services."""

from collections.abc import Callable

import numpy as np
import pytest

from crossdraft.pipeline.events import (
    Cancelled,
    DrafterLost,
    DrafterOpened,
    Emitted,
    Event,
    Expired,
    Finished,
    Reason,
    SetTimer,
    TargetLost,
    TargetOpened,
)
from crossdraft.pipeline.rules import IllegalEventError, State
from crossdraft.pipeline.session import Session
from crossdraft.text.letters import NOTHING, Letters
from crossdraft.verification.exchange import (
    Draft,
    Drafted,
    OpenDrafter,
    OpenTarget,
    Pass,
    PassDone,
    RowFetched,
    Scored,
)
from crossdraft.verification.methods import SLEM, TLI, Method
from crossdraft.verification.rows import Proposal, Row
from crossdraft.verification.walk import Kind
from tests.pipeline.sessions import assignment, drafting, emitted, end, fetching, passing, scoring, started, toys
from tests.running import run_session


def test_it_opens_both_sessions_and_then_drafts() -> None:
    session = Session(assignment())
    assert [type(command) for command in session.start()] == [OpenTarget, OpenDrafter]
    assert session.handle(DrafterOpened()) == []
    draft, timer = session.handle(TargetOpened())
    assert draft == Draft(1, 0, NOTHING, 3)
    assert timer == SetTimer(1, 30.0)


@pytest.mark.parametrize("method", [SLEM, TLI], ids=lambda method: method.name)
@pytest.mark.parametrize("drafts", [True, False])
def test_it_emits_what_was_asked_for(method: Method, drafts: bool) -> None:
    target, drafter = toys(method)
    out = run_session(Session(assignment(method, drafts=drafts)), target, drafter if drafts else None)
    finish = end(out)
    assert finish.reason is Reason.LENGTH
    assert len(emitted(out)) == 12
    assert finish.counts.tokens == 12
    assert sum(finish.counts.kinds.values()) == 12
    assert finish.counts.passes == (12 if not drafts else finish.counts.passes) <= 12
    assert (finish.counts.proposals > 0) == drafts
    offsets = [command.offset for command in emitted(out)]
    assert offsets == list(np.cumsum([0, *(len(command.letters) for command in emitted(out))])[:-1])


def test_the_drafter_always_goes_on_from_the_committed_text() -> None:
    """Whatever was drafted before, a Draft leaves the drafter with exactly the committed letters."""
    session = Session(assignment(max_tokens=30))
    target, drafter = toys()
    texts: list[Letters] = []
    original = drafter.draft

    def watched(wanted: Draft) -> Drafted:
        texts.append(Letters(drafter.text[: wanted.offset] + wanted.letters))
        return original(wanted)

    drafter.draft = watched  # type: ignore[method-assign]
    out = run_session(session, target, drafter)
    whole = "".join(command.letters for command in emitted(out))
    assert len(texts) > 3
    assert all(whole.startswith(text) for text in texts)
    assert sorted(texts, key=len) == texts


WAITING: list[tuple[State, Callable[[], Session], tuple[type, ...]]] = [
    (State.NEW, lambda: Session(assignment()), ()),
    (State.OPENING, started, (TargetOpened, DrafterOpened, DrafterLost, TargetLost, Cancelled)),
    (State.DRAFTING, lambda: drafting()[0], (Drafted, Expired, DrafterLost, TargetLost, Cancelled)),
    (State.PASSING, lambda: passing()[0], (PassDone, DrafterLost, TargetLost, Cancelled)),
    (State.FETCHING, fetching, (RowFetched, DrafterLost, TargetLost, Cancelled)),
    (State.SCORING, lambda: scoring()[0], (Scored, Expired, DrafterLost, TargetLost, Cancelled)),
]


def events() -> list[Event]:
    whole = Row(np.array([0, 1, 2]), np.array([0.2, 0.5, 0.3]))
    return [
        TargetOpened(),
        DrafterOpened(),
        Drafted(1, (Proposal(0, Row.certain(0)),), 0.0),
        PassDone(1, (), 0.0),
        RowFetched(1, 0, whole),
        Scored(1, np.array([0.5]), 0.0),
        Expired(1),
        DrafterLost("gone"),
        TargetLost(OSError("gone")),
        Cancelled(),
    ]


@pytest.mark.parametrize(("state", "made", "legal"), WAITING, ids=lambda value: getattr(value, "name", ""))
def test_illegal_events_raise_and_change_nothing(
    state: State, made: Callable[[], Session], legal: tuple[type, ...]
) -> None:
    for event in events():
        session = made()
        assert session.state is state
        before = (session.state, session.counts.passes, session.counts.tokens, session.counts.epochs)
        outdated = isinstance(event, Expired) and state in (State.PASSING, State.FETCHING, State.SCORING)
        if isinstance(event, PassDone) or (not isinstance(event, legal) and not outdated):
            with pytest.raises(IllegalEventError):
                session.handle(event)
            assert before == (session.state, session.counts.passes, session.counts.tokens, session.counts.epochs)
        else:
            session.handle(event)


def test_starting_twice_is_illegal() -> None:
    with pytest.raises(IllegalEventError):
        started().start()


def test_after_the_end_everything_is_ignored() -> None:
    session, _ = passing()
    assert isinstance(session.handle(Cancelled())[0], Finished)
    assert [session.handle(event) for event in events()] == [[]] * len(events())


def test_answers_of_older_epochs_and_old_timers_are_dropped() -> None:
    session, draft = drafting()
    assert session.handle(Drafted(draft.epoch - 1, (), 0.0)) == []
    assert session.handle(Expired(draft.epoch - 1)) == []
    assert session.state is State.DRAFTING
    with pytest.raises(IllegalEventError):
        session.handle(Drafted(draft.epoch + 1, (), 0.0))


def test_a_whole_row_is_fetched_when_the_head_lacks_an_id() -> None:
    session = fetching()
    out = session.handle(RowFetched(1, 0, Row(np.array([0, 1, 2]), np.array([0.0, 0.5, 0.5]))))
    assert session.counts.rows_fetched == 1
    assert isinstance(out[0], Emitted)
    assert out[0].kind is Kind.CORRECTED


@pytest.mark.parametrize("lost", [DrafterLost("gone"), Expired(1)])
def test_without_its_drafter_the_session_decodes_plainly(lost: Event) -> None:
    session, _ = drafting()
    (sent,) = session.handle(lost)
    assert isinstance(sent, Pass)
    assert len(sent.tree) == 0
    assert session.counts.drafter_lost
    target, _ = toys()
    waiting: list[object] = [sent]
    out: list[object] = []
    while waiting:
        command = waiting.pop(0)
        if isinstance(command, Pass):
            waiting += session.handle(target.run(command))
        else:
            out.append(command)
    assert len(emitted(out)) == 12
    assert session.handle(Drafted(1, (), 0.0)) == []


def test_a_drafter_lost_while_opening_is_not_waited_for() -> None:
    session = started()
    session.handle(TargetOpened())
    assert isinstance(session.handle(DrafterLost("gone"))[0], Pass)


def test_a_drafter_with_impossible_proposals_is_given_up() -> None:
    session, draft = drafting()
    (sent,) = session.handle(Drafted(draft.epoch, (Proposal(99),), 0.0))
    assert isinstance(sent, Pass)
    assert len(sent.tree) == 0
    assert "99" in session.counts.drafter_lost


def test_a_lost_target_ends_the_session_with_its_error() -> None:
    error = OSError("gone")
    session, _ = passing()
    finish = end(session.handle(TargetLost(error)))  # type: ignore[arg-type]
    assert finish.reason is Reason.FAILED
    assert finish.error is error


def test_stop_strings_end_the_output_where_they_begin() -> None:
    target, drafter = toys()
    free = run_session(Session(assignment(max_tokens=30)), target, drafter)
    whole = "".join(command.letters for command in emitted(free))
    stop = Letters(whole[9:12])
    target, drafter = toys()
    out = run_session(Session(assignment(max_tokens=30, stop=(stop,))), target, drafter)
    assert end(out).reason is Reason.STOP
    assert emitted(out)[-1].kept == whole.find(stop)
    assert all(command.kept is None for command in emitted(out)[:-1])


def test_the_context_bounds_output_and_trees() -> None:
    target, drafter = toys()
    session = Session(assignment(max_tokens=50, context=20))
    sent: list[Pass] = []
    original = target.run

    def watched(request: Pass) -> PassDone:
        sent.append(request)
        return original(request)

    target.run = watched  # type: ignore[method-assign]
    out = run_session(session, target, drafter)
    assert len(emitted(out)) == 18
    assert end(out).reason is Reason.LENGTH
    committed = 2
    for request in sent:
        committed += len(request.committed)
        assert committed + len(request.tree) <= 20


def test_a_drafter_that_stood_aside_is_told_the_text_from_where_it_is() -> None:
    """Nothing that it drafted before counts any more, even if the output grows to be the same."""
    session, draft = drafting()
    target, drafter = toys()
    lengths = []
    waiting: list[object] = session.handle(drafter.draft(draft))
    while waiting:
        command = waiting.pop(0)
        if isinstance(command, Pass):
            waiting += session.handle(target.run(command))
        elif isinstance(command, Draft):
            assert command.offset <= len(drafter.text)
            drafter.text = Letters(drafter.text[: command.offset] + command.letters)
            lengths.append(len(drafter.text))
            waiting += session.handle(Drafted(command.epoch, (), 0.0, "it stands aside"))
    assert len(lengths) > 2
    assert session.counts.stood_aside == len(lengths)

"""Which event is legal when: what is not raises and changes nothing."""

from collections.abc import Callable

import numpy as np
import pytest

from crossdraft.session.events import (
    Cancelled,
    Event,
    Expired,
    Finished,
    IllegalEventError,
    Lost,
    Ready,
    Replied,
    Timer,
)
from crossdraft.session.session import Session, State
from crossdraft.types.messages import Drafted, PassDone, RowFetched, Scored
from crossdraft.types.rows import DraftToken, Row
from tests.clock import GONE
from tests.session.sessions import (
    DRAFTER,
    TARGET,
    assignment,
    drafting,
    fetching,
    passing,
    scoring,
    snapshot,
    started,
    toys,
)
from tests.verification.toys import row_of

WHOLE = Row(np.array([0, 1, 2]), np.array([0.2, 0.5, 0.3]))

WAITING: dict[str, tuple[Callable[[], Session], set[str]]] = {
    "new": (lambda: Session(assignment()), set()),
    "opening": (started, {"target ready", "drafter ready"}),
    "drafting": (lambda: drafting()[0], {"draft_tokens"}),
    "passing": (lambda: passing()[0], {"pass", "draft_tokens"}),
    "fetching": (fetching, {"row", "draft_tokens"}),
    "scoring": (lambda: scoring()[0], {"scores"}),
}
ALWAYS: dict[str, Event] = {  # once it has begun
    "a lost target": Lost(TARGET, GONE),
    "a lost drafter": Lost(DRAFTER, GONE),
    "a stall": Expired(Timer.STALL, 1),
    "a late drafter": Expired(Timer.DRAFTER, 1),
    "no target": Expired(Timer.TARGET, 1),
    "a timer of the past": Expired(Timer.STALL, 0),
    "cancelled": Cancelled(),
    "a lane that is unknown": Ready(99),
    "draft tokens of an older epoch": Replied(DRAFTER, Drafted(0, (), 0.0)),
    "scores of an older epoch": Replied(DRAFTER, Scored(0, np.array([0.5]), 0.0)),
}


def events() -> dict[str, Event]:
    """Those that are legal in one state or the other, and those that never are."""
    three = tuple(DraftToken(0, Row.certain(0)) for _ in range(3))
    nodes = toys()[0].run(passing()[1]).nodes
    return {
        "target ready": Ready(TARGET),
        "drafter ready": Ready(DRAFTER),
        "draft_tokens": Replied(DRAFTER, Drafted(1, three, 0.0)),
        "pass": Replied(TARGET, PassDone(1, nodes, 0.0)),
        "row": Replied(TARGET, RowFetched(1, 0, Row(np.array([0, 1, 2]), np.array([0.2, 0.5, 0.3])))),
        "scores": Replied(DRAFTER, Scored(1, np.array([0.5]), 0.0)),
        "a pass that was not asked for": Replied(TARGET, PassDone(2, nodes, 0.0)),
        "a pass without its nodes": Replied(TARGET, PassDone(1, (), 0.0)),
        "rows where samples were asked for": Replied(TARGET, PassDone(1, (WHOLE,) * len(nodes), 0.0)),
        "a row of a later pass": Replied(TARGET, RowFetched(2, 0, WHOLE)),
        "a row of another node": Replied(TARGET, RowFetched(1, 5, WHOLE)),
        "draft tokens out of order": Replied(DRAFTER, Drafted(1, three, 0.0, first=7)),
        "draft tokens of a later epoch": Replied(DRAFTER, Drafted(9, three, 0.0)),
        "scores of a later epoch": Replied(DRAFTER, Scored(9, np.array([0.5]), 0.0)),
        "a target that proposes": Replied(TARGET, Drafted(1, three, 0.0)),
        "a drafter that passes": Replied(DRAFTER, PassDone(1, nodes, 0.0)),
    }


@pytest.mark.parametrize("name", events())
@pytest.mark.parametrize("state", WAITING)
def test_what_was_not_asked_for_is_illegal_and_changes_nothing(state: str, name: str) -> None:
    make, legal = WAITING[state]
    session, twin = make(), make()
    event = events()[name]
    if name in legal:
        session.handle(event, 1.0)
        return
    before = snapshot(session)
    with pytest.raises(IllegalEventError):
        session.handle(event, 1.0)
    assert snapshot(session) == before == snapshot(twin)


@pytest.mark.parametrize("name", ALWAYS)
@pytest.mark.parametrize("state", WAITING)
def test_losses_timers_and_what_is_outdated_are_always_legal(state: str, name: str) -> None:
    make, _ = WAITING[state]
    session = make()
    if state == "new":
        with pytest.raises(IllegalEventError):
            session.handle(ALWAYS[name], 1.0)
    elif state != "opening" or not name.startswith("draft_tokens"):
        session.handle(ALWAYS[name], 1.0)


def test_a_row_that_is_not_that_of_its_head_is_illegal_and_changes_nothing() -> None:
    session = fetching()
    before = snapshot(session)
    with pytest.raises(IllegalEventError, match="not that of the head"):
        session.handle(Replied(TARGET, RowFetched(1, 0, row_of([0, 1, 2], [0.9, 0.05, 0.05]))), 1.0)
    assert snapshot(session) == before


def test_after_the_end_everything_is_ignored() -> None:
    session, _ = passing()
    assert isinstance(session.handle(Cancelled(), 1.0)[0], Finished)
    assert session.state is State.DONE
    late = [*events().values(), *ALWAYS.values()]
    assert [session.handle(event, 1.0) for event in late] == [[]] * len(late)


@pytest.mark.parametrize("state", ["drafting", "passing", "fetching", "scoring"])
def test_answers_of_older_epochs_and_old_timers_change_nothing(state: str) -> None:
    session = WAITING[state][0]()
    before = snapshot(session)
    for name in ("draft tokens of an older epoch", "scores of an older epoch", "a lane that is unknown"):
        assert session.handle(ALWAYS[name], 1.0) == []
        assert snapshot(session) == before
    for timer in Timer:
        assert session.handle(Expired(timer, 0), 1.0) == []

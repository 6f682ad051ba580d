"""Which event is legal when: what is not raises and changes nothing. And who may write what."""

import ast
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from crossdraft import client, session
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
from crossdraft.session.rules import TRANSITIONS, LaneState, State, TargetState
from crossdraft.session.session import Session
from crossdraft.speculation.choice import PLAIN, Choice
from crossdraft.types.messages import Drafted, PassDone, PromptScored, RowFetched, Scored, ScorePrompt
from crossdraft.types.rows import DraftToken, Row
from crossdraft.verification.methods import SLEM, SLRS, TLI
from tests.clock import GONE
from tests.session.sessions import (
    DRAFTER,
    TARGET,
    WHOLE,
    Followed,
    assignment,
    drafting,
    fetching,
    passing,
    scoring,
    snapshot,
    started,
    toys,
)
from tests.session.test_interleavings import life
from tests.verification.toys import row_of

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
        "row": Replied(TARGET, RowFetched(1, 0, WHOLE)),
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


def test_lanes_go_through_their_states_as_the_table_says_and_use_all_of_it() -> None:
    """In random lives, whose sessions check it (`Followed`)."""
    used: set[tuple[LaneState, type]] = set()
    choices = [Choice(3, 1, chunk=2), replace(PLAIN, run=3), Choice(2, 0, patience=0.0)]
    for seed, method in enumerate((SLEM, TLI, SLRS) * 12):
        numbers = [int(number) for number in np.random.default_rng(seed).integers(0, 2**12, 80)]
        rounds = [Choice(3, 3, overlap=False)] if method.whole_draft else choices
        lived = life(method, rounds, numbers, 1 + seed % 2, 1.0, seed)
        lived.run(mute=False)
        assert isinstance(lived.stage.session, Followed)
        used |= lived.stage.session.used
    every = {(state, kind) for state, kinds in TRANSITIONS.items() for kind in kinds}
    assert every - used == {(TargetState.IDLE, ScorePrompt), (TargetState.SCORING, PromptScored)}


@pytest.mark.parametrize("module", [session, client], ids=lambda module: module.__name__)
def test_nobody_writes_another_objects_fields(module: ModuleType) -> None:
    """An object says by methods what may be done to it, so that all that changes a field is in one class."""
    written = [
        f"{path.name}:{one.lineno}: {ast.unparse(one)}"
        for path in sorted(Path(module.__path__[0]).glob("*.py"))
        for one in ast.walk(ast.parse(path.read_text()))
        if isinstance(one, ast.Attribute) and not isinstance(one.ctx, ast.Load) and ast.unparse(one.value) != "self"
    ]
    assert written == []

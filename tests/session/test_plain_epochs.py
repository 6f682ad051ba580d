"""Epochs without a drafter: the target draws by itself, unless a drafter is about to open."""

import numpy as np
import pytest

from crossdraft.session.events import IllegalEventError, Lost, Ready, Replied
from crossdraft.session.session import Session
from crossdraft.speculation.choice import PLAIN, Choice
from crossdraft.types.messages import Draft, Drafted, Pass, PassDone, Sample
from crossdraft.types.rows import DraftToken, Row
from crossdraft.verification.methods import COUPLED, TLI, Method
from tests.clock import GONE
from tests.session.sessions import DRAFTER, TARGET, assignment, emitted, opened, requests
from tests.verification.scheduling import InTurn

ROW_METHODS = (TLI, COUPLED)
WHOLE = Row(np.array([0, 1, 2]), np.array([0.2, 0.5, 0.3]))


def alone(method: Method = TLI) -> tuple[Session, Pass]:
    """A session whose first drafter is gone, with its first pass."""
    session = Session(assignment(method, controller=InTurn((Choice(2, 1),)).fresh()))
    session.start(0.0)
    session.handle(Lost(DRAFTER, GONE), 0.0)
    (sent,) = requests(session.handle(Ready(TARGET), 0.0))
    assert isinstance(sent, Pass)
    return session, sent


@pytest.mark.parametrize("method", ROW_METHODS, ids=lambda method: method.name)
def test_without_a_drafter_passes_are_answered_by_draws_and_emitted_as_they_are(method: Method) -> None:
    session, sent = alone(method)
    for token in (1, 2, 0):
        assert sent.draws
        assert not sent.listed
        out = session.handle(Replied(TARGET, PassDone(sent.number, (Sample(token, -0.5),), 0.0)), 1.0)
        assert [(one.token, one.log_probability) for one in emitted(out)] == [(token, -0.5)]
        (sent,) = requests(out)
        assert isinstance(sent, Pass)


def test_before_its_first_drafter_has_opened_a_session_asks_for_rows() -> None:
    """A drafter that opens meanwhile needs the row that follows its first draft token."""
    session = Session(assignment(TLI, controller=InTurn((Choice(2, 1),)).fresh()))
    session.start(0.0)
    (sent,) = requests(session.handle(Ready(TARGET), 0.0))
    assert isinstance(sent, Pass)
    assert not sent.draws


def test_rounds_are_answered_by_rows_and_what_is_decoded_between_them_by_draws() -> None:
    controller = InTurn((Choice(2, 2, overlap=False), PLAIN), waits_for_drafter=True).fresh()
    session = Session(assignment(TLI, controller=controller))
    draft = requests(opened(session))[0]
    assert isinstance(draft, Draft)
    two = (DraftToken(0, Row.certain(0)), DraftToken(0, Row.certain(0)))
    (sent,) = requests(session.handle(Replied(DRAFTER, Drafted(1, two, 0.0)), 1.0))
    assert isinstance(sent, Pass)
    assert not sent.draws
    certain = Row(np.array([0, 1, 2]), np.array([1.0, 0.0, 0.0]))
    out = session.handle(Replied(TARGET, PassDone(1, (certain,) * len(sent.answered), 0.0)), 2.0)
    assert [one.token for one in emitted(out)] == [0, 0, 0]
    (after,) = [one for one in requests(out) if isinstance(one, Pass)]
    assert after.draws


@pytest.mark.parametrize("wrong", [WHOLE, Sample(1, 0.0)], ids=["a row", "a draw"])
def test_an_answer_of_the_other_kind_is_illegal(wrong: Row | Sample) -> None:
    if isinstance(wrong, Row):
        session, _ = alone()
    else:
        session = Session(assignment(TLI, controller=InTurn((Choice(2, 1),)).fresh()))
        session.start(0.0)
        session.handle(Ready(TARGET), 0.0)
    with pytest.raises(IllegalEventError, match="pass 1 with 1 answers"):
        session.handle(Replied(TARGET, PassDone(1, (wrong,), 0.0)), 1.0)

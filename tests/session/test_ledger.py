"""What a service owes a session, since when, and how long it has."""

from dataclasses import replace

import numpy as np
import pytest

from crossdraft.session.ledger import Ledger
from crossdraft.text.letters import NOTHING, Letters
from crossdraft.types.messages import (
    Advance,
    Branch,
    Draft,
    Drafted,
    FetchRow,
    OpenDrafter,
    Opened,
    OpenTarget,
    Pass,
    PassDone,
    PromptScored,
    RowFetched,
    RunTo,
    SamplingOptions,
    Score,
    Scored,
    ScorePrompt,
)
from crossdraft.types.rows import DraftToken, Row
from crossdraft.types.trees import TokenTree

OPENED = Opened("f1")
OPEN, BEGUN = OpenTarget((1,), SamplingOptions(), None), OpenDrafter(NOTHING, SamplingOptions(), None, 0)
PASS, DONE, RUN = Pass(1, (), TokenTree()), PassDone(1, (), 0.0), Pass(1, (), TokenTree(), draws=True, run=8)
FETCH, ROW = FetchRow(1, 0), RowFetched(1, 0, Row.certain(1))
OLD, NEWER = (Draft(epoch, 0, NOTHING, 2, chunk=1) for epoch in (1, 2))
BRANCHES, LATE = (Drafted(epoch, (), 0.0, branches=(Branch(1, 0, Letters("a"), (1,)),)) for epoch in (1, 1))
ONE, FRESH = Drafted(1, (DraftToken(1),), 0.0), Drafted(2, (DraftToken(1),) * 2, 0.0)
SCORE, SCORED = Score(1, 0, (Letters("a"),), 1), Scored(1, np.ones(1), 0.0)
PROMPT, PART = ScorePrompt(1, 0), PromptScored(1, (), 0.0, more=True)
REPLIES = (PassDone, RowFetched, PromptScored, Drafted, Scored)


def told(ledger: Ledger, message: object, now: float) -> None:
    if isinstance(message, Opened):
        ledger.opened(now)
    elif isinstance(message, REPLIES):
        ledger.take(message, now)
    else:
        ledger.sent(message, now)


@pytest.mark.parametrize(
    "story",
    [
        [(OPEN, 1), (PASS, 1), (FETCH, 1), (OPENED, 4), (DONE, 5), (ROW, None), (ROW, None)],
        [(RUN, 1), (replace(DONE, more=True), 2), (RunTo(1, 0), 2), (DONE, None), (PASS, 5)],
        [(DONE, None), (PASS, 2)],  # a reply too many does not pay for what is asked later
        [(PASS, 1), (ROW, 1), (replace(DONE, number=2), 1), (DONE, None)],  # nor one that answers nothing
        [(PROMPT, 1), (PART, 2), (replace(PART, more=False), None)],
        [(BEGUN, 1), (OPENED, None), (OLD, 3), (BRANCHES, 4), (ONE, 5), (replace(ONE, first=1), None)],
        [(OLD, 1), (ONE, 2), (replace(ONE, first=1), None), (Advance(1, 3), 4), (replace(ONE, first=2), None)],
        [(OLD, 1), (ONE, 2), (NEWER, 2), (ONE, 2), (FRESH, None)],  # a newer draft puts off nothing, nor a late reply
        [(OLD, 1), (Advance(1, 0), None), (NEWER, 2), (FRESH, None), (replace(NEWER, epoch=3), 5)],  # silence goes on
        [(OLD, 1), (replace(ONE, reason="it is at its end"), None), (Advance(1, 9), None)],
        [(OLD, 1), (ONE, 2), (SCORE, 2), (replace(ONE, first=1), 4), (SCORED, None)],
        [(OLD, 1), (SCORE, 1), (NEWER, 1), (SCORED, 1), (FRESH, None)],
    ],
)
def test_since_when_a_service_has_owed_something(story: list[tuple[object, int | None]]) -> None:
    """A message a second."""
    ledger = Ledger()
    for now, (message, since) in enumerate(story, 1):
        told(ledger, message, now)
        assert ledger.since == since, message
        assert ledger.owes == (since is not None)


def test_a_reply_names_what_it_answers_and_whether_it_is_the_first() -> None:
    ledger, second = Ledger(), replace(PASS, number=2)
    for now, message in enumerate((PASS, second, FETCH), 1):
        ledger.sent(message, now)
    found = [ledger.take(reply, 9) for reply in (DONE, replace(DONE, number=2), ROW, DONE)]
    assert [one and (one.request, one.at, one.replies) for one in found] == [
        (PASS, 1, 1),
        (second, 2, 1),
        (FETCH, 3, 1),
        None,
    ]
    ledger.sent(OLD, 10)
    assert [asked.replies for _ in range(2) if (asked := ledger.take(ONE, 11))] == [1, 2]


def test_how_long_it_has_owed_something() -> None:
    """While it was being opened it had no work; what it owes on and on counts once."""
    ledger = Ledger()
    for now, message in (
        (0, OPEN),
        (5, OPENED),
        (7, PASS),
        (8, FETCH),
        (9, DONE),
        (11, ROW),
        (20, replace(PASS, number=2)),
    ):
        told(ledger, message, now)
    assert [ledger.busy(now) for now in (20, 22)] == [4, 6]

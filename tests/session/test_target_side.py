"""Targets: lanes, passes, rows that are asked for while a pass is under way."""

from dataclasses import replace

import numpy as np
import pytest

from crossdraft.session.events import Command, IllegalEventError, Lost, Open, Ready, Reason, Replied, Timer
from crossdraft.session.rules import State
from crossdraft.session.session import Session
from crossdraft.session.target_side import Answers, Flight
from crossdraft.speculation.choice import Choice
from crossdraft.types import messages
from crossdraft.types.rows import DraftToken, Row
from crossdraft.types.trees import TokenTree
from crossdraft.verification.methods import TLI
from crossdraft.verification.walk import NeedRow
from tests.clock import GONE
from tests.session.sessions import TARGET, assignment, begun, emitted, requests
from tests.verification.scheduling import Turns
from tests.verification.toys import row_of

ONES = Row.certain(1)


def passing(choice: Choice, targets: int = 1) -> tuple[Session, Turns, messages.Pass]:
    """A pass left when one draft token, id 1, was known; the drafter goes on."""
    session, controller, first = begun(choice, method=TLI, waits=True, targets=targets, max_tokens=9)
    lanes = [command.lane for command in first if isinstance(command, Open)]
    for lane in lanes:
        session.handle(Ready(lane), 1.0)
    out = session.handle(Replied(lanes[-1], drafted(0)), 2.0)
    (sent,) = (request for request in requests(out) if isinstance(request, messages.Pass))
    return session, controller, sent


def drafted(first: int, epoch: int = 1) -> messages.Drafted:
    return messages.Drafted(epoch, (DraftToken(1, ONES),), 0.5, first=first)


def test_a_prompt_is_scored_before_the_first_pass_and_goes_on_elsewhere() -> None:
    opening = messages.OpenTarget((4, 5, 6, 7, 8), messages.SamplingOptions(), None)
    given = assignment(TLI, drafts=False, open_target=opening, prompt_logprobs=2, max_tokens=0, targets=2)
    session = Session(given)
    session.start(0.0)

    def scored(lane: int, first: int, *tokens: int, more: bool = True) -> list[Command]:
        reply = messages.PromptScored(first, tuple(messages.Sample(token, -1.0, rank=1) for token in tokens), 0.0, more)
        return session.handle(Replied(lane, reply), 1.0)

    assert requests(session.handle(Ready(TARGET), 0.0)) == [messages.ScorePrompt(1, 2)]
    (piece,) = scored(TARGET, 1, 5, 6)
    assert isinstance(piece, messages.PromptScored)
    for first, tokens, more in ((2, (6,), True), (3, (8,), True), (3, (7, 8), True), (3, (7,), False), (3, (), True)):
        with pytest.raises(IllegalEventError, match=r"^PromptScored \(first .*\) was not asked for"):
            scored(TARGET, first, *tokens, more=more)
    assert requests(session.handle(Ready(2), 1.5)) == []  # the first one does it
    assert requests(session.handle(Lost(TARGET, GONE, elsewhere=False), 2.0)) == [messages.ScorePrompt(3, 2)]
    (again,) = (one for one in session.handle(Lost(2, GONE), 3.0) if isinstance(one, Open))
    assert requests(session.handle(Ready(again.lane), 4.0)) == [messages.ScorePrompt(3, 2)]
    last, end = scored(again.lane, 3, 7, 8, more=False)
    assert isinstance(last, messages.PromptScored)
    assert (end.reason, session.counts.tokens, session.counts.passes) == (Reason.LENGTH, 0, 0)


def test_a_target_that_is_free_looks_ahead_of_the_one_that_is_not() -> None:
    session, _, _ = passing(Choice(4, 1, speculate=True), targets=2)
    (ahead,) = (one for one in requests(session.handle(Replied(3, drafted(1)), 3.0)) if isinstance(one, messages.Pass))
    assert ahead.tree.tokens == (1, 1)
    assert ahead.wanted == (2,)  # the first pass brings the others
    assert session.counts.speculated == 1
    (late,) = requests(session.handle(Replied(3, drafted(2)), 4.0))  # both are busy
    assert late.node == 2
    first = session.handle(Replied(TARGET, messages.PassDone(1, (ONES, ONES), 0.5)), 5.0)
    assert len(emitted(first)) == 2  # the row of the third is on its way
    second = session.handle(Replied(2, messages.PassDone(1, (ONES,), 0.5)), 6.0)
    assert len(emitted(second)) == 1


def test_it_waits_for_as_many_more_draft_tokens_as_any_pass() -> None:
    """One that left at each draft token would be back no sooner than the pass after the first."""
    session, _, first = begun(Choice(6, 2, speculate=True), method=TLI, waits=True, targets=2, max_tokens=9)
    for lane in [command.lane for command in first if isinstance(command, Open)]:
        session.handle(Ready(lane), 1.0)
    left = []
    for place in range(4):
        sent = requests(session.handle(Replied(3, drafted(place)), 2.0 + place))
        left.append([len(one.tree) for one in sent if isinstance(one, messages.Pass)])
    assert left == [[], [2], [], [4]]


def test_a_lane_that_owes_a_row_begins_no_pass_early() -> None:
    """It would answer the pass's rows only, and the walk would have to ask for its row by another pass."""
    session, _, _ = passing(Choice(6, 1, speculate=True), targets=2)
    session.handle(Replied(3, drafted(1)), 3.0)  # the other lane begins early
    out = session.handle(Replied(TARGET, messages.PassDone(1, (row_of([0], [0.5], 1.0), ONES), 0.5)), 4.0)
    (fetch,) = requests(out)[:1]
    assert isinstance(fetch, messages.FetchRow)
    more = [*out, *session.handle(Replied(3, drafted(2)), 5.0)]
    assert not any(isinstance(one, messages.Pass) for one in requests(more))
    last = session.handle(Replied(TARGET, messages.RowFetched(1, 0, row_of([0, 1], [0.5, 0.5]))), 6.0)
    assert emitted(last)


def test_a_lost_target_takes_its_pass_along() -> None:
    """What it owed is asked of the other, once."""
    session, _, sent = passing(Choice(2, 1), targets=2)
    out: list[Command] = session.handle(Lost(TARGET, GONE), 3.0)
    again = [one for one in requests(out) if isinstance(one, messages.Pass)]
    assert len(again) == 1
    assert again[0].tree == sent.tree
    assert [one.after for one in out if isinstance(one, Open)] == [0.0]
    assert session.handle(Replied(TARGET, messages.PassDone(1, (ONES, ONES), 0.0)), 4.0) == []
    waits = []
    for _ in range(8):  # who is lost again and again waits longer
        (opened,) = (one for one in out if isinstance(one, Open))
        waits.append(opened.after)
        out = session.handle(Lost(opened.lane, GONE), 5.0)
    assert waits == sorted(waits)
    assert (waits[0], waits[-1]) == (0.0, 1.0)
    assert session.counts.targets_lost == 1  # what never opened is no loss


def test_a_lane_that_nobody_can_have_leaves_those_that_are_being_opened() -> None:
    session, _, commands = begun(Choice(2, 1), method=TLI, targets=2)
    first, second = [command.lane for command in commands if isinstance(command, Open)][:2]
    (timer,) = session.handle(Lost(second, GONE, elsewhere=False), 1.0)
    assert timer.timer is Timer.TARGET  # there is a deadline for the other
    session.handle(Ready(first), 2.0)
    assert session.state is State.RUNNING


def held(row: Row, listed: list[int] | None, head: int) -> Answers:
    fetched = Answers([], head)
    asked = () if listed is None else (np.array(listed, dtype=np.int64),)
    fetched.add(Flight(1, messages.Pass(1, (), TokenTree(), asked), 0, ((),)), (row,))
    return fetched


@pytest.mark.parametrize(
    ("listed", "need", "ids"),
    [
        ([], [], [4, 2]),  # the head
        ([7], [7], [4, 2, 7]),
        ([7], [], [4, 2]),  # what was listed is not to be used
        ([7], [9], None),  # not at hand
    ],
)
def test_of_a_row_only_the_head_and_what_is_needed_is_used(listed: list[int], need: list[int], ids: list[int] | None):
    chances = {4: 0.4, 2: 0.2, 7: 0.2}
    known = [4, 2, *listed]
    row = Row(np.array(known), np.array([chances[one] for one in known]), 1 - sum(chances[one] for one in known))
    answer = held(row, listed, 2).answer(NeedRow(False, np.array(need, dtype=np.int64)))
    assert (answer.ids.tolist() if isinstance(answer, Row) else None) == ids
    if isinstance(answer, Row):
        assert answer.tail + answer.probabilities.sum() == pytest.approx(1)


def test_a_whole_row_is_cut_to_what_is_needed() -> None:
    row = Row(np.arange(4), np.array([0.1, 0.4, 0.3, 0.2]))
    answer = held(row, None, 1).answer(NeedRow(False, np.array([0])))
    assert answer.ids.tolist() == [0, 1]
    assert answer.tail == pytest.approx(0.5)
    whole = held(row, None, 1).answer(NeedRow(whole=True))
    assert whole is row


def after(number: int, root: int, *paths: tuple[int, ...]) -> Flight:
    """A pass that left after so many tokens of output and answers these paths."""
    sent = messages.Pass(number, (), TokenTree((), ()), (), tuple(range(len(paths))))
    return Flight(1, sent, root, paths)


def test_rows_of_a_way_that_the_output_has_not_taken_are_not_kept() -> None:
    """Neither when a pass of before returns late, nor when the paths begin at another root."""
    ids = [0]
    fetched = Answers(ids, 8)
    fetched.add(after(1, 0, (), (0,), (0, 1), (1, 1)), (ONES, ONES, ONES, Row.certain(0)))
    fetched.add(after(2, 1, ()), (ONES,))
    ids.append(1)
    assert fetched.answer(NeedRow()) is ONES  # not what follows 1, 1
    fetched.add(after(3, 0, (0, 1), (1, 1)), (ONES, Row.certain(0)))  # the output began with 0
    assert fetched.answer(NeedRow()) is ONES
    ids.append(0)
    fetched.add(after(4, 0, (1, 1, 0)), (ONES,))
    assert fetched.answer(NeedRow()) is None


def test_of_a_pass_that_draws_no_row_is_fetched() -> None:
    """The target keeps none: another pass brings what the walk needs."""
    session, _, _ = passing(Choice(3, 1))
    (lane,) = session.target.lanes.values()
    number, listed = lane.latest.sent.number, np.array([1])
    assert lane.fetch(number, 0, listed)
    lane.owed.clear()
    lane.latest = replace(lane.latest, sent=replace(lane.latest.sent, draws=True))
    assert lane.fetch(number, 0, listed) is None


def test_a_block_goes_on_as_far_as_a_pass_has_covered_the_draft() -> None:
    """Not along other paths whose rows are at hand; an earlier pass that returns late does not shorten it."""
    ids = [0]
    fetched = Answers(ids, 8)
    fetched.add(replace(after(2, 1, (), (1,), (1, 2), (3,)), own=(1, 2)), (ONES,) * 4)
    fetched.add(replace(after(1, 1, (), (1,)), own=(1,)), (ONES,) * 2)
    assert [fetched.covers(path) for path in ((1,), (1, 2), (1, 2, 3), (3,))] == [True, True, False, False]
    assert fetched.answer(NeedRow(path=(1, 2))) is ONES
    ids.append(1)
    assert fetched.covers((2,))
    ids.append(3)
    assert not fetched.covers(())
    fetched.add(replace(after(3, 3, (), (4,)), own=(4,)), (ONES,) * 2)
    assert fetched.covers((4,))

"""Targets: lanes, passes, rows that are asked for while a pass is under way. The drafter's side: its window, deadlines,
prepared continuations, and what a controller is told. The ledger: what a service owes, since when, and how long."""

from dataclasses import replace

import numpy as np
import pytest

from crossdraft.session import events
from crossdraft.session.drafter_side import Branches
from crossdraft.session.epoch import Epoch
from crossdraft.session.events import Command, Expired, IllegalEventError, Lost, Open, Ready, Reason, Replied, Timer
from crossdraft.session.ledger import Ledger
from crossdraft.session.rules import State
from crossdraft.session.session import Session
from crossdraft.session.target_side import Answers, Flight
from crossdraft.speculation.choice import PLAIN, Choice, DraftSeen, Judged, Lifecycle, PassSeen
from crossdraft.text.letters import NOTHING, Letters
from crossdraft.types import messages
from crossdraft.types.messages import Advance, Branch, Draft, Drafted, Pass, PassDone, PromptScored, Sample, ScorePrompt
from crossdraft.types.rows import DraftToken, Row, Whose
from crossdraft.types.statistics import Kind
from crossdraft.types.trees import TokenTree
from crossdraft.verification.chooser import RandomChooser
from crossdraft.verification.methods import TLI
from crossdraft.verification.walk import Ground, NeedRow
from tests.clock import GONE
from tests.ports import assignment
from tests.session.sessions import DRAFTER, TARGET, begun, emitted, only, requests, timer_of, timers, under_way
from tests.tables import pair_of
from tests.verification.toys import Turns, row_of

ONES = Row.certain(1)
ZEROS = Row.certain(0)
PAIR = pair_of(("a", "b", "ab"), ("a", "b", "ba"))
BRANCHING = Choice(2, 1, branch_depth=1)
BRANCH_2 = Branch(2, 5, Letters("a"), (1,))
BRANCH_3 = Branch(3, 6, Letters("b"), (2,))


def passing(choice: Choice, targets: int = 1) -> tuple[Session, Turns, Pass]:
    """A pass left when one draft token, id 1, was known; the drafter goes on."""
    session, controller, first = begun(choice, method=TLI, waits=True, targets=targets, max_tokens=9)
    lanes = [command.lane for command in first if isinstance(command, Open)]
    for lane in lanes:
        session.handle(Ready(lane), 1.0)
    out = session.handle(Replied(lanes[-1], drafted(0)), 2.0)
    (sent,) = (request for request in requests(out) if isinstance(request, Pass))
    return session, controller, sent


def drafted(first: int, epoch: int = 1) -> Drafted:
    return Drafted(epoch, (DraftToken(1, ONES),), 0.5, first=first)


def test_a_prompt_is_scored_before_the_first_pass_and_goes_on_elsewhere() -> None:
    opening = messages.OpenTarget((4, 5, 6, 7, 8), messages.SamplingOptions(), None)
    given = assignment(TLI, drafts=False, open_target=opening, prompt_logprobs=2, max_tokens=0, targets=2)
    session = Session(given)
    session.start(0.0)

    def scored(lane: int, first: int, *tokens: int, more: bool = True) -> list[Command]:
        reply = PromptScored(first, tuple(Sample(token, -1.0, rank=1) for token in tokens), 0.0, more)
        return session.handle(Replied(lane, reply), 1.0)

    assert requests(session.handle(Ready(TARGET), 0.0)) == [ScorePrompt(1, 2)]
    (piece,) = scored(TARGET, 1, 5, 6)
    assert isinstance(piece, PromptScored)
    for first, tokens, more in ((2, (6,), True), (3, (8,), True), (3, (7, 8), True), (3, (7,), False), (3, (), True)):
        with pytest.raises(IllegalEventError, match=r"^PromptScored \(first .*\) was not asked for"):
            scored(TARGET, first, *tokens, more=more)
    assert requests(session.handle(Ready(2), 1.5)) == []  # the first one does it
    assert requests(session.handle(Lost(TARGET, GONE, elsewhere=False), 2.0)) == [ScorePrompt(3, 2)]
    (again,) = (one for one in session.handle(Lost(2, GONE), 3.0) if isinstance(one, Open))
    assert requests(session.handle(Ready(again.lane), 4.0)) == [ScorePrompt(3, 2)]
    last, end = scored(again.lane, 3, 7, 8, more=False)
    assert isinstance(last, PromptScored)
    assert (end.reason, session.counts.tokens, session.counts.passes) == (Reason.LENGTH, 0, 0)


def test_a_target_that_is_free_looks_ahead_of_the_one_that_is_not() -> None:
    session, _, _ = passing(Choice(4, 1, speculate=True), targets=2)
    (ahead,) = (one for one in requests(session.handle(Replied(3, drafted(1)), 3.0)) if isinstance(one, Pass))
    assert ahead.tree.tokens == (1, 1)
    assert ahead.wanted == (2,)  # the first pass brings the others
    assert session.counts.speculated == 1
    (late,) = requests(session.handle(Replied(3, drafted(2)), 4.0))  # both are busy
    assert late.node == 2
    replies = (TARGET, PassDone(1, (ONES, ONES), 0.5)), (2, PassDone(1, (ONES,), 0.5))
    came = [emitted(session.handle(Replied(*reply), 5.0)) for reply in replies]
    assert list(map(len, came)) == [2, 1]  # after the first the row of the third is on its way


def test_it_waits_for_as_many_more_draft_tokens_as_any_pass() -> None:
    """One that left at each draft token would be back no sooner than the pass after the first."""
    session, _, first = begun(Choice(6, 2, speculate=True), method=TLI, waits=True, targets=2, max_tokens=9)
    for lane in [command.lane for command in first if isinstance(command, Open)]:
        session.handle(Ready(lane), 1.0)
    left = []
    for place in range(4):
        sent = requests(session.handle(Replied(3, drafted(place)), 2.0 + place))
        left.append([len(one.tree) for one in sent if isinstance(one, Pass)])
    assert left == [[], [2], [], [4]]


def test_a_lane_that_owes_a_row_begins_no_pass_early() -> None:
    """It would answer the pass's rows only, and the walk would have to ask for its row by another pass."""
    session, _, _ = passing(Choice(6, 1, speculate=True), targets=2)
    session.handle(Replied(3, drafted(1)), 3.0)  # the other lane begins early
    out = session.handle(Replied(TARGET, PassDone(1, (row_of([0], [0.5], 1.0), ONES), 0.5)), 4.0)
    (fetch,) = requests(out)[:1]
    assert isinstance(fetch, messages.FetchRow)
    more = [*out, *session.handle(Replied(3, drafted(2)), 5.0)]
    assert not any(isinstance(one, Pass) for one in requests(more))
    last = session.handle(Replied(TARGET, messages.RowFetched(1, 0, row_of([0, 1], [0.5, 0.5]))), 6.0)
    assert emitted(last)


def test_a_lost_target_takes_its_pass_along() -> None:
    """What it owed is asked of the other, once."""
    session, _, sent = passing(Choice(2, 1), targets=2)
    out: list[Command] = session.handle(Lost(TARGET, GONE), 3.0)
    again = [one for one in requests(out) if isinstance(one, Pass)]
    assert [one.tree for one in again] == [sent.tree]
    assert [one.after for one in out if isinstance(one, Open)] == [0.0]
    assert session.handle(Replied(TARGET, PassDone(1, (ONES, ONES), 0.0)), 4.0) == []
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
    fetched.add(Flight(1, Pass(1, (), TokenTree(), asked), 0, ((),)), (row,))
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
    assert (answer.ids.tolist(), answer.tail) == ([0, 1], pytest.approx(0.5))
    assert held(row, None, 1).answer(NeedRow(whole=True)) is row


def test_log_probabilities_are_those_that_came_with_the_row() -> None:
    likely = ((4, -0.25),)
    row = Row(np.array([4, 2]), np.array([0.75, 0.25]), log_probabilities=np.array([-0.25, -1.5]), likely=likely)
    assert held(row, None, 2).log_probabilities(2) == (-1.5, likely)
    assert held(ONES, None, 2).log_probabilities(1) == Answers([], 2).log_probabilities(1) == (None, ())


def after(number: int, root: int, *paths: tuple[int, ...]) -> Flight:
    """A pass that left after so many tokens of output and answers these paths."""
    sent = Pass(number, (), TokenTree((), ()), (), tuple(range(len(paths))))
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
    stall = timer_of(out, Timer.STALL)
    session.handle(Expired(Timer.STALL, stall.number), 8.0)  # the target's own
    session.handle(Replied(DRAFTER, drafted(1)), 9.0)  # the same
    judged = [seen for seen in controller.seen if isinstance(seen, Judged)]
    assert judged == [Judged(1, False, 1, 0), Judged(0, False, 1, 1), Judged(1, False, 0, 0)]


def test_a_window_that_moves_has_a_deadline() -> None:
    """The drafter owed nothing when its timer ran out, and owes something again."""
    session, _, _ = passing(Choice(2, 1))
    assert session.handle(Expired(Timer.DRAFTER, 1), 31.0) == [events.SetTimer(Timer.DRAFTER, 2, 1.0)]
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


@pytest.mark.parametrize(
    ("draft_tokens", "why"),
    [
        ((), "it sent a reply without anything in it"),
        ((DraftToken(1, None),), "without the whole row"),
        ((DraftToken(1, ZEROS),), "the row of id 1 cannot give it"),
        ((DraftToken(1, ONES, Whose.TARGET),), "'tli' asks for tokens of its own"),
    ],
)
def test_a_reply_of_no_use_costs_the_drafter_its_session(draft_tokens: tuple[DraftToken, ...], why: str) -> None:
    """An empty one puts off no deadline, and what nobody could verify is in no pass."""
    session, controller, _ = passing(Choice(3, 1))
    out = session.handle(Replied(DRAFTER, Drafted(1, draft_tokens, 0.0, first=1)), 3.0)
    assert why in session.counts.drafter_lost
    assert controller.seen[-1] == Lifecycle.DRAFTER_WENT
    assert not [request for request in requests(out) if isinstance(request, Pass)]


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


def test_a_drafter_that_is_heard_again_is_waited_for_again() -> None:
    """After a stall nothing is waited for until the drafter speaks."""
    session, _, _ = passing(Choice(3, 1, patience=3.0))
    stall = timer_of(session.handle(Replied(TARGET, PassDone(1, (ONES, ONES), 0.5)), 5.0), Timer.STALL)
    out = session.handle(Expired(Timer.STALL, stall.number), 8.0)
    assert Timer.STALL not in timers(out)
    session.handle(Replied(DRAFTER, drafted(1)), 9.0)
    out = session.handle(Replied(TARGET, PassDone(2, (ONES,), 0.5)), 10.0)
    assert timer_of(out, Timer.STALL).number == stall.number + 1  # with a patience of its own


def test_epochs_that_a_drafter_never_answers_put_off_no_deadline() -> None:
    session, _, out = under_way(Choice(2, patience=0.0), method=TLI, max_tokens=9)
    timer = timer_of(out, Timer.DRAFTER)
    for number in range(1, 5):
        session.handle(Replied(TARGET, PassDone(number, (ONES,), 0.5)), 5.0 + number)
    assert session.counts.epochs > 1
    session.handle(Expired(timer.timer, timer.number), 30.5)
    assert session.counts.drafters_lost == 1


def test_a_drafter_is_told_when_its_draft_is_of_no_use_any_more() -> None:
    """And not if it owes nothing; the silence of one that was asked again goes on, its rest does not count."""
    session, _, out = under_way(Choice(2, patience=0.0), PLAIN, method=TLI, max_tokens=9)
    sent = requests(out)
    for number in range(1, 4):
        sent += requests(session.handle(Replied(TARGET, PassDone(number, (ONES,), 0.5)), 5.0 + number))
    assert [one for one in sent if isinstance(one, Advance)] == [Advance(1, 0)]
    assert session.handle(Expired(Timer.DRAFTER, 1), 32.0) == []
    run = next(one for one in sent if isinstance(one, Pass) and one.draws)
    over = PassDone(run.number, (Sample(1, 0.0),), 0.5)  # after one token
    asked = session.handle(Replied(TARGET, over), 100.0)
    (again,) = (one for one in requests(asked) if isinstance(one, Draft))
    assert (again.epoch, timer_of(asked, Timer.DRAFTER).seconds) == (3, 30.0 - 8.0)


def branches(*known: Branch) -> Branches:
    made = Branches(PAIR)
    made.add(known)
    return made


def epoch() -> Epoch:
    """A draft "a", "b", "a" after four letters."""
    made = Epoch(1, BRANCHING, PAIR, 4, 4)
    made.extend((DraftToken(0), DraftToken(1), DraftToken(0)))
    return made


@pytest.mark.parametrize(
    ("text", "letters_decide", "found"),
    [
        ("----b", False, 1),  # the first was refused, and "b" took its place
        ("----aa", False, 2),  # the second
        ("----abb", False, 3),  # the third
        ("----ba", False, 0),  # more than the branch replaced
        ("----ba", True, 1),  # its own draft token says the rest, and more
        ("----bb", True, 0),  # it says something else
        ("----baa", True, 0),  # it says no more than that
        ("----ab", False, 0),  # nothing was replaced
        ("----", True, 0),
    ],
)
def test_the_branch_that_replaced_just_what_was_refused(text: str, letters_decide: bool, found: int) -> None:
    known = branches(Branch(1, 4, Letters("b"), (0, 0)), BRANCH_2, BRANCH_3)
    match = known.match(epoch(), Letters(text), letters_decide)
    assert (match.number if match else 0) == found


def test_what_a_drafter_may_not_send() -> None:
    known = branches(BRANCH_2)
    assert known.fault_of((BRANCH_3,), 1, 9) == ""
    assert "after branch 2" in known.fault_of((BRANCH_2,), 1, 9)
    assert "after branch 3" in known.fault_of((BRANCH_3, BRANCH_3), 1, 9)
    for letters, ids in (("abab", (0,)), ("", (0,)), ("a", (3,)), ("a", (-1,)), ("a", (0, 0))):
        wrong = Branch(3, 0, Letters(letters), ids)
        assert "is not one of at most 1 ids from 0 to 2 after" in known.fault_of((wrong,), 1, 9)
    assert "2 branches in an epoch, asked for at most 1" in known.fault_of((BRANCH_3,), 1, 1)


def test_a_branch_is_kept_until_the_output_has_passed_it_or_the_epoch_is_over() -> None:
    """For as long as the output could still end with its letters or, where they count, its draft tokens."""
    known = branches(BRANCH_2, BRANCH_3)
    for end, left in ((7, 2), (8, 1), (10, 0)):  # the letters of the first end at 6, its draft token at 7
        known.release(end)
        assert len(known) == left
    known = branches(BRANCH_2, BRANCH_3)
    known.clear()  # the epoch is over
    assert len(known) == 0
    assert "after branch 3" in known.fault_of((BRANCH_3,), 1, 9)


def refused(paths: int = 1) -> tuple[Session, list[Command], Turns]:
    """A session whose first draft token "a" was refused for "b", with a branch for just that."""
    session, controller, _ = under_way(BRANCHING, method=TLI, paths=paths)
    first = Drafted(1, (DraftToken(0, Row.certain(0)),), 0.0, branches=(Branch(1, 0, Letters("b"), (1,)),))
    (sent,) = (one for one in requests(session.handle(Replied(DRAFTER, first), 1.0)) if isinstance(one, Pass))
    done = PassDone(sent.number, (Row.certain(1),) * (1 + len(sent.tree)), 0.0)
    return session, session.handle(Replied(TARGET, done), 2.0), controller


def test_a_refusal_goes_on_with_the_branch_that_foresaw_it() -> None:
    """The pass after it has the promised draft token in its tree, before that comes again; then it is no fast one."""
    session, out, controller = refused()
    draft, sent = requests(out)
    assert draft == Draft(2, 0, Letters("b"), 2, 1, 1, 1, adopt=1, first=1)
    assert session.counts.branches_hit == session.counts.branches_tried == 1
    assert (sent.committed, sent.tree.tokens) == ((1,), (1,))
    again = Drafted(2, (DraftToken(1, Row.certain(1)), DraftToken(0, Row.certain(0))), 0.25)
    session.handle(Replied(DRAFTER, again), 3.0)
    assert controller.seen[-1] == DraftSeen(1, 1.0, 0.25)
    session, out, _ = refused(paths=2)  # a tree with room has it at once: until then no pass is needed
    assert ([type(one) for one in requests(out)], session.counts.passes) == ([Draft], 1)


def test_another_drafter_numbers_its_branches_from_one() -> None:
    session, _, _ = refused()
    (again,) = (one for one in session.handle(Lost(DRAFTER, GONE), 3.0) if isinstance(one, Open))
    session.handle(Ready(again.lane), 4.0)
    assert session.drafter.branches.fault_of((Branch(1, 0, Letters("b"), (1,)),), 1, 9) == ""


def over_a_tree() -> tuple[Session, Turns, Drafted, Pass]:
    """A session whose first pass is over a draft "a" and a branch "b", "a"."""
    session, controller, _ = under_way(Choice(1, 1, overlap=False, tree_nodes=3))
    drafted = Drafted(1, (DraftToken(0),), 0.0, branches=(Branch(1, 0, Letters("b"), (0,)),))
    return session, controller, drafted, only(Pass, session.handle(Replied(DRAFTER, drafted), 1.0))


def test_what_the_target_drew_along_another_branch_is_emitted_with_the_refusal() -> None:
    """The draft "a" is refused for "b", and the tree has "a" after it; the draft's own fate is what is told."""
    session, controller, drafted, sent = over_a_tree()
    assert set(sent.tree.paths()) == {(), (0,), (1,), (1, 0)}
    draws = {(): 1, (0,): 0, (1,): 0, (1, 0): 1}
    samples = tuple(Sample(draws[path], -0.5) for path in sent.tree.paths())
    out = session.handle(Replied(TARGET, PassDone(sent.number, samples, 0.0)), 2.0)
    due = [(1, Kind.ACCEPTED), (0, Kind.ACCEPTED), (1, Kind.BONUS)]
    assert [(one.token, one.kind) for one in emitted(out)] == due
    assert [one for one in controller.seen if isinstance(one, Judged)] == [Judged(0, True, 3, 2)]
    assert only(Draft, out) == Draft(2, 0, Letters("bab"), 1, first=1, tree_nodes=3, chunk=1)
    wrong = replace(drafted, epoch=2, branches=(Branch(2, 0, Letters("b"), (0, 0)),))
    assert "at most 1 ids" in session.drafter.fault_of(wrong, session.epoch.choice)


def test_the_drafter_is_told_the_targets_states_of_what_was_committed() -> None:
    """Not those of the path that the output did not take, and each once."""
    session, _, _, sent = over_a_tree()
    paths = [*sent.tree.paths()]
    samples = tuple(Sample({(): 1, (0,): 0, (1,): 2, (1, 0): 1}[path], -0.5) for path in paths)
    states = messages.HiddenStates((0, 1, 2, 3), b"".join(bytes((node, 0)) for node in range(4)))
    out = session.handle(Replied(TARGET, PassDone(sent.number, samples, 0.0, hidden=states)), 2.0)
    draft = only(Draft, out)
    assert draft.letters == "bab"  # "b", then "ab", which is one token
    assert draft.hidden == messages.HiddenStates((0, 1), bytes((0, 0, paths.index((1,)), 0)))
    drafted = Drafted(2, (DraftToken(0),), 0.0)
    sent = only(Pass, session.handle(Replied(DRAFTER, drafted), 3.0))
    samples = tuple(Sample(1, -0.5) for _ in sent.tree.paths())
    out = session.handle(Replied(TARGET, PassDone(sent.number, samples, 0.0)), 4.0)
    assert only(Draft, out).hidden == messages.HiddenStates()  # a reply that lacks them


def test_a_tree_that_ends_early_is_what_was_asked_for() -> None:
    """No draft token of it is waited for any more, and the drafter has not stood aside."""
    session, *_ = under_way(Choice(3, 3, overlap=False, tree_nodes=5, least_likely=0.5))
    out = session.handle(Replied(DRAFTER, Drafted(1, (DraftToken(0),), 0.0, "a further one is unlikely")), 1.0)
    sent = only(Pass, out)
    assert (0,) in sent.tree.paths()
    assert (session.counts.stood_aside, session.counts.undrafted, session.counts.draft_tokens) == (0, "", 1)


OPENED = messages.Opened("f1")
OPEN = messages.OpenTarget((1,), messages.SamplingOptions(), None)
BEGUN = messages.OpenDrafter(NOTHING, messages.SamplingOptions(), None, 0)
PASS, DONE, RUN = Pass(1, (), TokenTree()), PassDone(1, (), 0.0), Pass(1, (), TokenTree(), draws=True, run=8)
FETCH, ROW = messages.FetchRow(1, 0), messages.RowFetched(1, 0, Row.certain(1))
OLD, NEWER = (Draft(epoch, 0, NOTHING, 2, chunk=1) for epoch in (1, 2))
BRANCHES, LATE = (Drafted(epoch, (), 0.0, branches=(Branch(1, 0, Letters("a"), (1,)),)) for epoch in (1, 1))
ONE, FRESH = Drafted(1, (DraftToken(1),), 0.0), Drafted(2, (DraftToken(1),) * 2, 0.0)
SCORE, SCORED = messages.Score(1, 0, (Letters("a"),), 1), messages.Scored(1, np.ones(1), 0.0)
PROMPT, PART = ScorePrompt(1, 0), PromptScored(1, (), 0.0, more=True)
REPLIES = (PassDone, messages.RowFetched, PromptScored, Drafted, messages.Scored)


def told(ledger: Ledger, message: object, now: float) -> None:
    if isinstance(message, messages.Opened):
        ledger.opened(now)
    elif isinstance(message, REPLIES):
        ledger.take(message, now)
    else:
        ledger.sent(message, now)


@pytest.mark.parametrize(
    "story",
    [
        [(OPEN, 1), (PASS, 1), (FETCH, 1), (OPENED, 4), (DONE, 5), (ROW, None), (ROW, None)],
        [(RUN, 1), (replace(DONE, more=True), 2), (messages.RunTo(1, 0), 2), (DONE, None), (PASS, 5)],
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
    named = [one and (one.request, one.at, one.replies) for one in found]
    assert named == [(PASS, 1, 1), (second, 2, 1), (FETCH, 3, 1), None]
    ledger.sent(OLD, 10)
    assert [asked.replies for _ in range(2) if (asked := ledger.take(ONE, 11))] == [1, 2]


def test_how_long_it_has_owed_something() -> None:
    """While it was being opened it had no work; what it owes on and on counts once."""
    ledger = Ledger()
    story = (0, OPEN), (5, OPENED), (7, PASS), (8, FETCH), (9, DONE), (11, ROW), (20, replace(PASS, number=2))
    for now, message in story:
        told(ledger, message, now)
    assert [ledger.busy(now) for now in (20, 22)] == [4, 6]
    stopped = Ledger()
    told(stopped, OLD, 1)
    assert stopped.busy(1) == 0
    told(stopped, Advance(1, 0), 4)  # nothing more is wanted of it
    assert stopped.busy(9) == 3

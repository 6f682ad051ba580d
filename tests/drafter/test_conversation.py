"""Epochs and their replies, without services and threads; and a client that asks and never reads."""

import asyncio
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossdraft.drafter.conversation import MAX_BEHIND_SCORE, Conversation, DraftProgress, Epochs, ReplyBuffer, Send
from crossdraft.drafter.drafting import DraftTree, Tip, branch_keys
from crossdraft.rpc.errors import ProtocolBroken
from crossdraft.text.letters import NOTHING, Letters
from crossdraft.types.messages import MOST_DRAFT_TOKENS, Advance, Branch, Draft, Drafted, Score, Scored
from crossdraft.types.rows import DraftToken
from crossdraft.types.trees import ROOT
from tests.rpc.linked import Direct
from tests.vocabularies import toy_vocabulary


def draft(epoch: int = 1, count: int = 5, chunk: int = 2, first: int = 0) -> Draft:
    return Draft(epoch, 3, Letters("ab"), count, chunk, first=first)


def branch(number: int) -> Branch:
    return Branch(number, 0, Letters("x"), (1,))


@pytest.mark.parametrize(
    ("act", "complaint"),
    [
        (lambda epochs: epochs.begin(draft(4)), "epoch 4 is over; the latest is 5"),
        (lambda epochs: epochs.begin(draft(5)), "epoch 5 has begun already"),
        (lambda epochs: epochs.advance(Advance(6, 9)), "epoch 6 has not begun"),
        (lambda epochs: epochs.advance(Advance(5, 4)), "may advance from 5 draft tokens to at most 69, not to 4"),
        (lambda epochs: epochs.advance(Advance(5, 70)), "may advance from 5 draft tokens to at most 69, not to 70"),
        (lambda epochs: epochs.scored(Score(4, 5, (), 5)), "epoch 4 cannot be scored; the latest is 5"),
        (lambda epochs: epochs.scored(Score(5, 3, (), 5)), "no draft of epoch 5 began at letter 3"),
        (lambda epochs: epochs.scored(Score(5, 5, (), 6)), "a score of 6 draft tokens was asked for"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(act, complaint: str) -> None:
    epochs = Epochs()
    epoch = epochs.begin(draft(5))
    with pytest.raises(ProtocolBroken, match=complaint):
        act(epochs)
    assert (epochs.number, epoch.count, epoch.over) == (5, 5, False)


def test_a_newer_epoch_ends_the_one_before() -> None:
    epochs = Epochs()
    older, newer = epochs.begin(draft(1)), epochs.begin(draft(4))
    assert (older.over, newer.over) == (True, False)
    assert epochs.advance(Advance(1, 50)) is None
    assert epochs.advance(Advance(4, 6)) is newer
    assert epochs.advance(Advance(4, 6)) is None  # no more than before
    assert newer.count == 6
    assert not older.wanted


@given(
    chunk=st.integers(1, 6),
    first=st.integers(0, 6),
    made=st.lists(st.sampled_from(["draft_token", "branch", "advance"]), max_size=40),
)
def test_replies_hold_everything_once_in_order_and_depend_on_numbers_only(chunk: int, first: int, made: list[str]):
    epoch = DraftProgress(draft(count=3, chunk=chunk, first=first))
    buffer = ReplyBuffer(epoch)
    replies: list[Drafted] = []
    branches = 0
    for event in made:
        if event == "advance":
            epoch.count += 2
        elif event == "branch":
            branches += 1
            buffer.add_branch(branch(branches))
        elif buffer.made < epoch.count:
            buffer.add(DraftToken(buffer.made))
        replies += buffer.due()
        held = buffer.made - epoch.sent
        assert held < (first - epoch.sent if epoch.sent < first else chunk)
        assert held == 0 or buffer.made < epoch.count  # whatever is wanted and complete is sent
    made_in_all = buffer.made
    replies.append(buffer.last("enough"))
    tokens = [draft_token.token for reply in replies for draft_token in reply.draft_tokens]
    assert tokens == list(range(made_in_all))
    assert [number.number for reply in replies for number in reply.branches] == list(range(1, branches + 1))
    assert all(len(reply.draft_tokens) <= (first if reply.first < first else chunk) for reply in replies)
    assert [reply.first for reply in replies] == np.cumsum([0, *(len(reply.draft_tokens) for reply in replies)])[
        :-1
    ].tolist()
    assert epoch.aside
    assert not epoch.wanted


def test_keys_are_text_that_was_not_drawn_each_once() -> None:
    vocabulary = toy_vocabulary(("a", "b", "\ue000", "a", "c", "b"))
    assert list(branch_keys([3, 2, 5, 1, 4, 0], 0, vocabulary)) == [5, 4]


@given(st.data())
def test_a_tree_that_is_planted_anew_has_the_same_paths(data: st.DataObject) -> None:
    tree, tips = DraftTree("session", (7, 8)), [Tip()]
    for token in range(data.draw(st.integers(1, 30))):
        grown = data.draw(st.sampled_from(tips))
        tree.work([Tip(grown.node, token)])
        tips.append(Tip(tree.nodes - 1))
    chosen = data.draw(st.sampled_from(tips))
    before = tree.work([chosen])
    paths = [before.context + path for path in before.tree.paths()]
    root = tree.ancestor(chosen.node, data.draw(st.integers(0, 5)))
    moved = tree.move_root(root)
    after = tree.work([Tip(moved[chosen.node])])
    assert after.context == paths[root + 1]
    now = [after.context + path for path in after.tree.paths()]
    for old, new in moved.items():
        assert now[new + 1] == paths[old + 1]
    assert len(moved) == sum(path[: len(after.context)] == after.context for path in paths)
    assert moved[root] == ROOT


ADVANCES = 10
WANTED = (1 + ADVANCES) * MOST_DRAFT_TOKENS


@dataclass
class Eager:
    """Has all that is wanted at once."""

    made: int = 0
    scored: int = 0
    closed: int = 0
    epochs: list[DraftProgress] = field(default_factory=list)

    def begin(self, epoch: DraftProgress) -> None:
        self.epochs.append(epoch)

    def draft(self, epoch: DraftProgress, send: Send) -> asyncio.Future[None]:
        return asyncio.ensure_future(self._draft(epoch, send))

    async def _draft(self, epoch: DraftProgress, send: Send) -> None:
        while epoch.wanted:
            send(Drafted(epoch.number, (DraftToken(epoch.sent),), 0.0, first=epoch.sent))
            epoch.sent += 1
            self.made += 1

    async def score(self, epoch: DraftProgress, request: Score) -> Scored:
        self.scored += 1
        return Scored(request.epoch, np.zeros(1), 0.0)

    def close(self) -> None:
        self.closed += 1


@dataclass
class Told(Eager):
    """Has what is wanted when it is told to."""

    drafts: list[asyncio.Future[None]] = field(default_factory=list)
    sends: list[Send] = field(default_factory=list)

    def draft(self, epoch: DraftProgress, send: Send) -> asyncio.Future[None]:
        self.drafts.append(asyncio.get_running_loop().create_future())
        self.sends.append(send)
        return self.drafts[-1]

    def finish(self, first: int, count: int) -> None:
        """The latest call ends with so many draft tokens, though more may be wanted by now."""
        self.epochs[-1].sent += count
        self.sends[-1](drafted(self.epochs[-1].number, first, count))
        self.drafts[-1].set_result(None)


def drafted(epoch: int, first: int, count: int) -> Drafted:
    return Drafted(epoch, tuple(map(DraftToken, range(first, first + count))), 0.0, first=first)


def talking(drafter: Eager) -> Direct:
    return Direct(lambda replies: Conversation(drafter, replies))


async def settled() -> None:
    """Returns when nothing more can happen by itself."""
    for _ in range(2 * WANTED):
        await asyncio.sleep(0)


async def test_a_draft_that_is_ended_sends_nothing_more_and_another_may_begin() -> None:
    drafter = Told()
    talk = talking(drafter)
    talk.ask(Draft(1, 0, NOTHING, 4, 2), Advance(1, 0))
    await settled()
    assert drafter.drafts[0].cancelled()
    assert not drafter.epochs[0].wanted
    talk.ask(Advance(1, 8), Draft(2, 0, NOTHING, 2, 2), Advance(1, 0))
    await settled()
    drafter.finish(0, 2)
    assert [reply.epoch for reply in talk.waiting] == [2]
    with pytest.raises(ProtocolBroken, match="epoch 3 has not begun"):
        talk.ask(Advance(3, 0))


async def test_each_score_is_answered() -> None:
    drafter = Eager()
    talk = talking(drafter)
    await talk.answer(Draft(1, 0, NOTHING, 1))
    score = Score(1, 0, (Letters("a"),), 1)
    for _ in range(20):
        assert isinstance(await talk.answer(score), Scored)
    talk.ask(*[score] * 20)
    await settled()
    assert drafter.scored == 40


async def test_requests_behind_a_score_wait_and_not_more_of_them_than_there_may_be() -> None:
    talk = talking(Eager())
    talk.ask(Draft(1, 0, NOTHING, 1), Score(1, 0, (Letters("a"),), 1))
    talk.ask(*[Advance(1, 1)] * MAX_BEHIND_SCORE)
    with pytest.raises(ProtocolBroken, match=f"{MAX_BEHIND_SCORE} requests of this session wait already"):
        talk.ask(Advance(1, 1))
    assert [type(await talk.receive()) for _ in range(2)] == [Drafted, Scored]


async def test_what_waited_behind_a_score_is_taken_after_it_and_its_faults_end_the_session() -> None:
    drafter = Eager()
    talk = talking(drafter)
    score = Score(1, 0, (Letters("a"),), 1)
    talk.ask(Draft(1, 0, NOTHING, 1), score, Draft(2, 0, NOTHING, 1), score, Draft(3, 0, NOTHING, 1))
    assert len(drafter.epochs) == 1
    await settled()
    assert ([epoch.number for epoch in drafter.epochs], drafter.scored) == ([1, 2], 1)
    assert isinstance(talk.error, ProtocolBroken)
    assert "epoch 1 cannot be scored; the latest is 2" in str(talk.error)


async def test_a_score_waits_for_all_that_was_asked_for_before_it() -> None:
    drafter = Told()
    talk = talking(drafter)
    talk.ask(Draft(1, 0, NOTHING, 2, 2), Advance(1, 4), Score(1, 0, (Letters("a"),), 4))
    for first in (0, 2):
        await settled()
        assert (len(drafter.drafts), drafter.scored) == (1 + first // 2, 0)
        drafter.finish(first, 2)
    await settled()
    assert (len(drafter.drafts), drafter.scored) == (2, 1)
    assert [type(reply) for reply in talk.waiting] == [Drafted, Drafted, Scored]


async def test_once_a_new_epoch_was_asked_for_nothing_of_the_one_before_is_sent() -> None:
    drafter = Told()
    talk = talking(drafter)
    talk.ask(Draft(1, 0, NOTHING, 4, 1))
    drafter.sends[0](drafted(1, 0, 1))  # waits still
    talk.ask(Draft(2, 0, NOTHING, 4, 1))
    assert drafter.drafts[0].cancelled()
    drafter.sends[0](drafted(1, 1, 1))  # was on its way
    drafter.sends[1](drafted(2, 0, 1))
    assert [reply.epoch for reply in talk.waiting] == [2]


async def test_what_ends_the_drafting_ends_the_session() -> None:
    drafter = Told()
    talk = talking(drafter)
    talk.ask(Draft(1, 0, NOTHING, 4, 1))
    drafter.drafts[0].set_exception(ProtocolBroken("cannot be drafted"))
    with pytest.raises(ProtocolBroken, match="cannot be drafted"):
        await talk.receive()


async def test_after_it_is_closed_nothing_is_said() -> None:
    talk = talking(Eager())
    talk.ask(Draft(1, 0, NOTHING, 1), Score(1, 0, (Letters("a"),), 1))
    talk.close()
    await settled()
    assert (talk.waiting, talk.error) == ([], None)

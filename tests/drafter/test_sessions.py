"""A drafter's sessions: rows, draws, chunks, epochs dropped between two forwards; and their rules, without a model."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import ref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from crossdraft.drafter.conversation import MAX_BEHIND_SCORE, Conversation, DraftProgress, Epochs, Send
from crossdraft.drafter.drafting import DraftTree, Tip, branch_keys
from crossdraft.drafter.service import DrafterService, DrafterSession
from crossdraft.engine import model_thread
from crossdraft.engine.engine import Engine
from crossdraft.engine.model_thread import ModelThread
from crossdraft.engine.served_model import RunningModel
from crossdraft.rpc.errors import BadRequest, ProtocolBroken
from crossdraft.rpc.server import without_collections
from crossdraft.text.grammar import Grammar, of_letters
from crossdraft.text.letters import NOTHING, Letters, Side, from_bytes
from crossdraft.types import messages
from crossdraft.types.messages import Advance, Branch, Draft, Drafted, OpenDrafter, SamplingOptions, Score, Scored
from crossdraft.types.rows import DraftToken
from crossdraft.types.trees import ROOT
from tests.drafter.streaming import Epoch, first_row, gated, masked_to_its_ids
from tests.drafter.streaming import drafted as first_draft
from tests.engine.gathering import nothing
from tests.engine.tiny import generated
from tests.rpc.linked import Direct, Noted
from tests.rpc.sessions import DrafterClient
from tests.services.conftest import direct
from tests.tables import toy_vocabulary

PROMPT = from_bytes(b"The quick brown fox")
WARM = SamplingOptions(temperature=0.8)
KEY = messages.NoiseKey(77)
OPEN = OpenDrafter(PROMPT, WARM, KEY, 8)
FIRST = Draft(1, 0, NOTHING, 4)
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}, "b": {"type": "boolean"}}, "required": ["n"]}
GRAMMAR = Grammar.json(SCHEMA)
ADVANCES = 10
WANTED = (1 + ADVANCES) * messages.MOST_DRAFT_TOKENS
END = "\ue000"
SHAPES = [
    replace(FIRST, **shape)
    for shape in ({"count": 9}, {"count": 6, "branch_depth": 3, "branch_width": 2}, {"count": 5, "tree_nodes": 14})
]


def tokens(drafted: Drafted) -> list[int]:
    return [draft_token.token for draft_token in drafted.draft_tokens]


def same(one: Drafted, other: Drafted) -> None:
    assert tokens(one) == tokens(other)
    for left, right in zip(one.draft_tokens, other.draft_tokens, strict=True):
        np.testing.assert_array_equal(left.row.ids, right.row.ids)
        np.testing.assert_allclose(left.row.probabilities, right.row.probabilities, atol=2e-6)


async def test_greedy_drafts_are_what_generate_gives(drafter: DrafterClient, drafter_model: RunningModel) -> None:
    ids = drafter_model.tokenization.encode_prompt_letters(PROMPT)
    draft = await first_draft(drafter, OpenDrafter(PROMPT, SamplingOptions(temperature=0), None, 8), count=8)
    assert tokens(draft) == generated(drafter_model.thread.engine.model, ids, 8)
    for one in draft.draft_tokens:
        assert (one.row.ids.tolist(), one.row.probabilities.tolist()) == ([one.token], [1.0])


async def test_a_drafter_says_that_it_works(drafter_model: RunningModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_thread, "WORKING_SECONDS", 0.0)  # after each step
    thread = ModelThread(Engine(drafter_model.thread.engine.model, budget=1, chunk=8))
    service, opening = DrafterService(replace(drafter_model, thread=thread)), replace(OPEN, prompt=Letters(9 * PROMPT))
    session = await direct(service, opening)
    await session.answer(FIRST)
    session.close()
    await asyncio.to_thread(thread.close)
    assert session.signs == thread.steps - FIRST.count > 1  # for each step of the prompt but its last


async def test_options_of_the_target_cost_a_drafter_nothing(drafter_model: RunningModel) -> None:
    """However long they are: steps would hash and compare them."""
    threads: list[int] = []
    options = SamplingOptions(0.8, allowed_token_ids=Noted(range(300), threads), end_ids=Noted(range(300), threads))
    threads.clear()  # of whoever makes them: there they are checked
    session = await direct(DrafterService(drafter_model), replace(OPEN, options=options))
    await session.answer(FIRST)
    session.close()
    assert not threads


@pytest.mark.usefixtures("seeded")
async def test_draws_without_a_key_follow_the_row(drafter: DrafterClient) -> None:
    opening, draws, rows = OpenDrafter(PROMPT, WARM, None, 5), Counter[int](), []

    async def count_draws() -> None:
        async with drafter.session(opening) as session:
            for epoch in range(1, 16):
                (draft_token,) = (await session.draft(Draft(epoch, 0, NOTHING, 1))).draft_tokens
                draws[draft_token.token] += 1
                rows.append(draft_token.row)

    await asyncio.gather(*(count_draws() for _ in range(20)))
    assert set(draws) <= set(rows[0].ids.tolist())
    counts = [draws[int(token)] for token in rows[0].ids]
    assert chisquare(counts, 300 * rows[0].probabilities / rows[0].probabilities.sum()).pvalue > 1e-3


async def test_only_allowed_ids_are_drawn_and_the_row_says_so(drafter: DrafterClient) -> None:
    allowed = np.array([70, 300, 301, 305, 400])
    draft = await first_draft(drafter, OpenDrafter(PROMPT, SamplingOptions(), KEY, 3, allowed), count=12)
    assert len(draft.draft_tokens) == 12
    for draft_token in draft.draft_tokens:
        assert set(draft_token.row.ids.tolist()) <= set(allowed.tolist())
        assert len(draft_token.row.ids) == 3
    masked = await first_row(drafter, OpenDrafter(PROMPT, SamplingOptions(), KEY, 100, allowed))
    masked_to_its_ids(masked, await first_row(drafter, OpenDrafter(PROMPT, SamplingOptions(), KEY, 1000)))


async def test_after_an_end_of_sequence_it_drafts_on(drafter: DrafterClient, drafter_model: RunningModel) -> None:
    (end,) = drafter_model.description.stops
    assert tokens(await first_draft(drafter, OpenDrafter(PROMPT, WARM, KEY, 3, np.array([end])))) == [end] * 4


@pytest.mark.parametrize("parts", [(" jumps over", " the dog"), (" jum", "ps"), (" Gr\xc3", "\xb6\xc3\x9fe")])
async def test_a_rewound_session_has_the_rows_of_a_fresh_one(drafter: DrafterClient, parts) -> None:
    first, second = map(Letters, parts)
    async with drafter.session(OPEN) as session:
        await session.draft(Draft(1, 0, first, 5))
        await session.draft(Draft(2, len(first), Letters(" other words"), 3))
        rewound = await session.draft(Draft(3, len(first), second, 5))
    same(rewound, await first_draft(drafter, OPEN, Letters(first + second), 5))


async def test_a_text_beyond_the_context_is_cut_and_drafting_goes_on(drafter: DrafterClient, drafter_model) -> None:
    word = Letters(" dog the")
    async with drafter.session(OpenDrafter(Letters(word * 100), WARM, KEY, 8)) as session:
        offset, most = 0, 0
        for epoch in range(1, 20):
            fed = drafter_model.thread.engine.computed
            drafted = await session.draft(Draft(epoch, offset, word, 4))
            assert (len(drafted.draft_tokens), drafted.reason) == (4, "")
            offset += len(word)
            most += drafter_model.thread.engine.computed - fed > 30
        assert 1 < most < 8  # the window of 64 tokens is fed anew only when it was cut


async def test_where_no_text_fits_it_stands_aside_and_says_why(drafter: DrafterClient) -> None:
    async with drafter.session(OPEN) as session:
        drafted = await session.draft(Draft(1, 0, NOTHING, 64))
        assert drafted.draft_tokens == ()
        assert "a context of 64 tokens has no room" in drafted.reason
        assert len((await session.draft(Draft(2, 0, NOTHING, 4))).draft_tokens) == 4


async def test_letters_that_it_cannot_write_are_left_out(drafter: DrafterClient) -> None:
    """As if they were not there, for the rest of the output."""
    unknown = Side.TARGET.control(2)
    async with drafter.session(OPEN) as session:
        drafted = await session.draft(Draft(1, 0, Letters(f" the{unknown} dog"), 4))
        after = await session.draft(Draft(2, 9, from_bytes(b" was"), 4))
    for text, one in ((" the dog", drafted), (" the dog was", after)):
        assert (len(one.draft_tokens), one.reason) == (4, "")
        row, expected = one.draft_tokens[0].row, await first_row(drafter, replace(OPEN, noise=None), Letters(text))
        np.testing.assert_array_equal(row.ids, expected.ids)
        np.testing.assert_allclose(row.probabilities, expected.probabilities, atol=2e-6)


async def test_a_session_that_is_cancelled_stops_drafting_and_gives_back_its_place(drafter_model: RunningModel) -> None:
    async with gated(drafter_model) as (client, gate):
        session = await client.open(OPEN)
        gate.close()
        await session.send(Draft(1, 0, NOTHING, 50))
        await gate.entered()  # the first step stands still
        await session.close()
        async with client.session(OPEN):  # on one link what is sent first comes first
            gate.open()
            await gate.thread.submit(nothing())
        assert gate.thread.steps == 1
        assert not gate.thread.engine.slots_in_use


async def test_what_an_ended_session_holds_is_freed_without_a_collection(drafter_model: RunningModel) -> None:
    with without_collections():
        session, epoch = DrafterSession(DrafterService(drafter_model), OPEN, nothing), DraftProgress(FIRST)
        gone = ref(session)
        session.begin(epoch)
        await session.draft(epoch, lambda _: None)
        session.close()
        del session, epoch
        await drafter_model.thread.submit(nothing())  # behind what closes it
        assert gone() is None


async def test_a_draft_token_is_sent_before_the_next_one_is_made(drafter_model: RunningModel) -> None:
    async with gated(drafter_model) as (client, gate), client.session(OPEN) as session:
        gate.close()
        await session.send(Draft(1, 0, NOTHING, 5, 1))
        epoch = Epoch(1)
        for count in range(1, 6):
            await gate.entered()
            gate.step()
            await epoch.hear(session)
            assert len(epoch.draft_tokens) == count == len(gate.works)


async def test_a_newer_epoch_drops_what_is_being_drafted(drafter_model: RunningModel) -> None:
    async with gated(drafter_model) as (client, gate), client.session(OPEN) as session:
        gate.close()
        await session.send(Draft(1, 0, NOTHING, 50, 1))
        await gate.entered()
        gate.step()
        await Epoch(1).hear(session)
        await gate.entered()  # the second step stands still
        await session.send(Draft(2, 0, Letters(" jumps"), 3, 1))
        await gate.job_arrived(client)
        gate.open()
        epoch = await Epoch(2).complete(session, 3)
        assert len(gate.works) == 2 + 3  # nothing was computed for the old epoch but the step under way
    async with gated(drafter_model) as (client, _), client.session(OPEN) as session:
        await session.send(Draft(1, 0, Letters(" jumps"), 3))
        assert (await Epoch(1).complete(session, 3)).tokens == epoch.tokens


async def test_the_text_of_an_epoch_that_was_never_drafted_counts(drafter: DrafterClient, drafter_model: RunningModel):
    words = [Letters(f" word{number % 3}") for number in range(12)]
    session = DrafterSession(DrafterService(drafter_model), OPEN, lambda: None)
    talk = Direct(lambda replies: Conversation(session, replies))
    # Nothing waits between them: only the last one is drafted.
    talk.ask(*(Draft(number, number * len(word), word, 4) for number, word in enumerate(words)))
    reply = await talk.receive()
    assert reply.epoch == len(words) - 1
    assert not talk.waiting
    talk.close()
    async with drafter.session(OPEN) as fresh:
        await fresh.send(Draft(1, 0, Letters("".join(words)), 4))
        assert (await Epoch(1).complete(fresh, 4)).tokens == [draft_token.token for draft_token in reply.draft_tokens]


async def test_a_window_that_moves_while_it_is_drafted(drafter_model: RunningModel) -> None:
    async with gated(drafter_model) as (client, gate), client.session(OPEN) as session:
        gate.close()
        await session.send(Draft(1, 0, NOTHING, 2, 2))
        await gate.entered()
        gate.step()
        await gate.entered()  # the last step that is wanted
        await session.send(Advance(1, 4))
        await client.describe()
        gate.open()
        epoch = await Epoch(1).complete(session, 4)
        assert [len(reply.draft_tokens) for reply in epoch.replies] == [2, 2]


async def test_what_cannot_be_ends_the_session(drafter: DrafterClient) -> None:
    async with drafter.session(OPEN) as session:
        await session.draft(FIRST)
        await session.send(Draft(2, 99, NOTHING, 4))
        with pytest.raises(ProtocolBroken, match="cannot rewind to letter 99"):
            await session.receive()
    assert len((await first_draft(drafter, OPEN)).draft_tokens) == 4


def fits(*parts: str) -> bool:
    """Whether this text begins something that the grammar takes; an end of sequence ends it."""
    text, end, rest = "".join(parts).partition(END)
    taken = of_letters().matcher(GRAMMAR).fitting(NOTHING, Letters(text))
    return taken.startswith(text) and not rest.strip(END) and not (end and text.count("}") != 1)


@pytest.mark.parametrize("request_", SHAPES, ids=["chain", "branches", "tree"])
@pytest.mark.parametrize("width", [0, 8])
async def test_drafts_and_what_is_prepared_beside_them_keep_to_the_grammar(drafter, drafter_model, request_, width):
    letters = drafter_model.tokenization.vocabulary.letters_of
    opening = OpenDrafter(PROMPT, replace(WARM, grammar=GRAMMAR), None, width)
    for begun in ("", "{", '{"n"', '{ "n": 12'):
        async with drafter.session(opening) as session:
            await session.send(replace(request_, letters=Letters(begun)))
            epoch = Epoch(1)
            reply = await epoch.hear(session)
            while len(epoch.draft_tokens) < request_.count and not reply.reason:
                reply = await epoch.hear(session)
        whole = letters(epoch.tokens)
        assert fits(begun, whole)
        for one in epoch.branches:
            assert fits(begun, whole[: one.offset - len(begun)], one.letters, letters(one.tokens))
        for place, one in enumerate(epoch.draft_tokens):
            for token in one.row.ids.tolist() if one.row is not None else ():
                assert fits(begun, letters([*epoch.tokens[:place], token]))


async def test_rows_of_drafts_by_a_grammar_are_the_drafters_own_masked(drafter: DrafterClient) -> None:
    free = OpenDrafter(PROMPT, WARM, KEY, 1000)
    kept = replace(free, options=replace(WARM, grammar=Grammar.regex("[0-9]+")))
    cut, full = await first_row(drafter, kept), await first_row(drafter, free)
    assert 5 < len(cut.ids) < len(full.ids)
    masked_to_its_ids(cut, full)


async def test_where_no_allowed_token_fits_the_grammar_it_drafts_as_without(drafter, drafter_model):
    letters = drafter_model.tokenization.vocabulary.letters
    ids = np.array([token for token, one in enumerate(letters) if one.isalpha() and one.isascii()])
    openings = [OpenDrafter(PROMPT, replace(WARM, grammar=one), KEY, 8, ids) for one in (Grammar.regex("[0-9]+"), None)]
    same(*[await first_draft(drafter, opening) for opening in openings])


async def test_scores_are_of_the_drafts_by_the_grammar(drafter: DrafterClient) -> None:
    opening = OpenDrafter(PROMPT, replace(WARM, grammar=Grammar.regex("[ab]{1,3}c")), None, 64)
    async with drafter.session(opening) as session:
        await session.draft(Draft(1, 0, NOTHING, 3))
        scored = await session.score(Score(1, 0, tuple(map(Letters, ["a", "b", "c", "aa", "ab", "ac", "d"])), 3))
    a, b, c, aa, ab, ac, d = scored.probabilities
    assert a + b == pytest.approx(1, abs=1e-6)
    assert aa + ab + ac == pytest.approx(a, abs=1e-6)
    assert (c, d) == (0, 0)


async def test_a_grammar_that_cannot_be_compiled_costs_the_session(drafter: DrafterClient) -> None:
    with pytest.raises(BadRequest, match="unclosed group"):
        await first_row(drafter, OpenDrafter(PROMPT, SamplingOptions(grammar=Grammar.regex("(")), None, 8))


def draft(epoch: int = 1, count: int = 5, chunk: int = 2, first: int = 0) -> Draft:
    return Draft(epoch, 3, Letters("ab"), count, chunk, first=first)


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
    st.integers(1, 6), st.integers(0, 6), st.lists(st.sampled_from(["draft_token", "branch", "advance"]), max_size=40)
)
def test_replies_hold_everything_once_in_order_and_depend_on_numbers_only(chunk: int, first: int, made: list[str]):
    epoch, replies, branches = DraftProgress(draft(count=3, chunk=chunk, first=first)), list[Drafted](), 0
    for event in made:
        if event == "advance":
            epoch.count += 2
        elif event == "branch":
            branches += 1
            epoch.add_branch(Branch(branches, 0, Letters("x"), (1,)))
        elif epoch.made < epoch.count:
            epoch.add(DraftToken(epoch.made))
        replies += epoch.due()
        held = epoch.made - epoch.sent
        assert held < (first - epoch.sent if epoch.sent < first else chunk)
        assert held == 0 or epoch.made < epoch.count  # whatever is wanted and complete is sent
    replies.append(epoch.last("enough"))
    assert [token for reply in replies for token in tokens(reply)] == list(range(epoch.made))
    assert [number.number for reply in replies for number in reply.branches] == list(range(1, branches + 1))
    assert all(len(reply.draft_tokens) <= (first if reply.first < first else chunk) for reply in replies)
    sizes = [len(reply.draft_tokens) for reply in replies]
    assert [reply.first for reply in replies] == np.cumsum([0, *sizes])[:-1].tolist()
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


@dataclass
class Eager:
    """Has all that is wanted at once."""

    scored: int = 0
    epochs: list[DraftProgress] = field(default_factory=list)

    def begin(self, epoch: DraftProgress) -> None:
        self.epochs.append(epoch)

    def draft(self, epoch: DraftProgress, send: Send) -> asyncio.Future[None]:
        return asyncio.ensure_future(self._draft(epoch, send))

    async def _draft(self, epoch: DraftProgress, send: Send) -> None:
        while epoch.wanted:
            send(Drafted(epoch.number, (DraftToken(epoch.sent),), 0.0, first=epoch.sent))
            epoch.sent += 1

    async def score(self, epoch: DraftProgress, request: Score) -> Scored:
        self.scored += 1
        return Scored(request.epoch, np.zeros(1), 0.0)

    def close(self) -> None:
        pass


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


def talking(drafter: Eager) -> tuple[Any, Direct]:
    return drafter, Direct(lambda replies: Conversation(drafter, replies))


async def settled() -> None:
    """Returns when nothing more can happen by itself."""
    for _ in range(2 * WANTED):
        await asyncio.sleep(0)


async def test_a_draft_that_is_ended_sends_nothing_more_and_another_may_begin() -> None:
    drafter, talk = talking(Told())
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
    drafter, talk = talking(Eager())
    await talk.answer(Draft(1, 0, NOTHING, 1))
    score = Score(1, 0, (Letters("a"),), 1)
    for _ in range(20):
        assert isinstance(await talk.answer(score), Scored)
    talk.ask(*[score] * 20)
    await settled()
    assert drafter.scored == 40


async def test_requests_behind_a_score_wait_and_not_more_of_them_than_there_may_be() -> None:
    _, talk = talking(Eager())
    talk.ask(Draft(1, 0, NOTHING, 1), Score(1, 0, (Letters("a"),), 1))
    talk.ask(*[Advance(1, 1)] * MAX_BEHIND_SCORE)
    with pytest.raises(ProtocolBroken, match=f"{MAX_BEHIND_SCORE} requests of this session wait already"):
        talk.ask(Advance(1, 1))
    assert [type(await talk.receive()) for _ in range(2)] == [Drafted, Scored]


async def test_what_waited_behind_a_score_is_taken_after_it_and_its_faults_end_the_session() -> None:
    drafter, talk = talking(Eager())
    score = Score(1, 0, (Letters("a"),), 1)
    talk.ask(Draft(1, 0, NOTHING, 1), score, Draft(2, 0, NOTHING, 1), score, Draft(3, 0, NOTHING, 1))
    assert len(drafter.epochs) == 1
    await settled()
    assert ([epoch.number for epoch in drafter.epochs], drafter.scored) == ([1, 2], 1)
    assert isinstance(talk.error, ProtocolBroken)
    assert "epoch 1 cannot be scored; the latest is 2" in str(talk.error)


async def test_a_score_waits_for_all_that_was_asked_for_before_it() -> None:
    drafter, talk = talking(Told())
    talk.ask(Draft(1, 0, NOTHING, 2, 2), Advance(1, 4), Score(1, 0, (Letters("a"),), 4))
    for first in (0, 2):
        await settled()
        assert (len(drafter.drafts), drafter.scored) == (1 + first // 2, 0)
        drafter.finish(first, 2)
    await settled()
    assert (len(drafter.drafts), drafter.scored) == (2, 1)
    assert [type(reply) for reply in talk.waiting] == [Drafted, Drafted, Scored]


async def test_once_a_new_epoch_was_asked_for_nothing_of_the_one_before_is_sent() -> None:
    drafter, talk = talking(Told())
    talk.ask(Draft(1, 0, NOTHING, 4, 1))
    drafter.sends[0](drafted(1, 0, 1))  # waits still
    talk.ask(Draft(2, 0, NOTHING, 4, 1))
    assert drafter.drafts[0].cancelled()
    drafter.sends[0](drafted(1, 1, 1))  # was on its way
    drafter.sends[1](drafted(2, 0, 1))
    assert [reply.epoch for reply in talk.waiting] == [2]


async def test_what_ends_the_drafting_ends_the_session() -> None:
    drafter, talk = talking(Told())
    talk.ask(Draft(1, 0, NOTHING, 4, 1))
    drafter.drafts[0].set_exception(ProtocolBroken("cannot be drafted"))
    with pytest.raises(ProtocolBroken, match="cannot be drafted"):
        await talk.receive()


async def test_after_it_is_closed_nothing_is_said() -> None:
    _, talk = talking(Eager())
    talk.ask(Draft(1, 0, NOTHING, 1), Score(1, 0, (Letters("a"),), 1))
    talk.close()
    await settled()
    assert (talk.waiting, talk.error) == ([], None)

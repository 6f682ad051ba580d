"""A drafter's sessions over loopback: rows, draws, chunks, advances, and epochs dropped between two forwards."""

import asyncio
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from crossdraft.drafter.conversation import Conversation
from crossdraft.drafter.service import DrafterService, DrafterSession
from crossdraft.engine import model_thread
from crossdraft.engine.engine import Engine
from crossdraft.engine.model_thread import ModelThread
from crossdraft.engine.served_model import RunningModel
from crossdraft.rpc.errors import BadRequest, ProtocolBroken
from crossdraft.text.grammar import Grammar, of_letters
from crossdraft.text.letters import NOTHING, Letters, Side, from_bytes
from crossdraft.types.messages import Advance, Draft, Drafted, NoiseKey, OpenDrafter, SamplingOptions, Score
from tests.drafter.streaming import Epoch, gated
from tests.engine.gathering import nothing
from tests.rpc.linked import Direct, Noted
from tests.rpc.sessions import DrafterClient

PROMPT = from_bytes(b"The quick brown fox")
WARM = SamplingOptions(temperature=0.8)
KEY = NoiseKey(77)
OPEN = OpenDrafter(PROMPT, WARM, KEY, 8)
FIRST = Draft(1, 0, NOTHING, 4)


def tokens(drafted: Drafted) -> list[int]:
    return [draft_token.token for draft_token in drafted.draft_tokens]


def same(one: Drafted, other: Drafted) -> None:
    assert tokens(one) == tokens(other)
    for left, right in zip(one.draft_tokens, other.draft_tokens, strict=True):
        np.testing.assert_array_equal(left.row.ids, right.row.ids)
        np.testing.assert_allclose(left.row.probabilities, right.row.probabilities, atol=2e-6)


async def test_greedy_drafts_are_what_generate_gives(drafter: DrafterClient, drafter_model: RunningModel) -> None:
    ids = torch.tensor([drafter_model.tokenization.encode_prompt_letters(PROMPT)])
    settings = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    with torch.inference_mode():
        out = drafter_model.thread.engine.model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    async with drafter.session(OpenDrafter(PROMPT, SamplingOptions(temperature=0), None, 8)) as session:
        drafted = await session.draft(Draft(1, 0, NOTHING, 8))
    assert tokens(drafted) == out[0, ids.shape[1] :].tolist()
    for one in drafted.draft_tokens:
        assert (one.row.ids.tolist(), one.row.probabilities.tolist()) == ([one.token], [1.0])


async def test_a_drafter_says_that_it_works(drafter_model: RunningModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_thread, "WORKING_SECONDS", 0.0)  # after each step
    thread = ModelThread(Engine(drafter_model.thread.engine.model, budget=1, chunk=8))
    session, opening = Direct(lambda _: None), replace(OPEN, prompt=Letters(9 * PROMPT))
    session.session = await DrafterService(replace(drafter_model, thread=thread)).open(opening, session)
    await session.answer(FIRST)
    session.close()
    await asyncio.to_thread(thread.close)
    assert session.signs == thread.steps - FIRST.count > 1  # for each step of the prompt but its last


async def test_options_of_the_target_cost_a_drafter_nothing(drafter_model: RunningModel) -> None:
    """However long they are: steps would hash and compare them."""
    threads: list[int] = []
    options = SamplingOptions(0.8, allowed_token_ids=Noted(range(300), threads), end_ids=Noted(range(300), threads))
    session = Direct(lambda _: None)
    session.session = await DrafterService(drafter_model).open(replace(OPEN, options=options), session)
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
    async with drafter.session(OpenDrafter(PROMPT, SamplingOptions(), KEY, 3, allowed)) as session:
        drafted = await session.draft(Draft(1, 0, NOTHING, 12))
    assert len(drafted.draft_tokens) == 12
    for draft_token in drafted.draft_tokens:
        assert set(draft_token.row.ids.tolist()) <= set(allowed.tolist())
        assert len(draft_token.row.ids) == 3
    async with drafter.session(OpenDrafter(PROMPT, SamplingOptions(), KEY, 100, allowed)) as session:
        masked = (await session.draft(FIRST)).draft_tokens[0].row
    async with drafter.session(OpenDrafter(PROMPT, SamplingOptions(), KEY, 1000)) as session:
        free = (await session.draft(FIRST)).draft_tokens[0].row
    expected = free.probabilities_of(masked.ids) / free.probabilities_of(masked.ids).sum()
    np.testing.assert_allclose(masked.probabilities, expected, atol=1e-5)


async def test_after_an_end_of_sequence_it_drafts_on(drafter: DrafterClient, drafter_model: RunningModel) -> None:
    (end,) = drafter_model.description.stops
    async with drafter.session(OpenDrafter(PROMPT, WARM, KEY, 3, np.array([end]))) as session:
        assert tokens(await session.draft(FIRST)) == [end] * 4


@pytest.mark.parametrize("parts", [(" jumps over", " the dog"), (" jum", "ps"), (" Gr\xc3", "\xb6\xc3\x9fe")])
async def test_a_rewound_session_has_the_rows_of_a_fresh_one(drafter: DrafterClient, parts) -> None:
    first, second = map(Letters, parts)
    async with drafter.session(OPEN) as session:
        await session.draft(Draft(1, 0, first, 5))
        await session.draft(Draft(2, len(first), Letters(" other words"), 3))
        rewound = await session.draft(Draft(3, len(first), second, 5))
    async with drafter.session(OPEN) as session:
        same(rewound, await session.draft(Draft(1, 0, Letters(first + second), 5)))


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
        async with drafter.session(replace(OPEN, noise=None)) as session:
            fresh = await session.draft(Draft(1, 0, Letters(text), 1))
        row, expected = one.draft_tokens[0].row, fresh.draft_tokens[0].row
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
            await gate.thread.run(nothing())
        assert gate.thread.steps == 1
        assert not gate.thread.engine.slots_in_use


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
        await session.draft(Draft(1, 0, NOTHING, 4))
        await session.send(Draft(2, 99, NOTHING, 4))
        with pytest.raises(ProtocolBroken, match="cannot rewind to letter 99"):
            await session.receive()
    async with drafter.session(OPEN) as session:
        assert len((await session.draft(Draft(1, 0, NOTHING, 4))).draft_tokens) == 4


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}, "b": {"type": "boolean"}}, "required": ["n"]}
GRAMMAR = Grammar.json(SCHEMA)


def fits(*parts: str) -> bool:
    """Whether this text begins something that the grammar takes; an end of sequence ends it."""
    text, end, rest = "".join(parts).partition(END)
    taken = of_letters().matcher(GRAMMAR).fitting(NOTHING, Letters(text))
    return taken.startswith(text) and not rest.strip(END) and not (end and text.count("}") != 1)


END = "\ue000"
SHAPES = [
    Draft(1, 0, NOTHING, 9),
    Draft(1, 0, NOTHING, 6, branch_depth=3, branch_width=2),
    Draft(1, 0, NOTHING, 5, tree_nodes=14),
]


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
    async with drafter.session(
        OpenDrafter(PROMPT, replace(WARM, grammar=Grammar.regex("[0-9]+")), KEY, 1000)
    ) as session:
        kept = (await session.draft(FIRST)).draft_tokens[0].row
    async with drafter.session(OpenDrafter(PROMPT, WARM, KEY, 1000)) as session:
        free = (await session.draft(FIRST)).draft_tokens[0].row
    assert 5 < len(kept.ids) < len(free.ids)
    expected = free.probabilities_of(kept.ids) / free.probabilities_of(kept.ids).sum()
    np.testing.assert_allclose(kept.probabilities, expected, atol=1e-5)


async def test_where_no_allowed_token_fits_the_grammar_it_drafts_as_without(drafter, drafter_model):
    letters = drafter_model.tokenization.vocabulary.letters
    ids = np.array([token for token, one in enumerate(letters) if one.isalpha() and one.isascii()])
    openings = [OpenDrafter(PROMPT, replace(WARM, grammar=one), KEY, 8, ids) for one in (Grammar.regex("[0-9]+"), None)]
    drafted = []
    for opening in openings:
        async with drafter.session(opening) as session:
            drafted.append(await session.draft(FIRST))
    same(*drafted)


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
        async with drafter.session(
            OpenDrafter(PROMPT, SamplingOptions(grammar=Grammar.regex("(")), None, 8)
        ) as session:
            await session.draft(FIRST)

"""Drafts as they are made: chunks, windows that move on, and epochs that are dropped between two forwards."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from crossdraft.drafter.service import DrafterService, DrafterSession
from crossdraft.engine.served_model import RunningModel
from crossdraft.rpc.clients import DrafterClient
from crossdraft.rpc.errors import ProtocolBroken
from crossdraft.text.letters import Letters, from_bytes
from crossdraft.types.messages import Advance, Draft, NoiseKey, OpenDrafter, SamplingOptions, Score
from tests.services.streaming import PATIENCE, Epoch, gated

PROMPT = from_bytes(b"The quick brown fox")
NOTHING = Letters("")
OPEN = OpenDrafter(PROMPT, SamplingOptions(temperature=0.8), NoiseKey(77), 8)


@pytest.mark.parametrize(("chunk", "sizes"), [(1, [1] * 7), (3, [3, 3, 1]), (7, [7]), (64, [7])])
async def test_draft_tokens_come_in_chunks(drafter: DrafterClient, chunk: int, sizes: list[int]) -> None:
    async with drafter.session(OPEN) as session:
        await session.send(Draft(1, 0, NOTHING, 7, chunk))
        epoch = await Epoch(1).complete(session, 7)
    assert [len(reply.draft_tokens) for reply in epoch.replies] == sizes
    assert all(reply.seconds > 0 and not reply.reason for reply in epoch.replies)
    async with drafter.session(OPEN) as session:
        assert [
            draft_token.token for draft_token in (await session.draft(Draft(1, 0, NOTHING, 7))).draft_tokens
        ] == epoch.tokens


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


async def test_epochs_that_are_dropped_at_once_leave_the_last_one_right(drafter: DrafterClient) -> None:
    async with drafter.session(OPEN) as session:
        await session.send(Draft(1, 0, Letters(" dog"), 5))
        expected = (await Epoch(1).complete(session, 5)).tokens
    async with drafter.session(OPEN) as session:
        for number in range(1, 20):
            await session.send(Draft(number, 0, Letters(" cat" if number % 2 else " dogs"), 40, 1))
        await session.send(Draft(20, 0, Letters(" dog"), 5, 1))
        async with asyncio.timeout(PATIENCE):
            while (reply := await session.receive()).epoch < 20:
                pass
        epoch = Epoch(20, [reply])
        assert (await epoch.complete(session, 5)).tokens == expected


async def test_the_text_of_an_epoch_that_was_never_drafted_counts(
    drafter: DrafterClient, drafter_model: RunningModel
) -> None:
    words = [Letters(f" word{number % 3}") for number in range(12)]

    async def asked() -> AsyncIterator[Draft]:
        for number, word in enumerate(words):  # nothing waits between them: only the last one is drafted
            yield Draft(number, number * len(word), word, 4)

    session = DrafterSession(DrafterService(drafter_model), OPEN)
    (reply,) = [reply async for reply in session.converse(asked())]
    await session.close()
    async with drafter.session(OPEN) as fresh:
        await fresh.send(Draft(1, 0, Letters("".join(words)), 4))
        assert (await Epoch(1).complete(fresh, 4)).tokens == [draft_token.token for draft_token in reply.draft_tokens]


async def test_a_window_moves_on_and_drafting_with_it(drafter: DrafterClient, drafter_model: RunningModel) -> None:
    engine = drafter_model.thread.engine
    async with drafter.session(OPEN) as session:
        await session.send(Draft(1, 0, NOTHING, 9))
        expected = (await Epoch(1).complete(session, 9)).tokens
    async with drafter.session(OPEN) as session:
        await session.send(Draft(1, 0, NOTHING, 2, 1))
        epoch = await Epoch(1).complete(session, 2)
        fed = engine.computed
        await session.send(Advance(1, 2))  # which is nothing new
        await session.send(Advance(1, 5))
        await epoch.complete(session, 5)
        await session.send(Advance(1, 9))
        assert (await epoch.complete(session, 9)).tokens == expected
        assert engine.computed - fed == 7


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


async def test_an_advance_of_an_epoch_that_is_over_means_nothing(drafter: DrafterClient) -> None:
    async with drafter.session(OPEN) as session:
        await session.draft(Draft(1, 0, NOTHING, 2))
        await session.draft(Draft(2, 0, NOTHING, 2))
        await session.send(Advance(1, 40))
        await session.send(Advance(2, 3))
        epoch = Epoch(2, first=2)
        assert len((await epoch.hear(session)).draft_tokens) == 1


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        (Advance(1, 3), "may advance from 4 draft tokens to at most 68, not to 3"),
        (Advance(1, 69), "may advance from 4 draft tokens to at most 68, not to 69"),
        (Advance(2, 5), "epoch 2 has not begun"),
        (Draft(2, 0, NOTHING, 4, adopt=1), "branch 1 is not one of the latest epoch's"),
    ],
)
async def test_what_cannot_be_ends_the_session(drafter: DrafterClient, bad: Advance | Draft, complaint: str) -> None:
    async with drafter.session(OPEN) as session:
        await session.draft(Draft(1, 0, NOTHING, 4))
        await session.send(bad)
        with pytest.raises(ProtocolBroken, match=complaint):
            await session.receive()
    async with drafter.session(OPEN) as session:
        assert len((await session.draft(Draft(1, 0, NOTHING, 4))).draft_tokens) == 4


async def test_a_draft_that_is_scored_may_be_streamed(drafter: DrafterClient) -> None:
    strings = (Letters("t"), Letters(" "), Letters("th"))
    scores = []
    for chunk in (64, 1):
        async with drafter.session(OPEN) as session:
            await session.send(Draft(1, 0, NOTHING, 3, chunk))
            await session.send(Score(1, 0, strings, 3))  # waits for the draft
            await Epoch(1).complete(session, 3)
            scores.append((await session.receive()).probabilities.tolist())
    assert scores[0] == scores[1]


async def test_a_context_that_is_full_is_cut_in_the_middle_of_an_epoch(drafter: DrafterClient) -> None:
    async with drafter.session(OPEN) as session:
        await session.send(Draft(1, 0, NOTHING, 20, 1))
        epoch = Epoch(1)
        for count in range(20, 200, 20):
            await session.send(Advance(1, count))
            await epoch.complete(session, count)
        assert not any(reply.reason for reply in epoch.replies)


async def test_sessions_side_by_side_draft_what_they_would_alone(drafter: DrafterClient) -> None:
    texts = [Letters(text) for text in (" jumps", " runs over", "", " and", " is", " of the")]

    async def drafted(text: Letters) -> list[int]:
        async with drafter.session(OPEN) as session:
            await session.send(Draft(1, 0, text, 6, 2, branch_depth=2))
            return (await Epoch(1).complete(session, 6, 6)).tokens

    alone = [await drafted(text) for text in texts]
    assert await asyncio.gather(*map(drafted, texts)) == alone

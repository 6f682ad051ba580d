"""Epochs that begin with a prepared continuation: it is gone on from, and only while it is the text."""

from dataclasses import replace

import numpy as np
import pytest

from crossdraft.engine.distributions import drafting_distributions
from crossdraft.engine.served_model import RunningModel
from crossdraft.rpc.clients import DrafterClient
from crossdraft.rpc.errors import ProtocolBroken
from crossdraft.text.letters import Letters, common_length
from crossdraft.types.messages import Advance, Draft, OpenDrafter
from tests.services.branching import GREEDY, KEY, KEYED, NOTHING, WITH_ROWS, Reference, corrected
from tests.services.streaming import Epoch


@pytest.mark.parametrize("opening", [KEYED, GREEDY])
@pytest.mark.parametrize("place", [0, 2, 4])
async def test_without_rows_an_epoch_goes_on_after_the_branch(
    drafter: DrafterClient, drafter_model: RunningModel, opening: OpenDrafter, place: int
) -> None:
    engine, reference = drafter_model.thread.engine, Reference(drafter_model, opening)
    async with drafter.session(opening) as session:
        await session.send(Draft(1, 0, NOTHING, 6, 1, 3, 1))
        first = await Epoch(1).complete(session, 6, 6)
        branch, before = first.branches[place], engine.computed
        await session.send(corrected(branch, 2, 7, 2))
        second = await Epoch(2, first=3).complete(session, 7)
        assert engine.computed - before == 4  # the branch's last draft token, and those after it but the last
    (key,) = reference.keys(tuple(first.tokens[:place]), 1)
    output = (*first.tokens[:place], key)
    assert branch.tokens + tuple(second.tokens) == reference.drafted(output, 7)


async def test_with_rows_the_branchs_draft_tokens_come_again(
    drafter: DrafterClient, drafter_model: RunningModel
) -> None:
    engine, reference = drafter_model.thread.engine, Reference(drafter_model, WITH_ROWS)
    async with drafter.session(WITH_ROWS) as session:
        await session.send(Draft(1, 0, NOTHING, 4, 1, 3, 1))
        first = await Epoch(1).complete(session, 4, 4)
        branch, before = first.branches[1], engine.computed
        await session.send(corrected(branch, 2, 5, 2, depth=2))
        second = await Epoch(2).complete(session, 5, 2)
        assert engine.computed - before == 2 + 2 * 2  # two draft tokens, and two branches of two
    assert [len(reply.draft_tokens) for reply in second.replies if reply.draft_tokens] == [2, 2, 1]
    assert tuple(second.tokens[:3]) == branch.tokens
    (key,) = reference.keys(tuple(first.tokens[:1]), 1)
    output = (first.tokens[0], key)
    for draft_token in second.draft_tokens:
        ((ids, weights),) = drafting_distributions(reference.logits(output), WITH_ROWS.options, 8)
        assert draft_token.row.ids.tolist() == ids.tolist()
        np.testing.assert_allclose(draft_token.row.probabilities, weights, atol=2e-6)
        assert drafter_model.noise.draw(ids, weights, KEY, reference.length(output)) == draft_token.token
        output = (*output, draft_token.token)
    assert [branch.number for branch in second.branches] == [5, 6]


async def test_a_window_shorter_than_the_branch_is_kept(drafter: DrafterClient) -> None:
    async with drafter.session(WITH_ROWS) as session:
        await session.send(Draft(1, 0, NOTHING, 2, 1, 4, 1))
        first = await Epoch(1).complete(session, 2, 2)
        await session.send(corrected(first.branches[0], 2, 2, 1))
        second = await Epoch(2).complete(session, 2)
        await session.send(Advance(2, 5))
        await second.complete(session, 5)
    assert tuple(second.tokens[:4]) == first.branches[0].tokens


async def test_the_text_may_be_told_from_anywhere(drafter: DrafterClient, drafter_model: RunningModel) -> None:
    """The other side counts from where the texts part, or from earlier."""
    async with drafter.session(KEYED) as session:
        epochs = []
        for number in (1, 3, 5):
            await session.send(Draft(number, 0, NOTHING, 4, 1, 3, 1))
            first = await Epoch(number).complete(session, 4, 4)
            branch = first.branches[2]
            written = drafter_model.tokenization.letters_of(first.tokens)
            text = written[: branch.offset] + branch.letters
            start = (0, branch.offset, common_length(written, text))[number // 2]
            await session.send(Draft(number + 1, start, Letters(text[start:]), 5, adopt=branch.number))
            epochs.append((await Epoch(number + 1, first=3).complete(session, 5)).tokens)
    assert epochs[0] == epochs[1] == epochs[2]


@pytest.mark.parametrize("change", [{"letters": Letters("#")}, {"offset": 0}, {"adopt": 9}])
async def test_a_branch_that_is_not_the_text_is_refused(drafter: DrafterClient, change: dict[str, object]) -> None:
    async with drafter.session(KEYED) as session:
        await session.send(Draft(1, 0, NOTHING, 4, 1, 3, 1))
        first = await Epoch(1).complete(session, 4, 4)
        await session.send(replace(corrected(first.branches[2], 2, 5), **change))
        with pytest.raises(ProtocolBroken, match=r"does not begin with the text of epoch 2|is not one of the latest"):
            await session.receive()


async def test_branches_are_forgotten_with_their_epoch(drafter: DrafterClient) -> None:
    async with drafter.session(KEYED) as session:
        await session.send(Draft(1, 0, NOTHING, 4, 1, 3, 1))
        first = await Epoch(1).complete(session, 4, 4)
        await session.draft(Draft(2, 0, NOTHING, 4))
        await session.send(corrected(first.branches[0], 3, 5))
        with pytest.raises(ProtocolBroken, match="branch 1 is not one of the latest epoch's"):
            await session.receive()


async def test_branches_that_the_output_must_have_passed_are_forgotten(drafter: DrafterClient) -> None:
    """A window has at most 64 draft tokens: what began more before the newest than that is behind the frontier."""
    async with drafter.session(KEYED) as session:
        await session.send(Draft(1, 0, NOTHING, 40, 1, 1, 1))
        epoch = await Epoch(1).reach(session, 40)
        for count in (80, 120):
            await session.send(Advance(1, count))
            await epoch.reach(session, count)
        await session.send(corrected(epoch.branches[0], 2, 4))
        with pytest.raises(ProtocolBroken, match="is not one of the latest epoch's"):
            await Epoch(2).complete(session, 4)

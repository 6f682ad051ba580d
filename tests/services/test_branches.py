"""Prepared continuations: what a drafter would draft had a draft token been refused."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from crossdraft.engine.served_model import RunningModel
from crossdraft.rpc.clients import DrafterClient
from crossdraft.text.letters import Side
from crossdraft.types.messages import Advance, Draft, OpenDrafter
from tests.services.branching import DRAWN, GREEDY, KEYED, NOTHING, PROMPT, WITH_ROWS, Reference, corrected, epoch_of
from tests.services.conftest import running, save
from tests.services.streaming import Epoch, gated
from tests.text.kinds import kind


@pytest.fixture
def long_model(tmp_path: Path) -> Iterator[RunningModel]:
    yield from running(save(tmp_path, kind("llama2"), 512), Side.DRAFTER)


@pytest.mark.parametrize("opening", [GREEDY, KEYED, WITH_ROWS])
@pytest.mark.parametrize(("depth", "width", "chunk"), [(1, 1, 1), (3, 2, 1), (3, 1, 4), (2, 3, 64)])
async def test_branches_are_what_would_be_drafted_after_the_key(
    drafter: DrafterClient, drafter_model: RunningModel, opening: OpenDrafter, depth: int, width: int, chunk: int
) -> None:
    reference = Reference(drafter_model, opening)
    epoch = await epoch_of(drafter, opening, Draft(1, 0, NOTHING, 5, chunk, depth, width))
    assert tuple(epoch.tokens) == reference.drafted((), 5)
    assert [branch.number for branch in epoch.branches] == list(range(1, 1 + 5 * width))
    expected = []
    for place in range(5):
        before = tuple(epoch.tokens[:place])
        for key in reference.keys(before, width):
            letters = drafter_model.tokenization.letters_of((key,))
            expected.append((reference.length(before), letters, reference.drafted((*before, key), depth)))
    assert [(branch.offset, branch.letters, branch.tokens) for branch in epoch.branches] == expected


async def test_branches_are_drafted_in_the_drafts_own_steps_and_fed_once(drafter_model: RunningModel) -> None:
    engine = drafter_model.thread.engine
    async with gated(drafter_model) as (client, gate), client.session(KEYED) as session:
        await session.send(Draft(1, 0, NOTHING, 6, 1, 3, 2))
        await Epoch(1).complete(session, 6, 12)
        assert len(gate.works) == 6 + 3  # the branches of the last draft token are finished after it
        prompt = len(drafter_model.tokenization.encode_prompt_letters(PROMPT))
        # Of the draft all but the last draft token, of each branch its key and all but the last one.
        assert engine.fed == prompt + 5 + 12 * 3


async def test_a_branch_is_sent_when_its_steps_are_done(drafter: DrafterClient) -> None:
    epoch = await epoch_of(drafter, KEYED, Draft(1, 0, NOTHING, 4, 1, 2, 1))
    assert [(len(reply.draft_tokens), len(reply.branches)) for reply in epoch.replies] == [
        (1, 0), (1, 0), (1, 1), (1, 1), (0, 1), (0, 1),
    ]  # fmt: skip


async def test_whether_branches_are_drafted_changes_no_keyed_draft(drafter: DrafterClient) -> None:
    async with drafter.session(WITH_ROWS) as session:
        bare = await session.draft(Draft(1, 0, NOTHING, 9))
    full = await epoch_of(drafter, WITH_ROWS, Draft(1, 0, NOTHING, 9, 2, 3, 2))
    assert [draft_token.token for draft_token in bare.draft_tokens] == full.tokens
    for one, other in zip(bare.draft_tokens, full.draft_tokens, strict=True):
        assert one.row.ids.tolist() == other.row.ids.tolist()
        np.testing.assert_allclose(one.row.probabilities, other.row.probabilities, atol=2e-6)


async def test_a_window_that_moves_on_has_branches_too(drafter: DrafterClient) -> None:
    whole = await epoch_of(drafter, KEYED, Draft(1, 0, NOTHING, 12, 1, 3, 1))
    async with drafter.session(KEYED) as session:
        await session.send(Draft(1, 0, NOTHING, 2, 1, 3, 1))
        epoch = await Epoch(1).reach(session, 2)
        for count in (3, 7, 12):
            await session.send(Advance(1, count))
            await epoch.reach(session, count)
        await epoch.complete(session, 12, 12)
    assert epoch.tokens == whole.tokens
    assert {branch.tokens for branch in epoch.branches} == {branch.tokens for branch in whole.branches}


async def test_audited_sessions_have_no_branches(drafter: DrafterClient) -> None:
    async with drafter.session(replace(WITH_ROWS, audited=True)) as session:
        await session.send(Draft(1, 0, NOTHING, 6, 2, 3, 2))
        assert not (await Epoch(1).complete(session, 6)).branches
        assert len((await session.draft(Draft(2, 0, NOTHING, 1, 1, 3, 2))).draft_tokens) == 1


@pytest.mark.usefixtures("seeded")
async def test_branches_have_draws_of_their_own(drafter: DrafterClient) -> None:
    """Without a key every draft is another, and each token is one that its row can give."""
    async with drafter.session(DRAWN) as session:
        drafts = set()
        for number in range(1, 9, 2):
            await session.send(Draft(number, 0, NOTHING, 3, 1, 4, 1))
            first = await Epoch(number).complete(session, 3, 3)
            drafts |= {branch.tokens for branch in first.branches}
            await session.send(corrected(first.branches[1], number + 1, 4))
            second = await Epoch(number + 1).complete(session, 4)
            assert tuple(second.tokens) == first.branches[1].tokens
            assert all(draft_token.row.probability(draft_token.token) > 0 for draft_token in second.draft_tokens)
    assert len(drafts) == 12


async def test_a_long_epoch_is_planted_anew_and_feeds_nothing_twice(long_model: RunningModel) -> None:
    engine, reference = long_model.thread.engine, Reference(long_model, KEYED)
    async with gated(long_model) as (client, gate), client.session(KEYED) as session:
        await session.send(Draft(1, 0, NOTHING, 20, 1, 3, 2))
        epoch = await Epoch(1).reach(session, 20)
        for count in range(40, 81, 20):
            await session.send(Advance(1, count))
            await epoch.reach(session, count)
        await epoch.complete(session, 80, 160)
        assert engine.fed == len(reference.prompt) + 79 + 160 * 3
        assert max(len(work.tree) for work in gate.works) < 150
        branch, before = epoch.branches[-4], engine.fed
        await session.send(corrected(branch, 2, 4))
        await Epoch(2, first=3).complete(session, 4)
        assert engine.fed - before == 1
    assert tuple(epoch.tokens) == reference.drafted((), 80)


async def test_a_context_that_is_full_is_cut_and_branches_go_on(drafter: DrafterClient) -> None:
    async with drafter.session(KEYED) as session:
        await session.send(Draft(1, 0, NOTHING, 10, 1, 3, 1))
        epoch = await Epoch(1).reach(session, 10)
        for count in range(20, 120, 10):
            await session.send(Advance(1, count))
            await epoch.reach(session, count)
        assert not any(reply.reason for reply in epoch.replies)
        assert len(epoch.branches) > 80
        branch = epoch.branches[-1]
        await session.send(corrected(branch, 2, 6))
        assert len((await Epoch(2, first=3).complete(session, 6)).tokens) == 3


async def test_branches_that_do_not_fit_the_context_are_not_drafted(drafter: DrafterClient) -> None:
    async with drafter.session(KEYED) as session:
        await session.send(Draft(1, 0, NOTHING, 8, 1, 8, 4))
        await Epoch(1).complete(session, 8)
        await session.draft(Draft(2, 0, NOTHING, 4))  # whose first reply is the next one

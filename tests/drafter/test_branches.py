"""Prepared continuations: what a drafter would draft had a draft token been refused, and epochs that begin with one."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from crossdraft.engine.served_model import RunningModel
from crossdraft.rpc.errors import ProtocolBroken
from crossdraft.text.letters import NOTHING, Letters, Side, common_length, from_bytes, is_plain
from crossdraft.types.messages import Advance, Branch, Draft, NoiseKey, OpenDrafter, SamplingOptions
from tests.drafter.streaming import Epoch, gated
from tests.engine.tiny import drafting_distributions
from tests.rpc.sessions import DrafterClient, ServiceSession
from tests.services.conftest import running, save
from tests.text.kinds import kind

PROMPT = from_bytes(b"The quick brown fox")
KEY = NoiseKey(77)
GREEDY = OpenDrafter(PROMPT, SamplingOptions(temperature=0), None, 0)
KEYED = OpenDrafter(PROMPT, SamplingOptions(temperature=0.8), KEY, 0)
DRAWN = OpenDrafter(PROMPT, SamplingOptions(temperature=0.8), None, 8)
WITH_ROWS = replace(KEYED, row_width=8)


class Reference:
    """A session's drafting by plain forwards over ids, without cache, tree and service."""

    def __init__(self, running: RunningModel, opening: OpenDrafter) -> None:
        self._running = running
        self._opening = opening
        self.prompt = running.tokenization.encode_prompt_letters(opening.prompt)

    def length(self, ids: tuple[int, ...]) -> int:
        return len(self._running.tokenization.letters_of(ids))

    @torch.inference_mode()
    def logits(self, output: tuple[int, ...]) -> torch.Tensor:
        """Of the token after the prompt and these, (1, V)."""
        return self._running.thread.engine.model(torch.tensor([self.prompt + output])).logits[:, -1].float()

    def ranking(self, output: tuple[int, ...]) -> list[int]:
        """Ids by how near they are to being drawn; the first one is."""
        logits = self.logits(output)
        if self._opening.options.temperature == 0:
            return logits[0].argsort(descending=True).tolist()
        ((ids, weights),) = drafting_distributions(logits, self._opening.options, self._opening.row_width)
        arrivals = self._running.noise.exponentials(KEY, self.length(output), ids) / weights
        return ids[np.argsort(arrivals)].tolist()

    def drafted(self, output: tuple[int, ...], count: int) -> tuple[int, ...]:
        for _ in range(count):
            output = (*output, self.ranking(output)[0])
        return output[-count:]

    def keys(self, output: tuple[int, ...], width: int) -> list[int]:
        """The likeliest other tokens than the one drawn that are text."""
        letters = self._running.tokenization.vocabulary.letters
        drawn, *others = self.ranking(output)
        found: list[int] = []
        for token in others:
            if is_plain(letters[token]) and letters[token] not in {letters[one] for one in (drawn, *found)}:
                found.append(token)
        return found[:width]


async def epoch_of(client: DrafterClient, opening: OpenDrafter, draft: Draft) -> Epoch:
    async with client.session(opening) as session:
        await session.send(draft)
        return await Epoch(draft.epoch).complete(session, draft.count, draft.count * draft.branch_width)


async def begun(session: ServiceSession) -> Epoch:
    """A complete first epoch of four draft tokens and as many branches."""
    await session.send(Draft(1, 0, NOTHING, 4, 1, 3, 1))
    return await Epoch(1).complete(session, 4, 4)


def corrected(branch: Branch, epoch: int, count: int, chunk: int = 64, depth: int = 0) -> Draft:
    return Draft(epoch, branch.offset, branch.letters, count, chunk, depth, adopt=branch.number)


@pytest.fixture
def long_model(tmp_path: Path) -> Iterator[RunningModel]:
    yield from running(save(tmp_path, kind("llama2"), 512), Side.DRAFTER)


@pytest.mark.parametrize(
    ("opening", "depth", "width", "chunk"),
    [(GREEDY, 3, 2, 1), (KEYED, 2, 3, 64), (KEYED, 1, 1, 1), (WITH_ROWS, 3, 1, 4)],
)
async def test_branches_are_what_would_be_drafted_after_the_key(drafter, drafter_model, opening, depth, width, chunk):
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
        assert engine.computed == prompt + 5 + 12 * 3


async def test_a_branch_is_sent_when_its_steps_are_done(drafter: DrafterClient) -> None:
    epoch = await epoch_of(drafter, KEYED, Draft(1, 0, NOTHING, 4, 1, 2, 1))
    assert [(len(reply.draft_tokens), len(reply.branches)) for reply in epoch.replies] == [
        (1, 0), (1, 0), (1, 1), (1, 1), (0, 1), (0, 1),
    ]  # fmt: skip


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
        await session.send(Advance(1, 40))
        await epoch.complete(session, 40, 80)
        assert engine.computed == len(reference.prompt) + 39 + 80 * 3
        assert max(len(work.tree) for work in gate.works) < 150
        branch, before = epoch.branches[-4], engine.computed
        await session.send(corrected(branch, 2, 4))
        await Epoch(2, first=3).complete(session, 4)
        assert engine.computed - before == 1
    assert tuple(epoch.tokens) == reference.drafted((), 40)


async def test_a_context_that_is_full_is_cut_and_branches_go_on(drafter: DrafterClient) -> None:
    async with drafter.session(KEYED) as session:
        await session.send(Draft(1, 0, NOTHING, 10, 1, 3, 1))
        epoch = await Epoch(1).reach(session, 10)
        for count in range(20, 70, 10):
            await session.send(Advance(1, count))
            await epoch.reach(session, count)
        assert not any(reply.reason for reply in epoch.replies)
        assert len(epoch.branches) > 40
        branch = epoch.branches[-1]
        await session.send(corrected(branch, 2, 6))
        assert len((await Epoch(2, first=3).complete(session, 6)).tokens) == 3


async def test_branches_that_do_not_fit_the_context_are_not_drafted(drafter: DrafterClient) -> None:
    async with drafter.session(KEYED) as session:
        await session.send(Draft(1, 0, NOTHING, 8, 1, 8, 4))
        await Epoch(1).complete(session, 8)
        await session.draft(Draft(2, 0, NOTHING, 4))  # whose first reply is the next one


@pytest.mark.parametrize(("opening", "place"), [(KEYED, 0), (GREEDY, 2), (KEYED, 4)])
async def test_without_rows_an_epoch_goes_on_after_the_branch(drafter, drafter_model, opening, place):
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


async def test_with_rows_the_branchs_draft_tokens_come_again(drafter: DrafterClient, drafter_model: RunningModel):
    engine, reference = drafter_model.thread.engine, Reference(drafter_model, WITH_ROWS)
    async with drafter.session(WITH_ROWS) as session:
        first = await begun(session)
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


@pytest.mark.parametrize("change", [{"letters": Letters("#")}, {"offset": 0}])
async def test_a_branch_that_is_not_the_text_is_refused(drafter: DrafterClient, change: dict[str, object]) -> None:
    async with drafter.session(KEYED) as session:
        first = await begun(session)
        await session.send(replace(corrected(first.branches[2], 2, 5), **change))
        with pytest.raises(ProtocolBroken, match="does not begin with the text of epoch 2"):
            await session.receive()


async def test_branches_are_forgotten_with_their_epoch(drafter: DrafterClient) -> None:
    async with drafter.session(KEYED) as session:
        first = await begun(session)
        await session.draft(Draft(2, 0, NOTHING, 4))
        await session.send(corrected(first.branches[0], 3, 5))
        with pytest.raises(ProtocolBroken, match="branch 1 is not one of the latest epoch's"):
            await session.receive()


async def test_branches_that_the_output_must_have_passed_are_forgotten(drafter: DrafterClient) -> None:
    """A window has at most 64 draft tokens: what began more before the newest than that is behind the frontier."""
    async with drafter.session(KEYED) as session:
        await session.send(Draft(1, 0, NOTHING, 40, 1, 1, 1))
        epoch = await Epoch(1).reach(session, 40)
        await session.send(Advance(1, 72))
        await epoch.reach(session, 72)
        await session.send(corrected(epoch.branches[0], 2, 4))
        with pytest.raises(ProtocolBroken, match="is not one of the latest epoch's"):
            await Epoch(2).complete(session, 4)

"""Prepared continuations: beside each draft token, or as a draft tree; and epochs that begin with one of them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import exp, log
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch

from crossdraft.engine import attention, model_thread, runner, scheduler, served_model
from crossdraft.engine.batch import StepInputs
from crossdraft.engine.engine import Engine
from crossdraft.engine.model_thread import ModelThread
from crossdraft.engine.requests import ForwardRequest
from crossdraft.engine.sampling import distributions
from crossdraft.engine.sampling.clocks import Clocks
from crossdraft.engine.sampling.paths import TREE_WIDTHS, StandingDraws, StandingTrees
from crossdraft.engine.sampling.sampler import TopRequest
from crossdraft.engine.served_model import ModelOptions, RunningModel
from crossdraft.rpc.errors import ProtocolBroken, ServiceError
from crossdraft.speculation.choice import TREES
from crossdraft.text.letters import NOTHING, Letters, Side, common_length, from_bytes, is_plain
from crossdraft.types.messages import Advance, Branch, Draft, Drafted, NoiseKey, OpenDrafter, SamplingOptions
from crossdraft.types.trees import ROOT, tree_width
from crossdraft.verification.noise import KeyedNoise
from tests.drafter.streaming import Epoch, gated, together
from tests.engine.taped import by_marks, taped, waits
from tests.engine.tiny import DRAWS, drafting_distributions
from tests.rpc.sessions import DrafterClient, ServiceSession
from tests.services.conftest import loaded, running, save
from tests.text.kinds import kind

PROMPT = from_bytes(b"The quick brown fox")
KEY = NoiseKey(77)
GREEDY = OpenDrafter(PROMPT, SamplingOptions(temperature=0), None, 0)
KEYED = OpenDrafter(PROMPT, SamplingOptions(temperature=0.8), KEY, 0)
DRAWN = OpenDrafter(PROMPT, SamplingOptions(temperature=0.8), None, 8)
WITH_ROWS = replace(KEYED, row_width=8)
FOUR = Draft(1, 0, NOTHING, 4, 1, 3, 1)
TRUNCATED = OpenDrafter(PROMPT, SamplingOptions(temperature=0.8, top_k=20), None, 0)
Tokens = tuple[int, ...]


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
        arrivals = self._running.clocks.noise.exponentials(KEY, self.length(output), ids) / weights
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


async def begun(session: ServiceSession, draft: Draft = FOUR, branches: int | None = None) -> Epoch:
    """A complete epoch; usually the first, of four draft tokens and as many branches."""
    await session.send(draft)
    count = draft.count * draft.branch_width * (draft.branch_depth > 0) if branches is None else branches
    return await Epoch(draft.epoch).complete(session, draft.count, count)


async def epoch_of(client: DrafterClient, opening: OpenDrafter, draft: Draft) -> Epoch:
    async with client.session(opening) as session:
        return await begun(session, draft)


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
        await begun(session, Draft(1, 0, NOTHING, 6, 1, 3, 2))
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
        assert not (await begun(session, Draft(1, 0, NOTHING, 6, 2, 3, 2), 0)).branches
        assert len((await session.draft(Draft(2, 0, NOTHING, 1, 1, 3, 2))).draft_tokens) == 1


@pytest.mark.usefixtures("seeded")
async def test_branches_have_draws_of_their_own(drafter: DrafterClient) -> None:
    """Without a key every draft is another, and each token is one that its row can give."""
    async with drafter.session(DRAWN) as session:
        drafts = set()
        for number in range(1, 9, 2):
            first = await begun(session, Draft(number, 0, NOTHING, 3, 1, 4, 1))
            drafts |= {branch.tokens for branch in first.branches}
            second = await begun(session, corrected(first.branches[1], number + 1, 4))
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
        await begun(session, Draft(1, 0, NOTHING, 8, 1, 8, 4), 0)
        await session.draft(Draft(2, 0, NOTHING, 4))  # whose first reply is the next one


@pytest.mark.parametrize(("opening", "place"), [(KEYED, 0), (GREEDY, 2), (KEYED, 4)])
async def test_without_rows_an_epoch_goes_on_after_the_branch(drafter, drafter_model, opening, place):
    engine, reference = drafter_model.thread.engine, Reference(drafter_model, opening)
    async with drafter.session(opening) as session:
        first = await begun(session, Draft(1, 0, NOTHING, 6, 1, 3, 1))
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
        second = await begun(session, corrected(branch, 2, 5, 2, depth=2), 2)
        assert engine.computed - before == 2 + 2 * 2  # two draft tokens, and two branches of two
    assert [len(reply.draft_tokens) for reply in second.replies if reply.draft_tokens] == [2, 2, 1]
    assert tuple(second.tokens[:3]) == branch.tokens
    (key,) = reference.keys(tuple(first.tokens[:1]), 1)
    output = (first.tokens[0], key)
    for draft_token in second.draft_tokens:
        ((ids, weights),) = drafting_distributions(reference.logits(output), WITH_ROWS.options, 8)
        assert draft_token.row.ids.tolist() == ids.tolist()
        np.testing.assert_allclose(draft_token.row.probabilities, weights, atol=2e-6)
        assert drafter_model.clocks.noise.draw(ids, weights, KEY, reference.length(output)) == draft_token.token
        output = (*output, draft_token.token)
    assert [branch.number for branch in second.branches] == [5, 6]


async def test_a_window_shorter_than_the_branch_is_kept(drafter: DrafterClient) -> None:
    async with drafter.session(WITH_ROWS) as session:
        first = await begun(session, Draft(1, 0, NOTHING, 2, 1, 4, 1))
        second = await begun(session, corrected(first.branches[0], 2, 2, 1))
        await session.send(Advance(2, 5))
        await second.complete(session, 5)
    assert tuple(second.tokens[:4]) == first.branches[0].tokens


async def test_the_text_may_be_told_from_anywhere(drafter: DrafterClient, drafter_model: RunningModel) -> None:
    """The other side counts from where the texts part, or from earlier."""
    async with drafter.session(KEYED) as session:
        epochs = []
        for number in (1, 3, 5):
            first = await begun(session, replace(FOUR, epoch=number))
            branch = first.branches[2]
            written = drafter_model.tokenization.letters_of(first.tokens)
            text = written[: branch.offset] + branch.letters
            start = (0, branch.offset, common_length(written, text))[number // 2]
            await session.send(Draft(number + 1, start, Letters(text[start:]), 5, adopt=branch.number))
            epochs.append((await Epoch(number + 1, first=3).complete(session, 5)).tokens)
    assert epochs[0] == epochs[1] == epochs[2]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"letters": Letters("#")}, "does not begin with the text of epoch 2"),
        ({"offset": 0}, "does not begin with the text of epoch 2"),
        ({"epoch": 3}, "branch 3 is not one of the latest epoch's"),  # with which it is forgotten
    ],
)
async def test_a_branch_that_is_not_the_text_or_no_more_there_is_refused(drafter, change, complaint):
    async with drafter.session(KEYED) as session:
        first = await begun(session)
        if "epoch" in change:
            await session.draft(Draft(2, 0, NOTHING, 4))
        await session.send(replace(corrected(first.branches[2], 2, 5), **change))
        with pytest.raises(ProtocolBroken, match=complaint):
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


class Weights(Reference):
    """How likely each token is to follow, by plain forwards."""

    def after(self, output: Tokens) -> dict[int, float]:
        scores, options = self.logits(output)[0].double(), self._opening.options
        if options.temperature:
            scores = scores / options.temperature
        if options.top_k:
            scores = scores.masked_fill(scores < scores.topk(options.top_k).values[-1], -torch.inf)
        weights = scores.softmax(-1)
        if options.temperature and self._opening.noise is not None:
            weights = weights / torch.from_numpy(self._running.clocks.noise.exponentials(KEY, self.length(output)))
        return dict(enumerate((weights / weights.sum()).tolist()))


def grown(
    reference: Weights, letters: list[Letters], nodes: int, depth: int, least: float = 0.0
) -> tuple[Tokens, set[Tokens]]:
    """The draft and the other nodes, as in EAGLE-2: each step expands the tip and the heaviest others."""
    width = tree_width(nodes, depth)
    costs: dict[Tokens, float] = {(): 0.0}
    draft: list[Tokens] = [()]
    expanded: set[Tokens] = set()
    for _ in range(depth):
        others = sorted((cost, path) for path, cost in costs.items() if path not in (*draft, *expanded))
        due = [path for _, path in others if len(path) < depth][: width - 1]
        if sum(exp(-costs[path]) for path in [draft[-1], *due]) < least:
            break
        for path in [draft[-1], *due]:
            expanded.add(path)
            heaviest = sorted(reference.after(path).items(), key=lambda one: -one[1])[:width]
            for place, (token, weight) in enumerate(heaviest):
                if letters[token] in [letters[other] for other, _ in heaviest[:place]]:
                    continue
                if path == draft[-1] and not place:
                    following = (*path, token)
                if is_plain(letters[token]) or (path == draft[-1] and not place):
                    costs[*path, token] = costs[path] - log(weight)
        draft.append(following)
    others = sorted((cost, path) for path, cost in costs.items() if path not in draft)
    return draft[-1], {path for _, path in others[: nodes - depth]}


@pytest.mark.parametrize("opening", [GREEDY, KEYED, TRUNCATED], ids=["greedy", "keyed", "drawn"])
@pytest.mark.parametrize(("nodes", "depth", "least"), [(12, 3, 0.0), (40, 5, 0.0), (12, 6, 0.5), (24, 8, 0.9)])
async def test_a_tree_has_the_heaviest_nodes_of_those_that_were_expanded(
    drafter: DrafterClient, drafter_model: RunningModel, opening: OpenDrafter, nodes: int, depth: int, least: float
) -> None:
    """It ends where it would expand nodes that are hardly reached."""
    vocabulary = drafter_model.tokenization.vocabulary
    reference = Weights(drafter_model, opening)
    draft, others = grown(reference, list(vocabulary.letters), nodes, depth, least)
    async with drafter.session(opening) as session:
        await session.send(Draft(1, 0, NOTHING, depth, tree_nodes=nodes, least_likely=least))
        reply = await Epoch(1).hear(session)
    assert bool(reply.reason) == (len(draft) < depth)
    assert least == 0 or len(draft) < depth
    assert tuple(one.token for one in reply.draft_tokens) == draft
    leaves = {path for path in others if not any(other[:-1] == path for other in others)}
    expected = set()
    for leaf in leaves:
        shared = next(place for place in range(len(leaf)) if leaf[: place + 1] != draft[: place + 1])
        expected.add((reference.length(leaf[:shared]), vocabulary.letters[leaf[shared]], leaf[shared + 1 :]))
    assert {(branch.offset, branch.letters, branch.tokens) for branch in reply.branches} == expected
    assert [branch.number for branch in reply.branches] == list(range(1, 1 + len(leaves)))


async def test_a_step_feeds_the_nodes_that_it_expands_once(drafter_model: RunningModel) -> None:
    engine = drafter_model.thread.engine
    async with gated(drafter_model) as (client, gate), client.session(KEYED) as session:
        await session.send(Draft(1, 0, NOTHING, 4, tree_nodes=24))
        await Epoch(1).hear(session)
        assert len(gate.works) == 4
        prompt = len(drafter_model.tokenization.encode_prompt_letters(PROMPT))
        assert engine.computed == prompt + len(gate.works[-1].tree)
        assert 3 * tree_width(24, 4) - 2 <= len(gate.works[-1].tree) <= 3 * tree_width(24, 4)  # some are no text


async def test_a_node_is_not_expanded_where_nothing_after_it_can_be_sent(drafter_model: RunningModel) -> None:
    async with gated(drafter_model) as (client, gate), client.session(KEYED) as session:
        await session.send(Draft(1, 0, NOTHING, 4, tree_nodes=5))
        reply = await Epoch(1).hear(session)
        assert [len(branch.tokens) for branch in reply.branches] == [0]
        assert [one.token for one in reply.draft_tokens[:3]] == list(gate.works[-1].tree.tokens)


async def test_a_branch_of_a_tree_can_be_adopted(drafter: DrafterClient) -> None:
    async with drafter.session(GREEDY) as session:
        await session.send(Draft(1, 0, NOTHING, 4, tree_nodes=40))
        branch = max((await Epoch(1).hear(session)).branches, key=lambda one: len(one.tokens))
        assert branch.tokens
        count = len(branch.tokens)
        await session.send(Draft(2, branch.offset, branch.letters, count + 2, adopt=branch.number))
        assert len((await Epoch(2, first=count).complete(session, count + 2)).tokens) == 2


@pytest.mark.parametrize(
    ("opening", "draft"),
    [
        (WITH_ROWS, Draft(1, 0, NOTHING, 4, tree_nodes=16)),
        (replace(WITH_ROWS, audited=True), Draft(1, 0, NOTHING, 4, tree_nodes=16)),
        (KEYED, Draft(1, 0, NOTHING, 4, tree_nodes=4)),  # no room for anything besides the draft
    ],
    ids=["rows", "audited", "small"],
)
async def test_a_chain_is_drafted_where_a_tree_cannot_be(drafter: DrafterClient, opening: OpenDrafter, draft: Draft):
    async with drafter.session(opening) as session:
        assert not (await begun(session, draft)).branches


async def test_a_tree_is_drafted_once(drafter: DrafterClient) -> None:
    async with drafter.session(GREEDY) as session:
        await session.send(Draft(1, 0, NOTHING, 4, tree_nodes=16))
        epoch = Epoch(1)
        await epoch.hear(session)
        await session.send(Advance(1, 8))
        last = await epoch.hear(session)
    assert (last.draft_tokens, last.branches) == ((), ())
    assert last.reason == "a tree is drafted once"


@pytest.mark.parametrize("nodes", [0, 16])
@pytest.mark.parametrize("opening", [KEYED, WITH_ROWS, GREEDY, replace(GREEDY, row_width=8)])
async def test_logits_that_are_not_finite_end_the_drafters_session(drafter, drafter_model, opening, nodes, monkeypatch):
    step = drafter_model.thread._engine_step

    def broken(scheduled: Sequence[ForwardRequest]) -> list[torch.Tensor | None]:
        return [None if one is None else torch.full_like(one, torch.nan) for one in step(scheduled)]

    monkeypatch.setattr(drafter_model.thread, "_engine_step", broken)
    async with drafter.session(opening) as session:
        await session.send(Draft(1, 0, NOTHING, 4, tree_nodes=nodes))
        with pytest.raises(ServiceError, match="not finite"):
            await Epoch(1).hear(session)


def as_on_a_gpu(patch: pytest.MonkeyPatch) -> None:
    """Forwards read numbers, and are captured; so are levels of trees.

    In what is captured nothing waits for the device, and no number comes from the host.
    """

    class OnDevice(Clocks):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            self._on_host = False

    patch.setattr(served_model, "Clocks", OnDevice)
    patch.setattr(runner, "capture_for", lambda _: taped)
    patch.setattr(distributions, "NUCLEUS", 1 << 20)
    patch.setattr(attention, "_by_kernel", by_marks)
    patch.setattr(runner, "SIZES", (1, 4, 8, 16, 32, 64))
    made = partial(Engine, graphs=True)
    patch.setattr(served_model, "engine_of", lambda model, length, budget, **options: made(model, length, budget))


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningModel]:
    """To capture all takes as long as some tests."""
    with pytest.MonkeyPatch.context() as patch:
        as_on_a_gpu(patch)
        folder = save(tmp_path_factory.mktemp("captured"), kind("llama2"), 256)
        model = RunningModel.of(loaded(folder), Side.DRAFTER, ModelOptions("", cache_mib=1))
    yield model
    model.close()


@pytest.fixture
def captured_model(captured: RunningModel, monkeypatch: pytest.MonkeyPatch) -> RunningModel:
    as_on_a_gpu(monkeypatch)
    return captured


def sent(reply: Drafted) -> tuple[object, ...]:
    branches = [(one.number, one.offset, one.letters, one.tokens) for one in reply.branches]
    return [one.token for one in reply.draft_tokens], branches, reply.reason


SETTINGS = {"greedy": (DRAWS["likeliest"], None)} | {name: (options, KEY) for name, options in DRAWS.items()}
SETTINGS["likeliest"] = SamplingOptions(0.7, top_k=1), KEY
TEXTS = [b"The quick", b"def f(x):\n    return", b"a", b"Once upon a time there was", b"12 + 12 = "]


def opened(name: str, text: bytes) -> OpenDrafter:
    return OpenDrafter(from_bytes(text), SETTINGS[name][0], SETTINGS[name][1], 0)


@pytest.mark.parametrize("names", [*([name] for name in SETTINGS), [*SETTINGS]], ids=lambda names: names[-1])
@pytest.mark.parametrize(("nodes", "depths"), [(16, [5]), (32, [8]), (16, [3, 5, 1]), (6, [5, 2])])
async def test_trees_that_grow_without_the_host_are_the_same(captured_model, names, nodes, depths):
    """Of several sessions at once, with texts of their own, and with settings and depths of which some are alike."""
    thread, graphs = captured_model.thread, captured_model.thread.engine.runner.graphs
    openings = [opened(names[place % len(names)], text) for place, text in enumerate(TEXTS)]
    drafts = [Draft(2, 0, NOTHING, depths[place % len(depths)], tree_nodes=nodes) for place in range(len(TEXTS))]
    answers = thread.answers
    found = await together(captured_model, openings, *drafts)
    assert thread.answers - answers == 2 * len(TEXTS)  # the prompt, and one forward of each tree
    with patch.dict(graphs._growing, clear=True):
        expected = await together(captured_model, openings, *drafts)
    assert list(map(sent, found)) == list(map(sent, expected))
    assert sum(len(one.branches) for one in found) > 0


@pytest.mark.parametrize("nodes", [16, 32])
async def test_a_tree_waits_for_the_device_once(captured_model, nodes, monkeypatch):
    """And the model's own code runs at start only, whatever the settings are."""
    monkeypatch.setattr(scheduler, "SHORT", 64)  # no prompt is computed in parts, however long steps take
    depth, thread = {16: 5, 32: 8}[nodes], captured_model.thread
    openings = [opened(name, text) for name, text in zip(SETTINGS, TEXTS, strict=False)]
    drafts, steps = [Draft(2, 0, NOTHING, depth, tree_nodes=nodes)] * len(openings), thread.steps
    with waits(monkeypatch) as calls, patch.object(thread.engine.runner, "_call", Mock(side_effect=AssertionError)):
        await together(captured_model, openings, *drafts)
    # Of the prompts, and of all trees; those that are drawn alike grow in one batch.
    assert calls == ["cpu"] * (len(openings) + 1)
    assert thread.steps - steps == len(openings) + 1 + 3 * (depth - 1)


@pytest.mark.parametrize("levels", range(1, 5))
async def test_a_tree_that_others_interrupt_goes_on_step_by_step(captured_model, levels, monkeypatch):
    openings, drafts = [opened("truncated", text) for text in TEXTS[:3]], [Draft(2, 0, NOTHING, 5, tree_nodes=16)] * 3
    expected = await together(captured_model, openings, *drafts)
    looks = 0

    def others_wait(thread: ModelThread, jobs: Sequence[object]) -> bool:
        nonlocal looks
        looks += len(jobs) == len(TEXTS[:3])
        return looks > levels

    monkeypatch.setattr(ModelThread, "_others_wait", others_wait)
    answers = captured_model.thread.answers
    found = await together(captured_model, openings, *drafts)
    assert captured_model.thread.answers - answers == 3 * (1 + 6 - levels)
    assert list(map(sent, found)) == list(map(sent, expected))


async def test_what_the_engine_has_not_expanded_is_left_out(captured_model, monkeypatch):
    """As where it rounds costs otherwise: the draft stays."""
    opening, draft = opened("truncated", TEXTS[0]), Draft(2, 0, NOTHING, 5, tree_nodes=16)
    (whole,) = await together(captured_model, [opening], draft)
    rows_of = model_thread.rows_of
    monkeypatch.setattr(model_thread, "rows_of", lambda found: [rows[:2] + rows[3:] for rows in rows_of(found)])
    (less,) = await together(captured_model, [opening], draft)
    assert [one.token for one in less.draft_tokens] == [one.token for one in whole.draft_tokens]
    assert sent(less) != sent(whole)


async def test_a_tree_whose_logits_are_not_finite_keeps_no_other_from_growing(captured_model, monkeypatch):
    """Each then goes on by itself, step by step."""
    openings, drafts = [opened("greedy", text) for text in TEXTS[:3]], [Draft(2, 0, NOTHING, 5, tree_nodes=16)] * 3
    expected, rows_of, tried = await together(captured_model, openings, *drafts), model_thread.rows_of, list[Any]()

    def broken(found: np.ndarray) -> object:
        tried.append(found)
        found[1, 1, 0, 3] = np.nan
        return rows_of(found)

    monkeypatch.setattr(model_thread, "rows_of", broken)
    found = await together(captured_model, openings, *drafts)
    assert len(tried) == 1
    assert list(map(sent, found)) == list(map(sent, expected))


@pytest.mark.parametrize(("nodes", "depth"), [(16, 5), (32, 8), (16, 3), (6, 5)])
@torch.inference_mode()
def test_a_level_keeps_and_expands_the_heaviest_that_are_text(nodes: int, depth: int) -> None:
    """Among few ids, of which some have the letters of others, and some are control symbols."""
    letters = [*(Letters(chr(97 + token // 2)) for token in range(10)), *map(Letters, ("\u0100", "\u0101"))]
    clocks = Clocks(KeyedNoise(letters, [0] * 12), torch.device("cpu"), None, [1] * 12)
    trees, draws = StandingTrees(tree_width(nodes, depth), clocks, letters), StandingDraws(clocks, 1)
    width = trees.width
    for seed in range(20):

        def after(path: Tokens, seed: int = seed) -> torch.Tensor:
            generator = torch.Generator().manual_seed(hash((seed, *path)) % (1 << 31))
            return torch.randn(12, generator=generator) * 2

        forward, options = ForwardRequest(0, (1,), more=(depth - 1) * width), SamplingOptions(temperature=0)
        first = TopRequest(after(())[None], options, clocks, [(KEY, 0)], False, width, None, forward, nodes - depth)
        assert trees.serves(first)
        trees.begin([first], 1)
        here, paths, own = after(()).repeat(width, 1), {ROOT: ()}, trees._nodes[0]
        costs = own.view(torch.float64)[:, 0]
        for level in range(depth):
            trees.grow(draws, here, StepInputs.of(torch.zeros(9, width, dtype=torch.int64)))
            for row in (costs[:width] < torch.inf).nonzero()[:, 0].tolist():
                path = paths[level * width + row] = (*paths[int(own[row, 1])], int(own[row, 2]))
                here[row] = after(path)
        kept = {(*paths[parent], token) for parent, token in own[width:-1][costs[width:-1] < torch.inf, 1:3].tolist()}
        reference = Mock(after=lambda path: dict(enumerate(after(path).double().softmax(-1).tolist())))
        assert (paths[(depth - 1) * width], kept) == grown(reference, letters, nodes, depth)


def test_trees_of_the_controllers_choices_are_captured() -> None:
    assert {tree_width(nodes, depth) for depth, nodes in TREES} == {*TREE_WIDTHS}

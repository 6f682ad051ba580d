"""Draft trees: what is in them, and how many steps they take."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import exp, log
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch

from crossdraft.drafter.service import DrafterService
from crossdraft.engine import attention, distributions, model_thread, runner, served_model
from crossdraft.engine.batch import StepInputs
from crossdraft.engine.engine import Engine
from crossdraft.engine.model_thread import ModelThread
from crossdraft.engine.paths import TREE_WIDTHS, StandingDraws, StandingTrees
from crossdraft.engine.requests import ForwardRequest
from crossdraft.engine.sampler import Clocks, TopRequest
from crossdraft.engine.served_model import RunningModel
from crossdraft.rpc.errors import ServiceError
from crossdraft.speculation.choice import TREES
from crossdraft.text.letters import Letters, Side, from_bytes, is_plain
from crossdraft.types.messages import Advance, Draft, Drafted, OpenDrafter, SamplingOptions
from crossdraft.types.trees import ROOT, tree_width
from crossdraft.verification.noise import KeyedNoise
from tests.drafter.streaming import Epoch, gated
from tests.drafter.test_branches import GREEDY, KEY, KEYED, NOTHING, PROMPT, WITH_ROWS, Reference
from tests.engine.gathering import Gate
from tests.engine.taped import by_marks, taped, waits
from tests.rpc.linked import Direct
from tests.rpc.sessions import DrafterClient
from tests.services.conftest import running, save
from tests.text.kinds import kind

DRAWN = OpenDrafter(PROMPT, SamplingOptions(temperature=0.8, top_k=20), None, 0)
Path = tuple[int, ...]


class Weights(Reference):
    """How likely each token is to follow, by plain forwards."""

    def after(self, output: Path) -> dict[int, float]:
        scores, options = self.logits(output)[0].double(), self._opening.options
        if options.temperature:
            scores = scores / options.temperature
        if options.top_k:
            scores = scores.masked_fill(scores < scores.topk(options.top_k).values[-1], -torch.inf)
        weights = scores.softmax(-1)
        if options.temperature and self._opening.noise is not None:
            weights = weights / torch.from_numpy(self._running.noise.exponentials(KEY, self.length(output)))
        return dict(enumerate((weights / weights.sum()).tolist()))


def grown(
    reference: Weights, letters: list[Letters], nodes: int, depth: int, least: float = 0.0
) -> tuple[Path, set[Path]]:
    """The draft and the other nodes, as in EAGLE-2: each step expands the tip and the heaviest others."""
    width = tree_width(nodes, depth)
    costs: dict[Path, float] = {(): 0.0}
    draft: list[Path] = [()]
    expanded: set[Path] = set()
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


@pytest.mark.parametrize("opening", [GREEDY, KEYED, DRAWN], ids=["greedy", "keyed", "drawn"])
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
        await session.send(draft)
        assert not (await Epoch(1).complete(session, 4)).branches


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


@pytest.fixture
def captured_model(tmp_path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningModel]:
    """A model whose forwards read numbers, and are captured, as on a GPU; so are levels of trees.

    In what is captured nothing waits for the device, and no number comes from the host.
    """

    class OnDevice(Clocks):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            self._on_host = False

    monkeypatch.setattr(served_model, "Clocks", OnDevice)
    monkeypatch.setattr(runner, "capture_for", lambda _: taped)
    monkeypatch.setattr(distributions, "NUCLEUS", 1 << 20)
    monkeypatch.setattr(attention, "_by_kernel", by_marks)
    monkeypatch.setattr(runner, "SIZES", (1, 4, 8, 16, 32, 64))
    made = partial(Engine, graphs=True)
    monkeypatch.setattr(served_model, "engine_of", lambda model, length, budget, **options: made(model, length, budget))
    yield from running(save(tmp_path, kind("llama2"), 256), Side.DRAFTER)


async def together(model: RunningModel, openings: Sequence[OpenDrafter], *drafts: Draft) -> list[Drafted]:
    """The replies to drafts that are asked for at once, one of each session; the model waits until all are there."""
    sessions, gate = [], Gate()
    for opening in openings:
        sessions.append(Direct(lambda _: None))
        sessions[-1].session = await DrafterService(model).open(opening, sessions[-1])
        await sessions[-1].answer(Draft(1, 0, NOTHING, 1))  # the prompt is computed
    standing = asyncio.ensure_future(model.thread.submit(gate.job()))
    await asyncio.to_thread(gate.entered.wait, 120)
    for session, draft in zip(sessions, drafts, strict=True):
        session.ask(draft)
    gate.let_go.set()
    replies = [await session.receive() for session in sessions]
    await standing
    for session in sessions:
        session.close()
    return replies


def sent(reply: Drafted) -> tuple[object, ...]:
    branches = [(one.number, one.offset, one.letters, one.tokens) for one in reply.branches]
    return [one.token for one in reply.draft_tokens], branches, reply.reason


SETTINGS = {
    "greedy": (SamplingOptions(temperature=0), None),
    "likeliest": (SamplingOptions(0.7, top_k=1), KEY),
    "truncated": (SamplingOptions(0.8, top_k=20, min_p=0.01), KEY),
    "truncated twice": (SamplingOptions(1.2, top_k=50, top_p=0.9), KEY),
    "whole": (SamplingOptions(0.8), KEY),
    "nucleus": (SamplingOptions(0.8, top_p=0.9), KEY),
}
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
    graphs._growing.clear()
    expected = await together(captured_model, openings, *drafts)
    assert list(map(sent, found)) == list(map(sent, expected))
    assert sum(len(one.branches) for one in found) > 0


@pytest.mark.parametrize("nodes", [16, 32])
async def test_a_tree_waits_for_the_device_once(captured_model, nodes, monkeypatch):
    """And the model's own code runs at start only, whatever the settings are."""
    depth, thread = {16: 5, 32: 8}[nodes], captured_model.thread
    openings = [opened(name, text) for name, text in zip(SETTINGS, TEXTS, strict=False)]
    drafts = [Draft(2, 0, NOTHING, depth, tree_nodes=nodes)] * len(openings)
    with waits(monkeypatch) as calls, patch.object(thread.engine.runner, "_call", Mock(side_effect=AssertionError)):
        await together(captured_model, openings, *drafts)
    # Of the prompts, and of all trees; those that are drawn alike grow in one batch.
    assert calls == ["cpu"] * (len(openings) + 1)
    assert thread.steps == len(openings) + 1 + 3 * (depth - 1)


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

        def after(path: Path, seed: int = seed) -> torch.Tensor:
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

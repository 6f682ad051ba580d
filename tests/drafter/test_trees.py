"""Draft trees: what is in them, and how many steps they take."""

from collections.abc import Sequence
from dataclasses import replace
from math import exp, log

import pytest
import torch

from crossdraft.engine.requests import ForwardRequest
from crossdraft.engine.served_model import RunningModel
from crossdraft.rpc.errors import ServiceError
from crossdraft.text.letters import Letters, is_plain
from crossdraft.types.messages import Advance, Draft, OpenDrafter, SamplingOptions
from crossdraft.types.trees import tree_width
from tests.drafter.streaming import Epoch, gated
from tests.drafter.test_branches import GREEDY, KEY, KEYED, NOTHING, PROMPT, WITH_ROWS, Reference
from tests.rpc.sessions import DrafterClient

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

"""Passes of a target that want some nodes only, that follow a moved branch, or that begin with a long output."""

import asyncio

import numpy as np
import pytest

from crossdraft.engine.engine import Engine
from crossdraft.engine.loader import load_model
from crossdraft.engine.served_model import RunningModel
from crossdraft.rpc.errors import ProtocolBroken
from crossdraft.target.service import TargetSession
from crossdraft.text.letters import Side
from crossdraft.types.messages import FetchRow, NoiseKey, OpenTarget, Pass, PassDone, SamplingOptions
from crossdraft.types.rows import Row
from crossdraft.types.trees import ROOT, TokenTree

PROMPT = (40, 41, 42, 300, 7)
WARM = SamplingOptions(temperature=0.7, presence_penalty=0.5)
OPENING = OpenTarget(PROMPT, WARM, None, head=300)
TREE = TokenTree((5, 6, 7, 90, 8), (ROOT, 0, 0, ROOT, 3))  # 5 6, 5 7, 90 8


def same_row(one: Row, other: Row) -> None:
    order, other_order = np.argsort(one.ids), np.argsort(other.ids)
    assert one.ids[order].tolist() == other.ids[other_order].tolist()
    np.testing.assert_allclose(one.probabilities[order], other.probabilities[other_order], atol=2e-6)


async def passed(session: TargetSession, request: Pass) -> PassDone:
    done = await session.answer(request)
    assert isinstance(done, PassDone)
    assert done.number == request.number
    return done


async def alone(model: RunningModel, opening: OpenTarget, output: tuple[int, ...]) -> Row:
    """The row after an output, in a session of its own."""
    session = TargetSession(model, opening)
    (row,) = (await passed(session, Pass(1, output, TokenTree()))).nodes
    await session.close()
    assert isinstance(row, Row)
    return row


@pytest.mark.parametrize("wanted", [(0,), (2, 5), (0, 1, 4), (5,)])
async def test_a_pass_answers_what_is_wanted_and_computes_no_other_logits(
    target_model: RunningModel, wanted: tuple[int, ...]
) -> None:
    heads: list[int] = []
    head = target_model.thread.engine.model.get_output_embeddings()
    listed = tuple(np.array([400 + row]) for row in wanted)
    session = TargetSession(target_model, OPENING)
    hook = head.register_forward_hook(lambda _, __, logits: heads.append(logits[..., 0].numel()))
    done = await passed(session, Pass(1, (60,), TREE, listed, wanted))
    hook.remove()
    assert heads == [len(wanted)]
    paths = list(TREE.paths())
    for row, node, more in zip(wanted, done.nodes, listed, strict=True):
        assert isinstance(node, Row)
        assert node.lists(more)
        same_row(await alone(target_model, OPENING, (60, *paths[row])), Row(node.ids[:300], node.probabilities[:300]))


async def test_samples_of_wanted_nodes_are_those_of_the_whole_pass(target_model: RunningModel) -> None:
    opening = OpenTarget(PROMPT, WARM, NoiseKey(11))
    whole, part = TargetSession(target_model, opening), TargetSession(target_model, opening)
    every = (await passed(whole, Pass(1, (60,), TREE, draws=True))).nodes
    some = (await passed(part, Pass(1, (60,), TREE, wanted=(1, 3), draws=True))).nodes
    assert [node.token for node in some] == [every[1].token, every[3].token]
    assert (await passed(part, Pass(2, (5,), TREE, wanted=(), draws=True))).nodes == ()


async def test_a_branch_that_was_emitted_stays_and_the_next_passes_follow_it(target_model: RunningModel) -> None:
    session = TargetSession(target_model, OPENING)
    await passed(session, Pass(1, (60,), TREE, wanted=(1, 3)))
    engine = target_model.thread.engine
    fed = engine.computed
    done = await passed(session, Pass(2, (5, 7, 91), TREE, wanted=(0, 2, 5)))  # 5 7 moves: the places of 5 and 6
    assert engine.computed - fed == 1 + len(TREE)
    again = await passed(session, Pass(3, (90, 8), TokenTree((3, 4), (ROOT, ROOT))))  # and moves again
    assert engine.computed - fed == 1 + len(TREE) + 1 + 2  # the row after 8 is computed by feeding it again
    paths = list(TREE.paths())
    for row, node in zip((0, 2, 5), done.nodes, strict=True):
        same_row(await alone(target_model, OPENING, (60, 5, 7, 91, *paths[row])), node)
    for path, node in zip(((), (3,), (4,)), again.nodes, strict=True):
        same_row(await alone(target_model, OPENING, (60, 5, 7, 91, 90, 8, *path)), node)


async def test_more_of_a_row_comes_from_the_latest_pass_without_a_forward(target_model: RunningModel) -> None:
    session = TargetSession(target_model, OpenTarget(PROMPT, WARM, None, head=4))
    done = await passed(session, Pass(1, (60,), TREE, wanted=(1, 4)))
    steps, listed = target_model.thread.steps, np.array([401, 3, 401])
    whole = (await session.answer(FetchRow(1, 4))).row
    more = (await session.answer(FetchRow(1, 4, listed))).row
    assert target_model.thread.steps == steps
    assert whole.whole
    assert set(more.ids.tolist()) == {*done.nodes[1].ids.tolist(), 401, 3}
    np.testing.assert_array_equal(more.probabilities, whole.probabilities_of(more.ids))
    assert more.tail == pytest.approx(1 - more.probabilities.sum(), abs=1e-9)


@pytest.mark.parametrize(
    ("request_sent", "complaint"),
    [
        (FetchRow(1, 2), r"pass 1 has answered \[1, 4\], not node 2"),
        (FetchRow(1, 2, np.array([3])), r"not node 2"),
        (Pass(2, (), TREE, wanted=(1, 6)), r"wanted must ascend within 0 to 5, got \[1, 6\]"),
        (Pass(2, (), TREE, wanted=(2, 1)), "wanted must ascend"),
        (Pass(2, (), TREE, wanted=(-1,)), "wanted must ascend"),
        (Pass(2, (), TREE, draws=True), "opened without a noise key"),
    ],
)
async def test_nodes_that_no_pass_answers(target_model: RunningModel, request_sent, complaint: str) -> None:
    session = TargetSession(target_model, OPENING)
    await passed(session, Pass(1, (60,), TREE, wanted=(1, 4)))
    with pytest.raises(ProtocolBroken, match=complaint):
        await session.answer(request_sent)


async def test_a_session_that_was_lost_elsewhere_goes_on_with_its_whole_output(target_folder) -> None:
    """The prompt and 100 committed ids arrive in one pass, and are fed in chunks."""
    loaded = load_model(str(target_folder))
    engine = Engine(loaded.model, budget=1, chunk=16)
    opening = OpenTarget(PROMPT, SamplingOptions(), NoiseKey(3))
    with_chunks, without = (RunningModel.of(loaded, side, 1) for side in (Side.TARGET, Side.TARGET))
    with_chunks.thread.engine = engine
    try:
        output: tuple[int, ...] = ()
        session = TargetSession(without, opening)
        for number in range(1, 101):
            (sample,) = (await passed(session, Pass(number, output[-1:], TokenTree(), draws=True))).nodes
            output = (*output, sample.token)
        tree = TokenTree((5, 6), (ROOT, ROOT))
        due = await passed(session, Pass(101, output[-1:], tree, draws=True))
        reopened = TargetSession(with_chunks, opening)
        assert [node.token for node in (await passed(reopened, Pass(1, output, tree, draws=True))).nodes] == [
            node.token for node in due.nodes
        ]
    finally:
        await asyncio.gather(*(asyncio.to_thread(model.close) for model in (with_chunks, without)))

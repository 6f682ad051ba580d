"""A target's sessions: rows and draws are those of its model, and bad input ends a session only."""

import asyncio
import threading
import urllib.request
from dataclasses import replace

import numpy as np
import pytest
import torch

from crossdraft.engine import model_thread
from crossdraft.engine.engine import Engine
from crossdraft.engine.served_model import RunningModel
from crossdraft.rpc.errors import BadRequest, CannotListen, ContextTooLong, ProtocolBroken, TimedOut
from crossdraft.rpc.frames import TARGET
from crossdraft.rpc.links import Join, Patience
from crossdraft.rpc.server import Listening, Server
from crossdraft.target.service import MAX_WAITING_REQUESTS, Reply, TargetService
from crossdraft.text import grammar
from crossdraft.text.grammar import Bits, Grammar, GrammarError, GrammarMatcher
from crossdraft.types import messages
from crossdraft.types.messages import IMPOSSIBLE, FetchRow, NoiseKey, OpenTarget, Pass, Sample, SamplingOptions
from crossdraft.types.rows import Row
from crossdraft.types.trees import ROOT, TokenTree
from tests.drafter.streaming import Gate
from tests.engine.gathering import nothing, standing
from tests.engine.taped import waits
from tests.engine.tiny import generated
from tests.rpc.clock import Clock
from tests.rpc.linked import Heard, Noted
from tests.rpc.sessions import ServiceSession as ClientSession
from tests.rpc.sessions import TargetClient
from tests.services.conftest import AT_ONCE, direct
from tests.serving.exposed import faults, value
from tests.target.talking import PROMPT, Talk

GREEDY = SamplingOptions(temperature=0)
WARM = SamplingOptions(temperature=0.7, top_k=200)
KEY = NoiseKey(2**63 + 5, 1)
LOW = tuple(range(300))
TREE = TokenTree((5, 6, 7, 90), (ROOT, 0, 0, ROOT))
BANS = SamplingOptions(
    frequency_penalty=0.8, bad_word_ids=((6,), (5, 7), (60, 90, 8)), min_tokens=3, end_ids=(0, 9), allowed_token_ids=LOW
)
PENALISED = SamplingOptions(temperature=0.7, presence_penalty=0.5)
OPENING = OpenTarget(PROMPT, PENALISED, None, head=300)
DEEP_TREE = TokenTree((5, 6, 7, 90, 8), (ROOT, 0, 0, ROOT, 3))  # 5 6, 5 7, 90 8
RUN = Pass(1, (), TokenTree(), draws=True, run=12)
MEASURED = Listening(grace_seconds=0, metrics_port=0)


def greedy(model: RunningModel, count: int) -> list[int]:
    return generated(model.thread.engine.model, PROMPT, count)


def token_of(node: Row | Sample) -> int:
    return node.token if isinstance(node, Sample) else int(node.ids[node.probabilities.argmax()])


async def alone(session: ClientSession, count: int, draws: bool) -> list[int]:
    """A token for each pass."""
    emitted: list[int] = []
    for number in range(1, count + 1):
        done = await session.run(Pass(number, tuple(emitted[-1:]), TokenTree(), draws=draws))
        emitted.append(token_of(done.nodes[0]))
    return emitted


def same_row(one: Row, other: Row) -> None:
    order, other_order = np.argsort(one.ids), np.argsort(other.ids)
    assert one.ids[order].tolist() == other.ids[other_order].tolist()
    np.testing.assert_allclose(one.probabilities[order], other.probabilities[other_order], atol=2e-6)


@pytest.mark.parametrize("draws", [False, True], ids=["rows", "samples"])
async def test_greedy_passes_give_what_generate_gives(target: TargetClient, target_model: RunningModel, draws) -> None:
    async with target.session(OpenTarget(PROMPT, GREEDY, KEY)) as session:
        assert await alone(session, 12, draws) == greedy(target_model, 12)


@pytest.mark.parametrize("options", [WARM, SamplingOptions(presence_penalty=1.5, repetition_penalty=1.2), BANS])
async def test_a_node_of_a_tree_has_the_row_of_its_own_path(target: TargetClient, options) -> None:
    opening = OpenTarget(PROMPT, options, None, head=1000)
    async with target.session(opening) as session:
        done = await session.run(Pass(1, (60,), TREE))
    for path, node in zip(TREE.paths(), done.nodes, strict=True):
        async with target.session(opening) as session:
            (row,) = (await session.run(Pass(1, (60, *path), TokenTree()))).nodes
        same_row(row, node)
        assert abs(row.tail - node.tail) < 2e-6


@pytest.mark.parametrize("draws", [False, True], ids=["rows", "samples"])
async def test_hidden_states_are_sent_of_what_may_be_committed(target: TargetClient, target_model, draws: bool) -> None:
    """With rows of each node that is answered, with samples of those on the path that they follow; else none."""
    engine, opening = target_model.thread.engine, OpenTarget(PROMPT, GREEDY, KEY, hidden=True)
    assert target_model.description.hidden_size == engine.model.config.hidden_size
    first, second = greedy(target_model, 2)
    tree = TokenTree((5, first, 6, second), (ROOT, ROOT, 1, 1))
    for wanted, places in ((None, (0, 2, 4) if draws else range(5)), ((1, 2), (1, 2))):
        async with target.session(opening) as session:
            done = await session.run(Pass(1, (), tree, wanted=wanted, draws=draws))
        assert done.hidden.places == tuple(places)
        paths, found = [*tree.paths()], done.hidden.by_place()
        for place, state in found.items():
            ids = torch.tensor([(*PROMPT, *paths[place])])
            with torch.inference_mode():
                plain = engine.model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0, -1]
            sent = torch.frombuffer(bytearray(state), dtype=torch.bfloat16).float()
            torch.testing.assert_close(sent, plain, atol=2e-2, rtol=1e-2)
    async with target.session(replace(opening, hidden=False)) as session:
        assert (await session.run(Pass(1, (), tree, draws=draws))).hidden.places == ()


async def test_a_run_sends_the_state_before_its_last_token(target_model: RunningModel) -> None:
    opening = OpenTarget(PROMPT, GREEDY, KEY, hidden=True)
    *others, last = await Talk(target_model, opening).draw(Pass(1, (), TokenTree(), draws=True, run=4))
    assert [one.hidden.places for one in (*others, last)] == [()] * len(others) + [(3,)]
    drawn = tuple(token_of(node) for one in (*others, last) for node in one.nodes)
    plain = await Talk(target_model, opening).passed(Pass(1, drawn[:3], TokenTree(), draws=True))
    assert plain.hidden.places == (0,)
    found, alone = (torch.frombuffer(bytearray(one.hidden.states), dtype=torch.bfloat16) for one in (last, plain))
    torch.testing.assert_close(found, alone, atol=2e-2, rtol=1e-2)


async def test_samples_are_the_keyed_draws_at_their_letter_offsets(target: TargetClient, target_model) -> None:
    committed = (60, 300)
    letters_of = target_model.tokenization.letters_of
    async with target.session(OpenTarget(PROMPT, WARM, KEY)) as session:
        done = await session.run(Pass(1, committed, TREE, draws=True))
        await session.run(Pass(2, (), TREE))
        rows = [(await session.fetch(FetchRow(2, node))).row for node in range(len(done.nodes))]
    async with target.session(OpenTarget(PROMPT, WARM, KEY)) as session:
        again = await session.run(Pass(1, committed, TREE, draws=True))
    assert again.nodes == done.nodes
    for path, row, sample in zip(TREE.paths(), rows, done.nodes, strict=True):
        offset = len(letters_of((*committed, *path)))
        assert sample.token == target_model.clocks.noise.draw(row.ids, row.probabilities, KEY, offset)


@pytest.mark.parametrize("size", [2, messages.MAX_SCORED + 1])
async def test_a_prompt_is_scored_piece_by_piece(target_model: RunningModel, size: int) -> None:
    """No more rows of logits are computed at once than a piece has, and passes go on as if nothing had been scored."""
    prompt, rows = tuple(7 + (31 * at) % 400 for at in range(size)), list[int]()
    model = target_model.thread.engine.model
    with torch.inference_mode():
        due = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    hook = model.get_output_embeddings().register_forward_hook(lambda _, __, out: rows.append(out[..., 0].numel()))
    talk, pieces = Talk(target_model, OpenTarget(prompt, GREEDY, None)), list[messages.PromptScored]()
    first = min(3, size - 1)  # from there on
    talk.ask(messages.ScorePrompt(first, 2), Pass(1, (), TokenTree()))
    while not pieces or pieces[-1].more:
        piece = await talk.receive()
        assert isinstance(piece, messages.PromptScored)
        pieces.append(piece)
    done = await talk.receive()
    hook.remove()
    assert max(rows) <= messages.MAX_SCORED
    assert [piece.first for piece in pieces] == list(range(first, size, messages.MAX_SCORED))
    tokens = [token for piece in pieces for token in piece.tokens]
    assert [token.token for token in tokens] == list(prompt[first:])
    for token, row in zip(tokens, due[first - 1 :], strict=False):
        assert token.log_probability == pytest.approx(float(row[token.token]), abs=1e-4)
        assert token.rank == int((row >= row[token.token]).sum())
        assert [one for one, _ in token.likely] == row.topk(2).indices.tolist()
    assert token_of(done.nodes[0]) == int(due[-1].argmax())


@pytest.mark.parametrize(
    ("request_sent", "error", "complaint"),
    [
        (messages.ScorePrompt(len(PROMPT), 0), ProtocolBroken, "those from 1 on can be scored, not from 5"),
        (Pass(2, (), TREE), ProtocolBroken, "pass 2 is out of order; pass 1 is next"),
        (FetchRow(0, 0), ProtocolBroken, "rows of pass 0 are gone"),
        (Pass(1, (100_000,), TREE), BadRequest, "committed has the id 100000"),
        (Pass(1, (1,) * 124, TREE), ContextTooLong, "133 tokens, and the context holds 128"),
    ],
)
async def test_bad_requests_end_the_session_and_the_service_lives_on(
    target: TargetClient, target_model: RunningModel, request_sent, error, complaint
) -> None:
    async with target.session(OpenTarget(PROMPT, GREEDY, None)) as session:
        with pytest.raises(error, match=complaint):
            await session.ask(request_sent)
    async with target.session(OpenTarget(PROMPT, GREEDY, None)) as session:
        assert await alone(session, 2, draws=False) == greedy(target_model, 2)


@pytest.mark.parametrize(
    ("opening", "error", "complaint"),
    [
        (OpenTarget((100_000,), GREEDY, None), BadRequest, "prompt has the id 100000"),
        (OpenTarget((1,) * 129, GREEDY, None), ContextTooLong, "the prompt has 129 tokens, and the context holds 128"),
        (OpenTarget(PROMPT, SamplingOptions(grammar=Grammar.regex("(")), KEY), BadRequest, "unclosed group"),
    ],
)
async def test_bad_openings_are_refused_at_once(target: TargetClient, opening, error, complaint) -> None:
    with pytest.raises(error, match=complaint):
        await target.open(opening)
    async with target.session(OpenTarget((1,) * 128, GREEDY, None)) as session:
        assert len((await session.run(Pass(1, (), TokenTree()))).nodes) == 1


async def row_alone(model: RunningModel, opening: OpenTarget, output: tuple[int, ...]) -> Row:
    """The row after an output, in a session of its own."""
    talk = Talk(model, opening)
    (row,) = (await talk.passed(Pass(1, output, TokenTree()))).nodes
    talk.close()
    assert isinstance(row, Row)
    return row


async def fetched(talk: Talk, request: FetchRow) -> Row:
    reply = await talk.answer(request)
    assert (reply.number, reply.node) == (request.number, request.node)
    return reply.row


@pytest.mark.parametrize("wanted", [(2, 5), (0, 1, 4)])
async def test_a_pass_answers_what_is_wanted_and_computes_no_other_logits(target_model, wanted):
    heads: list[int] = []
    head = target_model.thread.engine.model.get_output_embeddings()
    listed = tuple(np.array([400 + row]) for row in wanted)
    talk = Talk(target_model, OPENING)
    hook = head.register_forward_hook(lambda _, __, logits: heads.append(logits[..., 0].numel()))
    done = await talk.passed(Pass(1, (60,), DEEP_TREE, listed, wanted))
    hook.remove()
    assert heads == [len(wanted)]
    paths = list(DEEP_TREE.paths())
    for row, node, more in zip(wanted, done.nodes, listed, strict=True):
        assert node.lists(more)
        head = Row(node.ids[:300], node.probabilities[:300])
        same_row(await row_alone(target_model, OPENING, (60, *paths[row])), head)


async def test_samples_of_wanted_nodes_are_those_of_the_whole_pass(target_model: RunningModel) -> None:
    opening = OpenTarget(PROMPT, PENALISED, NoiseKey(11))
    whole, part = Talk(target_model, opening), Talk(target_model, opening)
    every = (await whole.passed(Pass(1, (60,), DEEP_TREE, draws=True))).nodes
    some = (await part.passed(Pass(1, (60,), DEEP_TREE, wanted=(1, 3), draws=True))).nodes
    assert [node.token for node in some] == [every[1].token, every[3].token]
    assert (await part.passed(Pass(2, (5,), DEEP_TREE, wanted=(), draws=True))).nodes == ()


async def test_a_branch_that_was_emitted_stays_and_the_next_passes_follow_it(target_model: RunningModel) -> None:
    talk = Talk(target_model, OPENING)
    await talk.passed(Pass(1, (60,), DEEP_TREE, wanted=(1, 3)))
    engine = target_model.thread.engine
    fed = engine.computed
    done = await talk.passed(Pass(2, (5, 7, 91), DEEP_TREE, wanted=(0, 2, 5)))  # 5 7 moves: the places of 5 and 6
    assert engine.computed - fed == 1 + len(DEEP_TREE)
    again = await talk.passed(Pass(3, (90, 8), TokenTree((3, 4), (ROOT, ROOT))))  # and moves again
    assert engine.computed - fed == 1 + len(DEEP_TREE) + 1 + 2  # the row after 8 is computed by feeding it again
    paths = list(DEEP_TREE.paths())
    for row, node in zip((0, 2, 5), done.nodes, strict=True):
        same_row(await row_alone(target_model, OPENING, (60, 5, 7, 91, *paths[row])), node)
    for path, node in zip(((), (3,), (4,)), again.nodes, strict=True):
        same_row(await row_alone(target_model, OPENING, (60, 5, 7, 91, 90, 8, *path)), node)


async def test_more_of_a_row_comes_from_the_latest_pass_without_a_forward(target_model: RunningModel) -> None:
    talk = Talk(target_model, OpenTarget(PROMPT, PENALISED, None, head=4))
    done = await talk.passed(Pass(1, (60,), DEEP_TREE, wanted=(1, 4)))
    steps, listed = target_model.thread.steps, np.array([401, 3, 401])
    whole, more = await fetched(talk, FetchRow(1, 4)), await fetched(talk, FetchRow(1, 4, listed))
    assert target_model.thread.steps == steps
    assert whole.whole
    assert set(more.ids.tolist()) == {*done.nodes[1].ids.tolist(), 401, 3}
    np.testing.assert_array_equal(more.probabilities, whole.probabilities_of(more.ids))
    assert more.tail == pytest.approx(1 - more.probabilities.sum(), abs=1e-9)


async def test_where_a_draft_leads_to_nothing_that_can_be_drawn_only_an_output_that_goes_there_is_refused(target_model):
    options = replace(GREEDY, logit_bias=((5, 100.0),), allowed_token_ids=(5, 6), bad_word_ids=((6, 5), (6, 6)))
    older, talk = (Talk(target_model, OpenTarget(PROMPT, options, KEY, impossible=knows)) for knows in (False, True))
    here, there = (await talk.passed(Pass(1, (), TokenTree.chain((6,)), draws=True))).nodes
    assert (token_of(here), here.log_probability > IMPOSSIBLE, there.log_probability) == (5, True, IMPOSSIBLE)
    (alone,) = (await talk.passed(Pass(2, (), TokenTree.chain((6,)), wanted=(1,), draws=True))).nodes
    assert alone.log_probability == IMPOSSIBLE
    with pytest.raises(BadRequest, match="leave no id to draw"):
        await talk.passed(Pass(3, (6,), TokenTree(), draws=True))
    with pytest.raises(BadRequest, match="leave no id to draw"):
        await older.passed(Pass(1, (), TokenTree.chain((6,)), draws=True))


async def test_so_it_is_where_rows_are_asked_for(target_model: RunningModel) -> None:
    options = replace(GREEDY, logit_bias=((5, 100.0),), allowed_token_ids=(5, 6), bad_word_ids=((6, 5), (6, 6)))
    older, talk = (Talk(target_model, OpenTarget(PROMPT, options, None, impossible=knows)) for knows in (False, True))
    here, there = (await talk.passed(Pass(1, (), TokenTree.chain((6,))))).nodes
    assert (here.ids.tolist(), here.tail, there.tail) == ([5], 0, 1)
    late = await fetched(talk, FetchRow(1, 1, np.array([5])))
    assert (late.ids.tolist(), late.probabilities.tolist(), late.tail) == ([5], [0], 1)
    with pytest.raises(BadRequest, match="leave no id to draw"):
        await talk.passed(Pass(2, (6,), TokenTree()))
    with pytest.raises(BadRequest, match="leave no id to draw"):
        await older.passed(Pass(1, (), TokenTree.chain((6,))))


@pytest.mark.parametrize(
    ("request_sent", "complaint"),
    [
        (FetchRow(1, 2), r"pass 1 has answered \[1, 4\], not node 2"),
        (Pass(2, (), TREE, draws=True), "opened without a noise key"),
    ],
)
async def test_nodes_that_no_pass_answers(target_model: RunningModel, request_sent, complaint: str) -> None:
    talk = Talk(target_model, OPENING)
    await talk.passed(Pass(1, (60,), DEEP_TREE, wanted=(1, 4)))
    with pytest.raises(ProtocolBroken, match=complaint):
        await talk.answer(request_sent)


async def test_a_pass_that_draws_keeps_no_rows(target_model: RunningModel) -> None:
    """No copy of its logits is made: with a large vocabulary that is megabytes a pass."""
    talk = Talk(target_model, OpenTarget(PROMPT, SamplingOptions(), NoiseKey(11)))
    await talk.passed(Pass(1, (60,), TREE))
    assert (await fetched(talk, FetchRow(1, 0))).whole
    await talk.passed(Pass(2, (5,), TREE, draws=True))
    with pytest.raises(ProtocolBroken, match="pass 2 has drawn and keeps no rows; send a pass without draws for them"):
        await talk.answer(FetchRow(2, 0))


async def test_requests_wait_for_each_other_and_a_bad_one_for_the_replies_before_it(target_model: RunningModel) -> None:
    """The client does not wait for a reply before it asks again."""
    talk = Talk(target_model, OPENING)
    talk.ask(Pass(1, (60,), DEEP_TREE), FetchRow(1, 4), Pass(2, (5,), TREE), Pass(4, (), TREE), Pass(5, (), TREE))
    one, row, other = [await talk.receive() for _ in range(3)]
    assert (one.number, row.number, row.node, other.number) == (1, 1, 4, 2)
    same_row(row.row, await row_alone(target_model, replace(OPENING, head=row.row.ids.size), (60, 90)))
    with pytest.raises(ProtocolBroken, match="pass 4 is out of order; pass 3 is next"):
        await talk.receive()


async def test_so_many_requests_may_wait(target_model: RunningModel) -> None:
    talk = Talk(target_model, OPENING)
    talk.ask(*(Pass(number, (), TokenTree()) for number in range(1, MAX_WAITING_REQUESTS + 2)))  # one is under way
    with pytest.raises(ProtocolBroken, match="64 requests of this session wait already"):
        talk.ask(Pass(MAX_WAITING_REQUESTS + 2, (), TokenTree()))
    talk.close()


async def test_of_a_session_that_ends_with_a_reply_that_is_not_read_nothing_is_left(target_model: RunningModel) -> None:
    """The link closes it as soon as too many replies wait; the requests that wait behind must take no KV slots."""

    class Unread(Talk):
        def send(self, reply: Reply, within: float = 0.0, join: Join[Reply] | None = None) -> None:
            self.session.close()
            super().send(reply, within)

    unread, thread = Unread(target_model, OPENING), target_model.thread
    unread.ask(Pass(1, (), TokenTree()), Pass(2, (5,), TokenTree()), FetchRow(2, 0))
    await unread.news.until(lambda: unread.waiting)
    other = Talk(target_model, OPENING)
    await other.passed(Pass(1, (), TokenTree()))  # a step after any that was asked for before
    other.close()
    await thread.submit(nothing())
    assert (thread.steps, thread.engine.slots_in_use) == (2, 0)


@pytest.mark.parametrize("scored", [False, True])
async def test_a_prompt_may_take_longer_than_a_reply_and_a_target_that_hangs_is_noticed(
    target_model: RunningModel, clock: Clock, monkeypatch: pytest.MonkeyPatch, scored: bool
) -> None:
    monkeypatch.setattr(model_thread, "WORKING_SECONDS", 0.0)  # after each step
    gate, heard = Gate(Engine(target_model.thread.engine.model, budget=1, chunk=16)), Heard()
    async with (
        Server(TARGET, TargetService(replace(target_model, thread=gate.thread)), AT_ONCE) as server,
        TargetClient(server.address, Patience(reply_seconds=30)) as client,
    ):
        try:
            await client.describe()
            session = client.begin(OpenTarget(tuple(range(100)), GREEDY, None), heard)
            await heard.news.until(lambda: heard.is_open)
            gate.close()
            session.send(messages.ScorePrompt(98, 0) if scored else Pass(1, (), TokenTree()))
            for _ in range(4):
                await gate.entered()
                since = session.ledger.since
                clock.move(20)
                gate.step()
                await clock.still(lambda: session.ledger.since != since)  # noqa: B023
            assert (heard.replies, heard.errors) == ([], [])
            await gate.entered()
            gate.open(1)
            await heard.news.until(lambda: heard.replies)
            gate.close()
            session.send(Pass(1 if scored else 2, (), TokenTree()))
            await gate.entered()
            assert 29 <= await clock.until(lambda: bool(heard.errors)) <= 31
            assert type(heard.errors[0]) is TimedOut
        finally:
            gate.open()


@pytest.mark.parametrize("draws", [False, True], ids=["rows", "samples"])
async def test_long_options_are_gone_through_once_and_not_in_the_event_loop(target_model: RunningModel, draws) -> None:
    threads: list[int] = []
    bias, words = ([(token, other) for token in range(300)] for other in (1.0, 7))
    lists = {"logit_bias": bias, "allowed_token_ids": range(300), "bad_word_ids": words}
    options = SamplingOptions(**{name: Noted(each, threads) for name, each in lists.items()})
    threads.clear()  # of the checks of their ranges
    replies = await direct(TargetService(target_model), OpenTarget(PROMPT, options, NoiseKey(11)))
    assert threads
    assert threading.get_ident() not in threads
    threads.clear()
    done = await replies.answer(Pass(1, (60,), TREE, draws=draws))
    assert all(token_of(node) in range(300) for node in done.nodes)
    await replies.answer(Pass(2, (), TokenTree(), draws=True, run=4))
    assert not threads


ANYTHING = Grammar.regex("(?s:.*)")
SETTINGS = {
    "greedy": OpenTarget(PROMPT, GREEDY, KEY),
    "keyed": OpenTarget(PROMPT, SamplingOptions(0.8), KEY, likely=5),
    "truncated": OpenTarget(PROMPT, SamplingOptions(0.8, top_k=20, min_p=0.01), KEY),
    "nucleus": OpenTarget(PROMPT, SamplingOptions(0.8, top_p=0.9), KEY, likely=0),
    "banned": OpenTarget(PROMPT, SamplingOptions(0.7, presence_penalty=1, bad_word_ids=((3,), (1, 5))), KEY),
    "biased": OpenTarget(PROMPT, SamplingOptions(0.7, logit_bias=((4, 3.0),), min_tokens=9, end_ids=(0,)), KEY),
    "rows": OpenTarget(PROMPT, SamplingOptions(0.8), None),
    "rows and log-probabilities": OpenTarget(PROMPT, SamplingOptions(0.9, top_p=0.9), None, head=8, likely=3),
    "greedy rows": OpenTarget(PROMPT, GREEDY, None),
    "by a grammar": OpenTarget(PROMPT, SamplingOptions(0.8, grammar=ANYTHING), KEY, likely=5),
    "rows by a grammar": OpenTarget(PROMPT, SamplingOptions(0.8, grammar=ANYTHING), None),
}


@pytest.mark.parametrize("settings", [*([each] for each in SETTINGS), [*SETTINGS]], ids=lambda names: names[-1])
async def test_a_step_waits_for_the_device_once(target_model, monkeypatch, settings):
    """Whatever its sessions want to know: draws, rows and log-probabilities come in one copy."""
    sessions = []
    for name in 3 * settings if len(settings) == 1 else settings:
        opening = SETTINGS[name]
        session = await direct(TargetService(target_model), opening)
        await session.answer(Pass(1, (), TokenTree(), draws=opening.noise is not None))
        sessions.append((session, opening.noise is not None))
    steps, tree = target_model.thread.steps, TokenTree((5, 6, 7, 8, 9), (ROOT, 0, 1, ROOT, 3))
    with waits(monkeypatch) as calls:
        async with standing(target_model.thread):
            for session, draws in sessions:
                session.ask(Pass(2, (4,), tree, () if draws else (np.array([1, 2]),) * 6, draws=draws))
        replies = [await session.receive() for session, _ in sessions]
    assert [len(reply.nodes) for reply in replies] == [6] * len(sessions)
    assert (calls, target_model.thread.steps - steps) == (["cpu"], 1)
    for session, _ in sessions:
        session.close()


@pytest.mark.parametrize("draws", [False, True])
async def test_each_node_of_a_tree_has_the_mask_of_its_own_path(target_model: RunningModel, draws: bool) -> None:
    """Rows, draws, and rows that are fetched later: the model's, masked and normalized; other paths as they are."""
    letters = target_model.tokenization.vocabulary.letters
    (end,) = target_model.description.stops
    a, b, c = [token for token, one in enumerate(letters) if one.isascii() and one.isalpha() and len(one) > 1][:3]
    words = [letters[a] + letters[b], letters[a] + letters[c] + "x", letters[c]]
    tree = TokenTree((a, b, c, c, 5), (ROOT, 0, 0, ROOT, 0))
    paths = list(map(target_model.tokenization.letters_of, tree.paths()))
    opening = OpenTarget(PROMPT, WARM, KEY, head=50, likely=20)
    plain, kept = (replace(opening, options=replace(WARM, grammar=one)) for one in (None, Grammar.choice(words)))
    whole = replace(opening, options=SamplingOptions(temperature=0.7), head=1000)
    free = (await Talk(target_model, whole).passed(Pass(1, (), tree))).nodes
    talk = Talk(target_model, kept)
    nodes = (await talk.passed(Pass(1, (), tree, draws=draws))).nodes
    alone = (await Talk(target_model, plain).passed(Pass(1, (), tree, draws=draws))).nodes
    for place, (path, node, row) in enumerate(zip(paths, nodes, free, strict=True)):
        allowed = [at for at, one in enumerate(letters) if any(word.startswith(path + one) for word in words)]
        allowed += [end] if path in words else []
        if not any(word.startswith(path) for word in words):  # nothing that fits leads there
            assert token_of(node) == token_of(alone[place]) != end
            continue
        shares = row.probabilities_of(np.array(allowed))
        if isinstance(node, Sample):
            assert node.token in allowed
            assert len(node.likely) == min(20, len(allowed))
            assert node.log_probability <= 1e-6
            continue
        assert set(node.ids.tolist()) <= set(allowed)
        np.testing.assert_allclose(node.probabilities_of(np.array(allowed)), shares / shares.sum(), atol=1e-5)
        fetched = await talk.answer(FetchRow(1, place))
        same_row(fetched.row, node)
    stray = Talk(target_model, kept)
    with pytest.raises(BadRequest, match="the grammar allows no token of this vocabulary after"):
        await stray.answer(Pass(1, (b,), TokenTree()))


async def test_masks_that_take_long_are_made_before_the_model_thread_has_the_pass(target_model, monkeypatch):
    """A session that was slow waits for its own masks, and no other does; what it draws is the same."""
    options = SamplingOptions(grammar=Grammar.regex("[ab ]{30}"))
    opening = OpenTarget(PROMPT, options, KEY)
    due = [one for done in await Talk(target_model, opening).draw(RUN) for one in done.nodes]
    monkeypatch.setattr(grammar, "SLOW", -1.0)
    talk, drawn = Talk(target_model, opening), list[Row | Sample]()
    while len(drawn) < 12:
        (done,) = await talk.draw(replace(RUN, number=1 + len(drawn), committed=tuple(map(token_of, drawn[-1:]))))
        drawn += done.nodes
    assert list(map(token_of, drawn)) == list(map(token_of, due))
    entered, release = threading.Event(), threading.Event()

    def stand_still(*_: object) -> Bits:
        entered.set()
        assert release.wait(60)
        raise GrammarError("enough")

    monkeypatch.setattr(GrammarMatcher, "masks", stand_still)
    talk.ask(replace(RUN, number=13, committed=(token_of(drawn[-1]),)))
    assert await asyncio.to_thread(entered.wait, 60)
    await Talk(target_model, OpenTarget(PROMPT, WARM, KEY)).passed(Pass(1, (), TREE))  # comes to its end meanwhile
    release.set()
    with pytest.raises(BadRequest, match="enough"):
        await talk.drawn(13)


def read(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as reply:
        return str(reply.read().decode())


async def test_a_target_says_what_its_sessions_and_its_model_do(target_model: RunningModel) -> None:
    server = Server(TARGET, TargetService(target_model), MEASURED, statistics=target_model.statistics)
    async with server, TargetClient(server.address) as client:
        ready = server.ready()
        address, who = ready["metrics"], {"role": "target", "model_name": ready["model"]}
        async with client.session(OpenTarget((5, 6), SamplingOptions(), None)) as session:
            await session.run(Pass(1, (), TokenTree((7,), (-1,))))
            text = await asyncio.to_thread(read, address)
            sent = session.traffic.bytes_sent
    assert faults(text) == []
    due = {
        "open_sessions": 1, "sessions_total": 1, "passes_total": 1, "pass_nodes_total": 2, "model_steps_total": 1,
        "model_tokens_total": 3, "batch_size_count": 1, "model_answers_total": 1, "model_evictions_total": 0,
    }  # fmt: skip
    assert {name: value(text, f"service_{name}", who) for name in due} == due
    assert value(text, "service_bytes_total", who | {"direction": "received"}) == sent
    assert value(text, "service_model_seconds_total", who) > 0
    assert 0 < value(text, "service_model_queue_seconds_total", who) < 60
    assert 3 / target_model.statistics().kv_slots <= value(text, "kv_cache_usage_perc", who) <= 1
    with pytest.raises(OSError, match="refused"):
        await asyncio.to_thread(read, address)


async def test_a_port_for_metrics_is_free_checked_and_on_the_services_own_address_only(target_model: RunningModel):
    async with Server(TARGET, TargetService(target_model), MEASURED) as server:
        host, _, port = server.ready()["metrics"].rpartition(":")
        assert host == "127.0.0.1"
        with pytest.raises(OSError, match="refused"):
            await asyncio.to_thread(read, f"127.0.0.2:{port}")
        taken = Listening(grace_seconds=0, metrics_port=int(port))
        with pytest.raises(CannotListen, match=r"cannot listen on .*--metrics-port"):
            await Server(TARGET, TargetService(target_model), taken).start()
    async with Server(TARGET, TargetService(target_model), Listening(grace_seconds=0)) as server:
        assert "metrics" not in server.ready()

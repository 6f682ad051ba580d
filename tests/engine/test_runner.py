"""Forwards that read numbers against plain ones; on a CPU a tape of operations stands for CUDA's graphs."""

import asyncio
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import fields, replace
from types import SimpleNamespace
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
import triton
from transformers import PreTrainedModel

from crossdraft.engine import attention, runner
from crossdraft.engine.batch import StepInputs, numbers_of
from crossdraft.engine.engine import Engine
from crossdraft.engine.kv_cache import KVCache
from crossdraft.engine.model_thread import Job, ModelThread
from crossdraft.engine.requests import ForwardRequest as Request
from crossdraft.engine.requests import InputTokens, plan_inputs
from crossdraft.engine.sampling import distributions, paths
from crossdraft.engine.sampling.clocks import Clocks
from crossdraft.engine.sampling.paths import Paths, draw_path, standing_draws
from crossdraft.text.letters import Letters
from crossdraft.types.messages import NoiseKey, SamplingOptions
from crossdraft.types.trees import MOST_NODES, Path, TokenTree, tree_of
from crossdraft.verification.noise import KeyedNoise
from tests.engine.taped import SIZES, NeverWaiting, taped
from tests.engine.test_engine import BRANCHES, PROMPT, assert_right, plain, serve
from tests.engine.tiny import DRAWS, tiny_llama


class Cuda:
    """Names of `torch.cuda` that note what is done, with the arguments that the real ones take."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, broken: bool) -> None:
        real = inspect.signature(torch.cuda.graph.__init__)
        self.events: list[str] = []
        self.streams = ["usual"]
        note = self.events.append

        class Stream:
            def __init__(self, name: object) -> None:
                self.name = str(name)

            def wait_stream(self, other: "Stream") -> None:
                note(f"{self.name} waits for {other.name}")

        @contextmanager
        def stream(one: Stream) -> Iterator[None]:
            self.streams.append(one.name)
            yield
            self.streams.pop()

        @contextmanager
        def graph(*given: object, **options: object) -> Iterator[None]:
            real.bind(None, *given, **options)
            assert given[1:] == ("pool", self.side)
            assert options == {"capture_error_mode": "thread_local"}
            self.streams.append("capturing")
            yield
            if broken:  # as the real one, which leaves its stream then
                raise RuntimeError("captured nothing")
            self.streams.pop()

        self.side = Stream("side")
        recorded = SimpleNamespace(replay=lambda: note("replayed"))
        names = {
            "Stream": lambda device: self.side,
            "graph_pool_handle": lambda: "pool",
            "device": lambda device: nullcontext(),
            "current_stream": lambda: Stream(self.streams[-1]),
            "stream": stream,
            "set_stream": lambda one: setattr(self, "streams", [one.name]),
            "CUDAGraph": lambda: recorded,
        }
        assert all(hasattr(torch.cuda, name) for name in names)
        monkeypatch.setattr(torch, "cuda", SimpleNamespace(**names, graph=graph))


CAPTURE_FOR = runner.capture_for


def test_shapes_captured_after_start_none(llama: PreTrainedModel, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever numbers of sessions, tokens and slots there are; the model's own code runs at start only."""
    calls: list[object] = []
    plain(llama, PROMPT)  # the copy that this is compared with has no hook
    hook = llama.register_forward_pre_hook(lambda *_: calls.append(None))
    with caplog.at_level("INFO"):
        engine = Engine(llama, graphs=True)
    assert engine.runner.graphs.sizes == SIZES
    assert re.search(r"captured 4 CUDA graphs in \d+\.\d s, \d+ MiB", caplog.text)
    calls.clear()
    for count in (1, 2, 5):
        texts = [PROMPT[session:] * min(count, 3) for session in range(count)]
        serve(engine, *(Request((count, session), text) for session, text in enumerate(texts)))
        ask = [Request((count, session), (*text, 3), BRANCHES) for session, text in enumerate(texts)]
        assert serve(engine, *ask) == count * (1 + len(BRANCHES))
    hook.remove()
    assert calls == []
    assert engine.runner.graphs.sizes == SIZES


@pytest.mark.parametrize("graphs", [False, True])
def test_what_the_head_reads_is_handed_out_to_who_asks(llama: PreTrainedModel, graphs: bool) -> None:
    """Of each row the hidden state, also of a forward that is replayed, and of a session that shares it with others."""
    engine, tree = Engine(llama, graphs=graphs), TokenTree((3, 4, 5), (-1, 0, -1))
    assert engine.hidden_size == llama.config.hidden_size
    assert not graphs or engine.runner.graphs.sizes == SIZES
    for wanted in (None, (0, 2), (3,)):
        asked = Request("a", PROMPT, tree, wanted, hidden=True)
        engine.forward([Request("b", PROMPT[::-1], tree), asked, Request("c", PROMPT[2:])])
        assert [*engine.hidden] == ["a"]
        head = llama.get_output_embeddings()
        for states, path in zip(engine.hidden["a"], [[*tree.paths()][row] for row in asked.rows()], strict=True):
            logits = states @ head.weight.detach().T
            torch.testing.assert_close(logits, plain(llama, (*PROMPT, *path))[0], atol=1e-4, rtol=1e-4)


def test_64_outputs_with_5_draft_tokens_are_one_replay(llama: PreTrainedModel) -> None:
    engine, chain = Engine(llama, graphs=True, graph_sizes=(384,)), TokenTree((1,) * 5, (-1, 0, 1, 2, 3))
    requests = [Request(number, (number, 1, 2), chain) for number in range(64)]
    engine.forward([Request(one.session, one.context[:2]) for one in requests])
    with patch.object(engine.runner, "_call", Mock(side_effect=AssertionError)):
        found = engine.forward(requests)
    for number in (0, 31, 63):
        assert_right(llama, requests[number], found[number])


def drawn_path(session: str, ids: tuple[int, ...], count: int, options: SamplingOptions, clocks: Clocks) -> Job[Path]:
    at = (NoiseKey(len(ids)), 5)
    found, _ = yield from draw_path(Request(session, ids, more=count - 1), options, clocks, at)
    return (*ids, *(one.token for one in found))


@pytest.mark.parametrize("pruned", [False, True])
@pytest.mark.parametrize("names", [*((name,) for name in DRAWS), ("truncated", "truncated twice")])
async def test_drafts_are_replays(llama, names, pruned, monkeypatch):
    """The model's own code runs at start only, and what is drawn is what is drawn without."""
    size = len(llama.get_input_embeddings().weight)
    monkeypatch.setattr(distributions, "NUCLEUS", size)
    noise = KeyedNoise([Letters(f"{token}") for token in range(size)], [0] * size)
    kept = np.arange(size)[::-1].copy() if pruned else None
    clocks = Clocks(noise, torch.device("cpu"), kept, [1 + token % 3 for token in range(size)])
    clocks._on_host = False
    cases = [("a", PROMPT, 6), ("b", (9,), 6), ("c", PROMPT[::-1], 6)]
    options = [DRAWS[names[place % len(names)]] for place in range(len(cases))]

    async def drawn(engine: Engine) -> list[Path]:
        worker = ModelThread(engine)
        jobs = [drawn_path(*case, each, clocks) for case, each in zip(cases, options, strict=True)]
        found = await asyncio.gather(*map(worker.submit, jobs))
        more = [drawn_path(str(place), ids, 3, options[place], clocks) for place, ids in enumerate(found)]
        found = await asyncio.gather(*map(worker.submit, more))
        worker.close()
        return found

    engine = Engine(llama, graphs=True)
    engine.runner.graphs.capture_drawing(clocks)
    never = Mock(side_effect=AssertionError)
    with patch.object(engine.runner, "_call", never), patch.object(Paths, "begin", never):
        found = await drawn(engine)
    assert found == await drawn(Engine(llama, graphs=False))


def test_captured_draws_leave_options_that_they_do_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks(KeyedNoise([Letters("a")], [0]), torch.device("cpu"))
    kinds = [draws for draws, _ in standing_draws(clocks, 1, 1)]
    usual, other = SamplingOptions(), SamplingOptions(presence_penalty=1.0)
    assert all(any(draws.serves(options) for draws in kinds) for options in (usual, other))
    penalty = [field for field in fields(SamplingOptions) if field.name == "presence_penalty"]
    monkeypatch.setattr(paths, "UNKNOWN", penalty)  # as of an option that drafts have, too
    assert [any(draws.serves(options) for draws in kinds) for options in (usual, other)] == [True, False]


def test_without_cuda_the_first_forward_may_be_a_small_one(llama: PreTrainedModel) -> None:
    with patch.object(runner, "capture_for", CAPTURE_FOR):
        engine = Engine(llama, graphs=True, graph_sizes=(8, 64))
    for text in (PROMPT, PROMPT * 4):
        request = Request(len(text), text)
        assert_right(llama, request, engine.forward([request])[0])


def test_sizes_are_those_that_are_named_or_none(llama: PreTrainedModel) -> None:
    named, eager = (Engine(llama, graphs=True, graph_sizes=sizes).runner.graphs for sizes in ((32, 8, 8), ()))
    assert [named.size_for(tokens) for tokens in (1, 8, 9, 32, 33)] == [8, 8, 32, 32, 33]
    assert (named.sizes, eager.sizes, eager.size_for(5)) == ((8, 32), (), 5)
    engine = Engine(llama, graphs=True, graph_sizes=())
    assert serve(engine, Request("a", PROMPT, BRANCHES), Request("b", PROMPT * 3)) == 24 + len(BRANCHES)


def test_sizes_go_no_further_than_steps_and_memory(llama, monkeypatch, caplog):
    monkeypatch.setattr(runner, "unused_memory", lambda *_: 8.0 * runner.LOGITS)  # MiB
    graphs = Engine(llama, graphs=True, graph_sizes=()).runner.graphs
    assert graphs.fitting(15, 1) == (1, 4, 16)
    assert graphs.fitting(17, 1) == SIZES
    assert graphs.fitting(10**6, 1 << 20) == (1, 4)
    assert caplog.text == ""
    assert graphs.fitting(10**6, 1 << 30) == ()
    assert "no memory is left for CUDA graphs" in caplog.text


def test_what_is_too_large_is_not_captured_and_what_is_smaller_is(llama, monkeypatch, caplog):
    tried: list[None] = []

    def short(run: Callable[[], None]) -> Callable[[], None]:
        tried.append(None)
        if len(tried) == 1:
            raise torch.OutOfMemoryError("no memory is left")
        return taped(run)

    monkeypatch.setattr(runner, "capture_for", lambda _: short)
    engine = Engine(llama, graphs=True)
    assert engine.runner.graphs.sizes == SIZES[:-1]
    assert "no memory is left" in caplog.text
    serve(engine, Request("a", PROMPT * 9), Request("b", PROMPT))


def test_padding_is_written_to_slots_that_are_nobodys(llama: PreTrainedModel) -> None:
    engine = Engine(llama, graphs=True)
    pool = engine._cache.pools[0]
    pool.keys[0].zero_()
    engine.forward([Request("a", PROMPT[:3]), Request("b", PROMPT[:2])])  # five tokens of sixteen
    written = pool.keys[0][0].any(-1).any(0).nonzero()[:, 0].tolist()
    assert len(written) == 5 + 1
    assert written[-1] == pool.padding_slot


def only(plan: InputTokens, token: int) -> InputTokens:
    lists = (plan.tokens[token : token + 1], plan.positions[token : token + 1], plan.places[token : token + 1])
    return replace(plan, tokens=lists[0], positions=lists[1], places=lists[2], wanted=(0,))


def test_a_forward_may_be_run_several_times_in_one_capture(llama: PreTrainedModel) -> None:
    """Each draws its ids from the logits of the one before, on the device: three tokens of two greedy chains."""
    engine = Engine(llama, graphs=True)
    texts, chain = {"a": PROMPT, "b": PROMPT[::-1]}, TokenTree((0,) * 3, (-1, 0, 1))
    engine.forward([Request(name, text, wanted=()) for name, text in texts.items()])
    manager, graphs, steps = engine._manager, engine.runner.graphs, []
    entries = {name: manager.get(name) for name in texts}
    plans = [(one.extents, plan_inputs(one.cached, Request(name, texts[name], chain))) for name, one in entries.items()]
    for step in range(3):
        slices = [replace(only(plan, step), extents=extents) for extents, plan in plans]
        steps.append(torch.from_numpy(numbers_of(slices, 4, (None,), [engine._cache.pools[0].padding_slot])))
    given, drawn = torch.stack(steps), torch.zeros(4, 4, dtype=torch.int64)

    def run() -> None:
        for step in range(3):
            inputs = StepInputs.of(given[step])
            inputs = inputs if step == 0 else inputs._replace(ids=drawn[step])
            drawn[step + 1].copy_(engine.runner.forward(inputs).argmax(-1))

    with torch.inference_mode():
        replay = graphs.capture(run)
        drawn.zero_()
        replay()
    for row, text in enumerate(texts.values()):
        for step in range(3):
            assert drawn[step + 1, row] == plain(llama, text).argmax()
            text = (*text, int(drawn[step + 1, row]))


@pytest.mark.parametrize("graphs", [False, True])
def test_what_a_session_could_not_compute_reaches_no_other_one(graphs: bool) -> None:
    """Its keys and values are NaN, and lie in slots that others have after it, or start with; so are those of id 0,
    which is the padding's."""
    llama = tiny_llama()
    with torch.no_grad():
        llama.get_input_embeddings().weight[95] = float("nan")
    engine, bad = Engine(llama, budget=1, graphs=graphs), tree_of([(95,) * 9], 9)
    with torch.no_grad():
        llama.get_input_embeddings().weight[0] = float("nan")
    serve(engine, Request("before", PROMPT[:2]))
    engine.forward([Request("behind", (3, 95))])  # in the slots after it
    serve(engine, Request("before", PROMPT[:3]))
    engine.close("before")
    engine.close("behind")
    text, other = tuple(range(20, 60)), tuple(range(50, 90))
    for number in range(14):  # all slots
        engine.forward([Request(number, (number + 1, *(95,) * 120))])
    for session in range(14):
        engine.close(session)
    engine.forward([Request("tree", text)])
    engine.forward([Request("tree", text, bad, wanted=(9,))])
    engine.forward([Request("text", other, bad)])  # in one forward: what is held of the text is NaN too
    engine.close("tree")
    engine.close("text")
    serve(engine, Request("on", (*text, 1)), Request("like it", (*other, 1, 2, 3)))
    serve(engine, Request("a", PROMPT[:1]), Request("b", PROMPT * 2), Request("c", PROMPT[1:]))
    serve(engine, Request("on", (*text, 1, 2)), Request("like it", (*other, 1, 2, 3, 4, 5)))
    serve(engine, Request("a", PROMPT * 11), Request("b", PROMPT * 12), Request("c", PROMPT * 13))
    serve(engine, Request("a", (*PROMPT * 11, 7)), Request("b", (*PROMPT * 12, 7)), Request("c", (*PROMPT * 13, 7)))


def test_a_model_that_waits_for_the_device_goes_on_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    """Frequencies of this one are chosen by the largest position."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    engine = Engine(tiny_llama(rope_parameters=rope), graphs=True)
    serve(engine, Request("a", PROMPT, BRANCHES), Request("b", PROMPT[:1]))
    serve(engine, Request("a", (*PROMPT, 1)), Request("b", (*PROMPT[:1], 1)))
    assert engine.runner.graphs.sizes == ()
    ours = [record for record in caplog.records if record.name.startswith("crossdraft.")]  # others' come late
    assert [record.levelname for record in ours] == ["WARNING"]
    assert "captured" in caplog.text
    assert "the host would wait" in caplog.text


def nothing(run: Callable[[], None]) -> Callable[[], None]:
    run()
    return lambda: None


def only_logits(run: Callable[[], None]) -> Callable[[], None]:
    """One whose replays write no keys and values: those of the first forward are there, and later ones are not."""
    run()

    def replay() -> None:
        with patch.object(
            KVCache, "update", lambda self, keys, values, layer, *_: (self.keys[layer], self.values[layer])
        ):
            run()

    return replay


@pytest.mark.parametrize("wrong", [nothing, only_logits])
def test_captures_that_are_wrong_are_not_used(llama, wrong, caplog, monkeypatch):
    monkeypatch.setattr(runner, "capture_for", lambda _: wrong)
    engine = Engine(llama, graphs=True)
    assert engine.runner.graphs.sizes == ()
    assert "CUDA graphs are not used: " in caplog.text
    serve(engine, Request("a", PROMPT, BRANCHES), Request("b", PROMPT[:1]))


@pytest.mark.parametrize("error", [RuntimeError, triton.TritonError])
def test_a_kernel_that_does_not_run_is_not_used(llama, error, caplog, monkeypatch):
    monkeypatch.setattr(attention, "_by_kernel", Mock(side_effect=error("out of shared memory")))
    engine = Engine(llama, graphs=True)
    assert engine.runner.graphs is None
    assert re.search("attention in one kernel is not used: .*out of shared memory", caplog.text)
    serve(engine, Request("a", PROMPT, BRANCHES), Request("b", PROMPT[:1]))


def test_long_texts_and_large_trees_go_as_they_are_among_the_others() -> None:
    llama = tiny_llama(max_position_embeddings=1024)
    engine = Engine(llama, graphs=True)
    assert serve(engine, Request("a", tuple(range(90)) * 3)) == 270 > SIZES[-1]
    large = TokenTree(tuple(range(MOST_NODES + 1)), tuple(number // 3 - 1 for number in range(MOST_NODES + 1)))
    serve(engine, Request("b", PROMPT, large))
    longer = (*tuple(range(90)) * 3, 5)
    serve(engine, Request("a", longer, BRANCHES), Request("b", (*PROMPT, 3)), Request("c", PROMPT * 9))


def test_answers_stay_what_they_are_while_others_are_made(llama: PreTrainedModel) -> None:
    engine = Engine(llama, graphs=True)
    (first,) = engine.forward([Request("a", PROMPT)])
    copy = first.clone()
    engine.forward([Request("b", PROMPT[::-1])])
    assert torch.equal(first, copy)


@pytest.mark.parametrize("static", [False, True])
def test_no_pass_waits_for_the_device(llama: PreTrainedModel, static: bool) -> None:
    engine = Engine(llama, graphs=static)
    text = PROMPT * 5
    with NeverWaiting(), torch.inference_mode():
        engine.forward([Request("a", text, BRANCHES, (2,)), Request("b", PROMPT[:1])])
        engine.forward([Request("a", (*text, 7, 8), tree_of([(4, 5, 6)], 9)), Request("c", text, BRANCHES)])
        engine.forward([Request("a", (*text, 7, 8, 4, 4)), Request("c", (*text, 1, 2, 9), wanted=())])
        engine.forward([Request("b", (PROMPT[0], 1))])


def test_rows_are_picked_where_the_model_computes_all_of_them(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(runner, "keeps_logits", lambda _: False)
    engine = Engine(llama)
    serve(engine, Request("a", PROMPT, BRANCHES, (2, 5)), Request("b", PROMPT * 2))


def test_a_capture_is_warmed_up_on_its_own_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch, broken=False)
    replay = runner.CudaGraphCapture(torch.device("cuda:0"))(lambda: cuda.events.append(f"run, {cuda.streams[-1]}"))
    assert cuda.events == ["side waits for usual", "run, side", "usual waits for side", "run, capturing"]
    replay()
    assert cuda.events[4:] == ["replayed"]


def test_a_capture_that_fails_leaves_the_usual_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch, broken=True)
    with pytest.raises(RuntimeError, match="captured nothing"):
        runner.CudaGraphCapture(torch.device("cuda:0"))(lambda: None)
    assert cuda.streams == ["usual"]
    assert not runner.CAPTURING.locked()

"""Forwards in buckets against plain ones; on a CPU a tape of operations stands for CUDA's graphs."""

from collections.abc import Callable, Iterator

import pytest
import torch
from transformers import PreTrainedModel

from crossdraft.engine import runner
from crossdraft.engine.batch import TOKENS
from crossdraft.engine.engine import Engine
from crossdraft.engine.kv_cache import KVCache
from crossdraft.engine.requests import ForwardRequest as Request
from crossdraft.engine.runner import ModelRunner
from crossdraft.types.trees import MOST_NODES, TokenTree, tree_of
from tests.engine.cuda import Cuda
from tests.engine.taped import NeverWaiting, taped
from tests.engine.test_engine import BRANCHES, PROMPT, serve
from tests.engine.tiny import tiny_llama


@pytest.fixture(autouse=True, scope="module")
def capture() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "capture_for", lambda _: taped)
        yield


@pytest.fixture
def never_flat(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From when it is called on, forwards that go as they are fail."""

    def fail(*_: object) -> None:
        raise AssertionError("a forward went as it is")

    return lambda: monkeypatch.setattr(ModelRunner, "_flat", fail)


def test_trees_and_ragged_batches_of_all_architectures(model: PreTrainedModel, never_flat: Callable[[], None]) -> None:
    engine = Engine(model, graphs=True)
    never_flat()
    for turn in range(2):  # the second one replays what the first has captured
        names = [f"{letter}{turn}" for letter in "abcd"]
        shift = tuple((token + turn) % 90 for token in PROMPT)
        serve(
            engine,
            Request(names[0], shift * 4),
            Request(names[1], shift[:1], BRANCHES),
            Request(names[2], (9, turn), BRANCHES),
        )
        serve(
            engine, Request(names[0], (*shift * 4, 1)), Request(names[3], shift[::-1], tree_of([(4, 5, 6)], 9), (0, 3))
        )
        assert serve(engine, Request(names[2], (9, turn, 1, 2, 9, 50), BRANCHES)) == 1 + len(BRANCHES)
        assert serve(engine, Request(names[0], (*shift * 4, 1, 2)), Request(names[1], (shift[0], 7, 8, 3))) == 2
        for name in names:
            engine.close(name)


def test_a_recording_is_replayed_and_not_made_again(llama: PreTrainedModel) -> None:
    engine = Engine(llama, graphs=True)
    serve(engine, Request("a", PROMPT), Request("b", PROMPT[:1]))
    before = engine.runner.graphs.captured
    calls: list[object] = []
    hook = engine.model.register_forward_pre_hook(lambda *_: calls.append(None))
    for token in range(4):
        engine.forward([Request("a", (*PROMPT, token)), Request("b", (PROMPT[0], token))])
        engine.forward([Request("a", (*PROMPT, token, 1)), Request("b", (PROMPT[0], token, 3))])
    hook.remove()
    assert (engine.runner.graphs.captured, len(calls)) == (before + 1, 2)  # once to warm up, once to be captured


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
    assert engine.runner.graphs.captured == 0
    ours = [record for record in caplog.records if record.name.startswith("crossdraft.")]  # others' come late
    assert [record.levelname for record in ours] == ["WARNING"]
    assert "captured" in caplog.text
    assert "the host would wait" in caplog.text


def nothing(run: Callable[[], None]) -> Callable[[], None]:
    """A capture that misses all."""
    run()
    return lambda: None


def only_logits(run: Callable[[], None]) -> Callable[[], None]:
    """One whose replays write no keys and values: those of the first forward are there, and later ones are not."""
    run()

    def replay() -> None:
        update, KVCache.update = (
            KVCache.update,
            lambda self, keys, values, layer, *_: (self.keys[layer], self.values[layer]),
        )
        try:
            run()
        finally:
            KVCache.update = update

    return replay


@pytest.mark.parametrize("wrong", [nothing, only_logits])
def test_captures_that_are_wrong_are_not_used(
    llama: PreTrainedModel,
    wrong: runner.GraphCapture,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner, "capture_for", lambda _: wrong)
    engine = Engine(llama, graphs=True)
    assert engine.runner.graphs is None
    assert "are not used: " in caplog.text
    serve(engine, Request("a", PROMPT, BRANCHES), Request("b", PROMPT[:1]))


def test_long_texts_and_large_trees_go_as_they_are_among_the_others() -> None:
    llama = tiny_llama(max_position_embeddings=1024)
    engine = Engine(llama, graphs=True)
    before = engine.runner.graphs.captured
    assert serve(engine, Request("a", tuple(range(90)) * 3)) == 270 > TOKENS
    large = TokenTree(tuple(range(MOST_NODES + 1)), tuple(number // 3 - 1 for number in range(MOST_NODES + 1)))
    serve(engine, Request("b", PROMPT, large))
    assert engine.runner.graphs.captured == before
    serve(
        engine, Request("a", (*tuple(range(90)) * 3, 5), BRANCHES), Request("b", (*PROMPT, 3)), Request("c", PROMPT * 9)
    )
    assert engine.runner.graphs.captured == before + 1


def test_captures_are_bounded(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "MOST", 2)
    engine = Engine(llama, graphs=True)
    for number in range(1, 6):
        serve(engine, *(Request((number, session), PROMPT[session:]) for session in range(number)))
    assert engine.runner.graphs.captured == 2


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


def test_rows_are_picked_where_the_model_computes_all_of_them(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
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

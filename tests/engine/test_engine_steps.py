"""Partial steps, slots and other sessions' texts: whatever the order, logits are those of plain forwards."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from crossdraft.engine import runner
from crossdraft.engine.engine import CHUNK, Engine
from crossdraft.engine.kv_cache_manager import SlotAllocator
from crossdraft.engine.requests import ForwardRequest as Request
from crossdraft.types.trees import TokenTree, tree_of
from tests.engine.taped import taped
from tests.engine.test_engine import PROMPT, assert_right, plain, serve
from tests.engine.tiny import examples, tiny_gemma2, tiny_gpt2, tiny_llama, tiny_mistral, tiny_qwen2

WINDOW = 7  # tokens
WINDOWED = [tiny_gemma2(sliding_window=WINDOW), tiny_mistral(sliding_window=WINDOW)]  # in half of the layers, in all
MODELS = [tiny_llama(), tiny_gpt2(), tiny_qwen2(), tiny_gemma2(), *WINDOWED]
SMALL = 4  # extents of 64 places that all sessions share, in the random schedules


@pytest.fixture(autouse=True, scope="module")
def capture() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "capture_for", lambda _: taped)
        yield


def small(model: PreTrainedModel, places: int, graphs: bool = False, chunk: int = CHUNK) -> Engine:
    """An engine with so few places that sessions have to wait."""
    engine = Engine(model, graphs=graphs, chunk=chunk)
    for pool in engine._manager.pools:
        pool.allocator = SlotAllocator(places)
    return engine


def test_who_has_no_places_waits_and_nothing_of_it_is_fed(llama: PreTrainedModel) -> None:
    engine = small(llama, 128)
    first, second, third = (Request(name, (number, *PROMPT)) for number, name in enumerate("abc"))
    assert engine.slots == 128
    for request in (first, second):
        assert engine.admits(request)
        serve(engine, request)
    assert engine.slots_in_use == 128
    assert not engine.admits(third)
    assert engine.step([replace(third, tokens=9)]) == [None]
    engine.close("b")
    assert engine.slots_in_use == 64
    assert engine.admits(third)
    assert serve(engine, third) == 1 + len(PROMPT)
    assert not engine.admits(Request("a", first.context * 10))
    with pytest.raises(ValueError, match="too few free slots for these requests: close other sessions"):
        engine.forward([Request("a", first.context * 10)])


def test_one_session_twice_in_a_step_is_fed_once(llama: PreTrainedModel) -> None:
    engine = Engine(llama)
    first, second = engine.step([Request("a", PROMPT, tokens=9), Request("a", (*PROMPT, 1), tokens=9)])
    assert second is None
    assert first is not None
    assert_right(llama, Request("a", PROMPT), first)


def test_plain_calls_of_the_model_go_on_beside_the_engine(llama: PreTrainedModel) -> None:
    model, engine = llama, Engine(llama)
    serve(engine, Request("a", PROMPT))
    ids = torch.tensor([PROMPT, PROMPT[::-1]])
    padded = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])
    with torch.no_grad():
        both = model(ids, attention_mask=padded, position_ids=(padded.cumsum(1) - 1).clamp(min=0)).logits[:, -1]
        loss = model(ids, labels=ids).loss
    torch.testing.assert_close(both[0], plain(model, PROMPT), atol=1e-5, rtol=0)
    torch.testing.assert_close(both[1], plain(model, PROMPT[::-1][2:]), atol=1e-5, rtol=0)
    assert float(loss) > 0
    assert serve(engine, Request("a", (*PROMPT, 1))) == 1


@settings(max_examples=examples(15, 60))
@given(st.data())
def test_random_schedules(data: st.DataObject) -> None:
    """Sessions come, share steps, wait for places, roll back, end and go on from each other's texts."""
    model = data.draw(st.sampled_from(MODELS))
    # Layers with a window keep fewer tokens than a session may have where few are computed at a time.
    engine = small(model, SMALL * 64, data.draw(st.booleans()), data.draw(st.sampled_from([CHUNK, 20])))
    token = st.integers(0, 2)
    requests: dict[str, Request] = {}
    for _ in range(data.draw(st.integers(1, 12))):
        name = data.draw(st.sampled_from("abcdef"))
        if data.draw(st.integers(0, 5)) == 0:
            engine.close(name)
            requests.pop(name, None)
        else:
            requests[name] = _next(
                data, requests.get(name) or data.draw(st.sampled_from([None, *requests.values()])), name, token
            )
        names = data.draw(st.permutations(sorted(requests)))
        shares = [replace(requests[one], tokens=data.draw(st.sampled_from([1, 3, 20, 100]))) for one in names]
        admitted = {one: engine.admits(requests[one]) for one in names}
        dues = {one: engine.remaining(requests[one]) for one in names}
        before = engine.computed
        for share, logits in zip(shares, engine.step(shares), strict=True):
            if logits is not None:
                assert admitted[share.session]
                assert_right(model, share, logits)
        assert engine.computed - before <= sum(dues.values())
        assert not shares or not admitted[names[0]] or engine.computed > before or dues[names[0]] == 0
    for name in requests:
        engine.close(name)


def _next(data: st.DataObject, before: Request | None, name: str, token: st.SearchStrategy[int]) -> Request:
    """What a session asks for after `before`: more of its text, a branch of its tree, or an earlier point."""
    context, tree = (before.context, before.tree) if before is not None else ((1,), TokenTree())
    emitted = data.draw(st.sampled_from(list(tree.paths())))
    kept = data.draw(st.sampled_from([len(context)] * 3 + [1, 40]))
    fresh = tuple(data.draw(st.lists(token, max_size=3))) * data.draw(st.sampled_from([1, 1, 12]))
    paths = data.draw(st.lists(st.lists(token, min_size=1, max_size=4).map(tuple), max_size=4))
    again = [path[len(emitted) :] for path in tree.paths() if path[: len(emitted)] == emitted]
    grown = tree_of([path for path in (*again, *paths) if path], 10)
    rows = st.none() | st.sets(st.integers(0, len(grown))).map(lambda wanted: tuple(sorted(wanted)))
    return Request(name, (context[:kept] + emitted + fresh)[:100], grown, data.draw(rows))

"""The engine of drafters that read hidden states: a node has the logits of its own path, read token by token."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from crossdraft.engine.eagle.engine import EagleEngine, StateLayer
from crossdraft.engine.loader import FUSION, LoadOptions, load_model
from crossdraft.engine.names import BUNDLED, ModelLoadError
from crossdraft.engine.requests import ContextOverflowError, ForwardRequest, common_prefix
from crossdraft.engine.served_model import ModelOptions, RunningModel
from crossdraft.text.letters import Side
from crossdraft.types.trees import ROOT, TokenTree
from tests.engine.tiny import CONTEXT, VOCABULARY, examples, tiny_llama

WIDTH = 48
TEXT = (5, 9, 2, 77, 31, 8, 40)
TREE = TokenTree((3, 4, 5, 6, 7, 8), (ROOT, ROOT, 0, 2, 1, 0))
tokens = st.integers(0, VOCABULARY - 1)


@pytest.fixture(scope="module")
def layer() -> StateLayer:
    torch.manual_seed(3)
    model = tiny_llama(num_hidden_layers=1).eval()
    return StateLayer(model, torch.randn(WIDTH, 2 * WIDTH) * 0.2, torch.randn(WIDTH))


def state(seed: int) -> Tensor:
    """One of the target's, as exact as it travels."""
    return torch.randn(WIDTH, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def sent(seed: int) -> bytes:
    return state(seed).view(torch.int16).numpy().tobytes()


@torch.inference_mode()
def expected(layer: StateLayer, text: tuple[int, ...], path: tuple[int, ...], given: dict[int, Tensor]) -> Tensor:
    """Logits after a path: the text is read at once, with the states that are given before its tokens, then the path
    token by token, each with the state that the one before has led to."""
    absent, size = layer.absent, len(text)
    before = torch.stack([given.get(place, absent).to(absent.dtype) for place in range(size)])
    kept: list[Tensor] = []

    def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        known = [torch.cat(pair, 1) for pair in zip(kept, (keys, values), strict=True)] if kept else [keys, values]
        kept[:] = known
        repeats = queries.shape[2] // keys.shape[2]
        keys, values = (each.repeat_interleave(repeats, 2) for each in known)
        scores = torch.einsum("rqhd,rkhd->rhqk", queries, keys) * queries.shape[-1] ** -0.5
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(keys.shape[1] - queries.shape[1])
        return torch.einsum("rhqk,rkhd->rqhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), values)

    ids, places = torch.tensor([text]), torch.arange(size)[None]
    last = layer(ids, before[None], places, attend)[0, -1]
    last = given.get(size, last).to(absent.dtype)
    for depth, token in enumerate(path):
        last = layer(torch.tensor([[token]]), last[None, None], torch.tensor([[size + depth]]), attend)[0, 0]
    return layer.logits(last)


def compare(layer: StateLayer, found: Tensor, request: ForwardRequest, given: dict[int, Tensor]) -> None:
    paths = [*request.tree.paths()]
    for row, logits in zip(request.rows(), found, strict=True):
        torch.testing.assert_close(logits, expected(layer, request.context, paths[row], given), atol=2e-4, rtol=1e-3)


def test_a_tree_that_grows_has_the_logits_of_each_path(layer: StateLayer) -> None:
    engine, states = EagleEngine(layer, None, 1), {3: state(3), 4: state(4), 7: state(7)}
    engine.give("a", TEXT, {place: sent(place) for place in states})
    for size in (0, 2, 3, 6):
        tree = TokenTree(TREE.tokens[:size], TREE.parents[:size])
        request = ForwardRequest("a", TEXT, tree, (size,) if size == 3 else None)
        compare(layer, engine.forward([request])[0], request, states)
    assert engine.computed == len(TEXT) + len(TREE)  # each token once


def test_states_of_what_was_accepted_replace_those_that_were_drafted(layer: StateLayer) -> None:
    engine, request = EagleEngine(layer, None, 1), ForwardRequest("a", TEXT, TREE)
    engine.forward([request])
    longer = (*TEXT, 3, 5, 60)  # two nodes of the tree, and what the target has drawn after them
    states = {len(TEXT) + at: state(at) for at in range(3)}
    engine.give("a", longer, {place: sent(at) for at, place in enumerate(states)})
    request, computed = ForwardRequest("a", longer, TokenTree((1,), (ROOT,))), engine.computed
    compare(layer, engine.forward([request])[0], request, states)
    assert engine.computed - computed == 3 + 1


def test_a_state_that_comes_late_is_read_again_from_there(layer: StateLayer) -> None:
    engine, request = EagleEngine(layer, None, 1), ForwardRequest("a", TEXT, TREE)
    engine.forward([request])
    engine.give("a", TEXT, {1: sent(1)})
    found = engine.forward([request])[0]
    assert not torch.allclose(found[0], expected(layer, TEXT, (), {}), atol=1e-3)
    assert engine.due(request) == []


def test_where_no_states_come_the_drafted_ones_are_kept(layer: StateLayer) -> None:
    """Accepted, or lost with a target: what follows is as if the layer's own had been given."""
    engine, own = EagleEngine(layer, None, 1), {}
    engine.forward([ForwardRequest("a", TEXT, TREE)])
    text = engine._texts["a"]
    for at, slot in enumerate((7, 8, 10)):  # after the text, after 3, after 5
        own[len(TEXT) + at] = text.states[slot].clone()
    request = ForwardRequest("a", (*TEXT, 3, 5, 60))
    compare(layer, engine.forward([request])[0], request, own)


@settings(max_examples=examples(25, 300), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 8), st.lists(tokens, min_size=1, max_size=4), st.booleans()), max_size=6))
def test_texts_that_are_rewound_and_go_on(layer: StateLayer, changes: list[tuple[int, list[int], bool]]) -> None:
    """Every position's state comes, so that what is read does not depend on how the text came about."""
    engine, text, places = EagleEngine(layer, None, 1), TEXT, {*range(1, len(TEXT))}
    engine.give("a", text, {place: sent(place) for place in places})
    for back, more, drafts in changes:
        kept, before = max(1, len(text) - back), text
        text = (*text[:kept], *more)
        same = common_prefix(before, text)  # one that was given after the text's last token still holds
        places = {place for place in places if place <= same} | {*range(kept, len(text))}
        engine.give("a", text, {place: sent(place) for place in range(kept, len(text))})
        request = ForwardRequest("a", text, TREE if drafts else TokenTree())
        compare(layer, engine.forward([request])[0], request, {place: state(place) for place in places})


def test_sessions_of_one_step_do_not_see_each_other(layer: StateLayer) -> None:
    engine = EagleEngine(layer, None, 1)
    requests = [
        ForwardRequest("a", TEXT, TREE),
        ForwardRequest("b", TEXT[::-1]),
        ForwardRequest("c", TEXT * 3, TokenTree((1, 2), (ROOT, 0))),
        ForwardRequest("a", TEXT),  # another one of the same session: later
    ]
    *found, later = engine.step([replace(one, tokens=512) for one in requests])
    assert later is None
    for logits, request in zip(found, requests, strict=False):
        compare(layer, logits, request, {})


def test_a_long_text_is_read_in_parts(layer: StateLayer) -> None:
    engine, request = EagleEngine(layer, None, 1), ForwardRequest("a", TEXT * 3)
    assert engine.step([replace(request, tokens=16)]) == [None]
    assert engine.remaining(request) == 5
    (logits,) = engine.step([replace(request, tokens=16)])
    states = {16: engine._texts["a"].states[16]}  # the part goes on from what it has led to
    compare(layer, logits[:0] if logits is None else logits, request, states)


def test_what_a_session_may_take(layer: StateLayer) -> None:
    engine = EagleEngine(layer, 32, 1)
    with pytest.raises(ContextOverflowError):
        engine.check(ForwardRequest("a", TEXT * 5))
    with pytest.raises(ValueError, match="ids must be 0 to 96, got 97"):
        engine.check(ForwardRequest("a", (97,)))
    engine._slots = 256
    for name in ("a", "b"):
        engine.forward([ForwardRequest(name, TEXT)])
    third = ForwardRequest("c", TEXT)
    assert (engine.slots_in_use, engine.admits(third)) == (256, False)
    assert engine.step([replace(third, tokens=512)]) == [None]
    engine.close("a")
    engine.give("b", TEXT, {})
    assert engine.admits(third)


def test_only_what_fits_is_loaded_and_only_to_draft(tmp_path: Path) -> None:
    loaded = load_model(LoadOptions("bundled:drafter-eagle"))
    assert loaded.fusion == BUNDLED / "drafter-eagle"
    with pytest.raises(ModelLoadError, match="it can only draft"):
        RunningModel.of(loaded, Side.TARGET, ModelOptions(""))
    save_file({"fusion": torch.zeros(4, 8), "absent": torch.zeros(4)}, tmp_path / FUSION)
    with pytest.raises(ValueError, match="does not fit a model of 1 layers, 256 wide"):
        StateLayer.of(loaded.model, tmp_path)
    assert loaded.description.context >= CONTEXT

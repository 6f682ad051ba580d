"""Windows, sinks, latent attention and others against plain forwards, beyond the window."""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from math import nan
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from crossdraft.engine import attention, batch, compatibility, engine, kv_cache_manager
from crossdraft.engine.attention import Window
from crossdraft.engine.compatibility import UnsupportedModelError, window_of
from crossdraft.engine.conformance import conformance, greedy
from crossdraft.engine.engine import Engine
from crossdraft.engine.loader import LoadOptions, load_model, quantize
from crossdraft.engine.names import ModelLoadError
from crossdraft.engine.requests import ForwardRequest as Request
from crossdraft.lab import models
from crossdraft.lab.models import RANDOM_CONTEXT, RANDOM_WINDOW, architectures, random_model
from crossdraft.types.trees import tree_of
from tests.engine.test_engine import BRANCHES, serve
from tests.engine.tiny import CONTEXT, VOCABULARY

WINDOW = 8
SMALLER = {"sliding_window": WINDOW, "attention_chunk_size": WINDOW, "max_position_embeddings": CONTEXT}
MIXED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2}
ON = {"use_sliding_window": True, **MIXED}
# What differs from a configuration with small sizes: windows that are off in it, and numbers that show in short texts.
CHANGES: list[tuple[str, dict[str, object]]] = [
    ("mistral gemma3_text deepseek_v2 deepseek_v3 stablelm", {}),
    ("gpt_oss", {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}),
    ("nemotron", {"num_hidden_layers": 2}),
    ("mixtral phi3 starcoder2", {"sliding_window": WINDOW}),
    ("ministral cohere2 exaone4 olmo3", MIXED),
    ("qwen2 qwen3 qwen2_moe smollm3", ON),
    ("gemma2", {"attn_logit_softcapping": 2.0}),
    ("llama4_text", {"floor_scale": 4, "attn_scale": 0.5}),
]
ARCHITECTURES = {name: changes for names, changes in CHANGES for name in names.split()}
KERNEL = attention._by_kernel
TEXT = tuple((5 * number + number // 7) % 97 for number in range(5 * WINDOW))  # 40 tokens, longer than a hashed block
DEEP = tree_of([tuple(range(50, 50 + 2 * WINDOW)), (50, 51, 3, 4), (7, 8)], budget=40)  # a path of two windows


@cache
def made(name: str, **options: object) -> PreTrainedModel:
    """The model of a name, the same in all tests that change the same options."""
    with patch.dict(models.RANDOM_SIZES, SMALLER):
        return models.random_model(name, VOCABULARY, **{**ARCHITECTURES[name], **options})


@pytest.mark.parametrize("graphs", [False, True], ids=["flat", "graphs"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_are_the_models_own_beyond_the_window(name: str, graphs: bool) -> None:
    engine = Engine(made(name), chunk=2 * WINDOW - 1, graphs=graphs)
    assert (engine.runner.graphs is not None) == (graphs and not engine._cache.gathers)
    serve(engine, Request("a", TEXT), Request("b", TEXT[:1], DEEP), Request("c", TEXT[5:15]))  # in chunks
    longer = (*TEXT, 9)
    assert serve(engine, Request("a", longer, DEEP), Request("b", TEXT[: 2 * WINDOW])) == 1 + len(DEEP) + 2 * WINDOW - 1
    emitted = (*longer, 50, 51, 3)  # nodes that are not the first ones, which move
    assert serve(engine, Request("a", (*emitted, 6), BRANCHES, wanted=(0, 4))) == 1 + len(BRANCHES)
    assert serve(engine, Request("a", TEXT[:30], DEEP, wanted=(0, 5, 16))) == 1 + len(DEEP)  # rolled back
    engine.close("a")
    assert serve(engine, Request("d", (*TEXT[:30], *TEXT[:12])), Request("c", (*TEXT[5:15], 2))) == 42 + 1
    engine.close("d")
    assert serve(engine, Request("e", (*TEXT[:30], *TEXT[:6], 1, 2))) == 2  # what it has in common with d


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "gpt_oss" else pytest.mark.full) for name in ARCHITECTURES]
)
def test_so_they_are_by_the_kernel_for_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter."""
    monkeypatch.setattr(attention, "_by_kernel", KERNEL)
    monkeypatch.setattr(attention, "PARTS", 2)
    engine = Engine(made(name), chunk=2 * WINDOW - 1, graphs=True, graph_sizes=(8,))
    serve(engine, Request("a", TEXT[: WINDOW + 2]), Request("b", TEXT[:3]))
    serve(engine, Request("a", (*TEXT[: WINDOW + 2], 9), tree_of([(50, 51), (50, 3)], 3)))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("mistral", {"sliding_window": None}),
        ("qwen2", {"use_sliding_window": False, "layer_types": None}),
        ("qwen2_moe", {"use_sliding_window": False, "sliding_window": 0, "layer_types": None}),
    ],
)
def test_a_window_that_is_off_is_no_window(name: str, changes: dict[str, object]) -> None:
    engine = Engine(made(name, **changes))
    assert {*engine.windows} == {None}
    serve(engine, Request("a", TEXT))


def masked(sees: Callable[[Tensor, Tensor], Tensor]) -> Window | None:
    """The window that is found in a mask of 50 tokens."""
    return window_of(lambda _, __, place, key: (key <= place) & sees(place, key), 50, torch.device("cpu"))


def test_windows_are_read_from_masks() -> None:
    assert masked(lambda place, key: key > place - 50) is None
    for size in (1, 2, 7, 49):
        assert masked(lambda place, key, size=size: key > place - size) == Window(size)
    for size in (2, 7, 25, 49):
        assert masked(lambda place, key, size=size: key // size == place // size) == Window(size, chunked=True)
    for odd in (lambda place, key: (place - key) % 3 == 0, lambda place, key: (key > place - 5) | (key < 3)):
        with pytest.raises(UnsupportedModelError, match="neither causal, nor a sliding window, nor one of chunks"):
            masked(odd)


def test_a_window_of_nothing_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="set sliding_window to null"):
        Engine(made("mistral", sliding_window=0))


def test_windows_that_no_mask_tells_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, note = made("mistral"), compatibility._note
    patched = partial(monkeypatch.setitem, compatibility.AttentionInterface._global_mapping)
    patched(compatibility.NOTING, lambda *given, **options: note(*given[:4], None, **options))
    with pytest.raises(UnsupportedModelError, match=f"set --max-model-len to {WINDOW} or less"):
        Engine(model)
    serve(Engine(model, max_length=WINDOW), Request("a", TEXT[:WINDOW]))


# What `crossdraft check` compares: exact for many architectures, and every fault is seen.


# Of each family one, and those whose attention differs: windows, latent attention, sinks, norms, shared layers.
SERVED = (
    "llama", "gpt2", "opt", "gpt_bigcode", "gpt_neox", "phi", "persimmon", "biogpt", "olmo2", "olmoe",
    "granite", "cohere", "glm4", "helium", "arcee", "diffllama", "doge", "hunyuan_v1_moe", "longcat_flash",
    "minicpm3", "jetmoe", "dots1", "ernie4_5_moe", "nanochat", "mimo_v2_flash", "vaultgemma", "solar_open",
    "seed_oss", "youtu",
)  # fmt: skip
SEQUENTIAL = {
    "mamba": "does not keep keys and values",
    "rwkv": "does not keep keys and values",
    "jamba": "more than keys and values (LinearAttentionLayer",
    "lfm3": "more than keys and values (LinearAttentionLayer",
    "deepseek_v32": "more than keys and values (DynamicIndexedLayer",
    "bloom": "does not go through the interface",
}
REFUSED = {
    "bert": "does not keep keys and values .*; session by session: .* no causal mask",
    "recurrent_gemma": "does not keep keys and values .*; session by session: .* not those along its paths",
    "xmod": "no plain call",
}


@pytest.mark.parametrize("name", [name for name in SERVED if name not in ARCHITECTURES])
def test_the_engine_computes_what_the_model_does(name: str) -> None:
    found = conformance(random_model(name, VOCABULARY))
    assert found.exact, found.results
    assert max(result.difference for result in found.results) < 1e-4
    assert found.memory.context == RANDOM_CONTEXT


@pytest.mark.parametrize("name", SEQUENTIAL)
def test_so_does_the_one_that_runs_session_by_session(name: str) -> None:
    found = conformance(random_model(name, VOCABULARY))
    assert found.exact, found.results
    assert SEQUENTIAL[name] in found.unbatched
    assert "a reused prefix" not in {result.name for result in found.results}


@pytest.mark.full
@pytest.mark.parametrize("name", architectures())
def test_no_architecture_is_served_wrongly(name: str) -> None:
    try:
        assert conformance(random_model(name, VOCABULARY)).exact
    except (ModelLoadError, UnsupportedModelError) as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_has_the_true_reason(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=REFUSED[name]):
        conformance(random_model(name, VOCABULARY))


def test_a_random_model_has_the_data_type_that_is_asked_for_and_a_short_window_or_there_is_none() -> None:
    assert load_model(LoadOptions("random:llama", dtype="bfloat16")).model.dtype == torch.bfloat16
    windows = conformance(random_model("mistral", VOCABULARY)).windows
    assert windows == (Window(RANDOM_WINDOW),)
    with pytest.raises(ModelLoadError, match="no small random model of llama9"):
        random_model("llama9", VOCABULARY)


def test_a_model_whose_weights_are_no_numbers_is_refused_for_that() -> None:
    broken = random_model("llama", VOCABULARY)
    broken.model.norm.weight.data[0] = nan
    with pytest.raises(UnsupportedModelError, match="its weights have NaN"):
        Engine(broken)


def test_a_model_without_a_context_length_needs_one() -> None:
    model = random_model("mamba", VOCABULARY)
    del model.config.max_position_embeddings
    with pytest.raises(ValueError, match="set --max-model-len"):
        Engine(model)


def off_by_one(found: Callable[..., Window | None]) -> Callable[..., Window | None]:
    def wrong(*given: Any) -> Window | None:
        window = found(*given)
        return window and replace(window, size=window.size - 1)

    return wrong


def deep_nodes_see_all(visible: Callable[..., Any]) -> Callable[..., Any]:
    """In trees of more nodes than the engine compares at its start."""

    def wrong(slices: Any, width: int, used: int, *where: Any) -> Any:
        seen = visible(slices, width, used, *where)
        for row, one in enumerate(slices):
            if len(one.tree) > 8 and not one.tree.is_chain:
                seen[row, :, one.committed :] = True
        return seen

    return wrong


@pytest.mark.parametrize(
    ("place", "name", "wrong", "cases"),
    [
        (compatibility, "window_of", off_by_one, {"a prompt", "a text of 109 tokens"}),
        (batch, "visible", deep_nodes_see_all, {"a draft tree"}),
        (engine, "plan_inputs", lambda plan: lambda *given: replace(plan(*given), moves=()), {"a committed branch"}),
        (kv_cache_manager, "common_prefix", lambda _: lambda *texts: min(map(len, texts)), {"a reused prefix"}),
    ],
)
def test_a_fault_is_seen(place, name, wrong, cases, monkeypatch):
    model = random_model("gemma3_text", VOCABULARY)
    monkeypatch.setattr(place, name, wrong(getattr(place, name)))
    found = {result.name for result in conformance(model).results if not result.exact}
    assert cases <= found


def test_memory_is_what_weights_and_keys_take() -> None:
    model = random_model("llama", VOCABULARY)
    memory = conformance(model, max_length=256).memory
    assert memory.token_bytes == 4 * 2 * (2 * 16) * 4  # layers, keys and values, heads, float32
    assert memory.session_mib == 256 * memory.token_bytes / 2**20


def test_greedy_output_goes_on_behind_an_end() -> None:
    model = random_model("llama", VOCABULARY)
    found = greedy(model, (5, 6, 7), 12)
    model.generation_config.eos_token_id = found[3].token
    assert [one.token for one in greedy(model, (5, 6, 7), 12)] == [one.token for one in found]
    ids = torch.tensor([[5, 6, 7, *(one.token for one in found)]])
    best = model(ids).logits[0, 2:-1].float().topk(2)
    assert best.indices[:, 0].tolist() == [one.token for one in found]
    torch.testing.assert_close(best.values[:, 0] - best.values[:, 1], torch.tensor([one.ahead for one in found]))


def test_a_quantized_model_is_served_as_it_is() -> None:
    """Its distribution is that of its own weights, which are a quarter as large but for embedding and head.

    Where torchao is installed, transformers imports it whenever a model is loaded: other tests do without it.
    """
    pytest.importorskip("torchao")
    plain, model = random_model("llama", VOCABULARY), random_model("llama", VOCABULARY)
    quantize(model)
    found = conformance(model)
    assert found.exact, found.results
    assert found.memory.weights_mib < 0.6 * conformance(plain).memory.weights_mib
    assert {type(layer.mlp.up_proj.weight).__name__ for layer in model.model.layers} == {"Int8Tensor"}


def test_quantization_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(ModelLoadError, match=r"needs torchao: .* pip install"):
        load_model(LoadOptions("random:llama", quantization="int8"))

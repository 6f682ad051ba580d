"""Models made for measurements: inflated ones compute what the originals do."""

from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

from crossdraft.engine.engine import Engine
from crossdraft.engine.loader import LoadOptions, load_model
from crossdraft.engine.names import ModelLoadError, NumberOutOfRangeError, source_of
from crossdraft.engine.requests import ForwardRequest
from crossdraft.lab.models import Larger
from crossdraft.text.letters import Side
from crossdraft.text.tokenizer_file import load_tokenizer_json
from crossdraft.types.trees import tree_of
from tests.engine.tiny import tiny_gpt2, tiny_llama

PROMPT = (5, 17, 3, 88, 41, 2)
IDS = [(5, 6, 7, 8), (40, 41, 42), (9,) * 12]
ROPE = {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}
WORK = ForwardRequest("a", PROMPT, tree_of([(1, 2, 3), (7, 8)], 9))


@torch.inference_mode()
def greedy(model: PreTrainedModel, prompt: tuple[int, ...], tokens: int) -> tuple[int, ...]:
    """By whole forwards."""
    ids = list(prompt)
    for _ in range(tokens):
        ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return tuple(ids[len(prompt) :])


@torch.inference_mode()
def largest_difference(one: PreTrainedModel, other: PreTrainedModel) -> float:
    """Between the logits of two models on the same random prompts."""
    ids = torch.randint(one.config.vocab_size, (4, 24), generator=torch.Generator().manual_seed(0))
    return float((one(ids, use_cache=False).logits - other(ids, use_cache=False).logits).abs().max())


@pytest.mark.parametrize(
    ("size", "changes"),
    [
        (Larger(3, 48), {}),
        (Larger(5, 96), {"attention_bias": True, "mlp_bias": True}),
        (Larger(3, 50, 90), {"tie_word_embeddings": True, "num_key_value_heads": 4}),
        (Larger(4, 144, 64), {"head_dim": 16, "rope_parameters": ROPE}),
        (Larger(5, 96), {"rms_norm_eps": 0.1}),
    ],
)
def test_the_same_function_in_a_larger_shape(size: Larger, changes: dict[str, object]) -> None:
    original = tiny_llama(**changes)
    draw = torch.Generator().manual_seed(7)
    for name, parameter in original.named_parameters():
        if "norm" in name or "bias" in name:
            torch.nn.init.normal_(parameter, 0.5, generator=draw)
    model = size.grown(original)
    assert (model.config.num_hidden_layers, model.config.hidden_size) == (size.layers, size.hidden)
    assert len(model.model.layers) == size.layers
    assert largest_difference(original, model) < 1e-4
    for one, other in zip(Engine(model).forward([WORK]), Engine(original).forward([WORK]), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=0)


def test_added_layers_compute_and_only_their_outputs_are_zero() -> None:
    added = Larger(5, 96).grown(tiny_llama()).model.layers[4]
    for name, parameter in added.named_parameters():
        assert bool(parameter.any()) == (name not in ("self_attn.o_proj.weight", "mlp.down_proj.weight")), name


def test_a_smaller_shape_is_refused() -> None:
    for size in (Larger(2, 48), Larger(3, 47), Larger(3, 48, 63)):
        with pytest.raises(NumberOutOfRangeError, match="at least the model's own"):
            size.grown(tiny_llama())


def test_an_architecture_that_is_not_known_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="GPT2LMHeadModel, and only LlamaForCausalLM"):
        Larger(4, 96).grown(tiny_gpt2())


@torch.inference_mode()
def test_ids_that_a_larger_vocabulary_adds_are_never_drawn() -> None:
    for tied in (True, False):
        original = tiny_llama(tie_word_embeddings=tied)
        own = original.config.vocab_size
        for parameter in original.parameters():
            parameter.neg_()  # all logits may be negative, and those of rows of zeros are 0
        model = Larger(3, 48, None, own + 300).grown(original)
        ids = torch.randint(own, (4, 24), generator=torch.Generator().manual_seed(0))
        logits, larger = (one(ids, use_cache=False).logits for one in (original, model))
        torch.testing.assert_close(larger[..., :own], logits, atol=1e-4, rtol=0)
        assert larger.shape[-1] == own + 300
        assert larger.double().softmax(-1)[..., own:].sum() == 0
    loaded = load_model(LoadOptions("inflated:6x256x768+5000:bundled:target"))
    assert loaded.description.vocabulary_size == 5000
    assert greedy(loaded.model, IDS[0], 3) == greedy(load_model(LoadOptions("bundled:target")).model, IDS[0], 3)


@pytest.mark.parametrize(("model", "side"), [("target", Side.TARGET), ("drafter-b", Side.DRAFTER)])
@pytest.mark.parametrize("size", [128_256, 151_936])
def test_ids_that_a_larger_vocabulary_adds_have_texts_of_their_own(model: str, side: Side, size: int) -> None:
    about = load_tokenizer_json(source_of(f"bundled:{model}"))
    own, larger = about.tokenizer_json, Larger(6, 256, None, size).spelled(about.tokenizer_json)
    tokenization = replace(about, tokenizer_json=larger).tokenization(side, size)
    letters = tokenization.vocabulary.letters
    assert len({*letters[about.vocabulary_size :]}) == size - about.vocabulary_size
    assert letters[size - 1] == f"<unused{size - 1}>"
    for text in ("def f(x):\n    return x", "<unused5000>"):
        assert tokenization.encode_prompt(text) == about.tokenization(side).encode_prompt(text)
    assert Larger(6, 256).spelled(own) == own


@pytest.mark.parametrize(
    "name",
    [
        *("inflated:7:bundled:target", "inflated:axb:bundled:target", "inflated:1x512:bundled:target"),
        *("inflated:7x512+:bundled:target", "inflated:7x512+9x9:bundled:target", "inflated:7x512+4095:bundled:target"),
    ],
)
def test_shapes_that_cannot_be_are_refused(name: str) -> None:
    with pytest.raises(ModelLoadError, match=r"give inflated:LAYERSxHIDDEN|must be at least the model's own"):
        load_model(LoadOptions(name))

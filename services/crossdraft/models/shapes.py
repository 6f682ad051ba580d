"""Random weights in the shapes of real models, to measure times where the models themselves are not at hand."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PretrainedConfig, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from crossdraft.models.names import ModelLoadError

CONTEXT = 512  # tokens; the real ones have more, which changes no time of a short text

_QWEN = Qwen2Config(
    vocab_size=151_936,
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    max_position_embeddings=CONTEXT,
    tie_word_embeddings=True,
)
# What EAGLE-2 drafts with for Llama-3-8B: one layer, and the target's head. Tied here, which halves the memory.
_EAGLE = LlamaConfig(
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_hidden_layers=1,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=CONTEXT,
    tie_word_embeddings=True,
)
_SHAPES: dict[str, tuple[type[PreTrainedModel], PretrainedConfig]] = {
    "qwen2.5-0.5b": (Qwen2ForCausalLM, _QWEN),
    "eagle-llama-3-8b": (LlamaForCausalLM, _EAGLE),
}


def random_model(shape: str, seed: int = 0) -> PreTrainedModel:
    """A model with random weights, float32, in evaluation mode.

    Raises:
        ModelLoadError: there is no such shape.
    """
    if shape not in _SHAPES:
        raise ModelLoadError(f"there is no shape {shape!r}: there are {', '.join(_SHAPES)}")
    kind, config = _SHAPES[shape]
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model: PreTrainedModel = kind(config).eval()
    return model

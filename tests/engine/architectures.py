"""Small random models of architectures with windows, sinks, latent attention, and attention that gets no options."""

from functools import cache
from unittest.mock import patch

from transformers import PreTrainedModel

from crossdraft.lab import models
from tests.engine.tiny import CONTEXT, VOCABULARY

WINDOW = 8
SMALLER = {"sliding_window": WINDOW, "attention_chunk_size": WINDOW, "max_position_embeddings": CONTEXT}
MIXED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2}
ON = {"use_sliding_window": True, **MIXED}
# What differs from a configuration with small sizes: windows that are off in it, and numbers that show in short texts.
CHANGES: list[tuple[str, dict[str, object]]] = [
    ("mistral gemma3_text gpt_oss deepseek_v2 deepseek_v3 stablelm", {}),
    ("nemotron", {"num_hidden_layers": 2}),
    ("mixtral phi3 starcoder2", {"sliding_window": WINDOW}),
    ("ministral cohere2 exaone4 olmo3", MIXED),
    ("qwen2 qwen3 qwen2_moe smollm3", ON),
    ("gemma2", {"attn_logit_softcapping": 2.0}),
    ("llama4_text", {"floor_scale": 4, "attn_scale": 0.5}),
]
ARCHITECTURES = {name: changes for names, changes in CHANGES for name in names.split()}


@cache
def made(name: str, **options: object) -> PreTrainedModel:
    """The model of a name, the same in all tests that change the same options."""
    with patch.dict(models.RANDOM_SIZES, SMALLER):
        return models.random_model(name, VOCABULARY, **{**ARCHITECTURES[name], **options})

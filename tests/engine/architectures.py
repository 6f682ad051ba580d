"""Small random models of architectures with windows, sinks, latent attention, and attention that gets no options."""

from functools import cache

import transformers
from transformers import PreTrainedModel

from tests.engine.tiny import seeded

WINDOW = 8
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 97,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
SLIDING, CHUNKED, FULL = "sliding_attention", "chunked_attention", "full_attention"
MIXED = {"sliding_window": WINDOW, "layer_types": [SLIDING, FULL]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
LATENT = {
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "head_dim": 8,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
ARCHITECTURES: dict[str, tuple[str, dict[str, object]]] = {
    "mistral": ("Mistral", {"sliding_window": WINDOW}),
    "ministral": ("Ministral", MIXED),
    "mixtral": ("Mixtral", {"sliding_window": WINDOW, "num_local_experts": 4}),
    "phi3": ("Phi3", {"sliding_window": WINDOW}),
    "starcoder2": ("Starcoder2", {"sliding_window": WINDOW}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen2_moe": ("Qwen2Moe", {"use_sliding_window": True, **EXPERTS, **MIXED}),
    "gemma2": ("Gemma2", {**MIXED, "query_pre_attn_scalar": 9, "attn_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3", {**MIXED, "query_pre_attn_scalar": 9}),
    "gpt_oss": ("GptOss", {**MIXED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "cohere2": ("Cohere2", MIXED),
    "exaone4": ("Exaone4", MIXED),
    "olmo3": ("Olmo3", MIXED),
    "smollm3": ("SmolLM3", {"use_sliding_window": True, **MIXED}),
    "llama4": (
        "Llama4",
        {
            "attention_chunk_size": WINDOW,
            "layer_types": [CHUNKED, FULL],
            "no_rope_layers": [1, 0],
            "floor_scale": 4,
            "attn_scale": 0.5,
            "intermediate_size_mlp": 48,
            "num_local_experts": 4,
            "moe_layers": [1],
        },
    ),
    "deepseek_v2": ("DeepseekV2", {**LATENT, "topk_method": "greedy", "mlp_layer_types": ["dense", "sparse"]}),
    "deepseek_v3": ("DeepseekV3", {**LATENT, "mlp_layer_types": ["dense", "sparse"]}),
    "nemotron": ("Nemotron", {}),
    "stablelm": ("StableLm", {}),
}


@cache
def made(name: str, **options: object) -> PreTrainedModel:
    """The model of a name, the same in all tests that change the same options."""
    kind, changes = ARCHITECTURES[name]
    config = getattr(transformers, f"{kind}TextConfig", None) or getattr(transformers, f"{kind}Config")
    return seeded(getattr(transformers, f"{kind}ForCausalLM"), config(**{**SIZES, **changes, **options}))

"""Small random models of any architecture that transformers has: what `random:ARCHITECTURE` names.

Their configuration is the architecture's own, with small sizes; their tokenizer is one of bytes.
"""

from itertools import cycle, islice
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from crossdraft.engine.compatibility import FAILURES
from crossdraft.engine.names import ModelLoadError

WINDOW = 24  # tokens, of layers with a window
SWITCHES = ("sliding_window", "attention_chunk_size", "q_lora_rank")  # 0 or None: off, and then they stay so
KINDS = ("layer_types", "mlp_layer_types")  # of layers
LAYERS = 4
LARGEST = 10_000_000  # parameters: some architectures have parts whose sizes are not among those that are set
RANDOM_CONTEXT = 512
SIZES: dict[str, int] = {  # what configurations call their sizes: those that one has are set
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "intermediate_size_mlp", "decoder_ffn_dim"), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **{"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_ssm": 128, "mamba_d_state": 16, "expand": 1},
    **dict.fromkeys(("linear_head_dim", "linear_key_head_dim", "linear_value_head_dim", "mamba_head_dim"), 16),
    **dict.fromkeys(("linear_num_heads", "linear_num_key_heads", "linear_num_value_heads", "mamba_num_heads"), 4),
    **{"attn_layer_period": 2, "attn_layer_offset": 1, "n_groups": 1},
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), RANDOM_CONTEXT),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "kv_lora_rank"), 32),
    **dict.fromkeys(("head_dim", "query_pre_attn_scalar", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 16),
    **dict.fromkeys(("n_shared_experts", "n_group", "topk_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(SWITCHES, WINDOW),
    **{"num_key_value_heads": 2, "rotary_dim": 8, "hidden_size_per_layer_input": 16},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}


def architectures() -> list[str]:
    """All causal language models of transformers, by the names in their configurations."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def random_model(architecture: str, vocabulary: int) -> PreTrainedModel:
    """A small model of an architecture with so many ids and random weights, always the same; float32, on a CPU.

    Raises:
        ModelLoadError: transformers has no such causal language model, or none of these sizes.
    """
    try:
        config = _small(CONFIG_MAPPING[architecture]().get_text_config(), vocabulary)
        with torch.device("meta"):  # takes no memory
            size = AutoModelForCausalLM.from_config(config).num_parameters()
        if size > LARGEST:
            raise ValueError(f"with the sizes that are set it has {size:,} parameters")
        with torch.random.fork_rng(devices=()), torch.no_grad():
            torch.manual_seed(11)
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
            for parameter in model.parameters():
                if parameter.ndim > 1:  # larger than usual: the logits differ clearly
                    torch.nn.init.normal_(parameter, std=0.15)
    except (*FAILURES, ArithmeticError, StrictDataclassError) as error:
        raise ModelLoadError(f"there is no small random model of {architecture}: {error}") from error
    model.eval()
    return model


def _small(usual: PreTrainedConfig, vocabulary: int) -> PreTrainedConfig:
    """The configuration with small sizes, and with as many kinds of layers as it has."""
    off = {name for name in SWITCHES if not getattr(usual, name, None)}
    names = {name: usual.attribute_map.get(name, name) for name in (*SIZES, *KINDS)}
    derived = {name for name, own in names.items() if isinstance(getattr(type(usual), own, None), property)}
    sizes = {name: size for name, size in SIZES.items() if hasattr(usual, name) and name not in off | derived}
    changes: dict[str, Any] = {**sizes, "vocab_size": vocabulary}
    if "qk_rope_head_dim" in sizes:
        changes["num_key_value_heads"] = SIZES["num_attention_heads"]  # latent attention has no fewer
    for name in KINDS:
        kinds = getattr(usual, name, None)
        if kinds and name not in derived:
            kinds = [*kinds, "full_attention"] if {*kinds} == {"linear_attention"} else kinds  # as trained models have
            changes[names[name]] = [*islice(cycle(dict.fromkeys(kinds)), LAYERS)]
    if hasattr(usual, "attn_layer_indices"):
        changes["attn_layer_indices"] = [1, 3]
    config = type(usual)(**changes)
    if getattr(config, "max_position_embeddings", None) is None:
        config.max_position_embeddings = RANDOM_CONTEXT
    return config

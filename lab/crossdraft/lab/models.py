"""Models made for measurements: small random ones of any architecture, the same function in a larger shape, and one
that costs next to nothing."""

import copy
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from tokenizers import Tokenizer
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from crossdraft.engine.compatibility import FAILURES
from crossdraft.engine.loader import LoadOptions, load_model
from crossdraft.engine.names import INFLATED_PREFIX, ModelLoadError, NumberOutOfRangeError

SHAPE = re.compile(r"(\d+)x(\d+)(?:x(\d+))?(?:\+(\d+))?")
OUTPUTS = ("self_attn.o_proj.", "mlp.down_proj.")  # of a layer: what they give is added to the residual stream
UNUSED = -1e4  # logit of an id that a larger vocabulary adds: its probability is 0, also in float64


@dataclass(frozen=True)
class Larger:
    """The shape of a model that is inflated."""

    layers: int
    hidden: int  # width of the residual stream; the heads' width stays, and there are more of them
    intermediate: int | None = None  # width of the MLP; None: grows as `hidden` does
    vocabulary: int | None = None  # ids, of which those beyond the model's own are never drawn; None: the model's own

    @staticmethod
    def of(name: str) -> "Larger":
        """Of a name that begins with INFLATED_PREFIX; raises ModelLoadError."""
        numbers = SHAPE.fullmatch(name.removeprefix(INFLATED_PREFIX).partition(":")[0])
        if numbers is None:
            raise ModelLoadError(f"{name}: give {INFLATED_PREFIX}LAYERSxHIDDEN[xINTERMEDIATE][+VOCABULARY]:NAME")
        layers, hidden, *others = numbers.groups()
        return Larger(int(layers), int(hidden), *(None if number is None else int(number) for number in others))

    def spelled(self, tokenizer_json: str) -> str:
        """A tokenizer with a text for every id, as real vocabularies of that size have; it encodes none of the new."""
        tokenizer = json.loads(tokenizer_json)
        vocabulary = tokenizer["model"].get("vocab")
        if self.vocabulary is None or not isinstance(vocabulary, dict):
            return tokenizer_json
        taken = {*vocabulary.values(), *(token["id"] for token in tokenizer.get("added_tokens", ()))}
        vocabulary.update({f"<unused{token}>": token for token in range(self.vocabulary) if token not in taken})
        return json.dumps(tokenizer)

    def grown(self, original: PreTrainedModel, device: torch.device | None = None) -> LlamaForCausalLM:
        """The same function in a larger shape and the same dtype, unchecked; dense kernels multiply by zeros no faster.

        The residual stream is padded with zeros. A norm over H numbers in place of h then divides by a root mean
        square that is sqrt(h/H) times as large: its weights are multiplied by sqrt(h/H), and its epsilon by h/H. Heads
        keep their width, so that rotary angles and the scale of scores stay; new heads, new columns of the MLP and new
        layers end in output projections that are zero. New ids have rows of zeros, and a bias of the head keeps them
        from being drawn. `device`: where it is; None: a CPU. Raises ModelLoadError: the original's architecture is not
        Llama; NumberOutOfRangeError: the shape is smaller than it.
        """
        if not isinstance(original, LlamaForCausalLM):
            raise ModelLoadError(
                f"{original.config._name_or_path or 'this'} is a {type(original).__name__}, and only LlamaForCausalLM "
                "is known to be the same function after it is inflated"
            )
        old = original.config
        new = self._configuration(old, original.dtype)
        with torch.device(device or torch.device("cpu")):
            model: LlamaForCausalLM = LlamaForCausalLM._from_config(new, dtype=original.dtype)
        scale = (old.hidden_size / new.hidden_size) ** 0.5
        source = dict(original.named_parameters())
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.zero_()
                origin = _origin(name, old.num_hidden_layers)
                if origin is None:
                    continue
                weight = source[origin]
                corner = parameter[tuple(slice(0, length) for length in weight.shape)]
                corner.copy_(weight * scale if "norm" in name else weight)
            if new.vocab_size > old.vocab_size:
                unused = torch.arange(new.vocab_size, device=device) >= old.vocab_size
                model.lm_head.bias = nn.Parameter(
                    unused * torch.tensor(UNUSED, dtype=original.dtype), requires_grad=False
                )
        model.generation_config = copy.deepcopy(original.generation_config)
        model.eval()
        return model

    def _configuration(self, old: LlamaConfig, dtype: torch.dtype) -> LlamaConfig:
        shared_before = old.num_key_value_heads or old.num_attention_heads
        head: int = getattr(old, "head_dim", None) or old.hidden_size // old.num_attention_heads
        group = old.num_attention_heads // shared_before
        # Query heads belong to key-value heads by number: with groups of the same size the first ones keep theirs.
        shared = max(shared_before, self.hidden // (head * group))
        scaled = round(old.intermediate_size * self.hidden / old.hidden_size)
        intermediate = scaled if self.intermediate is None else self.intermediate
        vocabulary = self.vocabulary or old.vocab_size
        for what, least, given in (
            ("layers", old.num_hidden_layers, self.layers),
            ("hidden", old.hidden_size, self.hidden),
            ("intermediate", old.intermediate_size, intermediate),
            ("vocabulary", old.vocab_size, vocabulary),
        ):
            if given < least:
                raise NumberOutOfRangeError(f"{what} must be at least the model's own {least}, got {given}")
        new = copy.deepcopy(old)
        new.num_hidden_layers, new.hidden_size, new.intermediate_size = self.layers, self.hidden, intermediate
        new.head_dim, new.num_key_value_heads, new.num_attention_heads = head, shared, shared * group
        new.rms_norm_eps, new.vocab_size = old.rms_norm_eps * old.hidden_size / self.hidden, vocabulary
        new.dtype = dtype
        return new


def _origin(name: str, layers: int) -> str | None:
    """The parameter that one of the larger model is copied from; None: it is zero.

    A layer beyond the last one is a copy of one of the others, but adds nothing to the residual stream.
    """
    head, found, rest = name.partition("layers.")
    if not found:
        return name
    number, _, parameter = rest.partition(".")
    if int(number) >= layers and parameter.startswith(OUTPUTS):
        return None
    return f"{head}layers.{int(number) % layers}.{parameter}"


def write_free(folder: Path) -> None:
    """Writes a model that costs next to nothing: one layer of width 64 with random weights, over bytes.

    Its logits are far apart, so that it agrees with itself under a little noise. It samples printable ASCII only: its
    text is never cut inside of a character, with which a drafter could not go on. Raises OSError: the folder cannot be
    written."""
    loaded = load_model(LoadOptions("bundled:drafter-c", dtype="float32", device="cpu"))
    size = loaded.description.vocabulary_size
    texts = Tokenizer.from_str(loaded.description.tokenizer_json).decode_batch([[place] for place in range(size)])
    printable = [place for place, text in enumerate(texts) if text and text.isprintable() and text.isascii()]
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=()), torch.no_grad():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        # The first hidden dimension is nearly the same everywhere, and counts against what is not to be sampled.
        model.model.embed_tokens.weight[:, 0] = 0.2
        model.lm_head.weight.mul_(22)
        model.lm_head.weight[:, 0] = -10.0
        model.lm_head.weight[printable, 0] = 0.0
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(loaded.description.tokenizer_json, encoding="utf-8")


# Small random models of any architecture, which `random:ARCHITECTURE` names: its own configuration, with small sizes.

RANDOM_WINDOW = 24  # tokens, of layers with a window
SWITCHES = ("sliding_window", "attention_chunk_size", "q_lora_rank")  # 0 or None: off, and then they stay so
KINDS = ("layer_types", "mlp_layer_types")  # of layers
RANDOM_LAYERS = 4
RANDOM_LARGEST = 10_000_000  # parameters: some architectures have parts whose sizes are not among those that are set
RANDOM_CONTEXT = 512
RANDOM_SIZES: dict[str, int] = {  # what configurations call their sizes: those that one has are set
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "intermediate_size_mlp", "decoder_ffn_dim"), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), RANDOM_LAYERS),
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
    **dict.fromkeys(SWITCHES, RANDOM_WINDOW),
    **{"num_key_value_heads": 2, "rotary_dim": 8, "hidden_size_per_layer_input": 16},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}


def architectures() -> list[str]:
    """All causal language models of transformers, by the names in their configurations."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def random_model(architecture: str, vocabulary: int, **changes: object) -> PreTrainedModel:
    """A small model of an architecture with so many ids and random weights, always the same; float32, on a CPU.

    `changes` are of its configuration. Raises ModelLoadError: transformers has none such, or none of these sizes."""
    try:
        config = _small(CONFIG_MAPPING[architecture]().get_text_config(), vocabulary, changes)
        with torch.device("meta"):  # takes no memory
            size = AutoModelForCausalLM.from_config(config).num_parameters()
        if size > RANDOM_LARGEST:
            raise ValueError(f"with the sizes that are set it has {size:,} parameters")
        with torch.random.fork_rng(devices=()), torch.no_grad():
            torch.manual_seed(11)
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
            for parameter in model.parameters():
                if parameter.ndim > 1:  # larger than usual: the logits differ clearly
                    torch.nn.init.normal_(parameter, std=0.15)
    except (*FAILURES, ArithmeticError, StrictDataclassError) as error:
        why = error if architecture in CONFIG_MAPPING else "transformers has no such architecture"
        raise ModelLoadError(f"there is no small random model of {architecture}: {why}") from error
    model.eval()
    return model


def _small(usual: PreTrainedConfig, vocabulary: int, given: Mapping[str, object]) -> PreTrainedConfig:
    """The configuration with small sizes, and with as many kinds of layers as it has."""
    off = {name for name in SWITCHES if not getattr(usual, name, None)}
    names = {name: usual.attribute_map.get(name, name) for name in (*RANDOM_SIZES, *KINDS)}
    derived = {name for name, own in names.items() if isinstance(getattr(type(usual), own, None), property)}
    sizes = {name: size for name, size in RANDOM_SIZES.items() if hasattr(usual, name) and name not in off | derived}
    changes: dict[str, Any] = {**sizes, "vocab_size": vocabulary}
    if "qk_rope_head_dim" in sizes:
        changes["num_key_value_heads"] = RANDOM_SIZES["num_attention_heads"]  # latent attention has no fewer
    for name in KINDS:
        kinds = getattr(usual, name, None)
        if kinds and name not in derived:
            kinds = [*kinds, "full_attention"] if {*kinds} == {"linear_attention"} else kinds  # as trained models have
            changes[names[name]] = [*islice(cycle(dict.fromkeys(kinds)), RANDOM_LAYERS)]
    if hasattr(usual, "attn_layer_indices"):
        changes["attn_layer_indices"] = [1, 3]
    config = type(usual)(**changes | {**given})
    if getattr(config, "max_position_embeddings", None) is None:
        config.max_position_embeddings = RANDOM_CONTEXT
    return config

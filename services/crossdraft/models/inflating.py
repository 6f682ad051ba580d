"""A costlier model that computes the same function: for measuring speed with real acceptance.

The residual stream is padded with zeros, which a norm over H numbers in place of h divides by a root mean square that
is sqrt(h/H) times as large: its weights are multiplied by sqrt(h/H), and its epsilon by h/H. Heads keep their width,
so that rotary angles and the scale of scores stay; new heads, new columns of the MLP and new layers end in output
projections that are zero. Dense kernels multiply by zeros as slowly as by anything else.
"""

import copy
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.utils.hub import cached_file

from crossdraft.models.loading import load_model
from crossdraft.models.names import NumberOutOfRangeError, source_of

TOLERANCE = 1e-4  # between two logits, in float32
PROBES, LENGTH = 4, 24  # random prompts that both models are compared on, and their tokens
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
OUTPUTS = ("self_attn.o_proj.", "mlp.down_proj.")  # of a layer: what they give is added to the residual stream


class CannotInflateError(ValueError):
    """This model cannot be inflated; the text says why."""


@dataclass(frozen=True)
class Size:
    """The larger shape."""

    layers: int
    hidden: int  # width of the residual stream; the heads' width stays, and there are more of them
    intermediate: int | None = None  # width of the MLP; None: grows as `hidden` does


@dataclass(frozen=True, eq=False)
class Inflated:
    """A model and the larger one that computes the same."""

    original: PreTrainedModel
    model: PreTrainedModel
    difference: float  # largest, between logits on random prompts

    def save(self, name: str, folder: Path) -> None:
        """Writes a folder as transformers does, with the tokenizer and the generation settings of `name`.

        In float16 where that loses nothing, as when `hidden` is 4 or 16 times what it was; else in float32.
        """
        exact = all(bool((tensor.half() == tensor).all()) for tensor in self.model.parameters())
        (copy.deepcopy(self.model).half() if exact else self.model).save_pretrained(folder)
        for file in TOKENIZER_FILES:
            found = cached_file(source_of(name), file, _raise_exceptions_for_missing_entries=False)
            if found is not None:
                shutil.copyfile(found, folder / file)


def inflate(name: str, size: Size) -> Inflated:
    """The model `name` (a folder, a hub id or `bundled:NAME`) in a larger shape, both in float32.

    Raises:
        ModelLoadError: it cannot be loaded.
        NumberOutOfRangeError: the shape is smaller than the model.
        CannotInflateError: its architecture is not Llama, or the larger model's logits are not the same.
    """
    original = load_model(name, "float32").model
    if not isinstance(original, LlamaForCausalLM):
        raise CannotInflateError(
            f"{name} is a {type(original).__name__}, and only LlamaForCausalLM is known to be the same function after "
            "it is inflated"
        )
    model = inflated(original, size)
    difference = largest_difference(original, model)
    if not difference <= TOLERANCE:
        raise CannotInflateError(
            f"the larger model's logits differ from those of {name} by up to {difference:.2g}, and only {TOLERANCE:g} "
            "is allowed: something in its configuration is not known here"
        )
    return Inflated(original, model, difference)


def inflated(original: LlamaForCausalLM, size: Size) -> LlamaForCausalLM:
    """The same function in a larger shape, unchecked; raises NumberOutOfRangeError."""
    old = original.config
    new = _larger(old, size)
    model = LlamaForCausalLM(new)
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
    model.generation_config = copy.deepcopy(original.generation_config)
    model.eval()
    return model


@torch.inference_mode()
def largest_difference(one: PreTrainedModel, other: PreTrainedModel) -> float:
    """Between the logits of two models on the same random prompts."""
    return max(
        float((one(ids, use_cache=False).logits - other(ids, use_cache=False).logits).abs().max())
        for ids in _prompts(one.config.vocab_size)
    )


def _larger(old: LlamaConfig, size: Size) -> LlamaConfig:
    shared_before = old.num_key_value_heads or old.num_attention_heads
    head: int = getattr(old, "head_dim", None) or old.hidden_size // old.num_attention_heads
    group = old.num_attention_heads // shared_before
    # Heads follow their key-value head by number, so the first ones keep theirs where the group stays as it is.
    shared = max(shared_before, size.hidden // (head * group))
    grown = round(old.intermediate_size * size.hidden / old.hidden_size)
    intermediate = grown if size.intermediate is None else size.intermediate
    for what, least, given in (
        ("layers", old.num_hidden_layers, size.layers),
        ("hidden", old.hidden_size, size.hidden),
        ("intermediate", old.intermediate_size, intermediate),
    ):
        if given < least:
            raise NumberOutOfRangeError(f"{what} must be at least the model's own {least}, got {given}")
    new = copy.deepcopy(old)
    new.num_hidden_layers, new.hidden_size, new.intermediate_size = size.layers, size.hidden, intermediate
    new.head_dim, new.num_key_value_heads, new.num_attention_heads = head, shared, shared * group
    new.rms_norm_eps = old.rms_norm_eps * old.hidden_size / size.hidden
    new.dtype = torch.float32
    return new


def _origin(name: str, layers: int) -> str | None:
    """The parameter that one of the larger model begins with; None: it is zero.

    A layer beyond the last one is a copy of one of the others, but that it adds nothing.
    """
    head, found, rest = name.partition("layers.")
    if not found:
        return name
    number, _, parameter = rest.partition(".")
    if int(number) >= layers and parameter.startswith(OUTPUTS):
        return None
    return f"{head}layers.{int(number) % layers}.{parameter}"


def _prompts(vocabulary: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(0)
    for _ in range(PROBES):
        yield torch.randint(vocabulary, (1, LENGTH), generator=generator)

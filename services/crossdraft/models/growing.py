"""A larger shape of a model that computes the same function.

The residual stream is padded with zeros, which a norm over H numbers in place of h divides by a root mean square that
is sqrt(h/H) times as large: its weights are multiplied by sqrt(h/H), and its epsilon by h/H. Heads keep their width,
so that rotary angles and the scale of scores stay; new heads, new columns of the MLP and new layers end in output
projections that are zero. Dense kernels multiply by zeros as slowly as by anything else.
"""

import copy

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from crossdraft.models.names import NumberOutOfRangeError, Size

OUTPUTS = ("self_attn.o_proj.", "mlp.down_proj.")  # of a layer: what they give is added to the residual stream


class CannotInflateError(ValueError):
    """This model cannot be inflated; the text says why."""


def grown(original: PreTrainedModel, size: Size, device: torch.device | None = None) -> LlamaForCausalLM:
    """The same function in a larger shape, unchecked, with the same numbers' kind, made where it is to run.

    Args:
        original: the model.
        size: at least its own shape.
        device: where the larger one is; None: a CPU.

    Raises:
        CannotInflateError: its architecture is not Llama.
        NumberOutOfRangeError: the shape is smaller than the model.
    """
    if not isinstance(original, LlamaForCausalLM):
        raise CannotInflateError(
            f"{original.config._name_or_path or 'this'} is a {type(original).__name__}, and only LlamaForCausalLM is "
            "known to be the same function after it is inflated"
        )
    old = original.config
    new = _larger(old, size, original.dtype)
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
    model.generation_config = copy.deepcopy(original.generation_config)
    model.eval()
    return model


def _larger(old: LlamaConfig, size: Size, dtype: torch.dtype) -> LlamaConfig:
    shared_before = old.num_key_value_heads or old.num_attention_heads
    head: int = getattr(old, "head_dim", None) or old.hidden_size // old.num_attention_heads
    group = old.num_attention_heads // shared_before
    # Heads follow their key-value head by number, so the first ones keep theirs where the group stays as it is.
    shared = max(shared_before, size.hidden // (head * group))
    scaled = round(old.intermediate_size * size.hidden / old.hidden_size)
    intermediate = scaled if size.intermediate is None else size.intermediate
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
    new.dtype = dtype
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

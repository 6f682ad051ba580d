"""Which models the engine runs, and a check that it runs them as they are meant to run."""

import inspect
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer

from crossdraft.engine.attention import NAME
from crossdraft.engine.kv_cache import LayerShape
from crossdraft.engine.names import ModelLoadError, NumberOutOfRangeError
from crossdraft.engine.requests import ForwardRequest
from crossdraft.types.trees import ROOT, TokenTree

WINDOWS = ("sliding_window", "attention_chunk_size", "window_size")  # the same setting in different configurations
PROBE = ForwardRequest("probe", (1, 2, 0), TokenTree((2, 1, 0, 1), (ROOT, ROOT, 0, 1)))
TOLERANCES = {torch.float32: 1e-3, torch.float64: 1e-3}  # of 1 + the largest logit; less exact numbers: 0.1


class UnsupportedModelError(ValueError):
    """The engine cannot run this model correctly; the text says why and what may help."""


def check_configuration(model: PreTrainedModel, max_length: int) -> None:
    """Refuses what the configuration shows to be unsupported.

    Raises:
        UnsupportedModelError: sliding or chunked attention that `max_length` tokens would exceed, or rotary positions
            that change for a text so long.
    """
    config = model.config.get_text_config()
    for name in WINDOWS:
        window = getattr(config, name, None)
        if isinstance(window, int) and 0 < window <= max_length:
            raise UnsupportedModelError(
                f"{name} of this model is {window} tokens, and trees need full attention: "
                f"set --max-model-len below {window} (it is {max_length})"
            )
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *(each for each in ropes.values() if isinstance(each, dict))):  # once, or by type of layer
        original = rope.get("original_max_position_embeddings")
        if rope.get("rope_type") == "longrope" and isinstance(original, int) and original < max_length:
            # The longest text of a forward decides for all, and cached keys would have the other frequencies.
            raise UnsupportedModelError(
                f"the rotary positions of this model are others once a text is longer than {original} tokens: "
                f"set --max-model-len to {original} or less (it is {max_length})"
            )


@torch.inference_mode()
def layer_shapes(model: PreTrainedModel) -> tuple[LayerShape, ...]:
    """What each layer caches, seen in a forward of one token.

    Raises:
        UnsupportedModelError: the model keeps something other than keys and values.
    """
    usual = model.config._attn_implementation
    model.set_attn_implementation("eager")  # the engine's own has no soft-capped scores in a plain call
    ids = torch.zeros(1, 1, dtype=torch.int64, device=embedding_weight(model).device)
    cache = getattr(model(ids, use_cache=True), "past_key_values", None)
    model.set_attn_implementation(usual)
    shapes = []
    for layer in cache.layers if isinstance(cache, DynamicCache) else (None,):
        if not isinstance(layer, DynamicLayer) or layer.keys is None or layer.values is None:
            raise UnsupportedModelError(
                "this model keeps more than keys and values (linear attention, state space, encoder)"
            )
        shapes.append(LayerShape(layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3]))
    return tuple(shapes)


def install(model: PreTrainedModel, name: str = NAME) -> None:
    """Makes an attention implementation the model's own: the engine's, if no other is named.

    Raises:
        UnsupportedModelError: the model computes attention in its own way.
    """
    model.set_attn_implementation(name)
    if model.config.get_text_config()._attn_implementation != name:
        raise UnsupportedModelError("attention in this model does not go through the interface of transformers")


def plain_logits(model: PreTrainedModel) -> list[Tensor]:
    """The model's logits after each path of a small tree, with eager attention and no cache: float32 (V,) each.

    Leaves eager attention installed; raises UnsupportedModelError as `install` does.
    """
    install(model, "eager")
    device = embedding_weight(model).device
    with torch.inference_mode():
        return [
            model(torch.tensor([PROBE.context + path], device=device), use_cache=False).logits[0, -1].float()
            for path in PROBE.tree.paths()
        ]


def check_agreement(
    model: PreTrainedModel, forward: Callable[[Sequence[ForwardRequest]], list[Tensor]], expected: Sequence[Tensor]
) -> None:
    """Refuses a model whose logits over a small tree are not those of `plain_logits`.

    Raises:
        UnsupportedModelError: they differ, or the model cannot take explicit positions and a layout at all.
    """
    try:
        (found,) = forward([PROBE])
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedModelError(f"this model takes no layout with explicit positions: {error}") from error
    for plain, logits in zip(expected, found, strict=True):
        apart = float((plain - logits).abs().max() / (1 + plain.abs().max()))
        if not apart <= TOLERANCES.get(model.dtype, 0.1):
            raise UnsupportedModelError(
                f"this model's logits over a tree are not those along its paths (relative difference {apart:.1g}): "
                "its attention is not a function of what is seen and of positions (ALiBi, recurrence)"
            )


def embedding_weight(model: PreTrainedModel) -> Tensor:
    """The input embedding, shape (ids, width)."""
    weight = model.get_input_embeddings().weight
    if not isinstance(weight, Tensor):
        raise UnsupportedModelError("this model has no input embedding matrix")
    return weight


def keeps_logits(model: nn.Module) -> bool:
    return "logits_to_keep" in inspect.signature(model.forward).parameters


def length_of(model: PreTrainedModel, max_length: int | None) -> int:
    """Tokens of a session: `max_length`, or the model's context.

    Raises:
        NumberOutOfRangeError: `max_length` is too short for any tree or longer than the context.
        ModelLoadError: neither is known.
    """
    context: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if context is None and max_length is None:
        raise ModelLoadError("the model's config does not say how long its context is: set --max-model-len")
    length = max_length if max_length is not None else context or 0
    least = len(PROBE.context) + len(PROBE.tree)
    if not least <= length <= (context or length):
        raise NumberOutOfRangeError(
            f"the most tokens of a session (--max-model-len) must be between {least} and the model's context "
            f"{context}, got {length}"
        )
    return length

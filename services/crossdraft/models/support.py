"""Which models the engine runs, and a check that it runs them as they are meant to run."""

import inspect

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer

from crossdraft.models.slots import LayerShape

ATTENTIONS = ("sdpa", "eager")


class UnsupportedModelError(ValueError):
    """The engine cannot run this model correctly; the text says why and what may help."""


def check_configuration(model: PreTrainedModel, max_length: int) -> None:
    """Refuses what the configuration shows to be unsupported.

    Raises:
        UnsupportedModelError: sliding or chunked attention that `max_length` tokens would exceed, or an attention
            implementation that takes no 4-D mask.
    """
    config = model.config.get_text_config()
    for name in ("sliding_window", "attention_chunk_size"):
        window = getattr(config, name, None)
        if isinstance(window, int) and window <= max_length:
            raise UnsupportedModelError(
                f"{name} of this model is {window} tokens, and trees need full attention: "
                f"set max_length below {window} (it is {max_length})"
            )
    attention = config._attn_implementation
    if attention not in ATTENTIONS:
        raise UnsupportedModelError(
            f"attention {attention!r} takes no 4-D mask: load the model with one of {ATTENTIONS}"
        )


@torch.inference_mode()
def layer_shapes(model: PreTrainedModel) -> tuple[LayerShape, ...]:
    """What each layer caches, seen in a forward of one token.

    Raises:
        UnsupportedModelError: the model keeps something other than keys and values.
    """
    ids = torch.zeros(1, 1, dtype=torch.int64, device=embedding_weight(model).device)
    cache = model(ids, use_cache=True).past_key_values
    shapes = []
    for layer in cache.layers if isinstance(cache, DynamicCache) else (None,):
        if not isinstance(layer, DynamicLayer) or layer.keys is None or layer.values is None:
            raise UnsupportedModelError(
                "this model keeps more than keys and values (linear attention, state space, encoder)"
            )
        shapes.append(LayerShape(layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3]))
    return tuple(shapes)


def embedding_weight(model: PreTrainedModel) -> Tensor:
    """The input embedding, shape (ids, width)."""
    weight = model.get_input_embeddings().weight
    if not isinstance(weight, Tensor):
        raise UnsupportedModelError("this model has no input embedding matrix")
    return weight


def keeps_logits(model: nn.Module) -> bool:
    """Whether the model can compute the logits of some tokens only."""
    return "logits_to_keep" in inspect.signature(model.forward).parameters

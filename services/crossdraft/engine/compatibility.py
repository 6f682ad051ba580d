"""Which models the engine runs, and a check that it runs them as they are meant to run."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from crossdraft.engine.attention import KERNEL_FAILURES, NAME, Window
from crossdraft.engine.kv_cache import LayerShape
from crossdraft.engine.names import ModelLoadError, NumberOutOfRangeError
from crossdraft.engine.requests import ForwardRequest
from crossdraft.types.trees import ROOT, TokenTree

WINDOWS = ("sliding_window", "attention_chunk_size", "window_size")  # the same setting in different configurations
NOTING = NAME + "-noting"  # an attention implementation that notes what a module sees, and computes nothing
Sees = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # of batch, head, position and that of a key: whether it does
Forward = Callable[[Sequence[ForwardRequest]], list[Tensor]]  # as `Engine.forward`
PROBE = ForwardRequest("probe", (1, 2, 0), TokenTree((2, 1, 0, 1), (ROOT, ROOT, 0, 1)))
FAILURES = (AssertionError, AttributeError, ImportError, LookupError, RuntimeError, TypeError, ValueError)
TOLERANCES = {torch.float32: 1e-3, torch.float64: 1e-3}  # of 1 + the largest logit; less exact numbers: 0.1


class UnsupportedModelError(ValueError):
    """The engine cannot run this model correctly; the text says why and what may help."""


def check_rotary_positions(model: PreTrainedModel, max_length: int) -> None:
    """Refuses rotary positions that change within a session. Raises UnsupportedModelError: they are others for a text
    of up to `max_length` tokens than for a shorter one."""
    ropes = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    for rope in (ropes, *(each for each in ropes.values() if isinstance(each, dict))):  # once, or by type of layer
        original = rope.get("original_max_position_embeddings")
        if rope.get("rope_type") == "longrope" and isinstance(original, int) and original < max_length:
            # The longest text of a forward decides for all, and cached keys would have the other frequencies.
            raise UnsupportedModelError(
                f"the rotary positions of this model are others once a text is longer than {original} tokens: "
                f"set --max-model-len to {original} or less (it is {max_length})"
            )


@dataclass(frozen=True, eq=False)
class AttentionLayer:
    """What was noted of an attention module."""

    module: nn.Module
    sees: Sees | None  # None: its mask was not made by transformers' functions
    key: tuple[int, int]  # heads, and the width of a key that it attends to


@dataclass(frozen=True, eq=False)
class ModelLayers:
    """What the layers of a model cache, and what they see."""

    shapes: tuple[LayerShape, ...]
    attention: tuple[AttentionLayer, ...]

    @property
    def gathers(self) -> bool:
        """Whether keys and values are made of what is cached (multi-head latent attention)."""
        return any(layer.key not in {(shape.heads, shape.key) for shape in self.shapes} for layer in self.attention)

    def windows(self, model: PreTrainedModel, length: int) -> tuple[Window | None, ...]:
        """Of each attention module, in sessions of so many tokens, as the model's own masks have it. Raises
        UnsupportedModelError: a mask is neither causal nor a window, or not known where there is a window."""
        found: dict[Sees | None, Window | None] = {None: None}
        for layer in self.attention:
            if layer.sees is None:
                _check_no_window(model, length)
            elif layer.sees not in found:
                found[layer.sees] = window_of(layer.sees, length, embedding_weight(model).device)
        return tuple(found[layer.sees] for layer in self.attention)


def window_of(sees: Sees, length: int, device: torch.device) -> Window | None:
    """The window of a mask, found in what it lets the tokens of a text of so many see; None: all before. Raises
    UnsupportedModelError: it is no window."""
    none = torch.zeros((), dtype=torch.int64, device=device)
    places = torch.arange(length, device=device)
    blind = ~sees(none, none, places, none).broadcast_to(places.shape)  # who does not see the first token
    window = None
    if blind.any():
        size = int(blind.int().argmax())
        if not size:
            raise UnsupportedModelError(
                "the sliding window of this model is 0 tokens: set sliding_window to null in its config.json"
            )
        chunked = size > 1 and not bool(sees(none, none, none + size, none + 1))
        window = Window(size, chunked)
    edges = (0, 1, window.size - 1, window.size, window.size + 1, 2 * window.size) if window else (0, 1)
    for position in {*edges, length // 2, length - 1} & {*range(length)}:
        expected = places <= position
        if window is not None:
            expected &= places >= window.first(position)
        if not torch.equal(sees(none, none, none + position, places).broadcast_to(places.shape), expected):
            raise UnsupportedModelError(
                "a mask of this model is neither causal, nor a sliding window, nor one of chunks "
                f"(in what the token at position {position} sees)"
            )
    return window


def _check_no_window(model: PreTrainedModel, length: int) -> None:
    config = model.config.get_text_config()
    for name in WINDOWS:
        window = getattr(config, name, None)
        if isinstance(window, int) and 0 < window < length:
            raise UnsupportedModelError(
                f"{name} of this model is {window} tokens, and it does not say by transformers' masks in which layers: "
                f"set --max-model-len to {window} or less (it is {length})"
            )


def _note(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """In place of attention: notes at the module what it is given; the result has the right shape only."""
    sees: Sees | None = getattr(attention_mask, "sees", None)
    vars(module)["noted"] = AttentionLayer(module, sees, (key.shape[1], key.shape[3]))
    batch, heads, tokens, _ = query.shape
    return value.new_zeros(batch, tokens, heads, value.shape[3]), None


def _noted_mask(q_length: int, kv_length: int, mask_function: Sees, device: torch.device, **options: Any) -> Tensor:
    """In place of a mask: one that has the function by which it would be made."""
    mask = torch.zeros(1, 1, q_length, kv_length, device=device)
    vars(mask)["sees"] = mask_function
    return mask


AttentionInterface.register(NOTING, _note)
AttentionMaskInterface.register(NOTING, _noted_mask)


@torch.inference_mode()
def layers_of(model: PreTrainedModel) -> ModelLayers:
    """What each layer caches and sees, noted in a forward of one token. Raises UnsupportedModelError: the model keeps
    something other than keys and values."""
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError("this is an encoder-decoder model, which decodes from a second text")
    usual = model.config._attn_implementation
    ids = torch.zeros(1, 1, dtype=torch.int64, device=embedding_weight(model).device)
    model.set_attn_implementation(NOTING)
    try:
        cache = getattr(model(ids, use_cache=True), "past_key_values", None)
    except FAILURES as error:
        raise UnsupportedModelError(f"this model takes no plain call with a cache: {error!r}") from error
    finally:
        model.set_attn_implementation(usual)
    if not isinstance(cache, DynamicCache) or not cache.layers:
        raise UnsupportedModelError("this model does not keep keys and values (recurrence, or an encoder)")
    shapes = []
    for layer in cache.layers:
        plain = type(layer) in (DynamicLayer, DynamicSlidingWindowLayer)
        if not (plain and isinstance(layer, DynamicLayer)) or layer.keys is None or layer.values is None:
            raise UnsupportedModelError(
                f"this model keeps more than keys and values ({type(layer).__name__}: linear attention, a state space, "
                "or an index)"
            )
        shapes.append(LayerShape(layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3]))
    noted = [vars(module).pop("noted", None) for module in model.modules()]
    return ModelLayers(tuple(shapes), tuple(layer for layer in noted if layer is not None))


def install(model: PreTrainedModel) -> None:
    """Makes the engine's attention the model's own. Raises UnsupportedModelError: the model computes attention in its
    own way."""
    model.set_attn_implementation(NAME)
    if model.config.get_text_config()._attn_implementation != NAME:
        raise UnsupportedModelError("attention in this model does not go through the interface of transformers")


@torch.inference_mode()
def plain_call(model: PreTrainedModel, text: Sequence[int]) -> Tensor:
    """The model's own logits after each token of a text, without a cache, (tokens, V); or UnsupportedModelError."""
    ids = torch.tensor([text], device=embedding_weight(model).device)
    try:
        logits: Tensor = model(ids, use_cache=False).logits[0]
    except FAILURES as error:
        raise UnsupportedModelError(f"this model takes no plain call: {error!r}") from error
    return logits


def plain_logits(model: PreTrainedModel, request: ForwardRequest = PROBE) -> list[Tensor]:
    """The model's logits after each path of a small tree, with no cache and eager attention: float32 (V,) each.

    Leaves eager attention installed, where the model lets it be changed; raises UnsupportedModelError as `plain_call`.
    """
    model.set_attn_implementation("eager")
    return [plain_call(model, request.context + path)[-1].float() for path in request.tree.paths()]


def check_agreement(
    model: PreTrainedModel, forward: Forward, expected: Sequence[Tensor], request: ForwardRequest = PROBE
) -> None:
    """Refuses a model whose logits over a small tree are not those of `plain_logits`. Raises UnsupportedModelError:
    they differ or are no numbers, or the model cannot take what the engine gives it."""
    if any(plain.isnan().any() for plain in expected):
        raise UnsupportedModelError("this model's own logits are no numbers: its weights have NaN, or are too large")
    try:
        (found,) = forward([request])
    except (*FAILURES, *KERNEL_FAILURES) as error:
        raise UnsupportedModelError(f"this model does not take what the engine gives it: {error!r}") from error
    for plain, logits in zip(expected, found, strict=True):
        apart = float((plain - logits).abs().max() / (1 + plain.abs().max()))
        if not apart <= TOLERANCES.get(model.dtype, 0.1):
            raise UnsupportedModelError(
                f"this model's logits over a tree are not those along its paths (relative difference {apart:.1g}): "
                "they depend on more than what a token sees and its position (recurrence, no causal mask)"
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
    """Tokens of a session: `max_length`, or the model's context. Raises NumberOutOfRangeError: `max_length` is too
    short for any tree or longer than the context; ModelLoadError: neither is known."""
    context: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if context is None and max_length is None:
        raise ModelLoadError("the model's config does not say how long its context is: set --max-model-len")
    length = max_length if max_length is not None else context or 0
    least = len(PROBE.context) + len(PROBE.tree)
    if not least <= length <= (context or length):
        raise NumberOutOfRangeError(
            f"--max-model-len must be between {least} and the model's context, {context}, got {length}"
        )
    return length

"""Linear layers on a CPU whose weights are reordered once for oneDNN, for the few rows of a pass or a drafting step.

Torch otherwise reorders the weights in each call, or reads them badly for 2 to 16 rows: a pass of 9 tokens then costs
up to 2.5 times one of a single token, and with packed weights 1.5 times.

For each number of rows oneDNN compiles a kernel, in a millisecond, and keeps up to 1,024 of them, a third of a MiB
each. So rows beyond a few are padded to one of few numbers.
"""

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

ROWS = 8  # that the order of the weights is optimized for; others give the same numbers
STEPS = ((32, 1), (128, 8))  # up to so many rows their number is a multiple of this
COARSEST = 32  # ... and of this beyond


class PackedLinear(nn.Module):
    """A linear layer on a CPU, for inference; the same numbers but for rounding."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._bias = None if linear.bias is None else linear.bias.detach()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), ROWS)

    def forward(self, rows: Tensor) -> Tensor:
        """Shape (..., in) to (..., out)."""
        flat = rows.reshape(-1, self.in_features)
        count = len(flat)
        filled = nn.functional.pad(flat, (0, 0, 0, padded(count) - count)) if padded(count) > count else flat
        result: Tensor = torch.ops.mkldnn._linear_pointwise(filled, self._weight, self._bias, "none", [], "")
        return result[:count].view(*rows.shape[:-1], self.out_features)


def padded(rows: int) -> int:
    step = next((step for most, step in STEPS if rows <= most), COARSEST)
    return -(-rows // step) * step


def packable(weight: Tensor) -> bool:
    """Whether oneDNN computes with these numbers: float32 on a CPU, bfloat16 on one that multiplies them."""
    bfloat16 = weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    plain = type(weight) in (Tensor, nn.Parameter)  # quantized weights are tensors of their own kind
    return plain and weight.device.type == "cpu" and (weight.dtype == torch.float32 or bfloat16)


class Watched(nn.Linear):
    """A linear layer that notes whether others read its weight."""

    def forward(self, rows: Tensor) -> Tensor:
        vars(self)["computing"] = True
        try:
            return super().forward(rows)
        finally:
            vars(self)["computing"] = False

    def __getattr__(self, name: str) -> Any:
        if name == "weight" and not vars(self).get("computing"):
            vars(self)["read"] = True
        return super().__getattr__(name)


@torch.inference_mode()
def read_by_others(model: PreTrainedModel, linears: list[nn.Linear]) -> set[nn.Linear]:
    """Those of some linear layers whose weights the model reads by itself in a forward, as routers do."""
    if not linears:
        return set()
    for linear in linears:
        linear.__class__ = Watched
    try:
        with suppress(AttributeError, LookupError, RuntimeError, TypeError, ValueError):  # the engine will refuse it
            model(torch.zeros(1, 1, dtype=torch.int64), use_cache=False)
    finally:
        for linear in linears:
            linear.__class__ = nn.Linear
            vars(linear).pop("computing", None)
    return {linear for linear in linears if vars(linear).pop("read", False)}


def pack(model: PreTrainedModel) -> None:
    """Replaces the plain linear layers of a model that can be packed, where torch has oneDNN; others stay.

    Their own weights are freed, except those of the head, which are read, and may be those of the embedding too.
    """
    if not torch.backends.mkldnn.is_available():
        return
    head = model.get_output_embeddings()
    places = [(module, name, child) for module in model.modules() for name, child in module.named_children()]
    found = [
        (module, name, child)
        for module, name, child in places
        if isinstance(child, nn.Linear) and type(child) is nn.Linear and packable(child.weight)
    ]
    kept = read_by_others(model, [child for _, _, child in found if child is not head])
    for module, name, child in found:
        if child not in kept:
            packed = PackedLinear(child)
            if child is head:
                packed.weight = child.weight
            setattr(module, name, packed)

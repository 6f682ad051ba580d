"""Linear layers on a CPU whose weights are reordered once for oneDNN, for the few rows of a pass or a drafting step.

Torch otherwise reorders the weights in each call, or reads them badly for 2 to 16 rows: a pass of 9 tokens then costs
up to 2.5 times one of a single token, and with packed weights 1.5 times.

For each number of rows oneDNN compiles a kernel, in a millisecond, and keeps up to 1,024 of them, a third of a MiB
each. So rows beyond a few are padded to one of few numbers.
"""

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
        self.bias = None if linear.bias is None else linear.bias.detach()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), ROWS)

    @property
    def weight(self) -> Tensor:
        """In the usual order, for who reads it, as some routers do: a copy."""
        dense: Tensor = self._weight.to_dense()
        return dense

    def forward(self, rows: Tensor) -> Tensor:
        """Shape (..., in) to (..., out)."""
        flat = rows.reshape(-1, self.in_features)
        count = len(flat)
        filled = nn.functional.pad(flat, (0, 0, 0, padded(count) - count)) if padded(count) > count else flat
        result: Tensor = torch.ops.mkldnn._linear_pointwise(filled, self._weight, self.bias, "none", [], "")
        return result[:count].view(*rows.shape[:-1], self.out_features)


def padded(rows: int) -> int:
    step = next((step for most, step in STEPS if rows <= most), COARSEST)
    return -(-rows // step) * step


def packable(weight: Tensor) -> bool:
    """Whether oneDNN computes with these numbers: float32 on a CPU, bfloat16 on one that multiplies them."""
    bfloat16 = weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    plain = type(weight) in (Tensor, nn.Parameter)  # quantized weights are tensors of their own kind
    return plain and weight.device.type == "cpu" and (weight.dtype == torch.float32 or bfloat16)


def pack(model: PreTrainedModel) -> None:
    """Replaces the plain linear layers of a model that can be packed, where torch has oneDNN; others stay."""
    if not torch.backends.mkldnn.is_available():
        return
    for module in [*model.modules()]:
        for name, child in module.named_children():
            if type(child) is nn.Linear and packable(child.weight):
                setattr(module, name, PackedLinear(child))

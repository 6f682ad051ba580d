"""Linear layers on a CPU with their weights reordered once, for the few rows that a pass or a drafting step has.

What torch calls otherwise reorders the weights in each call, or reads them badly for 2 to 16 rows: a pass of 9 tokens
then costs up to 2.5 times one of a single token, and with packed weights 1.5 times.
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

ROWS = 8  # that the order of the weights is made for; others are as right


class PackedLinear(nn.Module):
    """A linear layer in float32 on a CPU, for inference; the same numbers but for rounding."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._bias = None if linear.bias is None else linear.bias.detach()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), ROWS)

    def forward(self, rows: Tensor) -> Tensor:
        """Shape (..., in) to (..., out)."""
        result: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._weight, self._bias, "none", [], "")
        return result


def pack(model: PreTrainedModel) -> None:
    """Replaces the plain linear layers of a model in float32 on a CPU, where torch has oneDNN; others stay.

    Their own weights are given back, but for those of the head: they are read, and often those of the embedding too.
    """
    if not torch.backends.mkldnn.is_available():
        return
    head = model.get_output_embeddings()
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and (child.weight.dtype, child.weight.device.type) == (torch.float32, "cpu"):
                packed = PackedLinear(child)
                if child is head:
                    packed.weight = child.weight
                setattr(module, name, packed)

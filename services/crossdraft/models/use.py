"""What a model has done, for metrics."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Use:
    """Since it was loaded. The names are those of `rpc.service_metrics.ModelUse`."""

    steps: int  # batched forwards
    seconds: float  # in them, and in what was drawn from their logits
    batches: Mapping[int, int]  # by number of jobs: steps that had so many
    tokens: int  # fed, padding not counted
    slots: int  # sessions that the cache can hold
    slots_taken: int  # ... and holds now

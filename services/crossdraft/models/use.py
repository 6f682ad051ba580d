"""What a model has done, for metrics."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Use:
    """Since it was loaded. The names are those of `rpc.service_metrics.ModelUse`."""

    steps: int  # batched forwards
    seconds: float  # in them, and in what was drawn from their logits
    batches: Mapping[int, int]  # by number of sessions: steps that had so many
    tokens: int  # fed
    places: int  # tokens whose keys and values the cache can hold
    held: int  # ... and that live sessions hold now
    answers: int  # works, such as passes and steps of a draft, that were answered
    queued: float  # seconds that these waited for their first steps
    evictions: int  # sessions that gave their places to others

"""What a drafting step costs: no copies of a whole vocabulary."""

import math
from typing import TypeVar

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from crossdraft.drafter.sampling import OwnTokens
from crossdraft.engine.sampler import SamplerSteps
from crossdraft.engine.served_model import RunningModel
from crossdraft.text.letters import from_bytes
from crossdraft.types.messages import NoiseKey, OpenDrafter, SamplingOptions

T = TypeVar("T")


def read_alone(asking: SamplerSteps[T]) -> T:
    """What it returns when each of its readings is answered by itself."""
    try:
        wanted = next(asking)
        while True:
            (found,) = wanted.run([wanted])
            wanted = asking.send(found)
    except StopIteration as end:
        result: T = end.value
        return result


class Copied(TorchFunctionMode):
    """The sizes of what is copied to tensors and from them."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if getattr(function, "__name__", "") in ("new_tensor", "tensor", "numpy"):
            self.sizes.append(math.prod(result.shape))
        return result


def test_a_step_copies_no_more_than_the_row(drafter_model: RunningModel) -> None:
    size = drafter_model.tokenization.vocabulary.size
    for allowed in (None, np.arange(size - 1)):
        own = OwnTokens(drafter_model, OpenDrafter(from_bytes(b"The"), SamplingOptions(), NoiseKey(77), 8, allowed))
        with Copied() as copied:
            ((ids, _),) = read_alone(own.distributions(torch.arange(size, dtype=torch.float32)[None]))
        assert ids.tolist() == [size - 1 - (allowed is not None) - place for place in range(8)]
        assert max(copied.sizes) == 16  # ids and probabilities

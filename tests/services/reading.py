"""What the model thread does with a part of a job that reads logits."""

from typing import TypeVar

from crossdraft.engine.sampler import SamplerSteps

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

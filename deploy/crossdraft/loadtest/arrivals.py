"""When requests are due. Pure."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class OpenLoop:
    """Requests come as those of many people do: at random moments, whatever became of the ones before.

    Raises:
        ValueError: a value is out of its range.
    """

    rate: float  # requests a second, on average
    most: int | None = None  # under way at once; further ones begin late, which counts for their latencies

    def __post_init__(self) -> None:
        if not 0 < self.rate < float("inf"):
            raise ValueError(f"--rate must be above 0, got {self.rate:g}")
        if self.most is not None and self.most < 1:
            raise ValueError(f"--max-concurrency must be at least 1, got {self.most}")


@dataclass(frozen=True)
class ClosedLoop:
    """Some clients, each of which asks again as soon as it has its answer.

    Raises:
        ValueError: there is no client.
    """

    clients: int

    def __post_init__(self) -> None:
        if self.clients < 1:
            raise ValueError(f"--clients must be at least 1, got {self.clients}")


Load = OpenLoop | ClosedLoop


def poisson(rate: float, count: int, seed: int) -> tuple[float, ...]:
    """Seconds from the beginning to each of `count` arrivals of a Poisson process with `rate` a second."""
    gaps = np.random.default_rng([seed, count]).exponential(1 / rate, count)
    return tuple(np.cumsum(gaps).tolist())

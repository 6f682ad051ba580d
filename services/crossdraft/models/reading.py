"""What jobs want to know of logits that they hold: laws, draws, rows. What several want alike is found together."""

from abc import ABC, abstractmethod
from collections.abc import Generator, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Generic, Self, TypeVar

import torch
from torch import Tensor

R = TypeVar("R")
T = TypeVar("T")

CACHED = 1 << 15  # logits that a CPU takes together: more leave its caches, and gain nothing
TOGETHER = 1 << 24  # that other devices take together: some hundred MiB in float64


class Reading(ABC, Generic[R]):
    """A question about rows of logits. Those of one kind are answered together, each as it would be alone.

    A job yields it, or better writes `yield from reading.found()`.
    """

    @property
    @abstractmethod
    def about(self) -> Tensor:
        """The logits: floating (n, V)."""

    @property
    @abstractmethod
    def kind(self) -> Hashable:
        """What must be equal in readings that are answered together, besides their class and V."""

    @abstractmethod
    def together(self, readings: Sequence[Self]) -> list[R]:
        """The answers to readings of one kind, this one among them.

        Raises:
            ValueError: one of them cannot be answered.
        """

    def found(self) -> "Generator[Reading[R], R, R]":
        """Asks the model thread; returns the answer."""
        return (yield self)


Asking = Generator[Reading[Any], Any, T]
"""Part of a job that holds logits: it yields readings, and returns what it has made of the answers."""


@dataclass(frozen=True)
class Likeness:
    """What is equal in readings that are answered together; of one of them, how much it asks."""

    reading: type[Reading[Any]]
    kind: Hashable
    columns: int
    most: int  # logits that are taken together
    size: int = field(compare=False)  # logits

    @staticmethod
    def of(reading: Reading[Any]) -> "Likeness":
        """That of one reading."""
        about = reading.about
        most = CACHED if about.device.type == "cpu" else TOGETHER
        found = Likeness(type(reading), reading.kind, about.shape[-1], most, about.numel())
        hash(found)  # a kind that has no hash is the fault of whoever asks
        return found


def groups(readings: Sequence[Likeness]) -> list[list[int]]:
    """The places of readings that are to be answered together, each in one group."""
    alike: dict[Likeness, list[int]] = {}
    for place, reading in enumerate(readings):
        alike.setdefault(reading, []).append(place)
    return [part for places in alike.values() for part in _parts(places, readings)]


def _parts(places: list[int], readings: Sequence[Likeness]) -> Iterator[list[int]]:
    """As many at once as the device takes together, at least one."""
    part: list[int] = []
    size = 0
    for place in places:
        if part and size + readings[place].size > readings[place].most:
            yield part
            part, size = [], 0
        part.append(place)
        size += readings[place].size
    yield part


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """One below the other: (n, V)."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def split(found: Sequence[T], sizes: Sequence[int]) -> list[tuple[T, ...]]:
    """Answers for rows, as those of each reading, which has so many rows."""
    rows = iter(found)
    return [tuple(islice(rows, size)) for size in sizes]

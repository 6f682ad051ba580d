"""What the processes that carry traffic are told, and the rule by which they delay it.

`network` starts such a process (`switch` or `relay`) and talks to it in lines of JSON: first the process says where
the hosts are, then it answers each order with a line, once the order has taken effect.
"""

import json
import os
import random
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

MILLISECONDS = 1000.0


@dataclass(frozen=True)
class Shape:
    """Delays of a link, and whether it is cut.

    Raises:
        ValueError: a value is out of its range.
    """

    there_ms: float = 0.0  # to the host, one way
    back_ms: float = 0.0  # from the host, one way
    jitter_ms: float = 0.0  # each delay is drawn uniformly from delay ± jitter; the order of arrival stays
    cut: bool = False  # nothing passes, and nobody is told

    def __post_init__(self) -> None:
        if not (0 <= self.there_ms <= 60_000 and 0 <= self.back_ms <= 60_000 and 0 <= self.jitter_ms <= 60_000):
            raise ValueError(f"delays and jitter must be between 0 and 60,000 ms, got {self}")


class Lane:
    """One direction of a link: when what enters may leave, in order."""

    def __init__(self) -> None:
        self._rng = random.Random(0)  # of the jitter; the same in every run
        self._last = 0.0  # seconds of the clock

    def due(self, now: float, delay_ms: float, jitter_ms: float) -> float:
        """When what enters `now` leaves, in seconds of the same clock; never before what entered earlier."""
        jitter = self._rng.uniform(-jitter_ms, jitter_ms) if jitter_ms else 0.0
        self._last = max(self._last, now + max(0.0, delay_ms + jitter) / MILLISECONDS)
        return self._last


@dataclass(frozen=True)
class Reshape:
    """From now on the link to this host has this shape."""

    host: str
    shape: Shape


@dataclass(frozen=True)
class Through:
    """Asks for the address by which a service on this host is reached through the link."""

    host: str
    address: str  # HOST:PORT, as the service names it


@dataclass(frozen=True)
class Part:
    """From now on nothing passes between these two hosts, or it passes again."""

    host: str
    other: str
    parted: bool


Order = Reshape | Through | Part
KINDS = {one.__name__: one for one in (Reshape, Through, Part)}


@dataclass(frozen=True)
class Place:
    """Where a host's commands run and listen."""

    prefix: tuple[str, ...]  # put before a command
    listen: str  # the address that its services listen on


def write_order(order: Order) -> bytes:
    """One line."""
    return json.dumps({type(order).__name__: asdict(order)}).encode() + b"\n"


def read_order(line: bytes) -> Order:
    """Raises ValueError, KeyError or TypeError for anything that `write_order` does not write."""
    ((kind, fields),) = json.loads(line).items()
    order: Order = KINDS[kind](**fields)
    return Reshape(order.host, Shape(**fields["shape"])) if isinstance(order, Reshape) else order


def write_places(places: dict[str, Place]) -> bytes:
    """The first line of a process that carries traffic."""
    return json.dumps({name: asdict(place) for name, place in places.items()}).encode() + b"\n"


def read_places(line: bytes) -> dict[str, Place]:
    """The inverse of `write_places`."""
    found: dict[str, Any] = json.loads(line)
    return {name: Place(tuple(one["prefix"]), one["listen"]) for name, one in found.items()}


def say(line: bytes) -> None:
    """Writes a line on stdout, from the process that carries traffic."""
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


def run_in_real_time() -> None:
    """Delays of this process are punctual on a busy machine too, where that is allowed."""
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))

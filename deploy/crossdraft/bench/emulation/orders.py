"""What the orchestrator's process and the one that carries the traffic say to each other: lines of JSON."""

import json
from dataclasses import asdict, dataclass
from typing import Any

from crossdraft.bench.emulation.shape import Shape


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
KINDS = {"reshape": Reshape, "through": Through, "part": Part}


@dataclass(frozen=True)
class Place:
    """Where a host's commands run and listen."""

    prefix: tuple[str, ...]  # put before a command
    listen: str  # the address that its services listen on


def write_order(order: Order) -> bytes:
    """One line."""
    (kind,) = (name for name, made in KINDS.items() if isinstance(order, made))
    return json.dumps({kind: asdict(order)}).encode() + b"\n"


def read_order(line: bytes) -> Order:
    """Raises ValueError or TypeError for anything that `write_order` does not write."""
    ((kind, fields),) = json.loads(line).items()
    if kind == "reshape":
        return Reshape(fields["host"], Shape(**fields["shape"]))
    return Part(**fields) if kind == "part" else Through(**fields)


def write_places(places: dict[str, Place]) -> bytes:
    """The first line of a carrier: it is ready."""
    return json.dumps({name: asdict(place) for name, place in places.items()}).encode() + b"\n"


def read_places(line: bytes) -> dict[str, Place]:
    """The same, read."""
    found: dict[str, Any] = json.loads(line)
    return {name: Place(tuple(one["prefix"]), one["listen"]) for name, one in found.items()}

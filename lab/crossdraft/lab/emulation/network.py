"""Emulated hosts with delayed links: namespaces behind a switch or, where these are not allowed, loopback relays.

The traffic is carried by a process (`carrier`), which is told what to do in lines of JSON: first it says
where the hosts are, then it answers each order with a line, once the order has taken effect.
"""

import asyncio
import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import IO, Any

from crossdraft.cli.processes import END_SECONDS, ended, launched

CARRIER = "crossdraft.lab.emulation.carrier"
READY_SECONDS = 30.0  # for Python to start on a busy machine
MILLISECONDS = 1000.0


# What the carrying process is told, and the rule by which it delays the traffic.


@dataclass(frozen=True)
class Shape:
    """From now on the link to a host is like this; the answer is the address by which a service is reached through it.
    Raises ValueError: a value is out of its range."""

    host: str
    delay_ms: float = 0.0  # of what is sent to the host or by it, one way
    cut: bool = False  # nothing passes, and nobody is told
    service: str = ""  # HOST:PORT, as the service on the host names it; empty: none is asked for

    def __post_init__(self) -> None:
        if not 0 <= self.delay_ms <= 60_000:
            raise ValueError(f"a delay must be between 0 and 60,000 ms, got {self.delay_ms}")


class DelayLine:
    """One direction of a link: when what enters may leave, in order."""

    def __init__(self) -> None:
        self._last = 0.0  # seconds of the clock

    def due(self, now: float, delay_ms: float) -> float:
        """When what enters `now` leaves, in seconds of the same clock; always after what entered earlier."""
        self._last = max(math.nextafter(self._last, math.inf), now + delay_ms / MILLISECONDS)
        return self._last


@dataclass(frozen=True)
class HostNamespace:
    """Where a host's commands run and listen."""

    prefix: tuple[str, ...]  # put before a command
    listen: str  # the address that its services listen on


def run_in_real_time() -> None:
    """Delays of this process are punctual on a busy machine too, where that is allowed."""
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))


# The hosts and their links.


class NoEmulationError(RuntimeError):
    """This machine allows no such hosts; the text says why."""


class EmulatedHost:
    """The way to one host, and the host itself. `tell` orders a shape and returns the answer, once it has effect."""

    def __init__(self, name: str, place: HostNamespace, tell: Callable[[Shape], Awaitable[str]]) -> None:
        self.name, self.place, self._tell = name, place, tell
        self.shape = Shape(name)  # what it does now

    async def delay(self, milliseconds: float) -> None:
        """Sets the time that it takes, one way. Raises ValueError."""
        await self._reshape(replace(self.shape, delay_ms=milliseconds))

    async def cut(self) -> None:
        """Nothing passes from now on, and neither side is told; raises NoEmulationError of a relayed host."""
        if not self.place.prefix:
            raise NoEmulationError("only links between namespaces can be cut")
        await self._reshape(replace(self.shape, cut=True))

    async def address_through(self, address: str) -> str:
        """By which HOST:PORT a service of the host, which listens on `address`, is reached through the link."""
        return await self._tell(replace(self.shape, service=address))

    async def _reshape(self, shape: Shape) -> None:
        await self._tell(shape)
        self.shape = shape


Links = AbstractAsyncContextManager[Mapping[str, EmulatedHost]]


def hosts(names: Sequence[str]) -> Links:
    """Network namespaces joined by a switch, for the time of the block.

    Commands run on a host with `link.place.prefix` before them, and must listen on `link.place.listen`. Raises
    NoEmulationError: they need root and /dev/net/tun, and nsenter to enter them."""
    if shutil.which("nsenter") is None:
        raise NoEmulationError("there is no nsenter (util-linux)")
    return _carried("switch", names)


def relays(names: Sequence[str]) -> Links:
    """The same over loopback: each service is reached through a relay that keeps its bytes for a while."""
    return _carried("relays", names)


@asynccontextmanager
async def network(names: Sequence[str]) -> AsyncIterator[Mapping[str, EmulatedHost]]:
    """Namespaces where they are allowed, else relays."""
    async with AsyncExitStack() as stack:
        try:
            links = await stack.enter_async_context(hosts(names))
        except NoEmulationError:
            links = await stack.enter_async_context(relays(names))
        yield links


@asynccontextmanager
async def _carried(kind: str, names: Sequence[str]) -> AsyncIterator[Mapping[str, EmulatedHost]]:
    with tempfile.TemporaryFile() as log:
        process, busy = await launched((sys.executable, "-m", CARRIER, kind, *names), stderr=log), asyncio.Lock()

        async def tell(shape: Shape) -> str:
            assert process.stdin is not None
            assert process.stdout is not None
            async with busy:
                process.stdin.write(json.dumps(asdict(shape)).encode() + b"\n")
                answer = await process.stdout.readline()
            if not answer:
                raise NoEmulationError("the process that carries the traffic has ended")
            return answer.decode().strip()

        try:
            yield {name: EmulatedHost(name, place, tell) for name, place in (await _places(process, log)).items()}
        finally:
            await asyncio.shield(ended(process, END_SECONDS))


async def _places(process: asyncio.subprocess.Process, log: IO[bytes]) -> Mapping[str, HostNamespace]:
    assert process.stdout is not None
    with suppress(TimeoutError):
        line = await asyncio.wait_for(process.stdout.readline(), READY_SECONDS)
        if line:
            found: dict[str, Any] = json.loads(line)
            return {name: HostNamespace(tuple(place["prefix"]), place["listen"]) for name, place in found.items()}
        log.seek(0)
        words = log.read().decode("utf-8", "replace").strip().splitlines()
        raise NoEmulationError(words[-1] if words else "it said nothing")
    raise NoEmulationError(f"the network is not ready after {READY_SECONDS:.0f} s")

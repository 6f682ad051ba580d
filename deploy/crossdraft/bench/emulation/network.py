"""Emulated hosts with delayed links: namespaces behind a switch or, where these are not allowed, loopback relays."""

import asyncio
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import IO

from crossdraft.bench.emulation.protocol import (
    Order,
    Part,
    Place,
    Reshape,
    Shape,
    Through,
    read_places,
    write_order,
)

SWITCH, RELAY = "crossdraft.bench.emulation.switch", "crossdraft.bench.emulation.relay"
READY_SECONDS = 30.0  # for Python to start on a busy machine
END_SECONDS = 5.0


class NotAllowed(RuntimeError):  # noqa: N818 - it says what happened
    """This machine allows no such hosts; the text says why."""


@dataclass(frozen=True, eq=False)
class Carrier:
    """The process that carries the traffic."""

    process: asyncio.subprocess.Process
    busy: asyncio.Lock

    async def tell(self, order: Order) -> str:
        """Its answer, which comes when the order has taken effect. Raises NotAllowed if the process has ended."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        async with self.busy:
            self.process.stdin.write(write_order(order))
            answer = await self.process.stdout.readline()
        if not answer:
            raise NotAllowed("the process that carries the traffic has ended")
        return answer.decode().strip()


class Link:
    """The way to one host, and the host itself."""

    def __init__(self, name: str, place: Place, carrier: Carrier) -> None:
        self.name = name
        self.place = place
        self._carrier = carrier
        self._shape = Shape()

    @property
    def shape(self) -> Shape:
        """What it does now."""
        return self._shape

    async def delay(self, there_ms: float, back_ms: float | None = None, jitter_ms: float = 0.0) -> None:
        """Sets the delays, one way each; back is as long as there unless it is given. Raises ValueError."""
        back = there_ms if back_ms is None else back_ms
        await self._reshape(replace(self._shape, there_ms=there_ms, back_ms=back, jitter_ms=jitter_ms))

    async def cut(self) -> None:
        """Nothing passes from now on, and neither side is told."""
        await self._reshape(replace(self._shape, cut=True))

    async def heal(self) -> None:
        """What is sent from now on passes again."""
        await self._reshape(replace(self._shape, cut=False))

    async def part(self, other: "Link") -> None:
        """Nothing passes between the two hosts from now on, and neither is told; all else passes as before.

        Raises:
            NotAllowed: they are behind relays, where each is reached from here only.
        """
        await self._part(other, True)

    async def join(self, other: "Link") -> None:
        """What these hosts send each other from now on passes again. Raises NotAllowed."""
        await self._part(other, False)

    async def address_through(self, address: str) -> str:
        """By which HOST:PORT a service of the host, which listens on `address`, is reached through the link."""
        return await self._carrier.tell(Through(self.name, address))

    async def _part(self, other: "Link", parted: bool) -> None:
        complaint = await self._carrier.tell(Part(self.name, other.name, parted))
        if complaint:
            raise NotAllowed(complaint)

    async def _reshape(self, shape: Shape) -> None:
        await self._carrier.tell(Reshape(self.name, shape))
        self._shape = shape


@asynccontextmanager
async def hosts(names: Sequence[str]) -> AsyncIterator[Mapping[str, Link]]:
    """Network namespaces joined by a switch, for the time of the block.

    Commands run on a host with `link.place.prefix` before them, and must listen on `link.place.listen`.

    Raises:
        NotAllowed: they need root and /dev/net/tun, and nsenter to enter them.
    """
    if shutil.which("nsenter") is None:
        raise NotAllowed("there is no nsenter (util-linux)")
    async with _carried(SWITCH, names) as links:
        yield links


@asynccontextmanager
async def relays(names: Sequence[str]) -> AsyncIterator[Mapping[str, Link]]:
    """The same over loopback: each service is reached through a relay that keeps its bytes for a while."""
    async with _carried(RELAY, names) as links:
        yield links


@asynccontextmanager
async def network(names: Sequence[str]) -> AsyncIterator[Mapping[str, Link]]:
    """Namespaces where they are allowed, else relays."""
    async with AsyncExitStack() as stack:
        try:
            links = await stack.enter_async_context(hosts(names))
        except NotAllowed:
            links = await stack.enter_async_context(relays(names))
        yield links


@asynccontextmanager
async def _carried(module: str, names: Sequence[str]) -> AsyncIterator[Mapping[str, Link]]:
    pipe = asyncio.subprocess.PIPE
    with tempfile.TemporaryFile() as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module, *names), stdin=pipe, stdout=pipe, stderr=log, start_new_session=True
        )
        try:
            places = await _places(process, log)
            carrier = Carrier(process, asyncio.Lock())
            yield {name: Link(name, place, carrier) for name, place in places.items()}
        finally:
            await asyncio.shield(_end(process))


async def _places(process: asyncio.subprocess.Process, log: IO[bytes]) -> Mapping[str, Place]:
    assert process.stdout is not None
    with suppress(TimeoutError):
        line = await asyncio.wait_for(process.stdout.readline(), READY_SECONDS)
        if line:
            return read_places(line)
        log.seek(0)
        words = log.read().decode("utf-8", "replace").strip().splitlines()
        raise NotAllowed(words[-1] if words else "it said nothing")
    raise NotAllowed(f"the network is not ready after {READY_SECONDS:.0f} s")


async def _end(process: asyncio.subprocess.Process) -> None:
    assert process.stdin is not None
    process.stdin.close()
    try:
        await asyncio.wait_for(process.wait(), END_SECONDS)
    except TimeoutError:
        process.kill()
        await process.wait()

"""Emulated hosts with delayed links: namespaces behind a switch or, where these are not allowed, loopback relays.

The traffic is carried by a process of its own, `python -m crossdraft.lab.emulation.network switch|relays NAME ...`,
which is told what to do in lines of JSON: first it says where the hosts are, then it answers each order with a line,
once the order has taken effect. It ends with its standard input.

`switch`: each name is a host with a network namespace of its own; they are reached from this process's own namespace. A
packet is delayed by the link by which it leaves its host and by the one by which it enters another. (The kernel's own
delays, tc netem, are missing from many kernels.) The namespaces are joined by TUN devices: what one end is written
comes out of the other as packets. A namespace made here has no name and no process. It lives as long as this process
keeps it open or a process started in it lives, and the devices end with this process.

`relays`, where namespaces are not allowed: hosts are only names. Their services run on this machine's loopback, and are
reached through a port of this process, which delays the bytes of TCP connections, but not handshakes and
acknowledgements. Their links cannot be cut.
"""

import asyncio
import ctypes
import fcntl
import json
import math
import os
import selectors
import shutil
import socket
import struct
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

from crossdraft.cli.processes import END_SECONDS, ended, launched

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


@asynccontextmanager
async def _carried(kind: str, names: Sequence[str]) -> AsyncIterator[Mapping[str, EmulatedHost]]:
    with tempfile.TemporaryFile() as log:
        process, busy = await launched((sys.executable, "-m", __name__, kind, *names), stderr=log), asyncio.Lock()

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


# Network namespaces joined by a switch, for the time of the block. Commands run on a host with `link.place.prefix`
# before them, and must listen on `link.place.listen`. Raises NoEmulationError: root, /dev/net/tun, nsenter is missing.
hosts = partial(_carried, "switch")
# The same over loopback: each service is reached through a relay that keeps its bytes for a while.
relays = partial(_carried, "relays")


@asynccontextmanager
async def network(names: Sequence[str]) -> AsyncIterator[Mapping[str, EmulatedHost]]:
    """Namespaces where they are allowed, else relays."""
    async with AsyncExitStack() as stack:
        try:
            links = await stack.enter_async_context(hosts(names))
        except NoEmulationError:
            links = await stack.enter_async_context(relays(names))
        yield links


# The process: namespaces behind a switch.

MTU = 65_000  # bytes: few packets, as each costs this process some work
QUEUED = 5_000  # packets that a device keeps for a reader that is behind
_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_SIOCSIFFLAGS, _SIOCSIFADDR, _SIOCSIFNETMASK = 0x8914, 0x8916, 0x891C
_SIOCSIFMTU, _SIOCSIFTXQLEN = 0x8922, 0x8943
_IFF_UP = 0x0001
_OWN = "/proc/thread-self/ns/net"
BURST = 64  # packets that one device may bring before the others are looked at
PACKET = 65_536  # bytes that are read at once
HERE = ""  # the name of this process's own namespace


@dataclass(frozen=True)
class Port:
    """A network device with its address, seen from its far end, and whose it is."""

    name: str
    fd: int  # packets that the namespace sends are read here, and those for it written
    address: str  # IPv4
    namespace: int | None  # a file descriptor of the namespace it is in; None: this process's own
    lanes: dict[int, DelayLine] = field(default_factory=dict)  # by the device that a packet leaves by


def far_port(name: str, device: str, address: str) -> Port:
    """A device in a new namespace; raises OSError where that is not allowed."""
    home = os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC)
    try:  # this thread goes there and comes back
        _check(_libc().unshare(_CLONE_NEWNET))
        _set("lo", _SIOCSIFFLAGS, "H14x", _IFF_UP)
        return Port(name, _configured(device, address), address, os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC))
    finally:
        _check(_libc().setns(home, _CLONE_NEWNET))
        os.close(home)


def _configured(name: str, address: str) -> int:
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    for request, value in ((_SIOCSIFADDR, address), (_SIOCSIFNETMASK, "255.255.255.0")):
        _set(name, request, "HH4s8x", socket.AF_INET, 0, socket.inet_aton(value))
    for request, number in ((_SIOCSIFMTU, MTU), (_SIOCSIFTXQLEN, QUEUED)):
        _set(name, request, "i12x", number)
    _set(name, _SIOCSIFFLAGS, "H14x", _IFF_UP)
    return fd


def _set(name: str, request: int, form: str, *values: int | bytes) -> None:
    """Something of a device in this thread's namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, request, struct.pack(f"16s{form}", name.encode(), *values))


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)  # Python has unshare and setns from 3.12 on


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class Switch:
    """Hosts with namespaces: ports, the shapes of their links, and what becomes of each packet. Raises OSError: this
    machine allows no namespaces or devices, or has nothing to enter them by."""

    def __init__(self, names: Sequence[str]) -> None:
        if shutil.which("nsenter") is None:
            raise OSError("there is no nsenter (util-linux)")
        ports = _ports(names)
        self._by_fd = {port.fd: port for port in ports}
        self._by_address = {bytes(map(int, port.address.split("."))): port for port in ports}
        self._shapes = {port.name: Shape(port.name) for port in ports}
        self._loop = asyncio.get_running_loop()
        for port in ports:
            self._loop.add_reader(port.fd, self._take, port)

    @property
    def places(self) -> dict[str, HostNamespace]:
        """Where the hosts are."""
        folder = f"/proc/{os.getpid()}/fd"
        return {
            port.name: HostNamespace(("nsenter", f"--net={folder}/{port.namespace}", "--"), port.address)
            for port in self._by_fd.values()
            if port.namespace is not None
        }

    async def obey(self, shape: Shape) -> str:
        """Takes effect at once: a cut also drops what is on its way to or from the host."""
        self._shapes[shape.host] = shape
        return shape.service

    def _take(self, port: Port) -> None:
        for _ in range(BURST):
            try:
                packet = os.read(port.fd, PACKET)
            except BlockingIOError:
                return
            peer = self._by_address.get(packet[16:20]) if packet[0] >> 4 == 4 else None
            if peer is not None:
                self._send(port, peer, packet)

    def _send(self, port: Port, peer: Port, packet: bytes) -> None:
        if not self._cut(port, peer):
            delay = self._shapes[port.name].delay_ms + self._shapes[peer.name].delay_ms
            due = port.lanes.setdefault(peer.fd, DelayLine()).due(self._loop.time(), delay)
            self._loop.call_at(due, self._write, port, peer, packet)

    def _write(self, port: Port, peer: Port, packet: bytes) -> None:
        if not self._cut(port, peer):
            with suppress(OSError):  # a full device drops it, as networks do
                os.write(peer.fd, packet)

    def _cut(self, one: Port, other: Port) -> bool:
        return self._shapes[one.name].cut or self._shapes[other.name].cut


def _ports(names: Sequence[str]) -> list[Port]:
    network = _free_network()
    address = f"{network}.1"
    own = Port(HERE, _configured(f"cd{os.getpid()}", address), address, None)
    return [own, *(far_port(name, "cd0", f"{network}.{number}") for number, name in enumerate(names, 2))]


def _free_network() -> str:
    """Three numbers of an address. 198.18.0.0/15 is for tests of networks (RFC 2544): nobody else is there."""
    routes = Path("/proc/net/route").read_text(encoding="ascii").split()
    first = os.getpid()  # so that two that start at once do not choose the same
    for number in range(first, first + 256):
        network = bytes((198, 18, number % 256))
        if not any(route.endswith(network[::-1].hex().upper()) for route in routes):
            return ".".join(map(str, network))
    raise OSError("all of 198.18.0.0/16 is taken")


# Relays.

LOOPBACK = "127.0.0.1"


class Relays:
    """Hosts on loopback."""

    def __init__(self, names: Sequence[str]) -> None:
        self.places = dict.fromkeys(names, HostNamespace((), LOOPBACK))
        self._delays = dict.fromkeys(names, 0.0)  # ms
        self._servers: dict[str, asyncio.Server] = {}  # by the address that is reached through them

    async def obey(self, shape: Shape) -> str:
        """Takes effect for what enters from now on."""
        self._delays[shape.host] = shape.delay_ms
        if shape.service and shape.service not in self._servers:
            host, _, port = shape.service.rpartition(":")
            joined = partial(self._join, shape.host, host, int(port))
            self._servers[shape.service] = await asyncio.start_server(joined, LOOPBACK)
        found = self._servers.get(shape.service)
        return "" if found is None else f"{LOOPBACK}:{found.sockets[0].getsockname()[1]}"

    async def _join(
        self, name: str, host: str, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        ends = [writer]
        try:
            far_reader, far_writer = await asyncio.open_connection(host, port)
            ends.append(far_writer)
            await asyncio.gather(self._carry(name, reader, far_writer), self._carry(name, far_reader, writer))
        except OSError:  # either end is gone: so is the other
            pass
        finally:
            for end in ends:
                end.close()

    async def _carry(self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One direction, until the sender has ended and everything is delivered; raises OSError if it is lost."""
        loop, line, ended = asyncio.get_running_loop(), DelayLine(), asyncio.Event()
        while piece := await reader.read(PACKET):
            loop.call_at(line.due(loop.time(), self._delays[name]), writer.write, piece)
        loop.call_at(line.due(loop.time(), self._delays[name]), ended.set)
        await ended.wait()
        writer.write_eof()


# The process.


async def _serve(kind: str, names: Sequence[str]) -> None:
    """Makes the hosts, says where they are, and carries their traffic until standard input ends."""
    carried = Switch(names) if kind == "switch" else Relays(names)
    run_in_real_time()
    orders = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    print(json.dumps({name: asdict(place) for name, place in carried.places.items()}), flush=True)
    while line := await orders.readline():
        print(await carried.obey(Shape(**json.loads(line))), flush=True)


if __name__ == "__main__":
    # select and not epoll, whose waits are whole milliseconds.
    asyncio.SelectorEventLoop(selectors.SelectSelector()).run_until_complete(_serve(sys.argv[1], sys.argv[2:]))

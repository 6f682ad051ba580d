"""A process that carries traffic between hosts and delays it as their links say.

    python -m crossdraft.lab.emulation.carrier switch|relays NAME ...

`switch`: each name is a host with a network namespace of its own; they are reached from this process's own namespace. A
packet is delayed by the link by which it leaves its host and by the one by which it enters another. (The kernel's own
delays, tc netem, are missing from many kernels.) The namespaces are joined by TUN devices: what one end is written
comes out of the other as packets. A namespace made here has no name and no process. It lives as long as this process
keeps it open or a process started in it lives, and the devices end with this process.

`relays`, where namespaces are not allowed: hosts are only names. Their services run on this machine's loopback, and are
reached through a port of this process, which delays the bytes of TCP connections, but not handshakes and
acknowledgements. Their links cannot be cut.

The process ends with its standard input.
"""

import asyncio
import ctypes
import fcntl
import json
import os
import selectors
import socket
import struct
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from crossdraft.lab.emulation.network import DelayLine, HostNamespace, Shape, run_in_real_time

MTU = 65_000  # bytes: few packets, as each costs this process some work
QUEUED = 5_000  # packets that a device keeps for a reader that is behind
_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _SIOCSIFADDR, _SIOCSIFNETMASK = 0x8913, 0x8914, 0x8916, 0x891C
_SIOCSIFMTU, _SIOCSIFTXQLEN = 0x8922, 0x8943
_IFF_UP = 0x0001
_OWN = "/proc/thread-self/ns/net"
BURST = 64  # packets that one device may bring before the others are looked at
PACKET = 65_536  # bytes
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
        _bring_up("lo")
        return Port(name, _configured(device, address), address, os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC))
    finally:
        _check(_libc().setns(home, _CLONE_NEWNET))
        os.close(home)


def _configured(name: str, address: str) -> int:
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for request, value in ((_SIOCSIFADDR, address), (_SIOCSIFNETMASK, "255.255.255.0")):
            fcntl.ioctl(
                control, request, struct.pack("16sHH4s8x", name.encode(), socket.AF_INET, 0, socket.inet_aton(value))
            )
        for request, number in ((_SIOCSIFMTU, MTU), (_SIOCSIFTXQLEN, QUEUED)):
            fcntl.ioctl(control, request, struct.pack("16si12x", name.encode(), number))
    _bring_up(name)
    return fd


def _bring_up(name: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        found = fcntl.ioctl(control, _SIOCGIFFLAGS, struct.pack("16sH14x", name.encode(), 0))
        (flags,) = struct.unpack_from("H", found, 16)
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sH14x", name.encode(), flags | _IFF_UP))


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)  # Python has unshare and setns from 3.12 on


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class Switch:
    """Hosts with namespaces: ports, the shapes of their links, and what becomes of each packet. Raises OSError: this
    machine allows no namespaces or devices."""

    def __init__(self, names: Sequence[str]) -> None:
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
PIECE = 65_536  # bytes read at once


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
        while piece := await reader.read(PIECE):
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

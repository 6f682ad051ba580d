"""A process that switches packets between network namespaces and delays them as their links say.

    python -m crossdraft.lab.emulation.switch NAME ...

Each name is a host with a network namespace of its own; they are reached from this process's own namespace. A packet
is delayed by the link by which it leaves its host and by the one by which it enters another. The process ends with its
standard input. (The kernel's own delays, tc netem, are missing from many kernels.)

The namespaces are joined by TUN devices: what one end is written comes out of the other as packets. A namespace made
here has no name and no process. It lives as long as this process keeps it open or a process started in it lives, and
the devices end with this process.
"""

import ctypes
import fcntl
import heapq
import json
import os
import select
import socket
import struct
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from crossdraft.lab.emulation.network import DelayLine, HostNamespace, Shape, run_in_real_time, say, write_places

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
STDIN = 0
HERE = ""  # the name of this process's own namespace
Packet = tuple[float, int, int, bytes]  # due, order of entry, device to leave by, IPv4 packet


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
    """Ports, the shapes of their links, and the packets on their way."""

    def __init__(self, ports: Sequence[Port]) -> None:
        self._by_fd = {port.fd: port for port in ports}
        self._by_address = {bytes(map(int, port.address.split("."))): port for port in ports}
        self._shapes = {port.name: Shape(port.name) for port in ports}
        self._waiting: list[Packet] = []
        self._entered = 0

    def run(self) -> None:
        """Until standard input ends."""
        while True:
            self._deliver()
            due = self._waiting[0][0] if self._waiting else None
            wait = None if due is None else max(0.0, due - time.monotonic())
            # select and not epoll, whose waits are whole milliseconds.
            for fd in select.select([STDIN, *self._by_fd], [], [], wait)[0]:
                if fd != STDIN:
                    self._take(self._by_fd[fd])
                elif not self._obey():
                    return

    def _obey(self) -> bool:
        line = sys.stdin.buffer.readline()
        if not line:
            return False
        shape = Shape(**json.loads(line))
        self._shapes[shape.host] = shape  # a cut also drops what is on its way to or from the host
        say(shape.service.encode() + b"\n")
        return True

    def _deliver(self) -> None:
        now = time.monotonic()
        while self._waiting and self._waiting[0][0] <= now:
            _, _, fd, packet = heapq.heappop(self._waiting)
            self._write(fd, packet)

    def _write(self, fd: int, packet: bytes) -> None:
        source = self._by_address.get(packet[12:16])
        if source is not None and not self._cut(source, self._by_fd[fd]):
            with suppress(OSError):  # a full device drops it, as networks do
                os.write(fd, packet)

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
        if self._cut(port, peer):
            return
        delay = self._shapes[port.name].delay_ms + self._shapes[peer.name].delay_ms
        due = port.lanes.setdefault(peer.fd, DelayLine()).due(time.monotonic(), delay)
        self._entered += 1
        heapq.heappush(self._waiting, (due, self._entered, peer.fd, packet))

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


def main(names: Sequence[str]) -> None:
    """Makes the hosts, says where they are, and carries their packets until standard input ends."""
    ports = _ports(names)
    run_in_real_time()
    places = {}
    for port in ports[1:]:
        file = f"/proc/{os.getpid()}/fd/{port.namespace}"
        places[port.name] = HostNamespace(("nsenter", f"--net={file}", "--"), port.address)
    say(write_places(places))
    Switch(ports).run()


if __name__ == "__main__":
    main(sys.argv[1:])

"""A switch between network namespaces, as a process: packets wait there as long as their links say.

    python -m crossdraft.bench.emulation.switch NAME ...

Each name is a host with a namespace of its own; this process's own namespace is the place they are reached from. A
packet waits for the link that it leaves its host by and for the one that it enters another by. It ends with its
standard input. Where network delays can be had from the kernel (tc netem) that would do, but many kernels lack it.
"""

import heapq
import os
import select
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from crossdraft.bench.emulation.devices import Device, far_device, own_device
from crossdraft.bench.emulation.orders import Part, Place, Reshape, Through, read_order, write_places
from crossdraft.bench.emulation.shape import Lane, Shape

BURST = 64  # packets that one device may bring before the others are looked at
PACKET = 65_536  # bytes
STDIN = 0
HERE = ""  # the name of this process's own namespace
UNDELAYED = Shape()
Packet = tuple[float, int, int, bytes]  # due, order of entry, device to leave by, IPv4 packet


@dataclass(frozen=True)
class Port:
    """A device of the switch, and whose it is."""

    name: str
    device: Device
    lanes: dict[int, Lane] = field(default_factory=dict)  # by the device that a packet leaves by


class Switch:
    """Ports, the shapes of their links, and the packets on their way."""

    def __init__(self, ports: Sequence[Port]) -> None:
        self._by_fd = {port.device.fd: port for port in ports}
        self._by_address = {bytes(map(int, port.device.address.split("."))): port for port in ports}
        self._shapes = {port.name: UNDELAYED for port in ports}
        self._parted: set[frozenset[str]] = set()  # names of two hosts each
        self._waiting: list[Packet] = []
        self._entered = 0

    def reshape(self, name: str, shape: Shape) -> None:
        """Takes effect for what enters from now on; a cut also drops what is on its way to or from the host."""
        self._shapes[name] = shape

    def part(self, names: frozenset[str], parted: bool) -> None:
        """From now on nothing passes between two hosts, or it passes again."""
        self._parted = self._parted | {names} if parted else self._parted - {names}

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
        order = read_order(line)
        match order:
            case Reshape(host, shape):
                self.reshape(host, shape)
                _say(b"\n")
            case Part(host, other, parted):
                self.part(frozenset((host, other)), parted)
                _say(b"\n")
            case Through(_, address):
                _say(address.encode() + b"\n")
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
                packet = os.read(port.device.fd, PACKET)
            except BlockingIOError:
                return
            peer = self._by_address.get(packet[16:20]) if packet[0] >> 4 == 4 else None
            if peer is not None:
                self._send(port, peer, packet)

    def _send(self, port: Port, peer: Port, packet: bytes) -> None:
        if self._cut(port, peer):
            return
        out, into = self._shapes[port.name], self._shapes[peer.name]
        lane = port.lanes.setdefault(peer.device.fd, Lane())
        delay, jitter = out.back_ms + into.there_ms, out.jitter_ms + into.jitter_ms
        self._entered += 1
        due = lane.due(time.monotonic(), delay, jitter)
        heapq.heappush(self._waiting, (due, self._entered, peer.device.fd, packet))

    def _cut(self, one: Port, other: Port) -> bool:
        shapes = self._shapes
        return shapes[one.name].cut or shapes[other.name].cut or frozenset((one.name, other.name)) in self._parted


def _say(line: bytes) -> None:
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


def _ports(names: Sequence[str]) -> list[Port]:
    network = _free_network()
    own = Port(HERE, own_device(f"cd{os.getpid()}", f"{network}.1"))
    return [own, *(Port(name, far_device("cd0", f"{network}.{2 + number}")) for number, name in enumerate(names))]


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
    with suppress(OSError):  # punctual on a busy machine too, where that is allowed
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    places = {}
    for port in ports[1:]:
        file = f"/proc/{os.getpid()}/fd/{port.device.namespace}"
        places[port.name] = Place(("nsenter", f"--net={file}", "--"), port.device.address)
    _say(write_places(places))
    Switch(ports).run()


if __name__ == "__main__":
    main(sys.argv[1:])

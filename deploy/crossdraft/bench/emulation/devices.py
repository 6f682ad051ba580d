"""Network namespaces joined by TUN devices: what is written into one end comes out of the other as packets.

A namespace made here has no name and no process of its own. It lives as long as this process keeps it open, or a
process that was started in it lives, and the devices end with this process.
"""

import ctypes
import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

MTU = 65_000  # bytes: few packets, as each costs this process some work
QUEUED = 5_000  # packets that a device keeps for a reader that is behind
_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _SIOCSIFADDR, _SIOCSIFNETMASK = 0x8913, 0x8914, 0x8916, 0x891C
_SIOCSIFMTU, _SIOCSIFTXQLEN = 0x8922, 0x8943
_IFF_UP = 0x0001
_OWN = "/proc/thread-self/ns/net"


@dataclass(frozen=True)
class Device:
    """A network device with its address, seen from its far end."""

    fd: int  # packets that the namespace sends are read here, and those for it written
    address: str  # IPv4
    namespace: int | None  # a file descriptor of the namespace it is in; None: this process's own


def own_device(name: str, address: str) -> Device:
    """A device in this process's own namespace; raises OSError where that is not allowed."""
    return Device(_configured(name, address), address, None)


def far_device(name: str, address: str) -> Device:
    """A device in a new namespace; raises OSError where that is not allowed."""
    with _aside():
        _check(_libc().unshare(_CLONE_NEWNET))
        _bring_up("lo")
        return Device(_configured(name, address), address, os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC))


@contextmanager
def _aside() -> Iterator[None]:
    """This thread may go into another namespace within the block, and is back after it."""
    home = os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield
    finally:
        _check(_libc().setns(home, _CLONE_NEWNET))
        os.close(home)


def _configured(name: str, address: str) -> int:
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for request, value in ((_SIOCSIFADDR, address), (_SIOCSIFNETMASK, "255.255.255.0")):
            fcntl.ioctl(control, request, struct.pack("16sHH4s8x", name.encode(), socket.AF_INET, 0, _packed(value)))
        for request, number in ((_SIOCSIFMTU, MTU), (_SIOCSIFTXQLEN, QUEUED)):
            fcntl.ioctl(control, request, struct.pack("16si12x", name.encode(), number))
    _bring_up(name)
    return fd


def _bring_up(name: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        found = fcntl.ioctl(control, _SIOCGIFFLAGS, struct.pack("16sH14x", name.encode(), 0))
        (flags,) = struct.unpack_from("H", found, 16)
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sH14x", name.encode(), flags | _IFF_UP))


def _packed(address: str) -> bytes:
    return socket.inet_aton(address)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)  # Python has unshare and setns from 3.12 on


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))

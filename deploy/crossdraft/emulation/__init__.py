"""Distance for tests and benchmarks: hosts on this machine with a real network delay between them."""

from crossdraft.emulation.network import Link, NotAllowed, hosts, network, relays
from crossdraft.emulation.shape import Shape

__all__ = ["Link", "NotAllowed", "Shape", "hosts", "network", "relays"]

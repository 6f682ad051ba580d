"""Emulated hosts and machines for tests and benchmarks, with real network delays between them."""

from crossdraft.bench.emulation.network import Link, NotAllowed, hosts, network, relays

__all__ = ["Link", "NotAllowed", "hosts", "network", "relays"]

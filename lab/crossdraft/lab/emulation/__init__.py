"""Emulated hosts and machines for tests and benchmarks, with real network delays between them."""

from crossdraft.lab.emulation.network import EmulatedHost, NoEmulationError, hosts, network, relays

__all__ = ["EmulatedHost", "NoEmulationError", "hosts", "network", "relays"]

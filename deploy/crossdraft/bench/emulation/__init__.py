"""Distance for tests and benchmarks: hosts and machines on this one, with a real network delay between them."""

from crossdraft.bench.emulation.machines import Machine, machines
from crossdraft.bench.emulation.network import Link, NotAllowed, hosts, network, relays
from crossdraft.bench.emulation.shape import Shape

__all__ = ["Link", "Machine", "NotAllowed", "Shape", "hosts", "machines", "network", "relays"]

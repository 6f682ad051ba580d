"""Emulated hosts and machines for tests and benchmarks, with real network delays between them."""

"""Connections of this process are patient here: what a frozen process and a cut link come to has tests elsewhere."""

from tests.rpc.unhurried import unhurried_module

__all__ = ["unhurried_module"]

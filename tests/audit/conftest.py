"""The command in this process, and patience with services."""

from tests.cli.conftest import cli, one_thread
from tests.rpc.unhurried import unhurried_module

__all__ = ["cli", "one_thread", "unhurried_module"]

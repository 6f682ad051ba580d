"""The command in this process, and patience with services."""

from tests.cli.conftest import cli, one_thread
from tests.endtoend.conftest import unhurried

__all__ = ["cli", "one_thread", "unhurried"]

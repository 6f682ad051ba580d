"""The command in this process, and small models for services in others."""

from tests.cli.conftest import cli, drafter_folder, one_thread, others_awaited, target_folder, unhurried

__all__ = ["cli", "drafter_folder", "one_thread", "others_awaited", "target_folder", "unhurried"]

"""The tiny models and services of the service tests, here too."""

from tests.services.conftest import (
    drafter,
    drafter_folder,
    drafter_model,
    one_thread,
    target,
    target_folder,
    target_model,
)

__all__ = ["drafter", "drafter_folder", "drafter_model", "one_thread", "target", "target_folder", "target_model"]

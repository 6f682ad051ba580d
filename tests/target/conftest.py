"""The tiny models and services of `tests.services`, here too."""

from tests.services.conftest import (  # noqa: F401 - fixtures
    drafter,
    drafter_folder,
    drafter_model,
    one_thread,
    seeded,
    target,
    target_folder,
    target_model,
    unhurried,
)

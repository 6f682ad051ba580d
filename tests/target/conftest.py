"""The tiny models and services of `tests.services`, here too."""

from tests.services.conftest import *  # noqa: F403 - fixtures

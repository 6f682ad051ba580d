"""Connections of this process are patient here: what a frozen process and a cut link come to has tests elsewhere."""

import pytest

from tests.rpc.unhurried import unhurried_module
from tests.serving.fakes import FakeBackend

__all__ = ["unhurried_module"]


@pytest.fixture
def outputs() -> FakeBackend:
    return FakeBackend()

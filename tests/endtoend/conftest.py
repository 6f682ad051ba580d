"""The bundled models, served, and the target by itself."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.endtoend.reference import Reference
from tests.endtoend.stack import TARGET, Stack, serving
from tests.rpc.unhurried import unhurried_module

__all__ = ["unhurried_module"]


@pytest.fixture(scope="session")
def reference() -> Reference:
    return Reference(TARGET)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(request: pytest.FixtureRequest) -> AsyncIterator[Stack]:
    """With the drafters that the tests of a file name."""
    async with serving(request.module.SERVED, getattr(request.module, "AFFINE", ())) as stack:
        yield stack

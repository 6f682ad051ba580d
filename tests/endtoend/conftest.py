"""The bundled models, served, and the target by itself."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.endtoend.reference import Reference
from tests.endtoend.stack import TARGET, Stack, serving


@pytest.fixture(scope="session")
def reference() -> Reference:
    return Reference(TARGET)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[Stack]:
    async with serving() as stack:
        yield stack

"""The bundled models, served, and the target by itself."""

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from tests.endtoend.reference import Reference
from tests.endtoend.stack import TARGET, Stack, serving
from tests.rpc.unhurried import unhurry


@pytest.fixture(autouse=True, scope="module")
def unhurried() -> Iterator[None]:
    """No service is taken for lost because the machine stands still for seconds."""
    with pytest.MonkeyPatch.context() as patch:
        unhurry(patch)
        yield


@pytest.fixture(scope="session")
def reference() -> Reference:
    return Reference(TARGET)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[Stack]:
    async with serving() as stack:
        yield stack

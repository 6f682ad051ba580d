"""What tests of TLS and of limits in time share."""

import pytest

from tests.rpc import linked
from tests.rpc.certificates import cluster
from tests.rpc.clock import clock
from tests.rpc.unhurried import unhurried

__all__ = ["clock", "cluster", "unhurried"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests of links run over gRPC and in memory, unless they are about what travels on a wire."""
    if "transport" in metafunc.fixturenames:
        wire = metafunc.definition.get_closest_marker("wire") is not None
        metafunc.parametrize("transport", [0] if wire else [0, None], ids=["gRPC"] if wire else ["gRPC", "memory"])


@pytest.fixture
async def service() -> linked.PuppetService:
    return linked.PuppetService()


@pytest.fixture
def carried(transport: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Services of the test listen on this port, or nowhere."""
    monkeypatch.setattr(linked, "PORT", transport)

"""What tests of TLS and of limits in time share."""

from pathlib import Path

import pytest

from tests.rpc import linked
from tests.rpc.certificates import Cluster
from tests.rpc.clock import Clock
from tests.rpc.unhurried import unhurry


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    unhurry(monkeypatch)


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path / "ours")


@pytest.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests of links run over gRPC and in memory, unless they are about what travels on a wire."""
    if "transport" in metafunc.fixturenames:
        wire = metafunc.definition.get_closest_marker("wire") is not None
        metafunc.parametrize("transport", [0] if wire else [0, None], ids=["gRPC"] if wire else ["gRPC", "memory"])


@pytest.fixture
def carried(transport: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Services of the test listen on this port, or nowhere."""
    monkeypatch.setattr(linked, "PORT", transport)

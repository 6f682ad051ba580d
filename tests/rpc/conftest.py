"""What tests of TLS and of limits in time share."""

from pathlib import Path

import pytest

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

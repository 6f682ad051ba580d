"""What tests of TLS share."""

from pathlib import Path

import pytest

from tests.rpc.certificates import Cluster


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path / "ours")

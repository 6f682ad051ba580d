"""Connections of this process are patient here: what a frozen process and a cut link come to has tests elsewhere."""

from collections.abc import Iterator

import pytest

from crossdraft.client import discovery
from tests.rpc.unhurried import LIMIT, unhurry


@pytest.fixture(scope="module", autouse=True)
def unhurried() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        unhurry(monkeypatch)
        monkeypatch.setattr(discovery, "OTHERS_SECONDS", LIMIT / 1000)
        yield

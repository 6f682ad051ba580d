"""Limits of gRPC's in tests that are not about them: a machine that stands still for seconds has lost no service."""

from collections.abc import Iterator

import pytest

from crossdraft.rpc import transport
from crossdraft.rpc.links import Patience
from crossdraft.rpc.server import Endpoint
from crossdraft.rpc.transport import CLIENT_OPTIONS, SERVER_OPTIONS, ChannelOptions

LIMIT = 60_000  # milliseconds
LIMITS = {
    "grpc.keepalive_timeout_ms",
    "grpc.http2.ping_timeout_ms",
    "grpc.min_reconnect_backoff_ms",  # that connecting may take
    "grpc.server_handshake_timeout_ms",
}


def longer(options: ChannelOptions) -> ChannelOptions:
    return tuple((name, LIMIT if name in LIMITS else value) for name, value in options)


def unhurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients and servers of this process that are made from now on take each other for lost after a minute, and wait
    as long for services that they can begin without."""
    monkeypatch.setattr(transport, "CLIENT_OPTIONS", longer(CLIENT_OPTIONS))
    monkeypatch.setattr(transport, "TLS_CONNECT_MS", LIMIT)
    monkeypatch.setattr("crossdraft.client.discovery.OTHERS_SECONDS", LIMIT / 1000)
    assert Endpoint.__init__.__defaults__ == (SERVER_OPTIONS,)
    monkeypatch.setattr(Endpoint.__init__, "__defaults__", (longer(SERVER_OPTIONS),))
    *waits, target_seconds, lives = Patience.__init__.__defaults__
    assert waits == [5.0, 30.0]
    monkeypatch.setattr(Patience.__init__, "__defaults__", (LIMIT / 1000, 2 * LIMIT / 1000, target_seconds, lives))


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    unhurry(monkeypatch)


@pytest.fixture(autouse=True, scope="module")
def unhurried_module() -> Iterator[None]:
    """The same where services live as long as a file's tests."""
    with pytest.MonkeyPatch.context() as patch:
        unhurry(patch)
        yield

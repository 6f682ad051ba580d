"""The tiny models and services of the service tests, here too; chance and limits in time that do not decide a test."""

import socket
from collections.abc import AsyncIterator, Iterator
from itertools import count

import pytest

from crossdraft.client import Pipeline, connect
from crossdraft.session.assignment import Secrets
from tests.rpc.sessions import DrafterClient, TargetClient
from tests.services.conftest import *  # noqa: F403 - fixtures
from tests.serving.ports import free_port


@pytest.fixture(autouse=True)
def same_chance(seeded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is drawn unasked is the same in every run: the secrets of generations, and seeds of drafters' sessions."""
    secrets = count(1)

    def drawn() -> Secrets:
        return Secrets(noise=next(secrets), audit=next(secrets), chooser=next(secrets))

    monkeypatch.setattr(Secrets, "drawn", staticmethod(drawn))


@pytest.fixture
async def pipeline(target: TargetClient, drafter: DrafterClient) -> AsyncIterator[Pipeline]:
    async with connect(target.address, drafter.address) as connected:
        yield connected


@pytest.fixture
def taken() -> Iterator[socket.socket]:
    """A port that is bound, and where nobody listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", free_port()))  # no connection and no other process of tests is given it later
        yield bound


@pytest.fixture
def nowhere(taken: socket.socket) -> str:
    """Its address."""
    return f"127.0.0.1:{taken.getsockname()[1]}"

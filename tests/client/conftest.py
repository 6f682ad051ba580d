"""The tiny models and services of the service tests, here too; chance and limits in time that do not decide a test."""

import socket
from collections.abc import AsyncIterator, Iterator
from itertools import count

import numpy as np
import pytest

from crossdraft.client import Pipeline, connect
from crossdraft.session.assignment import Secrets
from crossdraft.speculation.choice import Fixed
from crossdraft.speculation.controller import OutputController
from tests.rpc.sessions import DrafterClient, TargetClient
from tests.rpc.unhurried import LIMIT, unhurry
from tests.services.conftest import (  # noqa: F401 - fixtures
    drafter,
    drafter_folder,
    drafter_model,
    one_thread,
    target,
    target_folder,
    target_model,
)
from tests.serving.ports import free_port


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """No service is lost, and none left out, because the machine stands still for seconds."""
    unhurry(monkeypatch)
    monkeypatch.setattr("crossdraft.client.discovery.OTHERS_SECONDS", LIMIT / 1000)


@pytest.fixture(autouse=True)
def same_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is drawn unasked is the same in every run: the secrets of generations, and seeds of drafters' sessions."""
    secrets, seeds = count(1), count(1)

    def drawn() -> Secrets:
        return Secrets(noise=next(secrets), audit=next(secrets), chooser=next(secrets))

    monkeypatch.setattr(Secrets, "drawn", staticmethod(drawn))
    made = np.random.default_rng
    monkeypatch.setattr(np.random, "default_rng", lambda *seed: made(*seed or (next(seeds),)))


@pytest.fixture
async def pipeline(target: TargetClient, drafter: DrafterClient) -> AsyncIterator[Pipeline]:  # noqa: F811
    async with connect(target.address, drafter.address) as connected:
        yield connected


@pytest.fixture
def drafter_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """No output begins before its drafter has opened, which the target need not wait for and a test may."""
    for controller in (OutputController, Fixed):
        monkeypatch.setattr(controller, "waits_for_drafter", True)


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

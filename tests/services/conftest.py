"""Two tiny models with tokenizers of different kinds, saved, loaded and served on loopback."""

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from crossdraft.drafter.service import DrafterService
from crossdraft.engine.loader import LoadedModel, LoadOptions, load_model
from crossdraft.engine.served_model import ModelOptions, RunningModel
from crossdraft.rpc.frames import DRAFTER, TARGET
from crossdraft.rpc.server import Server
from crossdraft.target.service import TargetService
from crossdraft.text.letters import Side
from tests.engine.tiny import tiny_llama
from tests.rpc.clock import clock  # noqa: F401 - a fixture, as the next one
from tests.rpc.linked import AT_ONCE, Direct
from tests.rpc.sessions import DrafterClient, TargetClient
from tests.rpc.unhurried import unhurried  # noqa: F401
from tests.text.kinds import Kind, kind


async def direct(service: Any, opening: Any) -> Direct:
    """A session of a service without a link."""
    session = Direct(lambda _: None)
    session.session = await service.open(opening, session)
    return session


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws of drafter sessions that have no key are the same in every run."""
    seeds, made = count(), np.random.default_rng
    monkeypatch.setattr(np.random, "default_rng", lambda *seed: made(*seed or (next(seeds),)))


def save(folder: Path, some: Kind, context: int) -> Path:
    model = tiny_llama(vocab_size=some.size, max_position_embeddings=context)
    model.generation_config.eos_token_id = some.id_of(some.end)
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(some.json)
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": some.begin, "eos_token": some.end}))
    return folder


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("target"), kind("gpt2"), 128)


@pytest.fixture(scope="session")
def drafter_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("drafter"), kind("llama2"), 64)


@cache
def loaded(folder: Path) -> LoadedModel:
    """Read once for all tests of this process, of which one at a time runs it."""
    return load_model(LoadOptions(str(folder)))


def running_of(model: LoadedModel, side: Side) -> Iterator[RunningModel]:
    found = RunningModel.of(model, side, ModelOptions("", cache_mib=1))
    yield found
    found.close()


def running(folder: Path, side: Side) -> Iterator[RunningModel]:
    return running_of(loaded(folder), side)


@pytest.fixture
def target_model(target_folder: Path) -> Iterator[RunningModel]:
    yield from running(target_folder, Side.TARGET)


@pytest.fixture
def drafter_model(drafter_folder: Path) -> Iterator[RunningModel]:
    yield from running(drafter_folder, Side.DRAFTER)


@pytest.fixture
async def target(target_model: RunningModel) -> AsyncIterator[TargetClient]:
    async with Server(TARGET, TargetService(target_model), AT_ONCE) as server, TargetClient(server.address) as client:
        yield client


@asynccontextmanager
async def drafting(service: DrafterService) -> AsyncIterator[DrafterClient]:
    """A client of the service, which is served for the time of the block."""
    async with Server(DRAFTER, service, AT_ONCE) as server, DrafterClient(server.address) as client:
        yield client


@pytest.fixture
async def drafter(drafter_model: RunningModel) -> AsyncIterator[DrafterClient]:
    async with drafting(DrafterService(drafter_model)) as client:
        yield client

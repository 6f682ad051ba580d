"""What drafting costs: no copies of a whole vocabulary, and one wait for the device in a draft."""

import asyncio
import math
from typing import TypeVar

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from crossdraft.drafter.sampling import OwnTokens
from crossdraft.drafter.service import DrafterService
from crossdraft.engine.sampler import SamplerSteps
from crossdraft.engine.served_model import RunningModel
from crossdraft.text.letters import Letters, from_bytes
from crossdraft.types.messages import Draft, NoiseKey, OpenDrafter, SamplingOptions
from tests.engine.gathering import Gate
from tests.engine.taped import waits
from tests.engine.tiny import result
from tests.rpc.linked import Direct

T = TypeVar("T")


def read_alone(asking: SamplerSteps[T]) -> T:
    """What it returns when each of its readings is answered by itself."""
    try:
        wanted = next(asking)
        while True:
            (found,) = result(wanted)
            wanted = asking.send(found)
    except StopIteration as end:
        found: T = end.value
        return found


class Copied(TorchFunctionMode):
    """The sizes of what is copied to tensors and from them."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if getattr(function, "__name__", "") in ("new_tensor", "tensor", "numpy"):
            self.sizes.append(math.prod(result.shape))
        return result


def test_a_step_copies_no_more_than_the_row(drafter_model: RunningModel) -> None:
    size = drafter_model.tokenization.vocabulary.size
    for allowed in (None, np.arange(size - 1)):
        own = OwnTokens(drafter_model, OpenDrafter(from_bytes(b"The"), SamplingOptions(), NoiseKey(77), 8, allowed))
        with Copied() as copied:
            ((ids, _),) = read_alone(own.distributions(torch.arange(size, dtype=torch.float32)[None]))
        assert ids.tolist() == [size - 1 - (allowed is not None) - place for place in range(8)]
        assert max(copied.sizes) == 16  # ids and probabilities


SETTINGS = {
    "greedy": (SamplingOptions(temperature=0), None, 0),
    "keyed": (SamplingOptions(0.8), NoiseKey(77), 0),
    "truncated": (SamplingOptions(0.8, top_k=20, min_p=0.01), NoiseKey(77), 0),
    "nucleus": (SamplingOptions(0.8, top_p=0.9), NoiseKey(77), 0),
    "fresh": (SamplingOptions(0.8), None, 0),
    "rows": (SamplingOptions(0.8, top_k=20), NoiseKey(77), 8),
    "rows of a nucleus": (SamplingOptions(0.8, top_p=0.9), NoiseKey(77), 8),
    "greedy rows": (SamplingOptions(temperature=0), NoiseKey(77), 8),
}


@pytest.mark.parametrize("settings", [*([each] for each in SETTINGS), [*SETTINGS]], ids=lambda names: names[-1])
async def test_a_draft_waits_for_the_device_once(drafter_model, monkeypatch, settings):
    """Several sessions together, also with settings of which none is like another."""
    sessions = []
    for number, name in enumerate(3 * settings if len(settings) == 1 else settings):
        options, noise, width = SETTINGS[name]
        session = Direct(lambda _: None)
        opening = OpenDrafter(from_bytes(b"The quick" + bytes(number)), options, noise, width)
        session.session = await DrafterService(drafter_model).open(opening, session)
        await session.answer(Draft(1, 0, Letters(""), 1))  # the prompt is computed
        sessions.append(session)
    gate = Gate()
    standing = asyncio.ensure_future(drafter_model.thread.submit(gate.job()))
    await asyncio.to_thread(gate.entered.wait, 120)
    steps = drafter_model.thread.steps
    with waits(monkeypatch) as calls:
        for session in sessions:
            session.ask(Draft(2, 0, Letters(""), 5))
        gate.let_go.set()
        drafts = [await session.receive() for session in sessions]
        await standing
    assert [len(draft.draft_tokens) for draft in drafts] == [5] * len(sessions)
    assert (calls, drafter_model.thread.steps - steps) == (["cpu"], 5)
    for session in sessions:
        session.close()

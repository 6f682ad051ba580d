"""The end of services with sessions that are in use, and options that cannot be."""

from pathlib import Path

import pytest

from crossdraft.drafter.service import DrafterService, ServeDrafter, drafter_server
from crossdraft.engine.served_model import ModelOptions, RunningModel
from crossdraft.rpc.errors import ServiceError
from crossdraft.rpc.handlers import DRAFTER, TARGET
from crossdraft.rpc.server import Listening, Server
from crossdraft.target.service import ServeTarget, TargetService, target_server
from crossdraft.text.letters import Letters
from crossdraft.types.messages import Draft, OpenDrafter, OpenTarget, Pass, SamplingOptions
from crossdraft.types.trees import TokenTree
from tests.rpc.sessions import DrafterClient, TargetClient

SHORT_GRACE = Listening(grace_seconds=0.1)


async def test_a_target_in_use_ends_after_its_grace_period(target_model: RunningModel) -> None:
    server = Server(TARGET, TargetService(target_model), SHORT_GRACE)
    async with TargetClient(await server.start()) as client:
        async with client.session(OpenTarget((5,), SamplingOptions(), None)) as session:
            await session.run(Pass(1, (), TokenTree()))
            await server.drain()
            with pytest.raises(ServiceError) as raised:
                await session.run(Pass(2, (6,), TokenTree()))
        assert raised.value.lost
        with pytest.raises(ServiceError):
            await client.describe()


async def test_a_drafter_in_use_ends_after_its_grace_period(drafter_model: RunningModel) -> None:
    server = Server(DRAFTER, DrafterService(drafter_model), SHORT_GRACE)
    async with DrafterClient(await server.start()) as client:
        async with client.session(OpenDrafter(Letters("The"), SamplingOptions(), None, 4)) as session:
            assert len((await session.draft(Draft(1, 0, Letters(""), 4))).draft_tokens) == 4
            await server.drain()
            with pytest.raises(ServiceError) as raised:
                await session.draft(Draft(2, 0, Letters(""), 4))
        assert raised.value.lost


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        ({"name": "./no-such-folder"}, "there is no folder"),
        ({"dtype": "float8"}, "dtype 'float8' is unknown"),
        ({"device": "abacus"}, "device 'abacus' cannot be used here"),
        ({"max_length": 0}, "must be between \\d+ and the model's context 128"),
        ({"max_length": 129}, "must be between \\d+ and the model's context 128"),
        ({"budget": 0}, "the KV cache has 0 MiB"),
    ],
)
async def test_options_that_cannot_be_are_refused_before_serving(target_folder: Path, bad, complaint) -> None:
    model = ModelOptions(**{"name": str(target_folder)} | bad)
    with pytest.raises(ValueError, match=complaint):
        await target_server(ServeTarget(model))
    with pytest.raises(ValueError, match=complaint):
        await drafter_server(ServeDrafter(model))

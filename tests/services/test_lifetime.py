"""Services as processes: the ready line, the end on SIGTERM, and options that cannot be."""

import asyncio
import json
import signal
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from crossdraft.drafter.service import ServeDrafter, drafter_server
from crossdraft.engine.served_model import ModelOptions
from crossdraft.rpc.clients import DrafterClient, Patience, TargetClient
from crossdraft.rpc.errors import ServiceError, Unreachable
from crossdraft.rpc.streams import DrafterSession
from crossdraft.target.service import ServeTarget, target_server
from crossdraft.text.letters import Letters
from crossdraft.types.messages import Draft, OpenDrafter, OpenTarget, Pass, SamplingOptions
from crossdraft.types.trees import TokenTree

PROGRAM = """
import sys
from crossdraft.engine.served_model import ModelOptions
from crossdraft.rpc.server import Listening, run
from crossdraft.{role}.servicer import {options}, serve_{role}

run(serve_{role}({options}(ModelOptions(sys.argv[1], budget=4), Listening(grace_seconds=float(sys.argv[2])))))
"""


async def started(role: str, folder: Path, grace: float) -> tuple[asyncio.subprocess.Process, dict[str, str]]:
    """A service's process, and what it says when it is ready."""
    program = PROGRAM.format(role=role, options=f"Serve{role.capitalize()}")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, str(folder), str(grace), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    return process, json.loads(await asyncio.wait_for(process.stdout.readline(), 600))


async def ended(process: asyncio.subprocess.Process) -> tuple[int | None, bytes]:
    """Exit code, and what it printed after the ready line."""
    output, _ = await asyncio.wait_for(process.communicate(), 120)
    return process.returncode, output


async def found_again(client: DrafterClient) -> str:
    """The fingerprint of a service to which the connection was lost."""
    async with asyncio.timeout(120):
        while True:
            with suppress(ServiceError):
                return (await client.describe()).fingerprint


async def opened(client: DrafterClient) -> DrafterSession:
    """A session; a machine that stands still in this moment loses the connection, as it should."""
    async with asyncio.timeout(120):
        while True:
            with suppress(ServiceError):
                return await client.open(OpenDrafter(Letters("The"), SamplingOptions(), None, 4))


async def test_a_target_drains_on_sigterm(target_folder: Path) -> None:
    process, ready = await started("target", target_folder, 30)
    assert (ready["ready"], ready["role"], ready["model"]) == (True, "target", str(target_folder))
    async with TargetClient(ready["address"]) as client:
        assert (await client.describe()).fingerprint == ready["fingerprint"]
        async with client.session(OpenTarget((5,), SamplingOptions(), None)) as session:
            await session.run(Pass(1, (), TokenTree()))
            process.send_signal(signal.SIGTERM)
            for number in range(2, 20):  # an open session goes on within the grace period
                assert (await session.run(Pass(number, (6,), TokenTree()))).number == number
        assert await ended(process) == (0, b"")
        with pytest.raises(ServiceError):
            await client.describe()


async def test_a_drafter_that_is_in_use_ends_after_its_grace_period(drafter_folder: Path) -> None:
    process, ready = await started("drafter", drafter_folder, 0.2)
    async with DrafterClient(ready["address"]) as client:
        async with client.session(OpenDrafter(Letters("The"), SamplingOptions(), None, 4)) as session:
            assert len((await session.draft(Draft(1, 0, Letters(""), 4))).draft_tokens) == 4
            process.send_signal(signal.SIGTERM)
            assert await ended(process) == (0, b"")
            with pytest.raises(ServiceError) as raised:
                await session.draft(Draft(2, 0, Letters(""), 4))
        assert raised.value.lost


async def test_a_drafter_that_freezes_is_noticed_long_before_its_reply_is_due(
    drafter_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # gRPC's limits are as they are
    process, ready = await started("drafter", drafter_folder, 0)
    async with DrafterClient(ready["address"], Patience(reply_seconds=600)) as client:
        async with await opened(client) as session:
            process.send_signal(signal.SIGSTOP)  # like a link that was cut: nothing answers, nothing is closed
            with pytest.raises(Unreachable):
                await asyncio.wait_for(session.draft(Draft(1, 0, Letters(""), 4)), 60)
            process.send_signal(signal.SIGCONT)
        assert await found_again(client) == ready["fingerprint"]
    process.terminate()
    assert await ended(process) == (0, b"")


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        ({"name": "./no-such-folder"}, "there is no folder"),
        ({"dtype": "float8"}, "dtype 'float8' is unknown"),
        ({"device": "abacus"}, "device 'abacus' cannot be used here"),
        ({"max_length": 0}, "must be between \\d+ and the model's context 128"),
        ({"max_length": 129}, "must be between \\d+ and the model's context 128"),
        ({"budget": 0}, "the budget is 0 MiB"),
    ],
)
async def test_options_that_cannot_be_are_refused_before_serving(target_folder: Path, bad, complaint) -> None:
    model = ModelOptions(**{"name": str(target_folder)} | bad)
    with pytest.raises(ValueError, match=complaint):
        await target_server(ServeTarget(model))
    with pytest.raises(ValueError, match=complaint):
        await drafter_server(ServeDrafter(model))

"""What emulated machines share, and what becomes of one that is killed, switched off or parted from another."""

import asyncio
import subprocess
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest

from crossdraft.lab.emulation.network import NoEmulationError
from tests.cluster.machines.machines import Machine, machines
from tests.rpc.clock import HANGS

pytestmark = pytest.mark.full  # as are all tests that use machines


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Mapping[str, Machine]]:
    made = machines(["left", "right"], tmp_path)
    try:
        found = await made.__aenter__()
    except NoEmulationError as error:
        pytest.skip(str(error))
    try:
        yield found
    finally:
        await made.__aexit__(None, None, None)


async def said(machine: Machine, command: str, seconds: float = HANGS) -> str:
    process = await asyncio.create_subprocess_exec(*machine.ssh(command), stdout=subprocess.PIPE)
    try:
        output, _ = await asyncio.wait_for(process.communicate(), seconds)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0
    return output.decode().strip()


async def test_machines_share_nothing_and_fail_apart(pair: Mapping[str, Machine]) -> None:
    left, right = pair["left"], pair["right"]
    await said(left, "touch /tmp/ray/mine /dev/shm/mine")
    assert await said(right, "ls /tmp/ray /dev/shm") == "/dev/shm:\n\n/tmp/ray:"
    assert await said(left, "ssh right hostname") == "right"
    sleeping = await asyncio.create_subprocess_exec(*left.ssh("sleep 1000"))
    await said(left, "until pgrep -x sleep >/dev/null; do sleep 0.05; done")
    await left.kill()
    assert await asyncio.wait_for(sleeping.wait(), HANGS) != 0
    with pytest.raises(AssertionError):
        await said(left, "true")
    assert await said(right, "hostname") == "right"
    await right.switch_off()
    with pytest.raises(TimeoutError):
        await said(right, "true", seconds=1.0)


async def test_two_that_are_parted_do_not_reach_each_other_but_are_reached(pair: Mapping[str, Machine]) -> None:
    reach = "timeout {} bash -c 'echo > /dev/tcp/right/22' && echo yes || echo no"
    soon, ever = reach.format(1), reach.format(60)
    left, right = pair["left"], pair["right"]
    assert await said(left, ever) == "yes"
    await left.part(right)
    assert await said(left, soon) == "no"
    assert await said(right, "hostname") == "right"
    await right.join(left)
    assert await said(left, ever) == "yes"

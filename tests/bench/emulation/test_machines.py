"""Machines with sshd, where this machine allows them."""

import asyncio
import subprocess
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import grpc
import pytest

from crossdraft.bench.emulation import NotAllowed
from crossdraft.bench.emulation.machines import Machine, machines, outfit
from tests.bench.emulation.conftest import HANGS


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Mapping[str, Machine]]:
    made = machines(["left", "right"], tmp_path)
    try:
        found = await made.__aenter__()
    except NotAllowed as error:
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


async def test_machines_have_their_own_and_reach_each_other(pair: Mapping[str, Machine]) -> None:
    left, right = pair["left"], pair["right"]
    assert await said(left, "hostname; echo ~") == f"left\n{left.home}"
    assert "sshd" in await said(left, "cat /proc/1/comm")
    await said(left, "touch /tmp/ray/mine /dev/shm/mine")
    assert await said(right, "ls /tmp/ray /dev/shm") == "/dev/shm:\n\n/tmp/ray:"
    assert await said(left, "ssh right hostname") == "right"
    reached = (await said(right, "echo $SSH_CONNECTION")).split()[2]
    assert reached == right.address != left.address


async def test_a_killed_machine_is_gone_and_one_that_is_switched_off_is_silent(pair: Mapping[str, Machine]) -> None:
    left, right = pair["left"], pair["right"]
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


def test_an_outfit_has_packages_of_its_own_and_finds_all_others(tmp_path: Path) -> None:
    python = outfit(tmp_path / "venv")
    script = "import sys, grpc, pip; print(sys.prefix); print(grpc.__file__)"
    found = subprocess.run([python, "-c", script], capture_output=True, text=True, check=True, env={})
    prefix, shared = found.stdout.split()
    assert prefix == str(tmp_path / "venv")
    assert shared == grpc.__file__


async def test_two_machines_that_are_parted_do_not_reach_each_other_but_are_reached(
    pair: Mapping[str, Machine],
) -> None:
    reach = "timeout {} bash -c 'echo > /dev/tcp/right/22' && echo yes || echo no"
    soon, ever = reach.format(1), reach.format(60)
    left, right = pair["left"], pair["right"]
    assert await said(left, ever) == "yes"
    await left.link.part(right.link)
    assert await said(left, soon) == "no"
    assert await said(right, "hostname") == "right"
    await right.link.join(left.link)
    assert await said(left, ever) == "yes"

"""Emulated machines: what they share, a cluster that `ray up` makes of three as docs/cluster.md has it, and losses."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from crossdraft.lab.emulation.network import NoEmulationError
from tests.cluster.machines.host_losses import measure
from tests.cluster.machines.machines import Machine, machines
from tests.cluster.machines.person import FILE, OFFERS, Person, deploy, person, processes
from tests.cluster.machines.streams import client_of, first_piece
from tests.rpc.clock import HANGS

pytestmark = pytest.mark.full  # as are all tests that use machines


@contextmanager
def emulated() -> Iterator[None]:
    """Skips the test where there can be no such machines."""
    try:
        yield
    except NoEmulationError as error:
        pytest.skip(str(error))


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Mapping[str, Machine]]:
    with emulated():
        async with machines(["left", "right"], tmp_path) as found:
            yield found


async def test_machines_share_nothing_and_fail_apart(pair: Mapping[str, Machine]) -> None:
    left, right = pair["left"], pair["right"]
    await left.run("touch /tmp/ray/mine /dev/shm/mine")
    assert await right.run("ls /tmp/ray /dev/shm") == "/dev/shm:\n\n/tmp/ray:"
    assert await left.run("ssh right hostname") == "right"
    sleeping = await asyncio.create_subprocess_exec(*left.ssh("sleep 1000"))
    await left.run("until pgrep -x sleep >/dev/null; do sleep 0.05; done")
    await left.kill()
    assert await asyncio.wait_for(sleeping.wait(), HANGS) != 0
    with pytest.raises(AssertionError):
        await left.run("true")
    assert await right.run("hostname") == "right"
    await right.switch_off()
    with pytest.raises(TimeoutError):
        await right.run("true", seconds=1.0)


async def test_two_that_are_parted_do_not_reach_each_other_but_are_reached(pair: Mapping[str, Machine]) -> None:
    reach = "timeout {} bash -c 'echo > /dev/tcp/right/22' && echo yes || echo no"
    soon, ever = reach.format(1), reach.format(60)
    left, right = pair["left"], pair["right"]
    assert await left.run(ever) == "yes"
    await left.part(right)
    assert await left.run(soon) == "no"
    assert await right.run("hostname") == "right"
    await right.join(left)
    assert await left.run(ever) == "yes"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def somebody(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Person]:
    """Who has a cluster up, with everything deployed."""
    with emulated():
        async with person(["head", "left", "right"], tmp_path_factory.mktemp("cluster")) as found:
            await found.bring_up()
            await deploy(found)
            yield found


@pytest.mark.asyncio(loop_scope="module")
async def test_an_output_streams_through_openais_client(somebody: Person) -> None:
    async with client_of(somebody.url) as client:
        assert await first_piece(client)


@pytest.mark.asyncio(loop_scope="module")
async def test_status_names_services_on_both_workers(somebody: Person) -> None:
    where = {(one["role"], one["node"]) for one in await processes(somebody)}
    workers = [somebody.machines[name].address for name in ("left", "right")]
    assert where >= {(role, address) for role in ("target", "drafter", "orchestrator", "http") for address in workers}


@pytest.mark.asyncio(loop_scope="module")
async def test_nobody_without_the_token_joins(somebody: Person) -> None:
    command = f"RAY_AUTH_MODE=disabled ray status --address={somebody.head.address}:6379"
    with pytest.raises(AssertionError, match="ended with"):
        await somebody.exec(command)


@pytest.mark.asyncio(loop_scope="module")
async def test_the_cluster_can_be_taken_down(somebody: Person) -> None:
    await somebody.ray("down", "--yes", FILE)
    with pytest.raises(OSError, match="Connect call failed"):
        await asyncio.open_connection(somebody.head.address, 6379)


async def test_a_silent_host_costs_no_stream_of_other_fronts_its_text(tmp_path: Path) -> None:
    """One host of each role after the other. Outputs that its fronts ask for end on orchestrators of other hosts, which
    makes these stop nothing else."""
    with emulated():
        losses = await measure(list(OFFERS), clients=4, tokens=64, folder=tmp_path)
    assert [(one.host, one.faults) for one in losses] == [(host, []) for host in OFFERS]
    assert all(stream.ended for one in losses for streams in one.streams.values() for stream in streams)

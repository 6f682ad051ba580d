"""A cluster that `ray up` makes of three machines, as docs/cluster.md has it. Losses: `test_host_losses`."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from crossdraft.lab.emulation.network import NoEmulationError
from tests.cluster.machines.person import FILE, Person, deploy, person, processes
from tests.cluster.machines.streams import client_of, first_piece

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.full]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def somebody(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Person]:
    """Who has a cluster up, with everything deployed."""
    made = person(["head", "left", "right"], tmp_path_factory.mktemp("cluster"))
    try:
        found = await made.__aenter__()
    except NoEmulationError as error:
        pytest.skip(str(error))
    try:
        found.spare()
        await found.make_wheel()
        await found.ray("get-auth-token", "--generate")
        await found.ray("up", "--yes", FILE)
        await deploy(found)
        yield found
    finally:
        await made.__aexit__(None, None, None)


async def test_an_output_streams_through_openais_client(somebody: Person) -> None:
    async with client_of(somebody.url) as client:
        assert await first_piece(client)


async def test_status_names_services_on_both_workers(somebody: Person) -> None:
    where = {(one["role"], one["node"]) for one in await processes(somebody)}
    workers = [somebody.machines[name].address for name in ("left", "right")]
    assert where >= {(role, address) for role in ("target", "drafter", "orchestrator", "http") for address in workers}


async def test_nobody_without_the_token_joins(somebody: Person) -> None:
    command = f"RAY_AUTH_MODE=disabled ray status --address={somebody.head.address}:6379"
    with pytest.raises(AssertionError, match="ended with"):
        await somebody.exec(command)


async def test_the_cluster_can_be_taken_down(somebody: Person) -> None:
    await somebody.ray("down", "--yes", FILE)
    with pytest.raises(OSError, match="Connect call failed"):
        await asyncio.open_connection(somebody.head.address, 6379)

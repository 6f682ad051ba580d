"""A cluster that `ray up` makes of three machines, as docs/cluster.md has it: streams, and the loss of a machine."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from crossdraft.lab.emulation import NoEmulationError
from tests.cluster.machines.events import CONFIGURED, TARGET, deploy, json_of
from tests.cluster.machines.person import FILE, Person, person, said
from tests.cluster.machines.streams import REPEATS, Streams, client_of, faults_of, first_piece

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.full]
ALONE = f"replicas: 2\n        {TARGET}: 1}}}}"
SHARED = f"replicas: 1\n        tensor_parallel_size: 2\n        {TARGET}: 2}}}}"  # a machine offers one
WAIT_SECONDS = 900  # of an output, for its only target to be started again
PATIENT = f"grace_seconds: 30\n    target_wait_seconds: {WAIT_SECONDS}"
SEEDS = range(1, 7)
TOKENS = 64


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
        found.replace(CONFIGURED, "grace_seconds: 30", PATIENT)
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
    said = await somebody.exec("crossdraft status --json")
    (line,) = [line for line in said.splitlines() if line.startswith("{")]
    where = {(one["role"], one["node"]) for one in json.loads(line)["processes"]}
    workers = [somebody.machines[name].address for name in ("left", "right")]
    assert where >= {(role, address) for role in ("target", "drafter", "orchestrator", "http") for address in workers}


async def test_nobody_without_the_token_joins(somebody: Person) -> None:
    command = f"RAY_AUTH_MODE=disabled ray status --address={somebody.head.address}:6379"
    with pytest.raises(AssertionError, match="ended with"):
        await somebody.exec(command)


async def followers(somebody: Person) -> dict[str, str]:
    """The machines on which a rank but the first runs, and their ids of its process."""
    found = {name: await said(one, "pgrep -f 'ray::[_]followed'") for name, one in somebody.machines.items()}
    return {name: process for name, process in found.items() if process}


async def test_a_target_of_two_machines_streams_on_whichever_rank_is_killed(somebody: Person) -> None:
    async with client_of(somebody.url) as client:
        client = client.with_options(timeout=WAIT_SECONDS)
        undisturbed = await Streams(client, SEEDS, TOKENS).run()
        somebody.replace(CONFIGURED, ALONE, SHARED)
        await somebody.ray("rsync-up", FILE)
        await deploy(somebody)
        for first in (False, True):
            ((other, following),) = (await followers(somebody)).items()
            serving = json_of(await somebody.exec("crossdraft status --json"))["processes"]
            (target,) = [one for one in serving if one["role"] == "target"]
            (place,) = [name for name, one in somebody.machines.items() if one.address == target["node"]]
            assert {place, other} == {"left", "right"}
            machine, process = (place, target["process"]) if first else (other, following)
            streams = Streams(client, SEEDS, TOKENS)
            running = asyncio.create_task(streams.run())
            await streams.under_way()
            await said(somebody.machines[machine], f"kill -9 {process}")
            assert not all(one.ended for one in streams.current.values())
            assert faults_of(await running, undisturbed) == []
    somebody.replace(CONFIGURED, SHARED, ALONE)
    await somebody.ray("rsync-up", FILE)
    await deploy(somebody)
    for machine in somebody.machines.values():
        await said(machine, "while pgrep -f 'ray::[_]followed'; do sleep 0.2; done")


async def test_streams_lose_nothing_when_a_machine_is_lost(somebody: Person) -> None:
    async with client_of(somebody.url) as client:
        undisturbed = await Streams(client, SEEDS, TOKENS).run()
        assert [one.tokens for one in undisturbed] == [TOKENS] * len(SEEDS), faults_of(undisturbed, undisturbed)
        streams = Streams(client, SEEDS, TOKENS, REPEATS)
        running = asyncio.create_task(streams.run())
        await streams.under_way()
        await somebody.machines["left"].switch_off()
        assert not all(one.ended for one in streams.current.values())
        assert faults_of(await running, undisturbed) == []


async def test_the_cluster_can_be_taken_down(somebody: Person) -> None:
    await somebody.ray("down", "--yes", FILE)
    with pytest.raises(OSError, match="Connect call failed"):
        await asyncio.open_connection(somebody.head.address, 6379)

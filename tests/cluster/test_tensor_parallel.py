"""A target that two nodes share, of which either process is killed while streams are under way."""

import asyncio
import os
import signal

from ray.util.placement_group import placement_group_table

from crossdraft.cluster.directory import Role
from tests.cluster.running import RunningCluster, eventually, ray, streams

SEEDS = range(3)
TOKENS = 120
ALONE = "resources: {cpus: 0.5, custom: {target: 1}}"
SHARED = "resources: {cpus: 6}, tensor_parallel_size: 2"  # more than one node has


def rank_of(cluster: RunningCluster, number: int) -> int:
    """The process of a rank."""
    if not number:
        return cluster.entries(Role.TARGET)[0].process
    workers = ray._private.state.workers().values()
    raise NotImplementedError(workers)


def groups() -> list[set[str]]:
    """The nodes of placement groups."""
    found = placement_group_table().values()
    return [{*one["bundles_to_node_id"].values()} for one in found if one["state"] != "REMOVED"]


async def test_streams_go_on_whichever_rank_is_killed(cluster: RunningCluster) -> None:
    before = cluster.configuration()
    text = cluster.configuration("replicas: 1").replace(ALONE, SHARED)
    async with cluster.client() as client:
        async with streams(client, SEEDS, TOKENS) as undisturbed:
            pass
        await asyncio.to_thread(cluster.deploy, text)
        assert [len(nodes) for nodes in groups()] == [2]
        for number in (1, 0):
            (serving,) = cluster.entries(Role.TARGET)
            async with streams(client, SEEDS, TOKENS) as heard:
                os.kill(rank_of(cluster, number), signal.SIGKILL)
            assert [one.text for one in heard] == [one.text for one in undisturbed]
            assert [one.tokens for one in heard] == [TOKENS] * len(SEEDS)
            await eventually(lambda gone=serving: {one.process for one in cluster.entries(Role.TARGET)} - {gone.process})
    await asyncio.to_thread(cluster.deploy, before)
    await eventually(lambda: cluster.complete() and not groups())

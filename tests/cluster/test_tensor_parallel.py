"""A target that two nodes share, of which either process is killed while streams are under way."""

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest
from ray.util.placement_group import placement_group_table

from crossdraft.cluster.status import Role
from tests.cluster.running import RunningCluster, eventually, streams

SEEDS = range(3)
TOKENS = 120
ALONE = "resources: {cpus: 0.5, custom: {target: 1}}"
SHARED = "resources: {cpus: 6}, tensor_parallel_size: 2"  # more than one node has


def others() -> list[int]:
    """Processes of ranks but the first, which run in tasks."""
    found = []
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it is gone
            if command.read_bytes().startswith(b"ray::_followed"):
                found.append(int(command.parent.name))
    return found


def groups() -> list[set[str]]:
    """The nodes of placement groups."""
    found = placement_group_table().values()
    return [{*one["bundles_to_node_id"].values()} for one in found if one["state"] != "REMOVED"]


@pytest.mark.full
async def test_streams_go_on_whichever_rank_is_killed(cluster: RunningCluster) -> None:
    before = cluster.configuration()
    text = cluster.configuration("replicas: 1").replace(ALONE, SHARED)
    async with cluster.client() as client:
        async with streams(client, SEEDS, TOKENS) as undisturbed:
            pass
        await asyncio.to_thread(cluster.deploy, text)
        assert [len(nodes) for nodes in groups()] == [2]
        for first in (False, True):
            (serving,), (other,) = cluster.entries(Role.TARGET), others()
            async with streams(client, SEEDS, TOKENS) as heard:
                os.kill(serving.process if first else other, signal.SIGKILL)
            assert [one.text for one in heard] == [one.text for one in undisturbed]
            assert [one.tokens for one in heard] == [TOKENS] * len(SEEDS)
            await eventually(
                lambda gone=serving: any(one.process != gone.process for one in cluster.entries(Role.TARGET))
            )
    await asyncio.to_thread(cluster.deploy, before)
    await eventually(lambda: cluster.complete() and not groups() and not others())

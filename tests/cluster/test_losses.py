"""Processes of a cluster that die while streams are under way."""

import asyncio
import json
import os
import signal
from collections import Counter
from contextlib import suppress
from pathlib import Path

import httpx2 as httpx
import pytest
from openai import APIError, AsyncOpenAI
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import placement_group_table

from crossdraft.cluster import status
from crossdraft.cluster.status import DIRECTORY, NAMESPACE, Role
from tests.cluster.running import MODEL, PROMPT, RunningCluster, eventually, kill, ray, streams

SEEDS = range(4)
TOKENS = 80
TRIES = 5  # to hit streams that are under way


@pytest.fixture(scope="module")
def undisturbed(cluster: RunningCluster) -> list[str]:
    """The texts of all streams when nothing happens."""

    async def heard() -> list[str]:
        async with cluster.client() as client, streams(client, SEEDS, TOKENS) as found:
            pass
        return [one.text for one in found]

    return asyncio.run(heard())


ALL = (Role.ORCHESTRATOR, Role.TARGET, Role.DRAFTER)


@pytest.mark.parametrize("roles", [ALL, *(pytest.param((role,), marks=pytest.mark.full) for role in ALL)])
async def test_streams_go_on_where_they_were(cluster: RunningCluster, undisturbed: list[str], roles: tuple[Role, ...]):
    """One process of each role is killed, all at the same time."""
    amid, tries = False, 0
    while not amid:  # where this process stands still, streams may end before the kill: then another one
        assert (tries := tries + 1) <= TRIES
        killed = [cluster.entries(role)[0] for role in roles]
        async with cluster.client() as client, streams(client, SEEDS, TOKENS) as heard:
            for one in killed:
                kill(one)
            at_the_kill = [one.text for one in heard]
        amid = all(len(begun) < len(whole) for begun, whole in zip(at_the_kill, undisturbed, strict=True))
        assert [one.text for one in heard] == undisturbed
        assert [one.tokens for one in heard] == [TOKENS] * len(SEEDS)
        # They are started again, as other processes.
        await eventually(lambda gone=tuple(killed): cluster.complete(*gone))


@pytest.mark.full
async def test_an_orchestrator_that_falls_silent_is_given_up_and_not_asked_again_and_again(cluster, undisturbed):
    (front,) = cluster.entries(Role.HTTP)
    silent, _ = cluster.entries(Role.ORCHESTRATOR)
    before = len(cluster.log_of(front.process))
    given_up: Counter[str] = Counter()
    tries = 0
    while not given_up:  # as above
        assert (tries := tries + 1) <= TRIES
        async with cluster.client() as client, streams(client, SEEDS, TOKENS) as heard:
            os.kill(silent.process, signal.SIGSTOP)
        assert [one.text for one in heard] == undisturbed
        given_up = _given_up(cluster.log_of(front.process)[before:])
        if not given_up:
            os.kill(silent.process, signal.SIGCONT)
    # More than once where Serve sends the rest to the silent one again, which it does not know to be silent yet: until
    # it has as many under way as the other one, with those that were given up.
    assert max(given_up.values()) <= len(SEEDS)
    kill(silent)
    await eventually(lambda: cluster.complete(silent))


def _given_up(log: str) -> Counter[str]:
    """How often each request has lost an orchestrator."""
    said = [json.loads(line) for line in log.splitlines() if line.startswith("{") and line.endswith("}")]
    return Counter(line["request_id"] for line in said if "an orchestrator was lost" in line["message"])


async def test_without_its_directory_a_cluster_goes_on_and_all_of_it_is_known_again(cluster, undisturbed):
    await eventually(cluster.complete)
    before = cluster.entries()
    async with cluster.client() as client, streams(client, SEEDS, TOKENS) as heard:
        ray.kill(ray.get_actor(DIRECTORY, NAMESPACE), no_restart=False)
    assert [one.text for one in heard] == undisturbed
    await eventually(lambda: cluster.entries() == before)


@pytest.mark.full
def test_who_asks_a_directory_that_is_silent_is_told_so_in_time(cluster: RunningCluster, monkeypatch) -> None:
    monkeypatch.setattr(status, "ANSWER_SECONDS", 1.0)
    id = ray.get_actor(DIRECTORY, NAMESPACE)._actor_id.hex()
    process = ray._private.state.actors(id)["Pid"]
    os.kill(process, signal.SIGSTOP)
    try:
        with pytest.raises(GetTimeoutError):
            status.deployed()
    finally:
        os.kill(process, signal.SIGCONT)


@pytest.mark.full
async def test_who_asks_again_with_the_same_id_after_the_front_died_has_the_same_text(cluster: RunningCluster) -> None:
    async with cluster.client() as client:
        whole = begun = await _asked(client, "again-1")
        tries = 0
        while len(begun) == len(whole):  # as above
            assert (tries := tries + 1) <= TRIES
            await eventually(cluster.complete)
            begun = await _heard_until_the_front_died(cluster, client)
            assert whole.startswith(begun)
        again = ""
        while not again:
            try:
                again = await _asked(client, "again-1")
            except APIError:  # until another one is there
                await asyncio.sleep(0.2)
        assert again == whole
        assert await _asked(client, "another-1") != whole
    await eventually(cluster.complete)


async def _heard_until_the_front_died(cluster: RunningCluster, client: AsyncOpenAI) -> str:
    (front,) = await asyncio.to_thread(cluster.entries, Role.HTTP)
    stream = await client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=TOKENS, stream=True, extra_headers={"x-request-id": "again-1"}
    )
    chunks: list[str] = []
    with suppress(APIError, httpx.HTTPError):  # or the connection just ends
        async for chunk in stream:
            if not chunks:
                kill(front)
            chunks.append(chunk.choices[0].text)
    return "".join(chunks)


async def _asked(client: AsyncOpenAI, id: str) -> str:
    """An output without a seed."""
    reply = await client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=TOKENS, extra_headers={"x-request-id": id}
    )
    return reply.choices[0].text


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
async def test_streams_go_on_whichever_rank_is_killed(cluster: RunningCluster, undisturbed: list[str]) -> None:
    """Of a target that two nodes share."""
    await asyncio.to_thread(cluster.deploy, cluster.configuration("replicas: 1").replace(ALONE, SHARED))
    assert [len(nodes) for nodes in groups()] == [2]
    async with cluster.client() as client:
        for first in (False, True):
            (serving,), (other,) = cluster.entries(Role.TARGET), others()
            async with streams(client, SEEDS, TOKENS) as heard:
                os.kill(serving.process if first else other, signal.SIGKILL)
            assert [one.text for one in heard] == undisturbed
            assert [one.tokens for one in heard] == [TOKENS] * len(SEEDS)
            await eventually(
                lambda gone=serving: any(one.process != gone.process for one in cluster.entries(Role.TARGET))
            )
    await asyncio.to_thread(cluster.deploy, cluster.configuration())
    await eventually(lambda: cluster.complete() and not groups() and not others())

"""A cluster that is given other configurations, and its end."""

import asyncio
import socket
from contextlib import suppress
from pathlib import Path

import pytest

from crossdraft.client import connect
from crossdraft.cluster.config import NAMESPACE
from crossdraft.cluster.directory import Role
from crossdraft.rpc.authority import Purpose, Subject, issue, new_authority
from crossdraft.rpc.errors import ServiceError
from tests.cluster.running import (
    HEAD,
    MODEL,
    PROMPT,
    TARGETS,
    Heard,
    NoRoomError,
    NotServedError,
    RunningCluster,
    deployed,
    eventually,
    ray,
    streams,
    undeploy,
)

SEEDS = range(1)  # while processes start, which need the processors
TOKENS = 60


class Foreign:
    """An actor that is not crossdraft's."""


OTHER = """\
      - {name: other, model: bundled:drafter-a, threads: 1, cache_mib: 64,
        resources: {cpus: 0.5, custom: {drafter: 1}}}"""


def changed(cluster: RunningCluster) -> str:
    """Other options of targets and of the gRPC front, and another drafter beside the one that there was."""
    text = cluster.configuration(targets="replicas: 2, cache_mib: 256", drafters=OTHER)
    return text.replace(f"port: {cluster.grpc}", f"port: {cluster.grpc}, burst: 11")


def wide(cluster: RunningCluster) -> str:
    """A drafter that has room on the head only where the one that runs has ended."""
    takes = "resources: {cpus: 0.5, custom: {drafter: 1}}"
    text = cluster.configuration()
    assert takes in text
    return text.replace(takes, "resources: {cpus: 3.4, custom: {drafter: 1}}")


def test_what_has_no_room_is_given_up_in_time_and_another_configuration_is_taken(cluster: RunningCluster) -> None:
    (before,) = cluster.entries(Role.DRAFTER)
    foreign = ray.remote(Foreign).options(num_cpus=0.5, resources={"drafter": 0.1}).remote()
    ray.get(foreign.__ray_ready__.remote())
    with pytest.raises(NotServedError, match=r"does not serve in time: no node has CPU 3|the time for it is over"):
        cluster.deploy(wide(cluster), seconds=1.0)
    ray.kill(foreign)
    cluster.deploy(wide(cluster))
    assert cluster.complete(before)
    cluster.deploy(cluster.configuration())
    assert cluster.complete()


async def test_an_update_drops_no_stream(cluster: RunningCluster) -> None:
    before = {one.id: one for one in cluster.entries()}
    async with cluster.client() as client:
        async with streams(client, SEEDS, TOKENS) as heard:
            pass
        undisturbed = [one.text for one in heard]
        updating = asyncio.create_task(asyncio.to_thread(cluster.deploy, changed(cluster)))
        rounds: list[list[Heard]] = []
        while not updating.done():
            async with streams(client, SEEDS, TOKENS) as heard:
                rounds.append(heard)
        await updating
        (model,) = (await client.models.list()).data
    assert len(rounds) > 1
    for heard in rounds:
        assert [one.text for one in heard] == undisturbed
        assert [one.tokens for one in heard] == [TOKENS] * len(SEEDS)
    assert model.model_dump()["drafters"] == ["byte-level", "other"]
    after = {one.id: one for one in cluster.entries()}
    stayed = {one.what for id, one in after.items() if id in before}
    assert stayed == {"drafter byte-level", "http"}
    assert sorted(one.what for one in after.values()) == [
        "drafter byte-level", "drafter other", "grpc", "http", "orchestrator", "orchestrator", "target", "target",
    ]  # fmt: skip


def test_the_same_again_changes_nothing(cluster: RunningCluster) -> None:
    before = cluster.entries()
    assert cluster.deploy(changed(cluster)) == []
    assert cluster.entries() == before


@pytest.mark.full
def test_what_nodes_lack_is_said_before_anything_is_begun(cluster: RunningCluster) -> None:
    before = cluster.entries()
    with pytest.raises(NoRoomError, match=r"target of 'small': 5 wanted, each with .*; there is room for 3"):
        cluster.deploy(changed(cluster).replace("replicas: 2", "replicas: 5"))
    assert cluster.entries() == before


def test_a_service_that_cannot_be_run_leaves_the_others_as_they_are(cluster: RunningCluster) -> None:
    before = cluster.entries()
    with pytest.raises(NotServedError, match=r"small/drafter/other/0 cannot be served: .*nowhere"):
        cluster.deploy(changed(cluster).replace("bundled:drafter-a", "/nowhere"))
    assert cluster.entries() == before
    with pytest.raises(NotServedError, match="cannot be moved"):
        cluster.deploy(changed(cluster).replace(f"port: {cluster.http}", "port: 1"))
    assert cluster.entries() == before


async def test_orchestrators_come_and_go_with_the_load(cluster: RunningCluster) -> None:
    scale = "{min: 1, max: 2, outputs: 1, up_seconds: 0, down_seconds: 1}"
    await asyncio.to_thread(
        cluster.deploy, cluster.configuration().replace("orchestrators: 2", f"orchestrators: {scale}")
    )
    await eventually(lambda: len(cluster.entries(Role.ORCHESTRATOR)) == 1)
    over = asyncio.Event()

    async def ask() -> None:
        while not over.is_set():
            async with cluster.client() as client, streams(client, range(4), TOKENS):
                pass

    asking = asyncio.create_task(ask())
    await eventually(lambda: len(cluster.entries(Role.ORCHESTRATOR)) == 2)
    over.set()
    await asking
    await eventually(lambda: len(cluster.entries(Role.ORCHESTRATOR)) == 1)


def test_in_the_end_nothing_is_left(cluster: RunningCluster) -> None:
    done = cluster.command("undeploy")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    gone = cluster.command("status")
    assert (gone.returncode, gone.stdout) == (1, "")
    assert "nothing is deployed on this cluster; use `crossdraft deploy`" in gone.stderr
    with pytest.raises(ValueError, match="directory"):
        deployed()
    assert [one for one in ray.util.list_named_actors(all_namespaces=True) if one["namespace"] == NAMESPACE] == []


@pytest.mark.full
def test_a_port_that_is_taken_is_said(cluster: RunningCluster) -> None:
    with suppress(ValueError):  # nothing is deployed where the test before this one has run
        deployed()
        undeploy()
    complaint = f"cannot listen for HTTP on 127.0.0.1:{cluster.http}"
    with socket.create_server(("127.0.0.1", cluster.http)), pytest.raises(NotServedError, match=complaint):
        cluster.deploy(cluster.configuration())


@pytest.mark.full
async def test_with_certificates(cluster: RunningCluster, tmp_path: Path) -> None:
    authority = new_authority(10)
    issued = issue(authority, Subject((HEAD, TARGETS), Purpose.BOTH), 5)
    files = {"ca.pem": authority.certificate, "node.pem": issued.certificate, "node.key": issued.key}
    for name, raw in files.items():
        (tmp_path / name).write_bytes(raw)
    tls = f", tls: {{ca: {tmp_path}/ca.pem, certificate: {tmp_path}/node.pem, key: {tmp_path}/node.key}}"
    await asyncio.to_thread(cluster.deploy, cluster.configuration(targets="replicas: 1", tls=tls))
    async with cluster.client() as client:
        made = await client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=5)
        assert made.usage is not None
    (target,) = cluster.entries(Role.TARGET)
    with pytest.raises(ServiceError):
        async with connect(target.address):
            pass

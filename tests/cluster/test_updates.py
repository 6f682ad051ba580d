"""A cluster that is given other configurations, and its end."""

import asyncio
import socket
from contextlib import suppress
from pathlib import Path
from shutil import copytree

import pytest
import ray
import yaml
from ray import serve
from ray.serve.schema import ServeDeploySchema
from ray.util.placement_group import placement_group, remove_placement_group

from crossdraft.client import connect
from crossdraft.cluster.capacity import NotServedError
from crossdraft.cluster.deploy import ASKING, undeploy
from crossdraft.cluster.status import APPLICATION, Role, application_status, deployed, hosted
from crossdraft.engine.names import source_of
from crossdraft.rpc.errors import ServiceError
from tests.cluster.machines.streams import Stream, Streams
from tests.cluster.running import HEAD, MODEL, PROMPT, SERVING, TARGETS, RunningCluster, eventually, streams, unchanged
from tests.engine.test_loader import rewritten
from tests.rpc.certificates import Cluster as Certificates

NORM = "model.norm.weight"
SEEDS = range(1)  # while processes start, which need the processors
TOKENS = 60
TAKES = "resources: {cpus: 0.5, custom: {drafter: 1}}"
FRONT_TAKES = "resources: {cpus: 0.1, custom: {ingress: 1}}"
SCALE = "{min: 1, max: 2, outputs: 2, up_seconds: 0, down_seconds: 1}"
UNSERVED = """\
      - {name: other, model: /nowhere, threads: 1, cache_mib: 64,
        resources: {cpus: 0.1, custom: {drafter: 1}}}"""


def wide(cluster: RunningCluster, targets: str = "replicas: 2", drafters: str = "") -> str:
    """A drafter that has room on the head only where the one that runs has ended."""
    text = cluster.configuration(targets, drafters)
    assert TAKES in text
    return text.replace(TAKES, "resources: {cpus: 3.4, custom: {drafter: 1}}")


def changed(cluster: RunningCluster, drafters: str = "") -> str:
    """Other options of everything but the HTTP front, a target less, and orchestrators by the load."""
    text = wide(cluster, "replicas: 1, cache_mib: 256", drafters)
    text = text.replace(f"port: {cluster.grpc}", f"port: {cluster.grpc}, burst: 11").replace(
        "max_outputs: 16", "max_outputs: 15"
    )
    return text.replace("orchestrators: 2", f"orchestrators: {SCALE}")


def test_what_has_no_room_is_given_up_in_time(cluster: RunningCluster) -> None:
    """A front, as it starts again soon: where the one that runs has ended, something else has taken the room."""
    before = cluster.entries()
    foreign = placement_group([{"CPU": 0.5, "drafter": 0.1}])
    assert foreign.wait(600)  # seconds
    rest, front = cluster.configuration().split("grpc:")
    assert FRONT_TAKES in front
    wide_front = f"{rest}grpc:{front.replace(FRONT_TAKES, 'resources: {cpus: 3.4, custom: {ingress: 1}}')}"
    try:
        begun = r"[^$]*\nGrpc: [01] of 1"
        late = rf"the time for it is over:({begun}|\nRay Serve starts the application)"  # by how fast Serve begins
        with pytest.raises(NotServedError, match=late):
            cluster.deploy(wide_front, seconds=1.0)
    finally:
        remove_placement_group(foreign)
    assert [one for one in before if one.role is not Role.GRPC] == [
        one for one in cluster.entries() if one.role is not Role.GRPC
    ]


async def test_an_update_drops_no_stream(cluster: RunningCluster) -> None:
    before = {one.id for one in cluster.entries()}
    async with cluster.client() as client:
        async with streams(client, SEEDS, TOKENS) as heard:
            pass
        undisturbed = [one.text for one in heard]
        updating = asyncio.create_task(asyncio.to_thread(cluster.deploy, changed(cluster)))
        rounds: list[list[Stream]] = []
        while not updating.done():
            async with streams(client, SEEDS, TOKENS) as heard:
                rounds.append(heard)
        await updating
    assert len(rounds) > 1
    for heard in rounds:
        assert [one.text for one in heard] == undisturbed
        assert [one.tokens for one in heard] == [TOKENS] * len(SEEDS)
    await eventually(lambda: len(cluster.entries(Role.ORCHESTRATOR)) == 1)
    after = cluster.entries()
    assert [one.role for one in after if one.id in before] == [Role.HTTP]
    assert sorted(one.role for one in after) == sorted(SERVING)


def test_the_same_again_changes_nothing(cluster: RunningCluster) -> None:
    with unchanged(cluster):
        assert cluster.deploy(changed(cluster)) == [ASKING]


@pytest.mark.full
async def test_orchestrators_that_stay_serve_what_a_target_alone_was_changed_to(cluster: RunningCluster) -> None:
    before = {one.id for one in cluster.entries()}
    shorter = changed(cluster).replace("cache_mib: 256", "cache_mib: 256, max_model_len: 512")
    await asyncio.to_thread(cluster.deploy, shorter)
    async with cluster.client() as client:
        async with streams(client, SEEDS, TOKENS) as heard:
            pass
        assert [one.tokens for one in heard] == [TOKENS] * len(SEEDS)
        assert {one.role for one in cluster.entries() if one.id not in before} == {Role.TARGET}
        await asyncio.to_thread(cluster.deploy, changed(cluster))
        async with streams(client, SEEDS, TOKENS) as again:
            pass
    assert [one.text for one in again] == [one.text for one in heard]


def tuned(folder: Path) -> Path:
    """The target with other weights."""
    source, name = source_of("bundled:target"), folder / "tuned"
    copytree(source, name, dirs_exist_ok=True)
    rewritten(name, lambda tensors: tensors | {NORM: tensors[NORM] * 0.7})
    return name


@pytest.mark.full
async def test_no_output_is_made_by_the_weights_before_and_after_an_update(cluster: RunningCluster) -> None:
    """Those under way end, or go on where the ones before are served; none that has not begun fails."""
    made: list[Stream] = []
    async with cluster.client() as client:
        async with streams(client, SEEDS, TOKENS) as (before,):
            pass
        text = changed(cluster).replace("model: bundled:target", f"model: {tuned(cluster.folder)}")
        updating = asyncio.create_task(asyncio.to_thread(cluster.deploy, text))
        while not updating.done():
            made += await Streams(client, SEEDS, TOKENS, model=MODEL).run()
        await updating
        async with streams(client, SEEDS, TOKENS) as (after,):
            pass
        await asyncio.to_thread(cluster.deploy, changed(cluster))
    await eventually(lambda: len(cluster.entries(Role.ORCHESTRATOR)) == 1)  # the one before has left
    assert [one for one in made if one.fault and not (one.text and "replaced by another model" in one.fault)] == []
    assert before.text != after.text
    whole = [one.text for one in made if one.tokens]
    assert before.text in whole
    assert {*whole} <= {before.text, after.text}
    assert all(before.text.startswith(one.text) for one in made if not one.tokens)


def test_what_nodes_lack_is_said_before_anything_is_begun(cluster: RunningCluster) -> None:
    complaint = r"target of 'small': 5 wanted, each with .*; there is room for 3"
    with unchanged(cluster), pytest.raises(NotServedError, match=complaint):
        cluster.deploy(changed(cluster).replace("replicas: 1", "replicas: 5"))


def test_a_service_that_cannot_be_run_leaves_the_others_as_they_are(cluster: RunningCluster) -> None:
    text = changed(cluster)
    for wrong, complaint in (
        (changed(cluster, UNSERVED), r"drafter 'other' of 'small' cannot be served on node .*: .*nowhere"),
        (text.replace(f"port: {cluster.http}", "port: 1"), "cannot be moved"),
    ):
        with unchanged(cluster), pytest.raises(NotServedError, match=complaint):
            cluster.deploy(wrong)


@pytest.mark.full
def test_what_cannot_be_run_in_place_of_a_service_leaves_it_as_it_is(cluster: RunningCluster) -> None:
    text, unserved = changed(cluster), r"drafter 'byte-level' of 'small' cannot be served on node .*: .*nowhere"
    with socket.create_server((HEAD, 0)) as taken:
        for wrong, complaint in (
            (text.replace("bundled:drafter-b", "/nowhere"), unserved),  # it has no room beside the old one
            (text.replace(f"port: {cluster.grpc}", f"port: {taken.getsockname()[1]}"), f"cannot listen on {HEAD}"),
        ):
            with unchanged(cluster), pytest.raises(NotServedError, match=complaint):
                cluster.deploy(wrong)


@pytest.mark.full
def test_what_ended_for_one_that_cannot_be_run_is_started_again(cluster: RunningCluster) -> None:
    before = cluster.entries()
    wrong = changed(cluster).replace("bundled:drafter-b", "bundled:drafter-b, device: nowhere")
    with pytest.raises(NotServedError, match=r"(?s)Drafter-small-byte_2dlevel: (0 of|none) .*nowhere") as raised:
        cluster.deploy(wrong)
    assert not any(text in str(raised.value) for text in ("missing now", "Traceback"))
    asyncio.run(eventually(lambda: [one.what for one in cluster.entries()] == [one.what for one in before]))
    assert len({one.id for one in cluster.entries()} - {one.id for one in before}) == 1


@pytest.mark.full
@pytest.mark.parametrize("role", [Role.ORCHESTRATOR, Role.TARGET])
async def test_replicas_come_and_go_with_the_load(cluster: RunningCluster, role: Role) -> None:
    text = cluster.configuration("replicas: 1").replace("orchestrators: 2", "orchestrators: 1")
    before, after = {
        Role.ORCHESTRATOR: ("orchestrators: 1", f"orchestrators: {SCALE}"),
        Role.TARGET: ("replicas: 1", f"replicas: {SCALE}"),
    }[role]
    assert before in text
    await asyncio.to_thread(cluster.deploy, text.replace(before, after))
    over = asyncio.Event()

    async def ask() -> None:
        while not over.is_set():
            async with cluster.client() as client, streams(client, range(8), TOKENS) as heard:
                pass
            assert [one.tokens for one in heard] == [TOKENS] * 8

    asking = asyncio.create_task(ask())
    await eventually(lambda: len(cluster.entries(role)) == 2)
    over.set()
    await asking
    await eventually(lambda: len(cluster.entries(role)) == 1)


@pytest.mark.full
async def test_another_model_is_served_before_the_one_before_is_not(cluster: RunningCluster) -> None:
    text = cluster.configuration("replicas: 1")
    await asyncio.to_thread(cluster.deploy, text)
    updating = asyncio.create_task(asyncio.to_thread(cluster.deploy, text.replace(f"name: {MODEL}", "name: other")))
    seen = list[list[str]]()
    async with cluster.client() as client:
        while not updating.done():
            seen.append([model.id for model in (await client.models.list()).data])
    await updating
    assert seen[0] == [MODEL]
    assert seen[-1] == ["other"]
    assert [] not in seen
    await eventually(lambda: {one.model for one in cluster.entries(Role.TARGET)} == {"other"})


@pytest.mark.full
def test_serve_deploy_replaces_one_target_after_the_other_where_none_has_room_beside_them(cluster: RunningCluster):
    cluster.deploy(cluster.configuration("replicas: 3"))
    text = cluster.configuration("replicas: 3, cache_mib: 65").replace("keys: keys", f"keys: {cluster.folder}/keys")
    one = {"name": APPLICATION, "import_path": "crossdraft.cluster.deploy:build", "args": yaml.safe_load(text)}
    serve.context._get_global_client().deploy_apps(ServeDeploySchema.model_validate({"applications": [one]}))
    states: list[tuple[int, bool]] = []  # how many targets serve, and whether that is all

    def ended() -> bool:
        found = application_status()
        for target in (hosted(*one) for one in found.deployments.items() if one[0] == f"Target-{MODEL}"):
            states.append((target.replicas, target.state == "HEALTHY"))
        return bool(found.status != "DEPLOYING")

    asyncio.run(eventually(ended))
    assert (states[-1], application_status().status) == ((3, True), "RUNNING")
    assert min(states) == (2, False)


def test_when_serve_is_shut_down_nothing_is_left(cluster: RunningCluster) -> None:
    """As by `serve shutdown`."""
    processes = {one.process for one in cluster.entries()}
    assert len(processes) >= len(SERVING)
    serve.shutdown()
    with pytest.raises(ValueError, match="no application"):
        deployed()
    assert ray.util.list_named_actors(all_namespaces=True) == []
    asyncio.run(eventually(lambda: not any(Path(f"/proc/{process}").exists() for process in processes)))
    asyncio.run(eventually(lambda: ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"]))


@pytest.mark.full
def test_what_is_undeployed_is_gone_and_may_be_undeployed_again(cluster: RunningCluster) -> None:
    cluster.deploy(cluster.configuration())
    undeploy()
    assert ray.util.list_named_actors(all_namespaces=True) == []
    done = cluster.command("undeploy")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    gone = cluster.command("status")
    assert (gone.returncode, gone.stdout) == (1, "")
    assert "nothing is deployed on this cluster; use `crossdraft deploy`" in gone.stderr


@pytest.mark.full
def test_a_port_that_is_taken_is_said(cluster: RunningCluster) -> None:
    with suppress(ValueError):  # nothing is deployed where the tests before this one have run
        deployed()
        undeploy()
    complaint = f"cannot listen for HTTP: cannot listen on 127.0.0.1:{cluster.http}: .*; choose another port"
    with socket.create_server(("127.0.0.1", cluster.http)), pytest.raises(NotServedError, match=complaint):
        cluster.deploy(cluster.configuration())


@pytest.mark.full
async def test_with_certificates(cluster: RunningCluster, tmp_path: Path) -> None:
    Certificates(tmp_path).files("node", (HEAD, TARGETS))
    tls = f", tls: {{ca: {tmp_path}/ca.pem, cert: {tmp_path}/node.pem, key: {tmp_path}/node.key}}"
    await asyncio.to_thread(cluster.deploy, cluster.configuration(targets="replicas: 1", tls=tls))
    async with cluster.client() as client:
        made = await client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=5)
        assert made.usage is not None
    (target,) = cluster.entries(Role.TARGET)
    with pytest.raises(ServiceError):
        async with connect(target.address):
            pass

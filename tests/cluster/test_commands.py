"""`crossdraft deploy` and `status`, typed where a cluster runs, which was itself deployed so; and what they say."""

import json
import subprocess
from contextlib import nullcontext
from importlib import import_module
from io import StringIO
from pathlib import Path

import pytest
from ray.serve import schema
from ray.serve._private.common import ReplicaState
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview, DeploymentStatus, DeploymentStatusOverview
from rich.console import Console

from crossdraft.cli import cluster as commands
from crossdraft.cluster import capacity, status
from crossdraft.cluster.deploy import ASKING, alone
from crossdraft.cluster.status import Deployed, Entry, Hosted, Role, deployed_with, hosted, in_short
from tests.cluster.running import HEAD, MODEL, TARGETS, NotServedError, RunningCluster, unchanged


def test_status_shows_every_process_and_serves_replicas(cluster: RunningCluster) -> None:
    done = cluster.command("status")
    assert done.returncode == 0, done.stderr
    for one in cluster.entries():
        assert any({one.address or one.node, str(one.process)} <= set(line.split()) for line in _lines(done))
    assert f"Orchestrator-{MODEL}: healthy, 2 replicas" in _lines(done)
    assert {f"{name}: healthy, 1 replica" for name in ("Directory", "Http", "Grpc")} <= {*_lines(done)}


def test_status_has_whole_addresses_and_all_figures_in_80_columns() -> None:
    address = "192.168.100.101:65535"
    of = (Role.DRAFTER, MODEL, "of-a-long-name", address, "x:65534", "x", 1234567, "0.1.0+a", 1000.0)
    found = Deployed((Entry("t", *of, sessions=12, busy=0.345),), "RUNNING", "", ())
    console = Console(width=80, file=StringIO(), highlight=False)
    console.print(commands.table_of(found, 1000.0 + 3 * 86400 + 4 * 3600))
    written = console.file.getvalue().splitlines()
    assert max(map(len, written)) <= 80
    assert {address, "65534", "1234567", "76:00", "12", "34%"} <= set(" ".join(written).split())
    ahead = commands.table_of(found, 970.0)  # the clock of the process's node is half a minute ahead
    assert [*ahead.columns[4].cells] == ["0:00"]


def test_status_names_nodes_that_are_set_up_where_something_is_missing(monkeypatch, capsys):
    monkeypatch.setattr("crossdraft.cli.cluster._cluster", lambda _: nullcontext())
    monkeypatch.setattr("crossdraft.cluster.status.pending_nodes", lambda: ("10.77.0.2 waiting-for-ssh",))
    for state, named in ((ReplicaState.STARTING, True), (ReplicaState.STOPPING, False)):
        states = {ReplicaState.RUNNING: 1, state: 1}
        one = DeploymentStatusOverview(
            DeploymentStatus.UNHEALTHY, schema.DeploymentStatusTrigger.UNSPECIFIED, states, ""
        )
        found = ApplicationStatusOverview(ApplicationStatus.RUNNING, "", 0.0, {"Target": one})
        monkeypatch.setattr("crossdraft.cluster.status.application_status", lambda found=found: found)
        monkeypatch.setattr("crossdraft.cluster.status.deployed", lambda: deployed_with(()))
        commands.status("auto", as_json=False)
        lines = capsys.readouterr().out.splitlines()
        assert "Target: unhealthy, 1 replica" in lines
        assert ("Ray sets up a node: 10.77.0.2 waiting-for-ssh" in lines) == named


def test_replicas_that_serve_ends_as_there_are_to_be_fewer_are_not_missing_and_how_many_serve_is_said_in_words() -> (
    None
):
    states = {ReplicaState.RUNNING: 1, ReplicaState.STARTING: 1, ReplicaState.STOPPING: 3}
    fewer = DeploymentStatusOverview(
        DeploymentStatus.DOWNSCALING, schema.DeploymentStatusTrigger.AUTOSCALING, states, ""
    )
    assert hosted("Target", fewer) == Hosted("Target", "DOWNSCALING", 1, 2, "")
    progress = [Hosted("A", "UPDATING", serving, of, "").progress for serving, of in ((0, 0), (0, 1), (1, 2))]
    assert progress == ["none is started yet", "0 of 1 serve", "1 of 2 serve"]


def test_what_ray_says_is_said_without_tracebacks() -> None:
    dump = 'The deployment failed to start.\n  File "x.py", line 1\nTraceback:\n\nValueError: there is no folder\n'
    assert in_short(dump) == "The deployment failed to start. … ValueError: there is no folder"
    of_ours = "Deploying app failed:\ntarget: 5 wanted\nadd nodes"
    assert (in_short(of_ours), in_short("one line\n"), in_short("")) == (of_ours, "one line", "")


@pytest.mark.full
def test_status_as_json_says_where_each_one_is(cluster: RunningCluster) -> None:
    done = cluster.command("status", "--json")
    (line,) = _lines(done)
    found = json.loads(line)
    assert found["state"] == "RUNNING"
    due = [(one.role.value, one.process) for one in cluster.entries()]
    assert [(one["role"], one["process"]) for one in found["processes"]] == due
    assert {one["node"] for one in found["processes"] if one["role"] == Role.TARGET} == {TARGETS}
    assert {one["node"] for one in found["processes"] if one["role"] == Role.DRAFTER} == {HEAD}
    assert found["missing"] == []


@pytest.mark.full
def test_what_is_deployed_again_goes_on(cluster: RunningCluster) -> None:
    with unchanged(cluster):
        done = cluster.command("deploy", cluster.file(cluster.configuration()))
    assert done.returncode == 0, done.stderr
    assert _lines(done) == [
        ASKING,
        f"HTTP at 127.0.0.1:{cluster.http} of every node with an http front; `crossdraft status` shows which",
        f"gRPC at port {cluster.grpc}; `crossdraft status` shows on which node",
    ]


def test_one_deployment_at_a_time(cluster: RunningCluster) -> None:
    with alone():
        done = cluster.command("deploy", cluster.file(cluster.configuration()))
        assert (done.returncode, "another `crossdraft deploy` is under way" in done.stderr) == (1, True)


def test_nothing_is_begun_while_a_node_has_another_crossdraft(cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(capacity, "installed", lambda: "0.2.0+other")
    complaint = rf"0\.2\.0\+other is to run, and node .*{TARGETS}"
    with unchanged(cluster), pytest.raises(NotServedError, match=complaint):
        cluster.deploy(cluster.configuration())


def _lines(done: "subprocess.CompletedProcess[str]") -> list[str]:
    return [line.rstrip() for line in done.stdout.splitlines()]


def test_a_package_is_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = status.on_disk()
    assert found == status.on_disk() == status.installed()
    part = tmp_path / "one" / "invented_package" / "part"
    (part / "__pycache__").mkdir(parents=True)
    (part / "__init__.py").write_text("ONE = 1\n")
    monkeypatch.syspath_prepend(tmp_path / "one")
    monkeypatch.setattr(status, "PACKAGE", "invented_package")
    monkeypatch.setattr(status, "version", lambda _: "1")
    before = status.on_disk()
    (part / "__pycache__" / "__init__.pyc").write_bytes(b"compiled")
    assert status.on_disk() == before
    (part / "__init__.py").write_text("ONE = 2\n")
    changed = status.on_disk()
    (part / "more.py").touch()
    whole = status.on_disk()
    assert len({before, changed, whole}) == 3
    laboratory = tmp_path / "one" / "invented_package" / "lab"
    laboratory.mkdir()
    (laboratory / "__init__.py").touch()
    assert status.on_disk() == whole  # a checkout is as good as a wheel of it


def test_a_folder_that_has_the_packages_name_is_no_part_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = status.on_disk()
    (tmp_path / "crossdraft" / "venv").mkdir(parents=True)
    (tmp_path / "crossdraft" / "venv" / "many.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert str(tmp_path / "crossdraft") in list(import_module("crossdraft").__path__)
    assert status.on_disk() == found

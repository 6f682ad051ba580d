"""The files of `ray up`, as far as they can be checked without machines: Ray's own checks, and what they say."""

import copy
import json
import logging
import runpy
import subprocess
import tomllib
from collections.abc import Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from crossdraft.cluster.capacity import Amounts, needs_of, placed
from crossdraft.cluster.config import load, parse, processes_of
from crossdraft.config.cluster import Configuration
from crossdraft.lab.loadtest import LoadRun
from tests.lab.test_loadtest import WHOLE

REPOSITORY = Path(__file__).parents[2]
FILES = ["deploy/cluster.yaml", "deploy/cluster.local.yaml"]
CONFIGURATION = load(REPOSITORY / "deploy" / "serve.yaml")
RAY = "#!/bin/sh\nprintf '%s\\n' \"$@\"\n"  # says how it was called


def read(file: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((REPOSITORY / file).read_text(encoding="utf-8"))
    return found


def unplaced(configuration: Configuration, nodes: Sequence[Amounts]) -> list[str]:
    """What has no place on these nodes, of all that a configuration asks for at once."""
    named = {str(number): node for number, node in enumerate(nodes)}
    return list(placed(needs_of(processes_of(configuration)), named).faults)


def commands(cluster: dict[str, Any]) -> list[str]:
    return [one for name, ones in cluster.items() if name.endswith("_commands") for one in ones]


def launched(commands: list[str], environment: dict[str, str]) -> list[str]:
    """As `ray up` runs them."""
    found: list[str] = pytest.importorskip("ray.autoscaler._private.util").with_envs(commands, environment)
    return found


def called(command: str, home: Path, folder: Path) -> list[str]:
    """The arguments that `ray start` gets when a node runs a command."""
    ray = folder / "ray"
    ray.write_text(RAY, encoding="ascii")
    ray.chmod(0o755)
    environment = {
        "PATH": f"{folder}:/usr/bin:/bin",
        "HOME": str(home),
        "RAY_HEAD_IP": "10.0.0.1",
        "SSH_CONNECTION": "10.0.0.1 50000 10.0.0.2 22",
    }
    done = subprocess.run(["bash", "-ec", command], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.mark.parametrize("file", FILES)
def test_ray_takes_the_file(file: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    util = pytest.importorskip("ray.autoscaler._private.util")
    monkeypatch.chdir(REPOSITORY)
    caplog.set_level(logging.ERROR, "ray")  # for this test only
    prepared = util.prepare_config(copy.deepcopy(read(file)))
    util.validate_config(prepared)
    assert prepared["worker_setup_commands"][0].startswith("test -x ~/crossdraft/venv/bin/python")


@pytest.mark.parametrize("file", FILES)
def test_what_is_copied_is_in_the_repository_or_made_as_the_file_says(file: str) -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    made = {f"dist/crossdraft-{project['version']}-py3-none-any.whl", "~/.ray/auth_token"}
    copied = set(read(file)["file_mounts"].values())
    assert made <= copied
    logged_in = {"~/.cache/huggingface/token"}
    assert [path for path in copied - made - logged_in if not (REPOSITORY / path).is_file()] == []


@pytest.mark.parametrize("file", FILES)
def test_every_command_is_one_for_a_shell(file: str) -> None:
    for command in commands(read(file)):
        checked = subprocess.run(["bash", "-nc", command], capture_output=True, text=True, check=False)
        assert (checked.returncode, checked.stderr) == (0, ""), command


def test_machines_of_both_kinds_are_set_up_alike() -> None:
    cloud, own = (read(file) for file in FILES)
    assert cloud["setup_commands"] == own["setup_commands"]
    served = "~/crossdraft/serve.yaml"
    assert own["file_mounts"].items() - cloud["file_mounts"].items() == {(served, "deploy/serve.yaml")}


def test_a_clouds_models_are_on_its_nodes_and_on_their_gpus() -> None:
    cluster = read("deploy/cluster.yaml")
    configuration = load(REPOSITORY / cluster["file_mounts"]["~/crossdraft/serve.yaml"])
    for model in configuration.models:
        for service in (model.target, *model.drafters):
            assert (service.device, service.resources.gpus) == ("cuda:0", 1)
            assert any(f"hf download --quiet {service.model}" in one for one in cluster["worker_setup_commands"])


@pytest.mark.parametrize("file", FILES)
def test_nodes_ask_for_the_token(file: str, tmp_path: Path) -> None:
    (setting,) = [one for one in read(file)["setup_commands"] if ".bashrc" in one]
    for _ in range(2):  # a second time changes nothing
        subprocess.run(["bash", "-ec", setting], env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}, check=True)
    script = ". ~/.bashrc; echo $RAY_AUTH_MODE; echo $PATH"
    done = subprocess.run(
        ["bash", "-c", script], env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}, capture_output=True
    )
    assert done.stdout.decode().split() == ["token", f"{tmp_path}/crossdraft/venv/bin:/usr/bin:/bin"]


def test_a_cloud_of_the_fewest_nodes_has_room_for_what_is_deployed() -> None:
    cluster = read("deploy/cluster.yaml")
    kinds = cluster["available_node_types"]
    counts = {name: kind.get("min_workers", 0) for name, kind in kinds.items()} | {cluster["head_node_type"]: 1}
    nodes = [kinds[name]["resources"] for name, count in counts.items() for _ in range(count)]
    configuration = load(REPOSITORY / cluster["file_mounts"]["~/crossdraft/serve.yaml"])
    assert unplaced(configuration, nodes) == []


def test_two_machines_of_two_cpus_and_a_head_have_room_for_what_is_deployed(tmp_path: Path) -> None:
    cluster = read("deploy/cluster.local.yaml")
    nodes = []
    for name in ("head", "worker"):
        start = cluster[f"{name}_start_ray_commands"][-1]
        nodes.append({"CPU": 2.0} | offered(called(start, tmp_path, tmp_path)))
    workers = [nodes[1]] * len(cluster["provider"]["worker_ips"])
    assert unplaced(CONFIGURATION, [nodes[0], *workers]) == []


def test_a_machine_says_what_it_offers_and_uses_the_address_it_was_reached_by(tmp_path: Path) -> None:
    start = read("deploy/cluster.local.yaml")["worker_start_ray_commands"][-1]
    own = tmp_path / "crossdraft" / "offers.json"
    own.parent.mkdir()
    own.write_text('{"drafter": 2}\n', encoding="ascii")
    arguments = called(start, tmp_path, tmp_path)
    assert offered(arguments) == {"drafter": 2}
    assert {"--address=10.0.0.1:6379", "--node-ip-address=10.0.0.2"} <= set(arguments)


@pytest.mark.parametrize("file", FILES)
def test_usage_statistics_are_off_where_the_launcher_has_switched_them_on(file: str, tmp_path: Path) -> None:
    said = tmp_path / "said"
    ray = tmp_path / "ray"
    ray.write_text(f'#!/bin/sh\necho "$1 $RAY_USAGE_STATS_ENABLED" >> {said}\n', encoding="ascii")
    ray.chmod(0o755)
    for name in ("head", "worker"):
        for command in launched(read(file)[f"{name}_start_ray_commands"], {"RAY_USAGE_STATS_ENABLED": "1"}):
            environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path)}
            subprocess.run(["bash", "-c", command], env=environment, stderr=subprocess.DEVNULL, check=True)
    started = [line for line in said.read_text(encoding="ascii").splitlines() if line.startswith("start")]
    assert started == ["start 0"] * 2


def offered(arguments: list[str]) -> dict[str, float]:
    resources = [one.partition("=")[2] for one in arguments if one.startswith("--resources=")]
    found: dict[str, float] = json.loads(resources[0]) if resources else {}
    return found


def test_the_script_for_latency_puts_one_process_of_each_kind_on_a_node_of_its_choice() -> None:
    script = runpy.run_path(str(REPOSITORY / "deploy" / "loadtest" / "cluster.py"))
    nodes = {"http": "10.0.0.1", "orchestrator": "10.0.0.2", "target": "10.0.0.3", "drafter": "10.0.0.4"}
    shipped = read("deploy/serve.yaml")["applications"][0]["args"]
    for given in (shipped, script["placed"](copy.deepcopy(shipped), nodes)):
        found = parse(yaml.safe_dump(script["placed"](given, nodes)))
        free = {node: {"CPU": 1.0, f"node:{node}": 1.0} for node in nodes.values()}
        offers = {"target": 1.0, "orchestrator": 8.0, "ingress": 8.0, "drafter": 1.0}
        places = placed(needs_of(processes_of(found)), {node: has | offers for node, has in free.items()}).places
        assert places == {
            "target of 'crossdraft-bundled'": ("10.0.0.3",),
            "drafter 'byte-level' of 'crossdraft-bundled'": ("10.0.0.4",),
            "orchestrator of 'crossdraft-bundled'": ("10.0.0.2",),
            "http front": ("10.0.0.1",),
        }
    report = {"results": [asdict(LoadRun.of(None, [WHOLE]))]}
    _, _, *rows, _, said = script["table"](report)
    assert [row.split(" | ")[:2] for row in rows] == [
        *(["| TTFT", "1"], ["| TPOT", "1"], ["| client to front and back", "4"]),
        *(["| orchestrator to target and back", "4"], ["| orchestrator to drafter and back", "4"]),
    ]
    assert said.endswith("2.00 tokens a pass")


@pytest.mark.parametrize("file", ["deploy/serve.yaml", "deploy/serve.aws.yaml"])
def test_ray_serve_takes_what_is_served_and_listens_where_it_says(file: str) -> None:
    given = pytest.importorskip("ray.serve.schema").ServeDeploySchema.model_validate(read(file))
    (application,) = given.applications
    module, _, name = application.import_path.partition(":")
    assert callable(getattr(import_module(module), name))
    http = load(REPOSITORY / file).http
    assert (given.http_options.host, given.http_options.port) == (http.host, http.port)

"""The files of `ray up` and the Helm chart, as far as they can be checked without machines and without a cluster."""

import copy
import json
import logging
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import jsonschema
import pytest
import yaml

from crossdraft.cluster.capacity import Amounts, placed
from crossdraft.cluster.config import load, parse, processes_of
from crossdraft.config.cluster import Configuration
from crossdraft.lab.loadtest import LoadRun
from tests.lab.test_loadtest import WHOLE

REPOSITORY = Path(__file__).parents[2]
FILES = ["deploy/cluster.yaml", "deploy/cluster.local.yaml"]
CONFIGURATION = load(REPOSITORY / "deploy" / "serve.yaml")
RAY = "printf '%s\\n' \"$@\""  # says how it was called
PATHS = "/usr/bin:/bin"


def read(file: str | Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((REPOSITORY / file).read_text(encoding="utf-8"))
    return found


def unplaced(configuration: Configuration, nodes: Sequence[Amounts]) -> list[str]:
    """What has no place on these nodes, of all that a configuration asks for at once."""
    named = {str(number): node for number, node in enumerate(nodes)}
    return list(placed(processes_of(configuration)[1:], named).faults)


def commands(cluster: dict[str, Any]) -> list[str]:
    return [one for name, ones in cluster.items() if name.endswith("_commands") for one in ones]


def launched(commands: list[str], environment: dict[str, str]) -> list[str]:
    """As `ray up` runs them."""
    found: list[str] = pytest.importorskip("ray.autoscaler._private.util").with_envs(commands, environment)
    return found


def home_with(folder: Path, ray: str) -> dict[str, str]:
    """The environment of a command at home in a folder, where `ray` is this script."""
    (folder / "ray").write_text(f"#!/bin/sh\n{ray}\n", encoding="ascii")
    (folder / "ray").chmod(0o755)
    return {"PATH": f"{folder}:{PATHS}", "HOME": str(folder)}


def called(command: str, home: Path) -> list[str]:
    """The arguments that `ray start` gets when a node runs a command."""
    node = {"RAY_HEAD_IP": "10.0.0.1", "SSH_CONNECTION": "10.0.0.1 50000 10.0.0.2 22"} | home_with(home, RAY)
    done = subprocess.run(["bash", "-ec", command], env=node, capture_output=True, text=True, check=True)
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
    script, home = ". ~/.bashrc; echo $RAY_AUTH_MODE; echo $PATH", {"HOME": str(tmp_path), "PATH": PATHS}
    for command in (setting, setting, script):  # a second time changes nothing
        done = subprocess.run(["bash", "-ec", command], env=home, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["token", f"{tmp_path}/crossdraft/venv/bin:{PATHS}"]


def test_a_cloud_of_the_fewest_nodes_has_room_for_what_is_deployed() -> None:
    cluster = read("deploy/cluster.yaml")
    kinds = cluster["available_node_types"]
    counts = {name: kind.get("min_workers", 0) for name, kind in kinds.items()} | {cluster["head_node_type"]: 1}
    nodes = [kinds[name]["resources"] for name, count in counts.items() for _ in range(count)]
    configuration = load(REPOSITORY / cluster["file_mounts"]["~/crossdraft/serve.yaml"])
    assert unplaced(configuration, nodes) == []


def test_two_machines_of_two_cpus_and_a_head_have_room_for_what_is_deployed(tmp_path: Path) -> None:
    cluster = read("deploy/cluster.local.yaml")
    starts = [cluster[f"{name}_start_ray_commands"][-1] for name in ("head", "worker")]
    head, worker = ({"CPU": 2.0} | offered(called(start, tmp_path)) for start in starts)
    assert unplaced(CONFIGURATION, [head, *[worker] * len(cluster["provider"]["worker_ips"])]) == []


def test_a_machine_says_what_it_offers_and_uses_the_address_it_was_reached_by(tmp_path: Path) -> None:
    start = read("deploy/cluster.local.yaml")["worker_start_ray_commands"][-1]
    own = tmp_path / "crossdraft" / "offers.json"
    own.parent.mkdir()
    own.write_text('{"drafter": 2}\n', encoding="ascii")
    arguments = called(start, tmp_path)
    assert offered(arguments) == {"drafter": 2}
    assert {"--address=10.0.0.1:6379", "--node-ip-address=10.0.0.2"} <= set(arguments)


@pytest.mark.parametrize("file", FILES)
def test_usage_statistics_are_off_where_the_launcher_has_switched_them_on(file: str, tmp_path: Path) -> None:
    said = tmp_path / "said"
    environment = home_with(tmp_path, f'echo "$1 $RAY_USAGE_STATS_ENABLED" >> {said}')
    for name in ("head", "worker"):
        for command in launched(read(file)[f"{name}_start_ray_commands"], {"RAY_USAGE_STATS_ENABLED": "1"}):
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
    few = {name: copy.deepcopy(part) for name, part in shipped.items() if name != "http"}  # which may be left out
    for given in (shipped, script["placed"](copy.deepcopy(shipped), nodes), few):
        found = parse(yaml.safe_dump(script["placed"](given, nodes)))
        free = {node: {"CPU": 1.0, f"node:{node}": 1.0} for node in nodes.values()}
        offers = {"target": 1.0, "orchestrator": 8.0, "ingress": 8.0, "drafter": 1.0}
        places = placed(processes_of(found)[1:], {node: has | offers for node, has in free.items()}).places
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
    assert callable(resolve_name(application.import_path))
    http = load(REPOSITORY / file).http
    assert (given.http_options.host, given.http_options.port) == (http.host, http.port)


CHART = REPOSITORY / "deploy" / "kubernetes"
EXAMPLE, DEFAULT = CHART / "examples" / "gpu.yaml", read(CHART / "values.yaml")
BIN = Path(sys.executable).parent
HELM = shutil.which("helm", path=f"{BIN}{os.pathsep}{os.environ['PATH']}")
Values = dict[str, Any]


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> Values:
    """As Helm merges values."""
    both = [name for name in above if isinstance(below.get(name), dict) and above[name]]
    return {**below, **above, **{name: merged(below[name], above[name]) for name in both}}


def helm(*words: str | Path) -> str:
    if HELM is None:
        pytest.skip("there is no Helm here: .ci/run says where it is to be had")
    return subprocess.run([HELM, *words], capture_output=True, text=True, check=True, timeout=600).stdout


@dataclass(frozen=True)
class Rendered:
    """What the chart makes."""

    values: Values
    manifests: list[Values]

    def of(self, kind: str) -> list[Values]:
        return [one for one in self.manifests if one["kind"] == kind]

    @cached_property
    def service(self) -> Values:
        (found,) = self.of("RayService")
        spec: Values = found["spec"]
        return spec

    @cached_property
    def serve(self) -> Values:
        config: Values = yaml.safe_load(self.service["serveConfigV2"])
        return config

    @cached_property
    def configuration(self) -> Configuration:
        (application,) = self.serve["applications"]
        return parse(json.dumps(application["args"]))

    @cached_property
    def pods(self) -> dict[str, Values]:
        """By the names of their groups, the head first."""
        groups = {"headgroup": self.service["rayClusterConfig"]["headGroupSpec"]} | self.groups
        return {name: group["template"] for name, group in groups.items()}

    @property
    def groups(self) -> dict[str, Values]:
        return {one["groupName"]: one for one in self.service["rayClusterConfig"]["workerGroupSpecs"]}

    def chosen(self, labels: Mapping[str, str]) -> set[str]:
        """Groups whose pods have these labels, the operator's among them."""
        of = {name: pod["metadata"]["labels"] | {"ray.io/group": name} for name, pod in self.pods.items()}
        return {name for name, has in of.items() if labels.items() <= has.items()}


def rendered(values: Values, *options: str | Path) -> Rendered:
    return Rendered(values, list(filter(None, yaml.safe_load_all(helm("template", "crossdraft", CHART, *options)))))


@pytest.fixture(params=[False, True], ids=["default", "example"], scope="module")
def values(request: pytest.FixtureRequest) -> Values:
    return merged(DEFAULT, read(EXAMPLE) if request.param else {})


@pytest.fixture(scope="module")
def chart(values: Values) -> Rendered:
    return rendered(values, *(["-f", EXAMPLE] if values != DEFAULT else []))


def container(pod: Values) -> Values:
    only: Values
    (only,) = pod["spec"]["containers"]
    return only


def ports(pod: Values) -> dict[str, int]:
    return {one["name"]: one["containerPort"] for one in container(pod)["ports"]}


def offers(group: Values) -> dict[str, float]:
    found: dict[str, float] = json.loads(json.loads(group["rayStartParams"].get("resources", '"{}"')))
    return found


def node(group: Values) -> Amounts:
    """What Ray finds in a pod of a group."""
    resources = container(group["template"])["resources"]
    gpus = resources["limits"].get("nvidia.com/gpu", 0)
    return {"CPU": float(resources["requests"]["cpu"]), "GPU": float(gpus)} | offers(group)


def test_values_keep_to_their_schema_and_serve_what_the_package_reads(values: Values) -> None:
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft7Validator.check_schema(schema)
    jsonschema.validate(values, schema)
    assert parse(json.dumps(values["config"])).metrics_port
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(values | {"imgae": "a"}, schema)


def test_ray_is_the_version_that_is_installed_in_the_image() -> None:
    pinned = re.search(r"^ray==(.+)$", (REPOSITORY / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert DEFAULT["rayVersion"] == pinned[1]


def test_the_examples_of_secrets_have_what_the_chart_asks_for() -> None:
    secrets = list(yaml.safe_load_all((CHART / "examples" / "secrets.yaml").read_text(encoding="utf-8")))
    has = {one["metadata"]["name"]: set(one["stringData"]) for one in secrets}
    wanted = [{"keys.txt"}, {"ca.pem", "ca.key"}, {"tls.crt", "tls.key"}, {"token"}]
    assert [has[name] for name in read(EXAMPLE)["secrets"].values()] == wanted


def test_helm_finds_nothing_wrong_with_the_chart() -> None:
    for files in ([], ["-f", EXAMPLE]):
        assert "0 chart(s) failed" in helm("lint", "--strict", CHART, *files)


def test_manifests_and_pods_keep_to_the_schemas_of_kubernetes(chart: Rendered) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    pods = [{"apiVersion": "v1", "kind": "Pod"} | pod for pod in chart.pods.values()]
    known = [one for one in chart.manifests if "." not in one["apiVersion"] or "k8s.io" in one["apiVersion"]]
    assert len(known) > 5
    for one in (*known, *pods):
        validate.validate(one, "1.33", strict=True)


def test_serve_takes_its_configuration_and_builds_it_with_the_package(chart: Rendered) -> None:
    pytest.importorskip("ray.serve.schema").ServeDeploySchema.model_validate(chart.serve)
    (application,) = chart.serve["applications"]
    assert callable(resolve_name(application["import_path"]))


def test_the_smallest_cluster_has_room_for_the_application_and_a_front_for_each_pod_that_is_asked(chart: Rendered):
    head = {"template": chart.pods["headgroup"], "rayStartParams": {}}
    workers = [node(group) for group in chart.groups.values() for _ in range(group["minReplicas"])]
    assert unplaced(chart.configuration, [node(head), *workers]) == []
    fronts = sum(group["minReplicas"] for group in chart.groups.values() if "ingress" in offers(group))
    assert chart.configuration.http.replicas == chart.configuration.grpc.replicas == fronts


def test_the_head_checks_its_nodes_as_often_as_on_machines_of_ones_own(chart: Rendered) -> None:
    env = container(chart.pods["headgroup"])["env"]
    here = {one["name"]: one["value"] for one in env if "health_check" in one["name"]}
    for file in ("cluster.yaml", "cluster.local.yaml"):
        text = (REPOSITORY / "deploy" / file).read_text(encoding="utf-8")
        assert here == dict(re.findall(r"(RAY_health_check_\w+)=(\d+)", text))


def test_proxies_are_set_up_as_on_machines_of_ones_own(chart: Rendered) -> None:
    proxy = pytest.importorskip("crossdraft.cluster.serve_grpc").PROXY
    for pod in chart.pods.values():
        assert proxy.items() <= {one["name"]: one.get("value") for one in container(pod)["env"]}.items()
    assert callable(resolve_name(proxy["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"]))


def test_ray_asks_for_a_token_and_the_head_finds_its_cluster_again_where_that_is_chosen(chart: Rendered) -> None:
    cluster = chart.service["rayClusterConfig"]
    assert cluster["authOptions"] == {"mode": "token"}
    assert cluster.get("gcsFaultToleranceOptions", {}) == chart.values["gcsFaultTolerance"]


def test_pods_have_few_rights_and_bounded_memory_as_the_user_of_the_image(chart: Rendered) -> None:
    user = re.search(r"^USER (\d+)$", (REPOSITORY / "deploy/Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)
    assert user is not None
    for pod in chart.pods.values():
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
        assert pod["spec"]["securityContext"]["runAsUser"] == int(user[1])
        for one in (container(pod), *pod["spec"].get("initContainers", ())):
            assert one["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
            assert one["resources"]["limits"]["memory"] == one["resources"]["requests"]["memory"]
            assert one["image"] == chart.values["image"]


def test_clients_reach_pods_with_fronts_only_and_these_are_ready_when_all_their_fronts_serve(chart: Rendered) -> None:
    http, grpc = chart.configuration.http.port, chart.configuration.grpc.port
    fronts = {name for name, group in chart.groups.items() if "ingress" in offers(group)}
    # The operator's Service has all workers; those without a port of this name are not in it.
    (port,) = chart.service["serveService"]["spec"]["ports"]
    assert {name for name in chart.groups if port["targetPort"] in ports(chart.pods[name])} == fronts
    assert chart.service["excludeHeadPodFromServeSvc"] is True
    (of_grpc,) = chart.of("Service")
    assert chart.chosen(of_grpc["spec"]["selector"]) == fronts
    assert chart.serve["http_options"]["port"] == http
    for name in chart.groups:
        *_, command = container(chart.pods[name])["readinessProbe"]["exec"]["command"]
        assert "local_raylet_healthz" in command
        probed = [text in command for text in (f":{http}/-/healthz", f"tcp/127.0.0.1/{grpc}")]
        assert probed == [name in fronts] * 2
        assert {"serve": http, "grpc": grpc}.items() <= ports(chart.pods[name]).items() or name not in fronts


def test_policies_name_their_sources(chart: Rendered) -> None:
    everything, front = (one["spec"] for one in chart.of("NetworkPolicy"))
    assert chart.chosen(everything["podSelector"]["matchLabels"]) == set(chart.pods)
    assert all(rule["from"] and all(rule["from"]) for rule in (*everything["ingress"], *front["ingress"]))
    (rule,) = front["ingress"]
    assert {one["port"] for one in rule["ports"]} == {"serve", "grpc"}
    for name in chart.chosen(front["podSelector"]["matchLabels"]):
        assert {one["port"] for one in rule["ports"]} <= ports(chart.pods[name]).keys()
    assert rule["from"] == chart.values["network"]["clients"]


def test_prometheus_finds_all_pods_and_has_rules(chart: Rendered) -> None:
    on = chart.values["monitoring"]["enabled"]
    assert len(chart.of("PodMonitor")) == len(chart.of("PrometheusRule")) == on
    for monitor, rules in zip(chart.of("PodMonitor"), chart.of("PrometheusRule"), strict=True):
        assert chart.chosen(monitor["spec"]["selector"]["matchLabels"]) == set(chart.pods)
        read_at = {one["port"] for one in monitor["spec"]["podMetricsEndpoints"]}
        everything, _ = chart.of("NetworkPolicy")
        assert read_at == {one["port"] for one in everything["spec"]["ingress"][-1]["ports"]}
        assert all(ports(pod)["crossdraft"] == chart.configuration.metrics_port for pod in chart.pods.values())
        assert all(read_at <= ports(pod).keys() for pod in chart.pods.values())
        assert rules["spec"] == read(CHART / "alerts.yaml")


def test_pods_come_with_the_load_and_are_ended_one_by_one_and_the_head_not_where_it_would_lose_its_cluster(chart):
    scaled = any(group["maxReplicas"] > group["minReplicas"] for group in chart.groups.values())
    assert chart.service["rayClusterConfig"]["enableInTreeAutoscaling"] is scaled is True
    budgets = {}
    for one in chart.of("PodDisruptionBudget"):
        (name,) = chart.chosen(one["spec"]["selector"]["matchLabels"])
        budgets[name] = one["spec"]["minAvailable"]  # all that Kubernetes takes of pods that an operator owns
    wanted = {name: group["minReplicas"] - 1 for name, group in chart.groups.items()}
    assert budgets == wanted | {"headgroup": 0 if chart.values["gcsFaultTolerance"] else 1}


def test_files_of_the_configuration_are_where_it_is_read(chart: Rendered) -> None:
    security, grpc, secrets = chart.configuration.security, chart.configuration.grpc, chart.values["secrets"]
    files = {*filter(None, (security.api_keys, grpc.ssl_certfile, grpc.ssl_keyfile))}
    files |= set() if security.tls is None else {*vars(security.tls).values()}
    assert len(files) == (6 if secrets["apiKeys"] else 0)
    for name, group in chart.groups.items():
        mounts = {one["mountPath"]: one["name"] for one in container(chart.pods[name])["volumeMounts"]}
        assert set(mounts.values()) <= {one["name"] for one in chart.pods[name]["spec"]["volumes"]}
        needed = files if "ingress" in offers(group) else {path for path in files if "tls" in path.parts}
        assert all(str(path.parent) in mounts for path in needed)
        assert any(one["name"] == "HF_TOKEN" for one in container(chart.pods[name])["env"]) == bool(secrets["hfToken"])


def test_each_pod_makes_a_certificate_of_its_own_and_cannot_make_another(chart: Rendered, tmp_path: Path) -> None:
    if chart.configuration.security.tls is None:
        assert not any("initContainers" in pod["spec"] for pod in chart.pods.values())
        return
    authority, own = tmp_path / "authority", tmp_path / "tls"
    own.mkdir()
    environment = os.environ | {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "POD_IP": "10.1.2.3"}
    subprocess.run(["crossdraft", "certs", authority, "--host", "any"], env=environment, check=True, timeout=600)
    (init,) = chart.pods["target"]["spec"]["initContainers"]
    *shell, script = init["command"]
    script = script.replace("/authority/", f"{authority}/").replace("/tls", str(own))
    subprocess.run([*shell, script], env=environment, check=True, timeout=600)
    files = vars(chart.configuration.security.tls).values()
    assert {path.name for path in own.iterdir()} == {path.name for path in files}


def test_an_ingress_leads_to_http(chart: Rendered) -> None:
    wanted = chart.values["ingress"]
    assert len(chart.of("Ingress")) == bool(wanted["host"])
    for one in chart.of("Ingress"):
        (rule,) = one["spec"]["rules"]
        service = rule["http"]["paths"][0]["backend"]["service"]
        assert (rule["host"], service["name"]) == (wanted["host"], chart.service["serveService"]["metadata"]["name"])
        assert service["port"]["name"] == chart.service["serveService"]["spec"]["ports"][0]["name"]
        assert one["spec"]["tls"] == [{"hosts": [wanted["host"]], "secretName": wanted["tlsSecret"]}]


def test_what_is_not_wanted_is_left_out() -> None:
    without = ("--set", "config.grpc=null,config.metrics_port=null,network.enabled=false,monitoring.enabled=true")
    bare = rendered({}, *without)
    assert bare.configuration.grpc is None
    assert not [*bare.of("Service"), *bare.of("NetworkPolicy"), *bare.of("Ingress")]
    (monitor,) = bare.of("PodMonitor")
    assert [one["port"] for one in monitor["spec"]["podMetricsEndpoints"]] == ["metrics"]
    for pod in bare.pods.values():
        assert not {"grpc", "crossdraft"} & ports(pod).keys()
        assert "/dev/tcp" not in str(container(pod).get("readinessProbe"))

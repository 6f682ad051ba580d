"""The Helm chart: what can be known without a cluster; most of it where Helm is."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from crossdraft.cluster.capacity import Amounts
from crossdraft.cluster.config import parse
from crossdraft.config.cluster import Configuration
from tests.deploy.test_cluster_files import unplaced

REPOSITORY = Path(__file__).parents[2]
CHART = REPOSITORY / "deploy" / "kubernetes"
EXAMPLE = CHART / "examples" / "gpu.yaml"
BIN = Path(sys.executable).parent
HELM = shutil.which("helm", path=f"{BIN}{os.pathsep}{os.environ['PATH']}")
Values = dict[str, Any]


def read(path: Path) -> Values:
    values: Values = yaml.safe_load(path.read_text(encoding="utf-8"))
    return values


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> Values:
    """As Helm merges values."""
    both = {
        name: merged(below[name], above[name]) for name in above if isinstance(below.get(name), dict) and above[name]
    }
    return {**below, **above, **both}


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
        cluster = self.service["rayClusterConfig"]
        groups = {"headgroup": cluster["headGroupSpec"]} | {
            one["groupName"]: one for one in cluster["workerGroupSpecs"]
        }
        return {name: group["template"] for name, group in groups.items()}

    @property
    def groups(self) -> dict[str, Values]:
        return {one["groupName"]: one for one in self.service["rayClusterConfig"]["workerGroupSpecs"]}

    def chosen(self, labels: Mapping[str, str]) -> set[str]:
        """Groups whose pods have these labels, the operator's among them."""
        of = {name: pod["metadata"]["labels"] | {"ray.io/group": name} for name, pod in self.pods.items()}
        return {name for name, has in of.items() if labels.items() <= has.items()}


@pytest.fixture(scope="module", params=["default", "example"])
def chart(request: pytest.FixtureRequest) -> Rendered:
    files = [] if request.param == "default" else ["-f", EXAMPLE]
    values = merged(read(CHART / "values.yaml"), read(EXAMPLE) if files else {})
    return Rendered(values, list(filter(None, yaml.safe_load_all(helm("template", "crossdraft", CHART, *files)))))


def container(pod: Values) -> Values:
    (found,) = pod["spec"]["containers"]
    only: Values = found
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


@pytest.mark.parametrize("example", [False, True])
def test_values_keep_to_their_schema_and_serve_what_the_package_reads(example: bool) -> None:
    values = merged(read(CHART / "values.yaml"), read(EXAMPLE) if example else {})
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft7Validator.check_schema(schema)
    jsonschema.validate(values, schema)
    assert parse(json.dumps(values["config"])).metrics_port
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(values | {"imgae": "a"}, schema)


def test_ray_is_the_version_that_is_installed_in_the_image() -> None:
    pinned = re.search(r"^ray==(.+)$", (REPOSITORY / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert read(CHART / "values.yaml")["rayVersion"] == pinned[1]


def test_the_examples_of_secrets_have_what_the_chart_asks_for() -> None:
    secrets = list(yaml.safe_load_all((CHART / "examples" / "secrets.yaml").read_text(encoding="utf-8")))
    has = {one["metadata"]["name"]: set(one["stringData"]) for one in secrets}
    assert [has[name] for name in read(EXAMPLE)["secrets"].values()] == [
        {"keys.txt"},
        {"ca.pem", "ca.key"},
        {"tls.crt", "tls.key"},
        {"token"},
    ]


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
    module, _, name = application["import_path"].partition(":")
    assert callable(getattr(import_module(module), name))


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
    module, _, name = proxy["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"].rpartition(".")
    assert callable(getattr(import_module(module), name))


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
    configuration = chart.configuration
    fronts = {name for name, group in chart.groups.items() if "ingress" in offers(group)}
    # The operator's Service has all workers; those without a port of this name are not in it.
    (port,) = chart.service["serveService"]["spec"]["ports"]
    assert {name for name in chart.groups if port["targetPort"] in ports(chart.pods[name])} == fronts
    assert chart.service["excludeHeadPodFromServeSvc"] is True
    (grpc,) = chart.of("Service")
    assert chart.chosen(grpc["spec"]["selector"]) == fronts
    asked = {"serve": configuration.http.port, "grpc": configuration.grpc.port}
    assert chart.serve["http_options"]["port"] == configuration.http.port
    for name in chart.groups:
        *_, command = container(chart.pods[name])["readinessProbe"]["exec"]["command"]
        assert "local_raylet_healthz" in command
        assert (
            (f":{asked['serve']}/-/healthz" in command)
            == (f"tcp/127.0.0.1/{asked['grpc']}" in command)
            == (name in fronts)
        )
        assert asked.items() <= ports(chart.pods[name]).items() or name not in fronts


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


def test_files_of_the_configuration_are_where_it_is_read(chart: Rendered, tmp_path: Path) -> None:
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
    bare = Rendered({}, list(filter(None, yaml.safe_load_all(helm("template", "bare", CHART, *without)))))
    assert bare.configuration.grpc is None
    assert not [*bare.of("Service"), *bare.of("NetworkPolicy"), *bare.of("Ingress")]
    (monitor,) = bare.of("PodMonitor")
    assert [one["port"] for one in monitor["spec"]["podMetricsEndpoints"]] == ["metrics"]
    for pod in bare.pods.values():
        assert not {"grpc", "crossdraft"} & ports(pod).keys()
        assert "/dev/tcp" not in str(container(pod).get("readinessProbe"))

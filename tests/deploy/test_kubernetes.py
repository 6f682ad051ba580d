"""The Kubernetes manifest: what can be known without a cluster."""

import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from crossdraft.cluster.config import parse
from tests.deploy.placing import unplaced

REPOSITORY = Path(__file__).parents[2]
SERVICE, POLICY, *OTHERS = yaml.safe_load_all(
    (REPOSITORY / "deploy/kubernetes/rayservice.yaml").read_text(encoding="utf-8")
)
CLUSTER = SERVICE["spec"]["rayClusterConfig"]
GROUPS = [CLUSTER["headGroupSpec"], *CLUSTER["workerGroupSpecs"]]
(APPLICATION,) = yaml.safe_load(SERVICE["spec"]["serveConfigV2"])["applications"]


def pod(group: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = group["template"]["spec"]
    return spec


def node(group: dict[str, Any]) -> dict[str, float]:
    """What Ray finds in a pod of a group."""
    (container,) = pod(group)["containers"]
    custom: dict[str, float] = json.loads(json.loads(group["rayStartParams"].get("resources", '"{}"')))
    return {"CPU": float(container["resources"]["requests"]["cpu"])} | custom


def test_the_application_is_what_the_package_builds() -> None:
    pytest.importorskip("ray.serve")
    module, _, name = APPLICATION["import_path"].partition(":")
    assert callable(getattr(import_module(module), name))


def test_serve_takes_its_configuration() -> None:
    schema = pytest.importorskip("ray.serve.schema")
    schema.ServeDeploySchema.model_validate(yaml.safe_load(SERVICE["spec"]["serveConfigV2"]))


def test_the_smallest_cluster_has_room_for_the_application() -> None:
    configuration = parse(json.dumps(APPLICATION["args"]))
    workers = [node(group) for group in GROUPS[1:] for _ in range(group["minReplicas"])]
    assert unplaced(configuration, [node(GROUPS[0]), *workers]) == []


def test_ray_is_the_version_that_is_installed_in_the_image() -> None:
    pinned = re.search(r"^ray==(.+)$", (REPOSITORY / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert pinned is not None
    assert CLUSTER["rayVersion"] == pinned[1]


def test_the_head_checks_its_nodes_as_often_as_on_machines_of_ones_own() -> None:
    (head,) = pod(GROUPS[0])["containers"]
    here = {one["name"]: one["value"] for one in head["env"] if "health_check" in one["name"]}
    for file in ("cluster.yaml", "cluster.local.yaml"):
        text = (REPOSITORY / "deploy" / file).read_text(encoding="utf-8")
        assert here == dict(re.findall(r"(RAY_health_check_\w+)=(\d+)", text))


def test_proxies_are_set_up_as_on_machines_of_ones_own() -> None:
    proxy = pytest.importorskip("crossdraft.cluster.serve_grpc").PROXY
    for group in GROUPS:
        (container,) = pod(group)["containers"]
        assert proxy.items() <= {one["name"]: one["value"] for one in container["env"]}.items()
    module, _, name = proxy["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"].rpartition(".")
    assert callable(getattr(import_module(module), name))


def test_ray_asks_for_a_token() -> None:
    assert CLUSTER["authOptions"] == {"mode": "token"}


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.get("groupName", "head"))
def test_a_pod_has_few_rights_and_bounded_memory(group: dict[str, Any]) -> None:
    assert pod(group)["securityContext"]["runAsNonRoot"] is True
    (container,) = pod(group)["containers"]
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert container["resources"]["limits"]["memory"] == container["resources"]["requests"]["memory"]
    assert container["image"] == pod(GROUPS[0])["containers"][0]["image"]


def test_pods_run_as_the_user_of_the_image() -> None:
    user = re.search(r"^USER (\d+)$", (REPOSITORY / "deploy/Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)
    assert user is not None
    assert {pod(group)["securityContext"]["runAsUser"] for group in GROUPS} == {int(user[1])}


def test_clients_reach_the_port_that_serve_listens_on() -> None:
    (port,) = SERVICE["spec"]["serveService"]["spec"]["ports"]
    listening = yaml.safe_load(SERVICE["spec"]["serveConfigV2"])["http_options"]["port"]
    assert port["targetPort"] == listening
    assert listening in {one["port"] for rule in POLICY["spec"]["ingress"] for one in rule.get("ports", ())}


def test_the_network_policy_is_about_the_clusters_pods() -> None:
    labels = POLICY["spec"]["podSelector"]["matchLabels"]
    assert all(labels.items() <= group["template"]["metadata"]["labels"].items() for group in GROUPS)


def test_pods_without_serve_have_a_probe_that_does_not_ask_for_it() -> None:
    """The operator gives others one that asks for Serve's proxy, which is where replicas of Serve's are."""
    for group in GROUPS[1:]:
        (container,) = pod(group)["containers"]
        serves = {"orchestrator", "ingress"} & node(group).keys()
        assert bool(serves) == ("readinessProbe" not in container)


def test_what_has_a_greatest_number_of_pods_reaches_it_and_is_ended_one_by_one() -> None:
    assert any(group["maxReplicas"] > group["minReplicas"] for group in GROUPS[1:])
    assert CLUSTER["enableInTreeAutoscaling"] is True
    budgets = [one["spec"] for one in OTHERS if one["kind"] == "PodDisruptionBudget"]
    assert [one["selector"]["matchLabels"]["ray.io/group"] for one in budgets] == [
        group["groupName"] for group in GROUPS[1:]
    ]


def test_grpc_has_a_service_of_the_pods_where_it_may_be() -> None:
    (service,) = [one["spec"] for one in OTHERS if one["kind"] == "Service"]
    assert service["ports"][0]["port"] == APPLICATION["args"]["grpc"]["port"]
    offering = {group["groupName"] for group in GROUPS[1:] if "ingress" in node(group)}
    assert {service["selector"]["ray.io/group"]} == offering

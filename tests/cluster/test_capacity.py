"""Where replicas are placed, what is said of nodes that lack something, and what Serve is to run, in what order."""

import json
import socket
import sys
import time
import traceback
from contextlib import nullcontext
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from ray.experimental import internal_kv
from ray.serve._private import application_state
from ray.serve.config import AutoscalingConfig

from crossdraft.cluster import capacity, config, deploy, servers, status
from crossdraft.cluster.capacity import Nodes, NotServedError, Waiting, placed, take
from crossdraft.cluster.config import HEAD, Process, parse, processes_of
from crossdraft.cluster.deploy import Processes, application, replicas_of, steps, versions_of
from crossdraft.cluster.servers import OUTPUTS, by_outputs, check, ongoing
from crossdraft.config.cluster import Scale
from crossdraft.rpc.errors import CannotListen
from crossdraft.types.statistics import ModelStatistics

TWO: Nodes = {"a": {"CPU": 4.0, "target": 1.0}, "b": {"CPU": 2.0, "drafter": 2.0}}
THREE: Nodes = {"head": {"CPU": 2.0, HEAD: 1.0}, "a": {"CPU": 2.0}, "b": {"CPU": 2.0}}
TEXT = """\
models:
  - name: small
    target: {model: m, replicas: 2, port: 7001, resources: {cpus: 1, gpus: 0.5, custom: {target: 1}}}
    drafters: [{name: d, model: n}]
    orchestrators: 3
    orchestrator_resources: {cpus: 0.25}
grpc: {replicas: 2}
"""


@dataclass(frozen=True)
class Need:
    """What of a Process says where it has room."""

    what: str
    count: int
    amounts: dict[str, float]
    most: float = inf
    everywhere: bool = False


def test_a_node_can_be_chosen_by_its_address() -> None:
    nodes: Nodes = {"10.0.0.1": {"CPU": 1.0, "node:10.0.0.1": 1.0}, "10.0.0.2": {"CPU": 2.0, "node:10.0.0.2": 1.0}}
    assert placed([Need("t", 2, {"CPU": 1, "node:10.0.0.2": 0.001})], nodes).places == {"t": ("10.0.0.2",) * 2}
    (missing, *_) = placed([Need("t", 2, {"CPU": 1, "node:10.0.0.1": 0.001})], nodes).faults
    assert "room for 1" in missing


def test_every_replica_of_a_configuration_is_counted() -> None:
    _, *needs = processes_of(parse(TEXT))
    assert [(one.what, one.count, one.most) for one in needs] == [
        ("target of 'small'", 2, 1),
        ("drafter 'd' of 'small'", 1, float("inf")),
        ("orchestrator of 'small'", 3, float("inf")),
        ("grpc front", 2, 1),
        ("http front", 1, float("inf")),
    ]
    assert needs[0].amounts == {"CPU": 1, "GPU": 0.5, "target": 1}
    assert needs[2].amounts == {"CPU": 0.25}


def test_a_replica_on_several_devices_needs_places_for_each_of_its_processes() -> None:
    target = "{model: m, replicas: 2, tensor_parallel_size: 4, resources: {cpus: 8, gpus: 4, custom: {target: 1}}}"
    _, need, *_ = processes_of(parse(f"models: [{{name: small, target: {target}}}]"))
    assert (need.count, need.most, need.amounts) == (8, float("inf"), {"CPU": 2, "GPU": 1, "target": 0.25})
    free = {"a": {"GPU": 2.0, "CPU": 9.0, "target": 1.0}, "b": {"GPU": 3.0, "CPU": 4.0, "target": 1.0}}
    assert not take(need.amounts, free, 5)
    assert free["a"]["GPU"] == 2
    assert take(need.amounts, free, 4)
    assert {name: has["GPU"] for name, has in free.items()} == {"a": 0, "b": 1}


@pytest.mark.parametrize(
    ("need", "room"),
    [
        (Need("t", 1, {"CPU": 1, "target": 1}), 1),
        (Need("t", 10, {}), 10),
        (Need("t", 6, {"CPU": 1}), 6),
        (Need("t", 10, {"CPU": 0.6}), 9),
        (Need("t", 1, {"CPU": 5}), 0),
        (Need("t", 1, {"drafter": 1, "target": 1}), 0),
        (Need("t", 3, {"CPU": 1}, most=1), 2),
    ],
)
def test_what_has_no_place_is_said(need: Need, room: int) -> None:
    found = placed([need], TWO)
    assert len(found.places["t"]) == room
    if room == need.count:
        assert found.faults == ()
    else:
        assert found.faults[0].startswith(f"t: {need.count} wanted, each with ")
        assert found.faults[0].endswith(f"; there is room for {room}")
        assert len(found.faults) == 1 + len(TWO) + 1


def test_replicas_that_fit_in_sum_but_on_no_node_are_refused_with_what_each_node_has_left() -> None:
    found = placed([Need("t", 3, {"CPU": 1.5}), Need("d", 1, {"CPU": 1})], THREE)
    assert found.faults == (
        "d: 1 wanted, each with CPU 1 on one node; there is room for 0",
        "node a has CPU 0.5 of 2 left beside 1 t",
        "node b has CPU 0.5 of 2 left beside 1 t",
        "node head has CPU 0.5 of 2 left beside 1 t",
        "ask for fewer replicas or for less of a node (`resources`), or add nodes that offer what is lacking",
    )


def test_nodes_that_are_set_up_are_read_from_the_autoscaler(monkeypatch: pytest.MonkeyPatch) -> None:
    report = {"pending_nodes": [["10.77.0.2", "local", "setting-up"]], "pending_launches": {"gpu": 2}}
    pending = ("10.77.0.2 setting-up", "2 of type gpu, launching")
    for written, found in (({"autoscaler_report": report}, pending), ({"load_metrics_report": {}}, ()), (None, ())):
        raw = None if written is None else json.dumps(written).encode()
        monkeypatch.setattr(internal_kv, "_internal_kv_get", lambda _, raw=raw: raw)
        assert status.pending_nodes() == found


@pytest.mark.parametrize(("pending", "waited"), [((), 30.0), (("10.77.0.2 setting-up",), 60.0)])
def test_while_it_waits_for_nodes_it_says_so_and_those_that_are_set_up_are_waited_for_longer(
    pending: tuple[str, ...], waited: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=100.0, monotonic=lambda: clock.now)
    clock.sleep = lambda seconds: setattr(clock, "now", clock.now + seconds)
    said: list[tuple[float, str]] = []
    monkeypatch.setattr(capacity, "time", clock)
    for name, found in (("pending_nodes", pending), ("all_nodes", THREE)):
        monkeypatch.setattr(capacity, name, lambda found=found: found)
    monkeypatch.setattr(capacity, "request_resources", lambda bundles: None)
    waiting = Waiting(30.0, 60.0, lambda text: said.append((clock.now, text)))
    with pytest.raises(NotServedError, match="2 wanted"):
        capacity.await_nodes(processes_of(parse(TEXT))[1:], waiting)
    assert clock.now == 100.0 + waited
    assert [at for at, _ in said] == [105.0, *range(120, round(clock.now), 15)]
    assert all(line.startswith("waiting for nodes:\ntarget of 'small': 2 wanted") for _, line in said)
    assert all(f"pending: {one}" in line for _, line in said for one in pending)


def test_tenths_that_add_up_to_a_whole_fit() -> None:
    assert placed([Need("o", 10, {"drafter": 0.1})], {"b": {"drafter": 1.0}}).faults == ()


def test_orchestrators_are_on_as_many_nodes_as_have_room() -> None:
    found = placed([Need("o", 2, {"CPU": 0.5})], THREE)
    assert (len(set(found.places["o"])), found.most("o")) == (2, 1)
    full = placed([Need("t", 2, {"CPU": 2}), Need("o", 3, {"CPU": 0.5})], THREE)
    assert (full.faults, len(set(full.places["o"])), full.most("o")) == ((), 1, 3)


def test_a_front_is_on_every_node_that_has_room_left() -> None:
    front = next(process for process in processes_of(parse(TEXT)) if process.what == "http front")
    assert sorted(placed([front], THREE).places["http front"]) == ["a", "b", "head"]
    beside = placed([front, Need("t", 2, {"CPU": 2})], THREE)
    assert (beside.faults, len(beside.places["http front"]), beside.most("http front")) == ((), 1, 1)
    alone = replace(front, everywhere=False, replicas=Scale(min=2, max=2))
    assert len(placed([alone], THREE).places["http front"]) == 2


BEFORE = """\
models:
  - name: small
    target: {model: m, replicas: 2}
    drafters: [{name: d, model: n}]
grpc: {}
"""
NODES: Nodes = {"one": {"CPU": 16.0}}
ALL = ["Directory", "Target-small", "Drafter-small-d", "Orchestrator-small", "Grpc", "Http"]


def of(text: str, folder: Path | None = None, nodes: Nodes = NODES) -> Processes:
    configuration = parse(text, folder=folder)
    return replicas_of(configuration, placed(processes_of(configuration)[1:], nodes))


def named(found: Processes, name: str) -> Process:
    (one,) = (one for one in found if one.deployment == name)
    return one


def replaced(after: str, before: str = BEFORE) -> list[str]:
    """Deployments of both, with other versions."""
    versions = versions_of(of(before))
    return [one.deployment for one in of(after) if versions.get(one.deployment, one.version) != one.version]


def test_everything_is_a_deployment_and_what_is_the_same_goes_on() -> None:
    assert [one.deployment for one in of(BEFORE)] == ALL
    assert replaced(BEFORE) == []


def test_another_number_of_replicas_replaces_none_of_them_and_a_range_all() -> None:
    ranges = ("{min: 2, max: 3}", "{min: 1, max: 9}")
    some, more = (BEFORE.replace("replicas: 2", f"replicas: {many}") for many in ranges)
    assert replaced(BEFORE.replace("replicas: 2", "replicas: 3")) == replaced(more, some) == []
    assert replaced(some) == ["Target-small"]
    assert named(of(some), "Target-small").replicas == Scale(min=2, max=3)


def test_a_service_with_other_options_is_replaced_and_orchestrators_are_of_the_models_that_they_serve() -> None:
    for options in ("threads: 2", "resources: {cpus: 2}", "max_sessions: 4"):
        assert replaced(BEFORE.replace("model: n", f"model: n, {options}")) == ["Drafter-small-d"]
    assert replaced(BEFORE.replace("model: n", "model: o")) == ["Drafter-small-d", "Orchestrator-small"]
    assert replaced(BEFORE + "http: {burst: 20}\n") == ["Http"]
    assert replaced(BEFORE + "metrics_port: 9400\n") == ["Directory"]


def test_another_package_replaces_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    before = versions_of(of(BEFORE))
    monkeypatch.setattr(config, "installed", lambda: "0.2.0+other")
    assert {*before.items()}.isdisjoint(versions_of(of(BEFORE)).items())


def test_other_contents_of_a_file_make_another_service(tmp_path: Path) -> None:
    text = BEFORE.replace("model: n", "model: n, vocab_keep: 5, frequencies: f.npz")
    text = text.replace("model: m,", "model: m, chat_template: chat.jinja,")

    def versions() -> dict[str, str]:
        return versions_of(of(text, tmp_path))

    before = versions()
    assert versions() == before
    (tmp_path / "f.npz").write_bytes(b"another")
    assert {*versions().items()} - {*before.items()} == {("Drafter-small-d", versions()["Drafter-small-d"])}
    (tmp_path / "chat.jinja").write_text("another")
    assert versions()["Target-small"] != before["Target-small"]


def test_other_models_are_served_beside_those_before_until_fronts_know_them() -> None:
    before, after = of(BEFORE), of(BEFORE.replace("name: small", "name: other"))
    first, second, third = steps(after, before, NODES)
    assert versions_of(first).keys() == versions_of(second).keys() == (versions_of(before) | versions_of(after)).keys()
    for fronts, found in ((before, first), (after, second)):
        assert (named(found, "Http"), named(found, "Grpc")) == (named(fronts, "Http"), named(fronts, "Grpc"))
        assert found[-1].deployment == "Http"
    assert third == after


def test_without_room_or_without_other_models_all_is_replaced_at_once() -> None:
    before, after = of(BEFORE), of(BEFORE.replace("name: small", "name: other"))
    assert steps(after, before, {"one": {"CPU": 1.0}}) == (after,)
    assert steps(before, before, NODES) == (before,)
    assert steps(after, (), NODES) == (after,)


def built(found: Processes, before: Processes = (), nodes: Nodes | None = None) -> dict[str, Any]:
    """Serve's deployments, by name."""
    first = application(found, before, nodes or {})._bound_deployment
    below = [one._bound_deployment for one in first.init_args[1:] if hasattr(one, "_bound_deployment")]
    return {one.name: one for one in (first, *below)}


def surges(found: Processes, before: Processes, *cpus: float) -> dict[str, int]:
    """Percent of replicas that may exist twice, where nodes have so much left."""
    left = {name: {"CPU": much} for name, much in zip(("one", "two"), cpus, strict=False)}
    return {name: one._deployment_config.max_surge_percent for name, one in built(found, before, left).items()}


def test_a_replica_starts_before_the_one_that_it_replaces_ends_where_there_is_room_beside_it() -> None:
    before, after = of(BEFORE), of(BEFORE.replace("model: n", "model: n, threads: 2"))
    assert surges(after, before, 16.0)["Drafter-small-d"] == 100
    assert surges(after, before, 0.5)["Drafter-small-d"] == 0
    found = surges(after, before, 1.0)  # what goes on does not take it away
    assert (found["Drafter-small-d"], found["Target-small"]) == (100, 0)
    # More replicas start beside those before only if all have room.
    more = of(BEFORE.replace("replicas: 2", "replicas: 4, threads: 2"))
    assert (surges(more, of(BEFORE), 3.0)["Target-small"], surges(more, of(BEFORE), 2.9)["Target-small"]) == (100, 0)


def test_fronts_start_beside_those_before_only_where_each_node_has_room_for_another() -> None:
    """With room on some nodes only the new ones would wait for ever: Serve ends any of those before, not that one."""
    texts = [BEFORE.replace("grpc: {}", f"grpc: {{replicas: 2{more}}}") for more in ("", ", burst: 9")]
    fronts, changed = (of(text, nodes=NODES | {"two": {"CPU": 16.0}}) for text in texts)
    for left, surge in ((16.0, 100), (0.0, 0)):
        assert surges(changed, fronts, 16.0, left)["Grpc"] == surge


def test_a_replica_of_several_processes_has_a_place_for_each() -> None:
    target = "target: {model: m, tensor_parallel_size: 2, resources: {cpus: 4, gpus: 2}}"
    deployment = built(of(BEFORE.replace("target: {model: m, replicas: 2}", target)))["Target-small"]
    assert deployment._replica_config.placement_group_bundles == [{"CPU": 2, "GPU": 1}] * 2


def test_of_what_has_a_fixed_port_a_node_takes_one() -> None:
    assert named(of(BEFORE), "Grpc").most == 1
    assert named(of(BEFORE.replace("grpc: {}", "grpc: {port: 0}")), "Grpc").most == inf


def test_replicas_follow_the_outputs_that_they_have() -> None:
    aimed = AutoscalingConfig(min_replicas=1, max_replicas=9, target_ongoing_requests=4)
    loaded: Any = SimpleNamespace(aggregated_metrics={OUTPUTS: {"one": 9.0, "other": 8.0}}, config=aimed)
    idle: Any = SimpleNamespace(aggregated_metrics={}, config=aimed)
    assert (by_outputs(loaded), by_outputs(idle)) == ((5, {}), (0, {}))


def test_a_load_is_never_more_than_all_of_the_time() -> None:
    """Though a step that began before the load was last asked for counts whole."""
    replica: Any = SimpleNamespace(_work=(0, 0.0), _asked=time.monotonic(), _server=SimpleNamespace(work=(2, 5.0)))
    assert servers.ServerReplica._load(replica) == (2, 1.0)


async def test_serve_shows_the_text_alone_of_what_cannot_be_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "node_address", lambda: "127.0.0.1")
    monkeypatch.setattr(servers, "logged", lambda _: nullcontext())
    monkeypatch.setattr(sys, "tracebacklimit", 1000, raising=False)
    wrong = ValueError("there is no device nowhere")
    wrong.__cause__ = RuntimeError("a library's")
    replica: Any = SimpleNamespace(server=AsyncMock(side_effect=wrong))
    with pytest.raises(ValueError, match="nowhere") as raised:
        await servers.ServerReplica.__init__(replica, named(of(BEFORE), "Target-small"))  # type: ignore[func-returns-value]
    assert traceback.format_exception(raised.value) == ["ValueError: there is no device nowhere\n"]  # as Serve does


def test_of_a_drafter_those_outputs_count_that_it_drafts_for_or_that_wait_for_it() -> None:
    """Not all open sessions: where drafting does not pay it does nothing for them."""
    before = ModelStatistics(10, 1.0, {1: 10}, 0, 0, 0, 0, 0.5, 0)
    after = replace(before, steps=30, seconds=3.0, batches={1: 10, 4: 20}, queued_seconds=1.5)
    assert ongoing(before, after) == 2.0 * 4 + 1.0
    assert ongoing(after, after) == 0


def test_a_node_is_asked_for_what_a_service_needs_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "node_address", lambda: "127.0.0.1")

    def checked(text: str) -> None:
        check(named(of(text, tmp_path), "Target-small"))

    with pytest.raises(ValueError, match=f"there is no folder {tmp_path}/m"):
        checked(BEFORE.replace("model: m", f"model: {tmp_path}/m"))
    with pytest.raises(ValueError, match="there is no bundled model"):
        checked(BEFORE.replace("model: m", "model: 'bundled:e'"))
    with pytest.raises(ValueError, match=r"there is no file .*chat\.jinja"):
        checked(BEFORE.replace("model: m", "model: m, chat_template: chat.jinja"))
    with pytest.raises(ValueError, match=r"there is no file .*ca\.pem"):
        checked(BEFORE + "security: {tls: {ca: ca.pem, cert: c.pem, key: k.pem}}\n")
    checked(BEFORE)


def test_a_port_that_another_process_has_is_found_but_not_the_predecessors() -> None:
    def checked(port: int) -> None:
        check(named(of(BEFORE.replace("grpc: {}", f"grpc: {{port: {port}}}")), "Grpc"))

    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as mine:
        checked(mine.getsockname()[1])
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(CannotListen, match="cannot listen on 127"):
        checked(taken.getsockname()[1])


@pytest.mark.parametrize("at_fault", ["configuration", "nodes"])
def test_serve_shows_what_is_wrong_at_once_and_does_not_try_again(at_fault: str, monkeypatch: pytest.MonkeyPatch):
    """As its task does for `serve deploy`, which is tried three times more where it raises anything."""
    monkeypatch.setattr(application_state, "configure_component_logger", lambda **_: None)
    monkeypatch.setattr(deploy, "_checked", Mock(side_effect=NotServedError("a port is taken")))
    args, said = {
        "configuration": ({"models": []}, "models is empty; name at least one"),
        "nodes": ({"models": [{"name": "small", "target": {"model": "m"}}]}, "a port is taken"),
    }[at_fault]
    build = application_state.build_serve_application._function
    found = build(f"{deploy.__name__}:build", "1", "crossdraft", args, None, None, {}, {}, {})
    assert found == (None, None, said)

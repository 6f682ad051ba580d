"""Where replicas are placed, and what is said of nodes that lack something."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from ray.experimental import internal_kv

from crossdraft.cluster import capacity, status
from crossdraft.cluster.capacity import Need, Nodes, NotServedError, Waiting, needs_of, placed, take
from crossdraft.cluster.config import HEAD, parse, processes_of

NODES: Nodes = {"a": {"CPU": 4.0, "target": 1.0}, "b": {"CPU": 2.0, "drafter": 2.0}}
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


def test_a_node_can_be_chosen_by_its_address() -> None:
    nodes: Nodes = {"10.0.0.1": {"CPU": 1.0, "node:10.0.0.1": 1.0}, "10.0.0.2": {"CPU": 2.0, "node:10.0.0.2": 1.0}}
    assert placed([Need("t", 2, {"CPU": 1, "node:10.0.0.2": 0.001})], nodes).places == {"t": ("10.0.0.2",) * 2}
    (missing, *_) = placed([Need("t", 2, {"CPU": 1, "node:10.0.0.1": 0.001})], nodes).faults
    assert "room for 1" in missing


def test_every_replica_of_a_configuration_is_counted() -> None:
    needs = needs_of(processes_of(parse(TEXT)))
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
    need, *_ = needs_of(processes_of(parse(f"models: [{{name: small, target: {target}}}]")))
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
    found = placed([need], NODES)
    assert len(found.places["t"]) == room
    if room == need.count:
        assert found.faults == ()
    else:
        assert found.faults[0].startswith(f"t: {need.count} wanted, each with ")
        assert found.faults[0].endswith(f"; there is room for {room}")
        assert len(found.faults) == 1 + len(NODES) + 1


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
        capacity.await_nodes(processes_of(parse(TEXT)), waiting)
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
    front = next(need for need in needs_of(processes_of(parse(TEXT))) if need.what == "http front")
    assert sorted(placed([front], THREE).places["http front"]) == ["a", "b", "head"]
    beside = placed([front, Need("t", 2, {"CPU": 2})], THREE)
    assert (beside.faults, len(beside.places["http front"]), beside.most("http front")) == ((), 1, 1)
    alone = replace(front, more=False, count=2)
    assert len(placed([alone], THREE).places["http front"]) == 2

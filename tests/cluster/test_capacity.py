"""What is said of nodes that lack something."""

import pytest

from crossdraft.cluster.capacity import Need, Nodes, amounts_of, faults_of, fits, needs_of
from crossdraft.cluster.config import Resources, parse

NODES: Nodes = {"a": {"CPU": 4.0, "target": 1.0}, "b": {"CPU": 2.0, "drafter": 2.0}}
TEXT = """\
models:
  - name: small
    target: {model: m, replicas: 2, port: 7001, resources: {cpus: 1, gpus: 0.5, custom: {target: 1}}}
    drafters: [{name: d, model: n}]
    orchestrators: 3
    orchestrator_resources: {cpus: 0.25}
grpc: {replicas: 2}
"""


def test_every_replica_of_a_configuration_is_counted() -> None:
    needs = needs_of(parse(TEXT))
    assert [(one.what, one.count, one.apart) for one in needs] == [
        ("target of 'small'", 2, True),
        ("drafter 'd' of 'small'", 1, False),
        ("orchestrator of 'small'", 3, False),
        ("HTTP front", 1, False),
        ("gRPC front", 2, True),
    ]
    assert needs[0].amounts == {"CPU": 1, "GPU": 0.5, "target": 1}
    assert needs[2].amounts == {"CPU": 0.25}


@pytest.mark.parametrize(
    ("need", "faults"),
    [
        (Need("t", 1, {"CPU": 1, "target": 1}), []),
        (Need("t", 10, {}), []),
        (Need("t", 6, {"CPU": 1}), []),
        (Need("t", 10, {"CPU": 0.6}), ["t: 10 wanted, each with CPU 0.6 on one node; there is room for 9"]),
        (Need("t", 1, {"CPU": 5}), ["t: 1 wanted, each with CPU 5 on one node; there is room for 0"]),
        (
            Need("t", 1, {"drafter": 1, "target": 1}),
            ["t: 1 wanted, each with drafter 1, target 1 on one node; there is room for 0"],
        ),
        (
            Need("t", 1, {"GPU": 1}),
            [
                "t: 1 wanted, each with GPU 1 on one node; there is room for 0",
                "all replicas together want GPU 1, and the nodes have 0",
            ],
        ),
        (
            Need("t", 3, {"CPU": 1}, apart=True),
            ["t: 3 wanted, each with CPU 1 on one node, on different nodes as they have one port; there is room for 2"],
        ),
    ],
)
def test_what_one_kind_of_replica_lacks_is_said(need: Need, faults: list[str]) -> None:
    assert list(faults_of([need], NODES)) == faults


def test_what_all_of_them_lack_is_said() -> None:
    needs = [Need("t", 1, {"target": 1}), Need("o", 1, {"target": 0.01})]
    assert list(faults_of(needs, NODES)) == ["all replicas together want target 1.01, and the nodes have 1"]


def test_tenths_that_add_up_to_a_whole_fit() -> None:
    assert list(faults_of([Need("o", 10, {"drafter": 0.1})], {"b": {"drafter": 1.0}})) == []


def test_one_node_must_have_all_of_it() -> None:
    assert fits(amounts_of(Resources(cpus=2, custom={"drafter": 1})), NODES)
    assert not fits(amounts_of(Resources(cpus=3, custom={"drafter": 1})), NODES)
    assert fits({}, NODES)

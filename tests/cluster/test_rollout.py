"""What becomes of the actors that run when a configuration comes."""

import socket
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from crossdraft.cluster import rollout
from crossdraft.cluster.actors import ServerConfig
from crossdraft.cluster.capacity import IMPLICIT_RESOURCE, NotServedError
from crossdraft.cluster.config import parse, slot_of
from crossdraft.cluster.rollout import (
    Changes,
    Means,
    Replica,
    Rollout,
    changes,
    fronts_of,
    is_front,
    services_of,
    starts,
)
from crossdraft.rpc.errors import CannotListen

BEFORE = """\
models:
  - name: small
    target: {model: m, replicas: 2}
    drafters: [{name: d, model: n}]
grpc: {}
"""


def becoming(before: str, after: str, folder: Path | None = None) -> Changes:
    there = [one.name for one in services_of(parse(before, folder=folder))]
    return changes(services_of(parse(after, folder=folder)), there)


def slots(changed: Changes) -> dict[str, list[str]]:
    return {
        "begun": [one.slot for one in changed.begun],
        "replaced": [f"{slot_of(old)} {new.slot}" for old, new in changed.replaced],
        "kept": [one.slot for one in changed.kept],
        "ended": [slot_of(name) for name in changed.ended],
    }


ALL = ["small/target/0", "small/target/1", "small/drafter/d/0"]


def test_at_first_everything_begins_and_what_is_the_same_goes_on() -> None:
    assert [one.slot for one in changes(services_of(parse(BEFORE)), []).begun] == ALL
    assert slots(becoming(BEFORE, BEFORE)) == {"begun": [], "replaced": [], "kept": ALL, "ended": []}


def test_another_number_of_replicas_leaves_the_others_alone() -> None:
    fewer, more = BEFORE.replace("replicas: 2", "replicas: 1"), BEFORE.replace("replicas: 2", "replicas: 3")
    assert slots(becoming(BEFORE, fewer)) == {
        "begun": [],
        "replaced": [],
        "kept": ["small/target/0", "small/drafter/d/0"],
        "ended": ["small/target/1"],
    }
    assert slots(becoming(BEFORE, more))["begun"] == ["small/target/2"]


@pytest.mark.parametrize("changed", ["n, threads: 2", "o", "n, resources: {cpus: 2}", "n, sessions: {most: 4}"])
def test_a_service_with_other_options_is_replaced_where_it_is(changed: str) -> None:
    found = slots(becoming(BEFORE, BEFORE.replace("model: n", f"model: {changed}")))
    assert found["replaced"] == ["small/drafter/d/0 small/drafter/d/0"]
    assert found["kept"] == ["small/target/0", "small/target/1"]


def test_a_drafter_of_another_name_is_another_one_and_limits_of_the_front_change_no_service() -> None:
    found = slots(becoming(BEFORE, BEFORE.replace("name: d", "name: e")))
    assert (found["begun"], found["ended"], found["replaced"]) == (["small/drafter/e/0"], ["small/drafter/d/0"], [])
    assert slots(becoming(BEFORE, BEFORE + "http: {burst: 20}\n"))["kept"] == ALL


def test_what_two_failed_attempts_have_left_is_replaced_once() -> None:
    wanted = services_of(parse(BEFORE))
    found = changes(wanted, ["small/drafter/d/0@one", "small/drafter/d/0@two"])
    assert [(old, new.slot) for old, new in found.replaced] == [("small/drafter/d/0@one", "small/drafter/d/0")]
    assert found.ended == ("small/drafter/d/0@two",)


def test_other_contents_of_a_file_make_another_service(tmp_path: Path) -> None:
    text = BEFORE.replace("model: n", "model: n, vocab_keep: 5, frequencies: f.npz")
    text = text.replace("model: m,", "model: m, chat_template: chat.jinja,")

    def names() -> list[str]:
        return [one.name for one in services_of(parse(text, folder=tmp_path))]

    before = names()
    assert names() == before
    (tmp_path / "f.npz").write_bytes(b"another")
    assert [one == other for one, other in zip(names(), before, strict=True)] == [True, True, False]
    (tmp_path / "chat.jinja").write_text("another")
    assert [one == other for one, other in zip(names(), before, strict=True)] == [False, False, False]


def test_fronts_are_told_from_services() -> None:
    configuration = parse(BEFORE)
    assert [one.slot for one in fronts_of(configuration)] == ["grpc/0"]
    assert all(is_front(one.name) for one in fronts_of(configuration))
    assert not any(is_front(one.name) for one in services_of(configuration))


def test_what_starts_does_so_where_it_was_placed_and_nothing_else_moves() -> None:
    changed = becoming(BEFORE, BEFORE.replace("replicas: 2", "replicas: 3"))
    at = {one.name: node for one, node in zip(changed.kept, ["x", "y", "x"], strict=True)}
    places = {"target of 'small'": ["y", "z", "x"], "drafter 'd' of 'small'": ["y"]}
    assert starts(changed, at, places) == {"small/target/2": "z"}


def alone(replica: Replica) -> dict[str, float]:
    """Of what it takes, that of which each node has one."""
    return {name: amount for name, amount in replica.amounts.items() if name.startswith(IMPLICIT_RESOURCE)}


class Simulated(Rollout):
    """On one node, of which each replica takes one CPU: what starts (+), drains (~) and ends (-), in order."""

    def __init__(self, changed: Changes, free: float, port: int, fails: bool = False) -> None:
        super().__init__(changed, Means({}, 0.0, 0.0, print))
        self.free = {"CPU": free}
        self.did: list[str] = []
        self.port, self.fails = port, fails  # port of what ran before; whether nothing new can be served

    def _wait(self, replicas: Sequence[Replica]) -> None:
        for one in (one for one in replicas if one not in self._kept):
            if self.fails and one.name not in self._before:
                raise NotServedError("there is no folder")
            self.free["CPU"] -= 1
            self.did.append(f"+{one.slot}")

    def _configured(self, names: Sequence[str]) -> dict[str, Replica]:
        config = replace(self._waiting[0][1].config, port=self.port)
        return {name: Replica(name, config) for name in names}

    def _check(self) -> None:
        pass

    def _drain(self, names: Collection[str]) -> list[str]:
        self._gone += names
        self.did += [f"~{slot_of(name)}" for name in names]
        return [*names]

    def _await(self, names: Collection[str], draining: list[str]) -> None:
        ended = [one for one in (f"-{slot_of(name)}" for name in names) if one not in self.did]
        self.did += ended
        self.free["CPU"] += len(ended)


@pytest.mark.parametrize(
    ("free", "ports", "begun", "after"),
    [
        (2, (0, 0), ["+small/target/0", "+small/target/1"], ["~0", "~1", "-0", "-1"]),
        (1, (0, 0), ["+small/target/0"], ["~0", "-0", "+1", "~1", "-1"]),
        (0, (0, 0), [], ["~0", "-0", "+0", "~1", "-1", "+1"]),
        (2, (7001, 7002), ["+small/target/0", "+small/target/1"], ["~0", "~1", "-0", "-1"]),
        (2, (7001, 7001), [], ["~0", "+0", "-0", "~1", "+1", "-1"]),
    ],
)
def test_old_ones_end_before_new_ones_are_there_only_where_there_is_no_room(
    free: float, ports: tuple[int, int], begun: list[str], after: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = becoming(BEFORE, BEFORE.replace("replicas: 2", f"replicas: 2, threads: 1, port: {ports[1]}"))
    doing = Simulated(changed, free, ports[0])
    nodes = "ab" if ports[1] else "a"  # of what has a fixed port a node takes one
    monkeypatch.setattr(rollout, "free_nodes", lambda: {node: dict(doing.free) for node in nodes})
    doing.begin()
    assert doing.did == begun
    doing.finish()
    assert [one.replace("small/target/", "") for one in doing.did[len(begun) :]] == after


def test_of_what_has_a_fixed_port_each_node_takes_one_however_much_room_another_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, after = (parse(BEFORE.replace("grpc: {}", f"grpc: {{replicas: 2, port: {port}}}")) for port in (9000, 9001))
    changed = changes(fronts_of(after), [one.name for one in fronts_of(before)])
    doing = Simulated(changed, 0.0, 9000)
    nodes = {"a": {"CPU": 2.0}, "b": doing.free}
    monkeypatch.setattr(rollout, "free_nodes", lambda: {node: dict(has) for node, has in nodes.items()})
    doing.begin()
    assert doing.did == ["+grpc/0"]
    nodes["a"] |= dict.fromkeys(alone(changed.replaced[0][1]), 0.0)  # it is there
    doing.finish()  # there is room on the other node once what was there has ended
    assert doing.did[1:] == ["~grpc/0", "-grpc/0", "~grpc/1", "-grpc/1", "+grpc/1"]


@pytest.mark.parametrize(
    ("free", "port", "did", "missing"),
    [
        (0, 0, ["~0", "-0", "+0"], ()),
        (1, 7001, ["~0", "+0"], ()),
        (-1, 0, ["~0", "-0", "~1", "-1", "+0"], ("small/target/1",)),
    ],
)
def test_what_ended_for_one_that_cannot_be_served_is_started_again(
    free: float, port: int, did: list[str], missing: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = becoming(BEFORE, BEFORE.replace("replicas: 2", f"replicas: 2, threads: 1, port: {port}"))
    doing = Simulated(changed, free, port, fails=True)
    monkeypatch.setattr(rollout, "free_nodes", lambda: {"a": dict(doing.free)})
    monkeypatch.setattr(rollout, "SETTLED_SECONDS", 0.0)
    monkeypatch.setattr(rollout, "kill", lambda _: None)
    doing.begin()
    with pytest.raises(NotServedError):
        doing.finish()
    assert doing.undo() == missing
    assert [one.replace("small/target/", "") for one in doing.did] == did


def test_a_replacement_is_looked_for_before_anything_starts(tmp_path: Path) -> None:
    def config(text: str) -> ServerConfig:
        return services_of(parse(text, folder=tmp_path))[0].config

    with pytest.raises(ValueError, match=f"there is no folder {tmp_path}/m"):
        config(BEFORE.replace("model: m", f"model: {tmp_path}/m")).check(0)
    with pytest.raises(ValueError, match=r"there is no file .*chat\.jinja"):
        config(BEFORE.replace("model: m", "model: m, chat_template: chat.jinja")).check(0)
    with pytest.raises(ValueError, match=r"there is no file .*ca\.pem"):
        config(BEFORE + "security: {tls: {ca: ca.pem, certificate: c.pem, key: k.pem}}\n").check(0)
    config(BEFORE).check(0)


def test_a_port_that_another_process_has_is_found_but_not_the_predecessors() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (front,) = fronts_of(parse(BEFORE.replace("grpc: {}", f"grpc: {{port: {port}}}")))
        front.config.check(port)
        with pytest.raises(CannotListen, match=f"cannot listen on 127.0.0.1:{port}"):
            front.config.check(0)


def test_of_what_has_a_fixed_port_a_node_takes_one_of_each_version() -> None:
    def taken(grpc: str) -> list[dict[str, float]]:
        return [alone(one) for one in fronts_of(parse(BEFORE.replace("grpc: {}", f"grpc: {grpc}")))]

    first, second = taken("{replicas: 2}")
    assert first == second
    assert list(first.values()) == [1.0]
    assert taken("{burst: 11}")[0].keys() != first.keys()
    assert taken("{port: 0}") == [{}]

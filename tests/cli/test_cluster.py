"""`crossdraft deploy`, `status`, `undeploy`, as far as they go without a cluster."""

import socket
from pathlib import Path
from typing import NoReturn

import pytest

from crossdraft.cli import cluster
from crossdraft.cluster.config import parse
from tests.cli.conftest import Cli, lacking

SMALLEST = "models:\n  - name: small\n    target: {model: bundled:target}\n"


def test_a_configuration_is_checked_without_a_cluster_and_each_fault_has_a_line(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(SMALLEST)
    valid = cli("deploy", path, "--check")
    assert (valid.code, valid.out, valid.err) == (0, f"{path} is valid\n", "")
    path.write_text(SMALLEST + "port: 1\ntwo: 2\n")
    wrong = cli("deploy", path, "--check")
    wrong.failed("small.yaml, line 4: port: there is no such field; there are models, http, grpc", lines=2)
    assert "small.yaml, line 5: two: " in wrong.err.splitlines()[1]


@pytest.mark.parametrize("command", ["status", "undeploy"])
def test_where_no_cluster_is_that_is_said_at_once(cli: Cli, command: str, nowhere: str) -> None:
    ended = cli(command, "--address", nowhere)
    ended.failed(f"no Ray cluster answers at {nowhere}", 1)
    assert "start one with `ray up`" in ended.err
    cli(command, "--address", "nowhere").failed("--address must be HOST:PORT")


def test_a_head_that_says_nothing_is_named(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="the extra `cluster` is not installed")
    monkeypatch.setattr(cluster, "HEAD_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        ended = cli("status", "--address", address)
    ended.failed("the head of the Ray cluster does not answer at ", 1)
    assert address.partition(":")[2] in ended.err


@pytest.mark.parametrize("missing", [("ray",), ("ray", "yaml")])
def test_without_the_extra_a_cluster_command_names_it(missing: tuple[str, ...]) -> None:
    done = lacking(f"sys.modules.update(dict.fromkeys({missing}))", "status --address 127.0.0.1:1")
    needed = "a cluster needs the extra `cluster`: in the checkout, run pip install -c constraints.txt -e '.[cluster]'"
    assert (done.returncode, done.stderr) == (1, f"crossdraft: {needed}\n")


def test_fronts_that_others_can_reach_are_said_with_what_they_lack(tmp_path: Path) -> None:
    keys = "security: {api_keys: keys.txt}\n"
    open_http = "http: {host: 0.0.0.0}\n"
    open_grpc = "grpc: {host: 10.0.0.1, ssl_certfile: c.pem, ssl_keyfile: k.pem}\n"

    def said(more: str) -> list[str]:
        return [*cluster.exposed(parse(SMALLEST + more, folder=tmp_path))]

    assert said("grpc: {}\n") == []
    assert said(open_http) == ["HTTP listens on 0.0.0.0 without API keys and TLS"]
    assert said(open_http + open_grpc) == [*said(open_http), "gRPC listens on 10.0.0.1 without API keys"]
    assert said(open_http + open_grpc + keys) == ["HTTP listens on 0.0.0.0 without TLS"]


def test_who_runs_another_python_is_told_to_use_the_clusters(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray", reason="the extra `cluster` is not installed")

    def init(*_: object, **__: object) -> NoReturn:
        raise RuntimeError("Version mismatch: The cluster was started with:\n    Python: 3.11.2\n")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(cluster, "_check_answers", lambda *_: None)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        ended = cli("status", "--address", f"127.0.0.1:{listening.getsockname()[1]}")
    ended.failed("run crossdraft with the cluster's own Python", 1)
    assert "start one with" not in ended.err

"""`crossdraft deploy`, `status`, `undeploy`, as far as they go without a cluster."""

import socket
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from crossdraft.cli import cluster
from crossdraft.cluster.config import parse
from tests.cli.conftest import Cli

SMALLEST = "models:\n  - name: small\n    target: {model: bundled:target}\n"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (SMALLEST, ""),
        (SMALLEST + "port: 1\n", "small.yaml, line 4: port: there is no such field; there are models, http, grpc"),
    ],
)
def test_a_configuration_is_checked_without_a_cluster(cli: Cli, tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(text)
    ended = cli("deploy", path, "--check")
    assert (ended.code, ended.out) == ((2, "") if complaint else (0, f"{path} is valid\n"))
    assert complaint in ended.err


@pytest.mark.parametrize("command", ["status", "undeploy"])
def test_where_no_cluster_is_that_is_said_at_once(cli: Cli, command: str) -> None:
    with socket.socket() as taken:  # its port is nobody else's, and it does not listen
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        ended = cli(command, "--address", address)
    assert (ended.code, ended.out) == (1, "")
    assert f"no Ray cluster answers at {address}" in ended.err
    assert "start one with `ray up`" in ended.err
    wrong = cli(command, "--address", "nowhere")
    assert wrong.code == 2
    assert "--address must be HOST:PORT" in wrong.err


def test_a_head_that_says_nothing_is_named(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="the extra `cluster` is not installed")
    monkeypatch.setattr(cluster, "HEAD_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        ended = cli("status", "--address", address)
    assert (ended.code, ended.out) == (1, "")
    assert "the head of the Ray cluster does not answer at " in ended.err
    assert address.partition(":")[2] in ended.err


@pytest.mark.parametrize("missing", [("ray",), ("ray", "yaml")])
def test_without_the_extra_a_cluster_command_names_it(missing: tuple[str, ...]) -> None:
    script = f"""
import sys
sys.modules.update(dict.fromkeys({missing}))
from crossdraft.cli.app import main
main(["status", "--address", "127.0.0.1:1"])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    needed = "a cluster needs the extra `cluster`: in the checkout, run pip install -c constraints.txt -e '.[cluster]'"
    assert (done.returncode, done.stderr) == (1, f"crossdraft: {needed}\n")


def test_each_fault_of_a_configuration_has_a_line_of_its_own(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(SMALLEST + "one: 1\ntwo: 2\n")
    lines = cli("deploy", path, "--check").err.splitlines()
    assert [line.partition("small.yaml, ")[2].partition(":")[0] for line in lines] == ["line 4", "line 5"]


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
    assert (ended.code, ended.out) == (1, "")
    assert "run crossdraft with the cluster's own Python" in ended.err
    assert "start one with" not in ended.err

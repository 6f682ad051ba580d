"""`crossdraft deploy`, `status`, `undeploy`, as far as they go without a cluster."""

import socket
from pathlib import Path

import pytest

from tests.cli.conftest import Cli

SMALLEST = "models:\n  - name: small\n    target: {model: bundled:target}\n"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (SMALLEST, ""),
        (SMALLEST + "port: 1\n", r"small.yaml, line 4: port: there is no such field"),
        (SMALLEST + "security: {api_keys: none.txt}\n", "none.txt"),
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

"""`crossdraft deploy`, `status`, `undeploy`, as far as they go without a cluster."""

from pathlib import Path

import pytest

from tests.cli.conftest import Cli

SMALLEST = "models:\n  - name: small\n    target: {model: bundled:target}\n"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (SMALLEST, ""),
        (SMALLEST + "port: 1\n", r"small.yaml, line 4: port: Extra inputs"),
        (SMALLEST + "security: {api_keys: none.txt}\n", "none.txt"),
    ],
)
def test_a_configuration_is_checked_without_a_cluster(cli: Cli, tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(text)
    ended = cli("deploy", path, "--check")
    assert (ended.code, ended.out) == ((2, "") if complaint else (0, f"{path} is valid\n"))
    assert complaint in ended.err

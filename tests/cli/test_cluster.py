"""`crossdraft deploy`, `status`, `undeploy`, as far as they go without a cluster."""

from pathlib import Path

import pytest

from crossdraft.cli.cluster import deploy
from crossdraft.console.running import Misused

SMALLEST = "models:\n  - name: small\n    target: {model: bundled:target}\n"


def test_a_configuration_is_checked_without_a_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(SMALLEST)
    deploy(path, "auto", check=True, wait_seconds=0)
    assert capsys.readouterr().out == f"{path} is valid\n"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (SMALLEST + "port: 1\n", r"small\.yaml, line 4: port: Extra inputs"),
        (SMALLEST + "security: {api_keys: none.txt}\n", "none.txt"),
    ],
)
def test_what_is_wrong_with_it_is_said(text: str, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(text)
    with pytest.raises(Misused, match=complaint):
        deploy(path, "auto", check=True, wait_seconds=0)

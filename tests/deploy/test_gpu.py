"""`deploy/gpu/measure`: a dry run with small shapes, and stages that fail."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

MEASURE = Path(__file__).parents[2] / "deploy" / "gpu" / "measure"
SMALL = {
    "TARGET": "inflated:6x256x768+4200:bundled:target",
    "LARGE_TARGET": "",
    "DRAFTER": "inflated:2x256x704+2100:bundled:drafter-b",
    "SECONDS_ALL": "600",  # of a busy machine
    "SECONDS_ENGINE": "300",
    "SECONDS_HEAD": "0",  # it is as large as it is
} | {"DEVICE": "cpu", "DTYPE": "float32", "OUTPUTS": "1", "CACHE_MIB": "64", "OMP_NUM_THREADS": "1"}
FEW = ("--tokens", "3", "--limit", "4", "--prompt-tokens", "8", "--cache-mib", "64", "--clients-at", "0")


def measured(into: Path, *options: str, **environment: str) -> tuple[int, str]:
    """How it ended, and its report."""
    command = [MEASURE, into, *options]
    ended = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    return ended.returncode, (into / "report.md").read_text()


def test_a_dry_run_of_small_shapes_on_a_cpu(tmp_path: Path) -> None:
    code, report = measured(tmp_path, *FEW, **SMALL, PYTHON=sys.executable)
    assert code == 0, report
    _, engine, pair = report.split("\n### ")
    for row in ("+4200:bundled:target | 1 | 6 tokens", "+2100:bundled:drafter-b | 1 | a draft of 5"):
        assert row in engine
    for way in ("plain", "lock-step", "tree", "overlapped", "crossdraft"):
        assert f"| 1 | {way} | 0 |" in pair
        assert f"| 1 | {way} | 0.7 |" in pair


STUB = """#!/bin/sh
case "$*" in
*engine.py*) exec sleep 100000 ;;
*64x5120*) echo "crossdraft: out of memory" >&2; echo later >&2; exit 1 ;;
*bench*) echo "| $# | of it |" ;;
esac
"""


@pytest.mark.parametrize(
    ("limit", "found"),
    [("600", ["Broken off", "of it", "of it", "Failed: crossdraft: out of memory"]), ("0", ["Broken off"] * 4)],
)
def test_a_stage_that_fails_or_takes_too_long_leaves_the_others(limit: str, found: list[str], tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(STUB)
    python.chmod(0o755)
    code, report = measured(tmp_path, PYTHON=str(python), SECONDS_ENGINE="1", SECONDS_ALL=limit)
    assert code == 4 - found.count("of it")
    for expected, stage in zip(found, report.split("\n### ")[1:], strict=True):
        assert expected in stage

"""`crossdraft bench controller` on a corner of its grid."""

import json
from pathlib import Path

import pytest

from crossdraft.bench.controller import SimulatedControl


def test_cells_are_measured_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cells.json"
    SimulatedControl((1, 2), (0.0, 0.9), (8.0,), (0.0,), 60).run(path)
    assert "auto / best fixed: least" in capsys.readouterr().out
    results = json.loads(path.read_text())["results"]
    for useless, good in (results[:2], results[2:]):
        assert useless["choice"] == "no drafter"
        assert good["best"] > 2 * good["plain"]

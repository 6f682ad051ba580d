"""`crossdraft bench controller` on a corner of its grid."""

import json
from pathlib import Path

import pytest

from crossdraft.bench.commands import ControllerPlan
from crossdraft.bench.controller import Simulated, fixed_choices
from crossdraft.speculation.choice import Workload


def test_cells_are_measured_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cells.json"
    Simulated(ControllerPlan((0.0, 0.8), (0.05,), (0.5,), (0.2,), 200)).run(path)
    printed = capsys.readouterr().out
    assert "below 0.97 in" in printed
    useless, good = json.loads(path.read_text())["results"]
    assert useless["best"] == pytest.approx(1, abs=0.03)
    assert useless["short"] == pytest.approx(1, abs=0.03)
    assert good["best"] > 1.2


def test_fixed_choices_have_branches_where_they_are_wanted() -> None:
    given = Workload((0.5,), 0.5, 0.001, 0.02)
    assert not any(way.branch_depth for way in fixed_choices(given, branches=False))
    assert any(way.branch_depth for way in fixed_choices(given, branches=True))

"""`crossdraft bench distribution`, with tiny models."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from crossdraft.audit.statistics import Fit
from crossdraft.lab import acceptance
from crossdraft.lab.acceptance import DistributionCheck
from tests.cli.conftest import Cli
from tests.endtoend.reference import Reference

PROMPT = "The quick"
OPTIONS = ("--prompt", PROMPT, "--count", 24, "--drafter", "tiny")


class OtherDistributions(DistributionCheck):
    """Of a model that the services do not run."""

    def after(self, *ids: int) -> np.ndarray:
        distribution = np.full(len(self._letters), 0.01 / (len(self._letters) - 4))
        distribution[:4] = 0.99 / 4
        return distribution


def test_each_method_is_tested(
    cli: Cli, started: object, target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []

    def fit_of(counts: Mapping[int, int], distribution: np.ndarray) -> Fit:
        sizes.append((distribution.shape, distribution.sum()))
        return Fit(sum(counts.values()), 1.0, 1, 0.5)

    monkeypatch.setattr(acceptance, "fit_of", fit_of)
    out, names = tmp_path / "out.json", ("slem", "seeded", "tli")
    methods = [option for name in (*names, "rdk") for option in ("--method", name)]
    outcome = cli("bench", "distribution", "--target", target_folder, *OPTIONS, *methods, "--json", out)
    assert outcome.code == 0, outcome.err
    assert "'rdk' is left out: it needs a drafter with an affinity matrix" in outcome.err
    tests = json.loads(out.read_text())["results"]
    first = [test for test in tests if test["token"] == "first"]
    assert [(test["method"], test["drafter"], test["fit"]["count"]) for test in first] == [
        (name, "tiny", 24) for name in names
    ]
    assert len(tests) > len(first)
    assert all(1 <= test["fit"]["count"] < 24 for test in tests if test not in first)
    assert all(0 <= test["acceptance"] <= 1 for test in tests)
    assert sizes == [(sizes[0][0], pytest.approx(1))] * len(tests)


def test_too_few_continuations_are_said_to_be_so(cli: Cli, started: object, target_folder: Path) -> None:
    outcome = cli("bench", "distribution", "--target", target_folder, *OPTIONS, "--count", 3, "--method", "slem")
    assert outcome.code == 1
    assert "3 continuations are too few for a test: raise --count" in outcome.err


def test_a_distribution_that_is_not_the_targets_fails(
    cli: Cli, started: object, target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptance, "DistributionCheck", OtherDistributions)
    outcome = cli("bench", "distribution", "--target", target_folder, *OPTIONS, "--method", "slem")
    assert outcome.code == 1
    assert "slem with tiny, first" in outcome.err


@pytest.mark.parametrize(
    ("options", "complaint"),
    [(("--affinity", "file.npz"), "--affinity takes NAME=FILE"), (("--method", "guess"), "unknown method")],
)
def test_wrong_options_are_refused_before_anything_starts(cli: Cli, options: tuple[str, ...], complaint: str) -> None:
    cli("bench", "distribution", *options).failed(complaint)


CODE = "for i in range("


def test_distributions_are_the_models_softmax() -> None:
    check, reference = DistributionCheck("bundled:target", CODE), Reference("target")
    distribution = check.after()
    assert (distribution.shape, distribution.dtype) == ((4096,), np.float64)
    assert distribution.sum() == pytest.approx(1)
    assert reference.tokenizer.decode([int(distribution.argmax())]) == "5"
    assert abs(check.after(int(distribution.argmax())) - distribution).max() > 0.1

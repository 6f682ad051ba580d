"""`crossdraft bench rdk`: its figures are those of the formulas, and it writes what it is asked to."""

import json
from pathlib import Path

import numpy as np
import pytest

from crossdraft.bench.commands import RdkPlan
from crossdraft.bench.rdk import KEPT, TAUS, TOP_QUARTER, DistributionPair, RdkFigures, Study, figures_of, redistributed
from tests.cli.conftest import Cli

SMALL = Study(RdkPlan(tokens=1000, exact_tokens=1000, draws=2))


@pytest.fixture(scope="module")
def draw() -> DistributionPair:
    return SMALL.draw(1000, 0)


def test_the_most_probable_quarter_has_the_published_share(draw: DistributionPair) -> None:
    assert np.sort(draw.p)[::-1][:250].sum() == pytest.approx(TOP_QUARTER, abs=1e-6)
    assert draw.p.sum() == pytest.approx(1.0)
    assert draw.q.sum() == pytest.approx(1.0)


def test_draws_are_repeatable_and_differ(draw: DistributionPair) -> None:
    assert np.array_equal(SMALL.draw(1000, 0).q, draw.q)
    assert not np.array_equal(SMALL.draw(1000, 1).q, draw.q)
    assert not np.array_equal(Study(RdkPlan(seed=1)).draw(1000, 0).q, draw.q)


def test_masks_keep_what_they_say(draw: DistributionPair) -> None:
    probable = draw.masked("the most probable", 100)
    assert (probable > 0).sum() == 100
    assert draw.p[probable > 0].min() >= draw.p[probable == 0].max()
    random = draw.masked("random", 100)
    assert (random > 0).sum() == 100
    assert np.array_equal(random[random > 0], draw.q[random > 0])


@pytest.mark.parametrize("tau", TAUS)
def test_the_matrix_is_the_softmax_of_the_covariance(draw: DistributionPair, tau: float) -> None:
    masked = draw.masked("random", 300)
    proposed = masked / masked.sum()
    scaled = (np.diag(draw.p) - np.outer(draw.p, draw.p)) / tau
    rows = np.exp(scaled - scaled.max(axis=1, keepdims=True))
    rows /= rows.sum(axis=1, keepdims=True)
    assert redistributed(proposed, draw.p, tau) == pytest.approx(rows.T @ proposed, abs=1e-14)


def test_figures_are_acceptances(draw: DistributionPair) -> None:
    masked = draw.masked("random", 300)
    found = figures_of(draw.p, masked, ())
    p, q = draw.p.tolist(), (masked / masked.sum()).tolist()
    theta = sum(one * other for one, other in zip(p, q, strict=True))
    spread = [(1000 * other + theta * one) / (1000 + one) for one, other in zip(p, q, strict=True)]
    assert found == RdkFigures(
        masked=pytest.approx(sum(map(min, p, masked.tolist()))),
        tli=pytest.approx(sum(map(min, p, q))),
        first_order=pytest.approx(sum(min(one, other / sum(spread)) for one, other in zip(p, spread, strict=True))),
        uniform=pytest.approx(sum(min(one, 0.001) for one in p)),
        exact=(),
        theta=pytest.approx(theta),
        change=pytest.approx(
            sum(abs(one / sum(spread) - other) for one, other in zip(spread, q, strict=True)), abs=1e-9
        ),
        error=0.0,
    )


async def test_what_the_docs_say_of_the_formulas() -> None:
    levels = [level async for level in SMALL.measure(lambda count=1, doing="": None)]
    assert len(levels) == 4 * len(KEPT)
    for level in levels:
        found = level.figures
        assert found.change <= 3 * found.theta / level.tokens
        assert abs(found.first_order - found.tli) <= 2 * found.theta / level.tokens
        if found.exact:  # the largest τ: uniform, whatever is kept; so the first-order form is no approximation of it
            assert found.exact[-1] == pytest.approx(found.uniform, abs=2e-3)
            assert found.error > 1.0


def test_files_and_tables(cli: Cli, tmp_path: Path) -> None:
    small = ("--tokens", 1000, "--exact-tokens", 1000, "--draws", 2)
    ended = cli("bench", "rdk", *small, "--json", tmp_path / "rdk.json", "--plot", tmp_path / "rdk.png")
    assert ended.code == 0, ended.err
    assert ended.out.count("acceptance, N = 1,000") == 4
    record = json.loads((tmp_path / "rdk.json").read_text())
    plan = {"tokens": 1000, "exact_tokens": 1000, "draws": 2, "noise": 1.0, "seed": 0}
    assert record["plan"] == plan | {"plot": str(tmp_path / "rdk.png")}
    assert 0 < record["results"][0]["figures"]["tli"] < 1
    assert (tmp_path / "rdk.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("name", "complaint"), [("none/rdk.png", "no such folder"), ("rdk.nothing", "its name must end with .png")]
)
def test_pictures_that_cannot_be_written(cli: Cli, tmp_path: Path, name: str, complaint: str) -> None:
    cli("bench", "rdk", "--plot", tmp_path / name).failed(complaint)

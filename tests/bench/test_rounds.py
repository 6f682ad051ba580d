"""`crossdraft bench round`: what a round costs outside the models."""

from pathlib import Path

import pytest

from crossdraft.bench.rounds import RecordedGeneration, round_of
from crossdraft.bench.workload import Setting
from tests.bench.conftest import Measure, figures


def test_a_round_is_its_parts(measure: Measure, started: object, prompts_file: Path) -> None:
    options = ("--drafter", "tiny", "--method", "tli", "--max-tokens", 8)
    (found,) = measure("round", "--prompts", prompts_file, "--limit", 1, *options)
    parts = [found[name] for name in ("verification_ms", "codec_ms", "transport_ms")]
    assert all(part > 0 for part in parts[:2])  # the third is what they leave of a time that was measured apart
    assert sum(parts) == pytest.approx(found["outside_ms"])
    assert found["rounds"] >= 1  # the drawn text may end at once
    assert found["bytes_per_token"] > 100  # rows travel


def test_a_round_is_the_median_over_generations_of_means_over_rounds() -> None:
    recordings = [
        RecordedGeneration(
            figures(epochs=10, tokens=20, wire_seconds=wire, verification_seconds=0.02, bytes_sent=100), 0.01
        )
        for wire in (0.05, 0.07, 9.0)
    ]
    found = round_of(Setting("slem", "some/drafter", 1.0, 5), recordings)
    assert found.verification_ms == pytest.approx(2)
    assert found.codec_ms == pytest.approx(1)
    assert found.transport_ms == pytest.approx(6)
    assert found.outside_ms == pytest.approx(9)
    assert (found.rounds, found.generations, found.bytes_per_token) == (30, 3, 5)

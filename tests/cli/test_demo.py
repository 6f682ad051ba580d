"""`crossdraft demo`: with a drafter and without, side by side."""

import re
from dataclasses import replace

import pytest

from crossdraft.cli.demo import MODELS, DemoOutput, comparison, demo, explanation, speedup
from tests.serving.fakes import figures


def test_both_texts_and_their_figures(capsys, monkeypatch, target_folder, drafter_folder):
    folders = MODELS | {"target_model": str(target_folder), "drafter_model": str(drafter_folder)}
    monkeypatch.setattr("crossdraft.cli.demo.MODELS", folders)
    demo("The quick", k=5, max_tokens=10, temperature=[0.0, 0.8], seed=3)
    shown = capsys.readouterr().out
    for part in ("temperature 0 (greedy)", "temperature 0.8, seed 3", "with the drafter", "without", "tokens/s"):
        assert part in shown
    assert len(re.findall(r"times the tokens/s \([\d.]+ to [\d.]+\); the texts are equal", shown)) == 2
    assert "faster" in shown.splitlines()[-1]
    assert "suit this drafter" in shown.splitlines()[-1]
    passes = [line.split("│")[2:4] for line in shown.splitlines() if "tokens per pass  " in line]
    assert len(passes) == 2
    for drafted, plain in passes:
        assert float(drafted) >= float(plain) == 1


def outcome(speed: float, passes: int) -> DemoOutput:
    seconds = 12 / speed
    return DemoOutput((), replace(figures(12), passes=passes, seconds=seconds))


def test_one_sentence_says_why() -> None:
    fast, slow = ((outcome(speed, 4), outcome(20.0, 12)) for speed in (40.0, 10.0))
    assert speedup(fast) == pytest.approx(2)
    assert "It is faster because a pass of the target over the drafter's tokens yielded 3.0" in explanation([fast])
    assert "It is not faster here although" in explanation([fast, slow])


def test_texts_that_differ_are_told_apart() -> None:
    assert comparison("same", "same") == "the texts are equal"
    assert "DIFFER from character 2 on" in comparison("same", "safe")
    assert "DIFFER from character 4 on" in comparison("same", "same and more")

"""`crossdraft demo`: with a drafter and without, side by side."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from crossdraft.cli import generate
from crossdraft.cli.demo import comparison, demo
from crossdraft.console.processes import Wanted
from tests.cli.conftest import Cli


def test_both_texts_and_their_figures(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, pair: tuple[str, ...]
) -> None:
    @asynccontextmanager
    async def services(wanted: Sequence[Wanted]) -> AsyncIterator[list[str]]:
        assert [one.role for one in wanted] == ["target", "drafter"]
        yield [pair[1], pair[3]]

    monkeypatch.setattr(generate, "services", services)  # which test_generate.py starts
    demo("The quick", k=5, max_tokens=10, temperature=0.0, seed=3)
    shown = capsys.readouterr().out
    for part in ("with the drafter", "without", "tokens/s", "times the tokens/s", "the texts are equal"):
        assert part in shown
    (passes,) = [line.split("│")[2:4] for line in shown.splitlines() if "tokens per pass  " in line]
    assert float(passes[0]) >= float(passes[1]) == 1


def test_texts_that_differ_are_told_apart() -> None:
    assert comparison("same", "same") == "the texts are equal"
    assert "DIFFER from character 2 on" in comparison("same", "safe")
    assert "DIFFER from character 4 on" in comparison("same", "same and more")


def test_what_cannot_be_asked_for(cli: Cli) -> None:
    ended = cli("demo", "-k", "0")
    assert (ended.code, ended.err) == (2, "crossdraft: num_speculative_tokens must be between 1 and 64, got 0\n")

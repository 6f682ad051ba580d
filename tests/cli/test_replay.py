"""`crossdraft replay`: what it says, and how it ends."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tests.trace.recordings import SECRETS, header_of, save, toy_recording


def test_the_same_verdicts(cli: Cli, tmp_path: Path) -> None:
    recording = toy_recording(header_of("seeded"))
    outcome = cli("replay", save(recording, tmp_path / "record"))
    assert outcome.code == 0
    assert outcome.out == f"{len(recording.rounds)} rounds, 12 tokens: same verdicts\n"
    assert "not checked" in outcome.err


def test_other_verdicts_are_a_failure_that_says_where(cli: Cli, tmp_path: Path) -> None:
    recording = toy_recording(header_of())
    other = replace(recording, header=replace(recording.header, secrets=replace(SECRETS, chooser=1)))
    cli("replay", save(other, tmp_path / "record")).failed("in the recording and", 1)


def test_a_file_that_ends_early_is_replayed_as_far_as_it_goes(cli: Cli, tmp_path: Path) -> None:
    path = save(toy_recording(header_of()), tmp_path / "record")
    path.write_bytes(path.read_bytes()[:-5])
    outcome = cli("replay", path)
    assert (outcome.code, "same verdicts" in outcome.out, "middle of a record" in outcome.err) == (0, True, True)


@pytest.mark.parametrize("content", [None, b"no recording"])
def test_other_files_are_refused(cli: Cli, tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "file"
    if content is not None:
        path.write_bytes(content)
    outcome = cli("replay", path)
    outcome.failed("a file of `generate --record`")
    assert str(path) in outcome.err
    assert "Errno" not in outcome.err
    assert len(outcome.err.splitlines()) == 1


@pytest.mark.parametrize("overlap", ["on", *(pytest.param(one, marks=pytest.mark.full) for one in ("off", "auto"))])
def test_a_generation_over_the_wire_is_replayed(cli: Cli, pair: tuple[str, ...], tmp_path: Path, overlap: str) -> None:
    path = tmp_path / "record"
    options = ("--method", "coupled", "--max-tokens", 12, "--overlap", overlap, "--record", path, "--json")
    generated = cli("generate", "The quick brown", *pair, *options)
    assert generated.code == 0
    tokens = len(generated.records) - 1
    outcome = cli("replay", path)
    assert (outcome.code, outcome.out.split(", ")[1]) == (0, f"{tokens} tokens: same verdicts\n")
    page = tmp_path / "page.html"
    assert cli("timeline", path, "-o", page).code == 0
    assert "tokens per pass" in page.read_text()

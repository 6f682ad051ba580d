"""Places that a command cannot write to."""

import os
from errno import EACCES
from pathlib import Path

import pytest

from crossdraft.cli import corpus
from crossdraft.console.running import Misused, check_output


def refuse(path: Path) -> bool:
    raise PermissionError(EACCES, os.strerror(EACCES), str(path))


def test_a_folder_that_may_not_be_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "is_dir", refuse)
    output = tmp_path / "out"
    with pytest.raises(Misused, match=f"cannot write {output}: Permission denied"):
        corpus.count("none", tmp_path, output)
    with pytest.raises(Misused, match=f"cannot write {output}: Permission denied"):
        corpus.make("none", "none", tmp_path, output, "aligned", corpus.Options())


def test_what_may_not_be_written_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_output(tmp_path / "out")
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    with pytest.raises(Misused, match="Permission denied"):
        check_output(tmp_path / "out")
    for place, complaint in ((tmp_path, "it is a folder"), (tmp_path / "none" / "out", "no such folder")):
        with pytest.raises(Misused, match=complaint):
            check_output(place)

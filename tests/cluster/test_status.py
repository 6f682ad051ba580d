"""What tells one crossdraft from another."""

from importlib import import_module
from pathlib import Path

import pytest

from crossdraft.cluster import status


def test_a_package_is_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = status.on_disk()
    assert found == status.on_disk() == status.installed()
    part = tmp_path / "one" / "invented_package" / "part"
    (part / "__pycache__").mkdir(parents=True)
    (part / "__init__.py").write_text("ONE = 1\n")
    monkeypatch.syspath_prepend(tmp_path / "one")
    monkeypatch.setattr(status, "PACKAGE", "invented_package")
    monkeypatch.setattr(status, "version", lambda _: "1")
    before = status.on_disk()
    (part / "__pycache__" / "__init__.pyc").write_bytes(b"compiled")
    assert status.on_disk() == before
    (part / "__init__.py").write_text("ONE = 2\n")
    changed = status.on_disk()
    (part / "more.py").touch()
    whole = status.on_disk()
    assert len({before, changed, whole}) == 3
    laboratory = tmp_path / "one" / "invented_package" / "lab"
    laboratory.mkdir()
    (laboratory / "__init__.py").touch()
    assert status.on_disk() == whole  # a checkout is as good as a wheel of it


def test_a_folder_that_has_the_packages_name_is_no_part_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = status.on_disk()
    (tmp_path / "crossdraft" / "venv").mkdir(parents=True)
    (tmp_path / "crossdraft" / "venv" / "many.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert str(tmp_path / "crossdraft") in list(import_module("crossdraft").__path__)
    assert status.on_disk() == found


def test_what_serve_says_is_in_words_that_people_use() -> None:
    said = "Deployment 'A' has 1 replicas that have taken long, and 'B' has 11 replicas."
    assert status.in_short(said) == "Deployment 'A' has 1 replica that have taken long, and 'B' has 11 replicas."
    progress = [status.Hosted("A", "UPDATING", serving, of, "").progress for serving, of in ((0, 0), (0, 1), (1, 2))]
    assert progress == ["none is started yet", "0 of 1 serve", "1 of 2 serve"]

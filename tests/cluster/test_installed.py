"""What tells one crossdraft from another."""

from importlib import import_module
from pathlib import Path

import pytest

from crossdraft.cluster import config, installed
from crossdraft.cluster.capacity import needs_of, placed
from crossdraft.cluster.config import Configuration, parse, slot_of
from crossdraft.cluster.deploy import application
from crossdraft.cluster.rollout import changes, fronts_of, services_of

TEXT = """\
models:
  - name: small
    target: {model: m, replicas: 2}
    drafters: [{name: d, model: n}]
grpc: {}
"""


def names(configuration: Configuration) -> list[str]:
    return [one.name for one in (*services_of(configuration), *fronts_of(configuration))]


def versions(configuration: Configuration) -> set[str]:
    """Of what Serve runs."""
    plan = placed(needs_of(configuration), {"one": {"CPU": 16.0}})
    built = application(configuration, lambda resources: True, plan)
    below = [one._bound_deployment for one in built._bound_deployment.init_args[2:]]
    return {str(one.version) for one in (built._bound_deployment, *below)}


def test_another_package_replaces_everything_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    configuration = parse(TEXT)
    before, served = names(configuration), versions(configuration)
    assert (names(configuration), versions(configuration)) == (before, served)
    monkeypatch.setattr(config, "installed", lambda: "0.2.0+other")
    wanted = (*services_of(configuration), *fronts_of(configuration))
    replaced = [(slot_of(old), new.slot) for old, new in changes(wanted, before).replaced]
    assert sorted(replaced) == sorted((slot_of(name), slot_of(name)) for name in before)
    assert len(served) == 2
    assert served.isdisjoint(versions(configuration))


def test_a_package_is_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = installed.on_disk()
    assert found == installed.on_disk() == installed.installed()
    part = tmp_path / "one" / "invented_package" / "part"
    (part / "__pycache__").mkdir(parents=True)
    (part / "__init__.py").write_text("ONE = 1\n")
    monkeypatch.syspath_prepend(tmp_path / "one")
    monkeypatch.setattr(installed, "PACKAGE", "invented_package")
    before = installed.on_disk()
    (part / "__pycache__" / "__init__.pyc").write_bytes(b"compiled")
    assert installed.on_disk() == before
    (part / "__init__.py").write_text("ONE = 2\n")
    changed = installed.on_disk()
    (part / "more.py").touch()
    whole = installed.on_disk()
    assert len({before, changed, whole}) == 3
    laboratory = tmp_path / "one" / "invented_package" / "lab"
    laboratory.mkdir()
    (laboratory / "__init__.py").touch()
    assert installed.on_disk() == whole  # a checkout is as good as a wheel of it


def test_a_folder_that_has_the_packages_name_is_no_part_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = installed.on_disk()
    (tmp_path / "crossdraft" / "venv").mkdir(parents=True)
    (tmp_path / "crossdraft" / "venv" / "many.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert str(tmp_path / "crossdraft") in list(import_module("crossdraft").__path__)
    assert installed.on_disk() == found

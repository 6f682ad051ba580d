"""The layout that packaging and the import contracts rely on."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
SETTINGS = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
ROOTS = SETTINGS["hatch"]["build"]["dev-mode-dirs"]
LABORATORY = "lab"  # the root that no wheel has
STARTED = """
import runpy, sys
for name in sys.argv[1:]:
    sys.argv[1:] = ["--help"]
    try:
        runpy.run_module(name, run_name="__main__")
    except SystemExit as ended:
        assert not ended.code, name
"""


def test_every_package_is_under_the_import_contracts() -> None:
    packages = {
        f"crossdraft.{folder.name}"
        for root in ROOTS
        for folder in (REPOSITORY / root / "crossdraft").iterdir()
        if (folder / "__init__.py").exists()
    }
    assert packages == set(SETTINGS["importlinter"]["root_packages"])


def test_crossdraft_is_a_namespace_package_in_every_root() -> None:
    assert [root for root in ROOTS if (REPOSITORY / root / "crossdraft" / "__init__.py").exists()] == []


def test_wheel_editable_install_and_type_checker_know_the_same_roots() -> None:
    folders = [f"{root}/crossdraft" for root in ROOTS]
    packed = [folder for folder in folders if not folder.startswith(LABORATORY)]
    assert SETTINGS["hatch"]["build"]["targets"]["wheel"]["packages"] == packed
    assert len(packed) == len(folders) - 1
    assert SETTINGS["mypy"]["files"] == [*folders, "docs/hooks.py"]
    assert SETTINGS["mypy"]["mypy_path"] == ":".join(f"$MYPY_CONFIG_FILE_DIR/{root}" for root in ROOTS)


def test_nothing_imports_the_laboratory() -> None:
    (layers,) = [one["layers"] for one in SETTINGS["importlinter"]["contracts"] if one["type"] == "layers"]
    assert layers[0] == "crossdraft.lab"


def test_programs_that_only_measure_can_be_started() -> None:
    """One process for all: most of what they import takes seconds."""
    programs = {*re.findall(r"`python -m (tests\.[\w.]+)", (REPOSITORY / "BENCHMARKS.md").read_text("utf-8"))}
    command = [sys.executable, "-c", STARTED, *sorted(programs)]
    said = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    assert said.count("usage: ") == len(programs) > 1


def test_links_between_documents_can_be_followed_in_a_clone() -> None:
    pages = [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").glob("*.md")]
    links = {
        (page.name, target)
        for page in pages
        for target in re.findall(r"\]\(([^)#\s:]+)(?:#[^)\s]*)?\)", page.read_text("utf-8"))
        if not (page.parent / target).exists()
    }
    assert links == set()


def test_pages_name_modules_that_exist_and_the_architecture_counts_its_walks() -> None:
    architecture, *others = (REPOSITORY / "ARCHITECTURE.md", *(REPOSITORY / "docs").glob("*.md"))
    text = architecture.read_text("utf-8")
    places = [REPOSITORY, *(REPOSITORY / root for root in ROOTS), *(REPOSITORY / root / "crossdraft" for root in ROOTS)]
    named = {f"{name}.py" for name in re.findall(r"`([a-z]\w*(?:/\w+)+)`", text)}
    named |= {name for page in others for name in re.findall(r"`((?:\w+/)+[a-z]\w*\.py)`", page.read_text("utf-8"))}
    absent = {name for name in named if not any((place / name).exists() for place in places)}
    assert absent == {"vllm/utils/cpu_triton_utils.py"}  # vLLM's own

    walks = re.findall(r"^### A [^\n]*: (\d+) modules, (\d+) shapes$(.*?)(?=^#)", text, re.MULTILINE | re.DOTALL)
    for modules, shapes, steps in walks:
        assert re.findall(r"^(\d+)\. `", steps, re.MULTILINE) == [str(step + 1) for step in range(int(modules))]
        assert len(set(re.findall(r"[^*]\*(\w+)\*", steps))) == int(shapes)
    assert len(walks) == 2

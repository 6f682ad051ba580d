"""Nothing that comes from a network or a file can run as code: what could make it so is imported and called nowhere."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_layout import REPOSITORY, ROOTS

MODULES = frozenset(
    {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "jsonpickle"}
)
BUILTINS = frozenset({"eval", "exec", "compile", "__import__"})
UNSAFE = frozenset({"yaml.load", "yaml.unsafe_load", "yaml.full_load", "pandas.read_pickle", "pd.read_pickle"})
SOURCES = sorted(path for root in ROOTS for path in (REPOSITORY / root / "crossdraft").rglob("*.py"))


def faults(source: str) -> Iterator[str]:
    """What in a module could run bytes as code."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (f"imports {name.name}" for name in names if name.name.partition(".")[0] in MODULES)
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] in MODULES:
                yield f"imports from {module}"
            case ast.Call(func=function, keywords=keywords):
                yield from _call(ast.unparse(function), keywords)


def _call(name: str, keywords: list[ast.keyword]) -> Iterator[str]:
    given = {one.arg: one.value.value for one in keywords if isinstance(one.value, ast.Constant)}
    if name in BUILTINS | UNSAFE:
        yield f"calls {name}"
    if given.get("allow_pickle") or given.get("weights_only") is False:
        yield f"lets {name} read pickles"
    if name == "torch.load" and given.get("weights_only") is not True:
        yield "calls torch.load without weights_only=True"
    if name.endswith("from_pretrained") and given.get("trust_remote_code"):
        yield f"lets {name} run a model's own code, unasked"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_no_module_runs_bytes_as_code(path: Path) -> None:
    assert list(faults(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("import pickle", "imports pickle"),
        ("import os, dill.source", "imports dill.source"),
        ("from cloudpickle import loads", "imports from cloudpickle"),
        ("eval(text)", "calls eval"),
        ("np.load(path, allow_pickle=True)", "lets np.load read pickles"),
        ("torch.load(path)", "calls torch.load without weights_only=True"),
        ("torch.load(path, weights_only=False)", "lets torch.load read pickles"),
        ("yaml.load(text, Loader)", "calls yaml.load"),
        ("AutoModel.from_pretrained(name, trust_remote_code=True)", "run a model's own code"),
    ],
)
def test_what_would_is_found(source: str, fault: str) -> None:
    assert any(fault in found for found in faults(source))


@pytest.mark.parametrize(
    "source",
    ["np.load(path)", "torch.load(path, weights_only=True)", "model.eval()", "re.compile(text)", "import json"],
)
def test_what_would_not_is_left_alone(source: str) -> None:
    assert list(faults(source)) == []

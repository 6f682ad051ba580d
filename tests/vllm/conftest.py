"""An environment with vLLM beside this one, named by CROSSDRAFT_VLLM_ENV; without it these tests are skipped."""

import json
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from crossdraft.drafter.service import drafter_server
from crossdraft.engine.names import BUNDLED
from tests.endtoend.stack import AT_ONCE, model
from tests.started import in_a_thread

VARIABLE = "CROSSDRAFT_VLLM_ENV"
REPOSITORY = Path(__file__).resolve().parents[2]
ROOTS = ("services", "orchestrator", "deploy", "protos", "tests/vllm")
SECONDS = 1500  # that an engine may take with all its requests: a hang ends there
# One core and one thread, so that a batch is computed in the same order again.
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0",
    "VLLM_NO_USAGE_STATS": "1",
}

Engine = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def python() -> Path:
    """The interpreter of the environment with vLLM."""
    folder = os.environ.get(VARIABLE, "")
    if not folder:
        pytest.skip(f"{VARIABLE} names no environment with vLLM; docs/vllm.md says how to make one")
    found = Path(folder) / "bin" / "python"
    if not found.exists():
        pytest.fail(f"{VARIABLE} is {folder}, and there is no {found}")
    return found


@pytest.fixture(scope="session")
def engine(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """Runs a job of `engine.py` on the bundled target; returns its runs and counts."""
    folder = tmp_path_factory.mktemp("vllm")

    def run(environment: Mapping[str, str], **job: Any) -> dict[str, Any]:
        result = folder / "result.json"
        path = os.pathsep.join(str(REPOSITORY / root) for root in ROOTS)
        done = subprocess.run(
            [python, Path(__file__).with_name("engine.py"), result],
            input=json.dumps({"model": str(BUNDLED / "target"), **job}),
            env={**os.environ, **SETTINGS, "PYTHONPATH": path, **environment},
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
        found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        return {**found, "log": done.stdout + done.stderr}

    return run


@pytest.fixture(scope="session")
def drafter(python: Path) -> Iterator[str]:
    """The address of bundled drafter B, served in a thread."""
    with in_a_thread(lambda: drafter_server(model("drafter-b"), AT_ONCE)) as (address,):
        yield address

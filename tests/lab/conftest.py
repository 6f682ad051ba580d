"""The benchmarks in this process, with tiny models and services that already run."""

import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from crossdraft.cli.processes import Running, Wanted
from crossdraft.client import Statistics
from crossdraft.drafter.service import drafter_server
from crossdraft.engine.served_model import ModelOptions
from crossdraft.lab import acceptance, controller
from crossdraft.target.service import target_server
from tests.cli.conftest import Cli, Outcome, cli, drafter_folder, one_thread, target_folder, unhurried  # noqa: F401 - fixtures
from tests.golden.messages import NONE
from tests.rpc.linked import AT_ONCE
from tests.rpc.unhurried import unhurry
from tests.started import in_a_thread

PROCESS = 1234  # "of" the services that are there: nothing is sent to it
Measure = Callable[..., list[dict[str, Any]]]


def figures(**counted: float) -> Statistics:
    """Of a generation with these, and nothing else."""
    return replace(NONE, **counted)  # type: ignore[arg-type]


@pytest.fixture
def prompts_file(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    texts = {"The quick": "prose", "A brown fox": "code", "jumps": "prose"}
    path.write_text("".join(json.dumps({"text": text, "category": kind}) + "\n" for text, kind in texts.items()))
    return path


@pytest.fixture
def measure(cli: Cli, tmp_path: Path) -> Measure:  # noqa: F811
    """Runs `crossdraft bench` with these arguments and gives its results."""

    def run(*arguments: object) -> list[dict[str, Any]]:
        out, table = tmp_path / "out.json", tmp_path / "out.md"
        outcome = cli("bench", *arguments, "--json", out, "--markdown", table)
        assert outcome.code == 0, outcome.err
        assert outcome.out == table.read_text()
        results: list[dict[str, Any]] = json.loads(out.read_text())["results"]
        return results

    return run


@pytest.fixture(scope="session")
def addresses(target_folder: Path, drafter_folder: Path) -> Iterator[dict[str, str]]:  # noqa: F811
    """By role, of a target and a drafter with different vocabularies."""
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        unhurry(patch)
        services = in_a_thread(
            lambda: target_server(ModelOptions(str(target_folder)), AT_ONCE),
            lambda: drafter_server(ModelOptions(str(drafter_folder)), AT_ONCE),
        )
        target, drafter = stack.enter_context(services)
        patch.undo()
        yield {"target": target, "drafter": drafter}


@pytest.fixture
def started(addresses: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> list[Wanted]:
    """What was to be started, in order."""
    asked: list[Wanted] = []

    @asynccontextmanager
    async def running(wanted: Sequence[Wanted]) -> AsyncIterator[list[Running]]:
        asked.extend(wanted)
        yield [Running(addresses[one.role], PROCESS) for one in wanted]

    @asynccontextmanager
    async def service(wanted: Wanted, core: int, distant: bool) -> AsyncIterator[tuple[str, None]]:
        asked.append(wanted)
        yield addresses[wanted.role], None

    monkeypatch.setattr(acceptance, "running", running)
    monkeypatch.setattr(controller, "service", service)
    return asked

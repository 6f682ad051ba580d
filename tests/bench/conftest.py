"""The benchmarks in this process, with tiny models and services that already run."""

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from crossdraft.bench import acceptance, faults, overlap, workload
from crossdraft.bench.services import Distant, Served
from crossdraft.client import Statistics
from crossdraft.console.processes import Running, Wanted
from crossdraft.rpc.clients import Patience
from tests.cli.conftest import (  # noqa: F401 - fixtures
    Cli,
    Outcome,
    Pair,
    addresses,
    cli,
    drafter_folder,
    in_a_thread,
    one_thread,
    others_awaited,
    target_folder,
    unhurried,
)

PROMPTS = Path(__file__).parents[1] / "prompts.jsonl"
PROCESS = 1234  # "of" the services that are there: nothing is sent to it
NOTHING: dict[str, Any] = dict.fromkeys(Statistics.__annotations__, 0) | {
    "method": "slem",
    "drafter_lost": "",
    **dict.fromkeys(("drafted_at", "judged_at", "accepted_at"), ()),
}
Measure = Callable[..., list[dict[str, Any]]]


def figures(**counted: float) -> Statistics:
    """Of a generation with these, and nothing else."""
    return Statistics(**NOTHING | counted)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No benchmark gives a service up because the machine stands still for seconds."""
    monkeypatch.setattr(acceptance, "PATIENCE", Patience(reply_seconds=acceptance.PATIENCE.reply_seconds))


@pytest.fixture
def prompts_file(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("The quick", "A brown fox", "jumps")))
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


@pytest.fixture
def started(addresses: Pair, monkeypatch: pytest.MonkeyPatch) -> list[Wanted | Served]:  # noqa: F811
    """What was to be started, in order."""
    asked: list[Wanted | Served] = []

    @asynccontextmanager
    async def services(wanted: Sequence[Wanted]) -> AsyncIterator[list[str]]:
        asked.extend(wanted)
        yield [addresses[one.role] for one in wanted]

    @asynccontextmanager
    async def target_service(target: Served) -> AsyncIterator[Running]:
        asked.append(target)
        yield Running(addresses["target"], PROCESS)

    @asynccontextmanager
    async def drafter_service(drafter: Served, distant: bool) -> AsyncIterator[Distant]:
        asked.append(drafter)
        yield Distant(addresses["drafter"], PROCESS, None)

    for module in (workload, acceptance):
        monkeypatch.setattr(module, "services", services)
    for module in (overlap, faults):
        monkeypatch.setattr(module, "target_service", target_service)
        monkeypatch.setattr(module, "drafter_service", drafter_service)
    return asked

"""The benchmarks in this process, with tiny models and services that already run."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

import pytest

from crossdraft.cli.processes import Running, Wanted
from crossdraft.client import Statistics
from crossdraft.drafter.service import ServeDrafter, drafter_server
from crossdraft.engine.served_model import ModelOptions
from crossdraft.lab import controller, workload
from crossdraft.lab.workload import Distant, Served
from crossdraft.rpc.server import Listening, Serving
from crossdraft.target.service import ServeTarget, target_server
from crossdraft.types.statistics import Counts, Times, statistics_of
from tests.cli.conftest import Cli, Outcome, cli, drafter_folder, one_thread, others_awaited, target_folder, unhurried  # noqa: F401 - fixtures
from tests.rpc.unhurried import unhurry

PROMPTS = Path(__file__).parents[1] / "prompts.jsonl"
PROCESS = 1234  # "of" the services that are there: nothing is sent to it
NOTHING = statistics_of("slem", 0, 0, Counts(), Times(0.0, 0.0, 0.0, 0.0, 0, 0))
AT_ONCE = Listening(grace_seconds=0)
Pair = dict[str, str]  # addresses by role
Measure = Callable[..., list[dict[str, Any]]]


def figures(**counted: float) -> Statistics:
    """Of a generation with these, and nothing else."""
    return replace(NOTHING, **counted)  # type: ignore[arg-type]


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


@contextmanager
def in_a_thread(target: Callable[[], Awaitable[Serving]], drafter: Callable[[], Awaitable[Serving]]) -> Iterator[Pair]:
    """Addresses of a target and a drafter that run in a thread of this process for the time of the block."""
    ready: SimpleQueue[Pair] = SimpleQueue()
    over = Event()

    async def serve() -> None:
        async with await target() as first, await drafter() as second:
            ready.put({"target": first.address, "drafter": second.address})
            await asyncio.to_thread(over.wait)

    thread = Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    yield ready.get(timeout=300)
    over.set()
    thread.join()


@pytest.fixture(scope="session")
def addresses(target_folder: Path, drafter_folder: Path) -> Iterator[Pair]:  # noqa: F811
    """Of a target and a drafter with different vocabularies."""
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        unhurry(patch)
        found = stack.enter_context(
            in_a_thread(
                lambda: target_server(ServeTarget(ModelOptions(str(target_folder)), AT_ONCE)),
                lambda: drafter_server(ServeDrafter(ModelOptions(str(drafter_folder)), AT_ONCE)),
            )
        )
        patch.undo()
        yield found


@pytest.fixture
def started(addresses: Pair, monkeypatch: pytest.MonkeyPatch) -> list[Wanted | Served]:
    """What was to be started, in order."""
    asked: list[Wanted | Served] = []

    @asynccontextmanager
    async def running(wanted: Sequence[Wanted]) -> AsyncIterator[list[Running]]:
        asked.extend(wanted)
        yield [Running(addresses[one.role], PROCESS) for one in wanted]

    @asynccontextmanager
    async def service(role: str, served: Served, core: int | None, distant: bool) -> AsyncIterator[Distant]:
        asked.append(served)
        yield Distant(addresses[role], None)

    monkeypatch.setattr(workload, "running", running)
    monkeypatch.setattr(controller, "service", service)
    return asked

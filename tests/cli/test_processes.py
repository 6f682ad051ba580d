"""Services as processes of a command: they end with it, however it ends."""

import asyncio
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from crossdraft.cli import processes
from crossdraft.cli.processes import Wanted, running
from crossdraft.cli.running import CommandFailed, Interrupted, UsageError, run_to_end
from crossdraft.config.engine import EngineOptions
from crossdraft.engine.served_model import ModelOptions

READY = """
import json, os, signal
print(json.dumps({"address": str(os.getpid())}), flush=True)
signal.pause()
"""
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)" + READY
FAILED = "import sys; sys.exit('noise\\ncrossdraft: the reason')"
GONE = "pass"


@dataclass(frozen=True)
class Program(Wanted):
    """In place of a service: a program whose address is its process id."""

    program: str = READY

    def command(self) -> list[str]:
        return [sys.executable, "-c", self.program]


def wanted(program: str = READY, role: str = "target") -> Program:
    return Program(role, "", 1, program=program)


def alive(process: str) -> bool:
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(
    ("given", "typed", "captured"),
    [
        ({}, (), None),
        ({"cuda_graph_sizes": (1, 8)}, ("--cuda-graph-sizes", "1,8"), (1, 8)),
        ({"cuda_graph_sizes": (1,), "enforce_eager": True}, ("--enforce-eager", "--cuda-graph-sizes", "1"), ()),
    ],
)
def test_sizes_of_graphs_reach_a_model(given: dict[str, Any], typed: tuple[str, ...], captured: object) -> None:
    options = EngineOptions(**given)
    assert options.arguments == typed
    assert ModelOptions.of("bundled:target", options).captured == captured


async def ended(address: str) -> None:
    while True:
        if not processes.patience().lives(address):
            return
        await asyncio.sleep(0)


async def test_they_run_for_the_time_of_the_block() -> None:
    async with running([wanted(), wanted(role="drafter")]) as found:
        assert [alive(one.address) for one in found] == [True, True]
    assert [alive(one.address) for one in found] == [False, False]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_them(number: signal.Signals) -> None:
    started: list[str] = []

    async def work() -> None:
        async with running([wanted(), wanted()]) as found:
            started.extend(one.address for one in found)
            os.kill(os.getpid(), number)
            await asyncio.Event().wait()

    with pytest.raises(Interrupted) as raised:
        run_to_end(work())
    assert raised.value.number == number
    assert [alive(address) for address in started] == [False, False]


async def test_one_that_ignores_sigterm_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "END_SECONDS", 0.05)
    async with running([wanted(STUBBORN)]) as (found,):
        pass
    assert not alive(found.address)


async def test_one_that_does_not_start_is_quoted_and_ends_the_others(tmp_path: Path) -> None:
    note = tmp_path / "note"
    program = f"import os; open({str(note)!r}, 'w').write(str(os.getpid()))\n{READY}"
    with pytest.raises(CommandFailed, match="the drafter did not start: the reason"):
        async with running([wanted(program), wanted(FAILED, "drafter")]):
            raise AssertionError("it cannot have started")
    assert not alive(note.read_text())


async def test_what_is_wrong_with_its_options_is_wrong_usage_here_too() -> None:
    wrong = "import sys; print('crossdraft: the reason', file=sys.stderr); sys.exit(2)"
    with pytest.raises(UsageError, match="the target did not start: the reason"):
        async with running([wanted(wrong)]):
            raise AssertionError("it cannot have started")


async def test_one_that_is_slow_is_waited_for_and_asked_while_it_lives(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    noted = tmp_path / "noted"
    monkeypatch.setattr(processes, "NOTE_SECONDS", 0.001)
    monkeypatch.setattr(processes, "print", lambda text, file: noted.write_text(text), raising=False)
    assert not processes.patience().lives("1")
    slow = f"import os\nwhile not os.path.exists({str(noted)!r}): pass\n{READY}"
    async with running([wanted(slow)]) as (found,):
        assert processes.patience(target_seconds=7.0).target_seconds == 7
        assert processes.patience().lives(found.address)
        os.kill(found.process_id, signal.SIGKILL)
        await ended(found.address)
    assert "the target is still starting" in noted.read_text()


async def test_one_that_ends_while_it_is_waited_for_is_not_waited_for_any_more() -> None:
    with pytest.raises(CommandFailed, match="the target did not start: it printed no error"):
        async with running([wanted(GONE)]):
            raise AssertionError("it cannot have started")

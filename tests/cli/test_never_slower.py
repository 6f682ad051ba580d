"""`crossdraft bench never-slower`: bad drafters that do what they are said to do, beside none."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from crossdraft.bench import faults
from crossdraft.bench.faults import NeverSlowerPlan, dead, slow
from crossdraft.bench.overlap import Distant, Served
from crossdraft.console.processes import Running
from tests.cli.conftest import Cli

PLAN = NeverSlowerPlan(Served("target"), Served("drafter", "1,0"), (1.0,), None, ("one", "two"), 32)
MORTAL = 1234  # not the id of a process: nothing is killed with it


@pytest.fixture
def asked(pair: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> list[Served]:
    """Drafters that were to be started; the services that are there take their places."""
    drafters: list[Served] = []

    @asynccontextmanager
    async def target_service(target: Served) -> AsyncIterator[Running]:
        yield Running(pair[1], 0)

    @asynccontextmanager
    async def drafter_service(drafter: Served, distant: bool) -> AsyncIterator[Distant]:
        drafters.append(drafter)
        yield Distant(pair[3], MORTAL, None)

    monkeypatch.setattr(faults, "target_service", target_service)
    monkeypatch.setattr(faults, "drafter_service", drafter_service)
    return drafters


def test_every_kind_is_compared_on_every_prompt(
    cli: Cli, asked: list[Served], drafter_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda process, number: killed.append((process, number)))
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    prompts.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("The quick", "A brown fox")))
    options = ("--drafter", drafter_folder, "--temperature", 1, "--tokens", 16, "--json", out)
    outcome = cli("bench", "never-slower", "--prompts", prompts, *options)
    assert outcome.code == 0, outcome.err
    verdicts = json.loads(out.read_text())["verdicts"]
    names = [verdict["drafter"] for verdict in verdicts]
    assert names == ["random weights", "500 ms an answer", "dead from the start", "killed in mid-stream"]
    assert all(len(verdict["ratios"]) == 2 for verdict in verdicts)
    assert all(name in outcome.out for name in names)
    assert [served.pace for served in asked] == [None, None, "500,0", "500,0", None, None]
    assert asked[0].model != str(drafter_folder) == asked[2].model
    assert killed == [(MORTAL, signal.SIGKILL)] * 2
    assert verdicts[2]["accepted"] == 0


async def test_nobody_listens_where_the_dead_one_is() -> None:
    async with dead(PLAN) as bad:
        host, _, port = bad.address.rpartition(":")
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(host, int(port))
        assert bad.mortal is None


async def test_the_slow_one_is_the_good_one_with_another_pace(asked: list[Served]) -> None:
    async with slow(PLAN):
        pass
    assert asked == [Served("drafter", "500,0")]


def test_outputs_are_as_long_as_was_asked() -> None:
    request = PLAN.request(1.0, 1)
    assert (request.prompt, request.max_tokens, request.ignore_eos) == ("two", 32, True)


def test_wrong_options_are_refused_before_anything_starts(cli: Cli, asked: list[Served]) -> None:
    outcome = cli("bench", "never-slower", "--temperature", -1)
    assert (outcome.code, asked) == (2, [])
    assert "temperature must be 0 or more" in outcome.err

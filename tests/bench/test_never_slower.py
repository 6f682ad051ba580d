"""`crossdraft bench never-slower`: bad drafters that do what they are said to do, beside none."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from crossdraft.bench.commands import NeverSlowerPlan
from crossdraft.bench.faults import NeverSlower, dead, slow
from crossdraft.bench.services import Served
from tests.bench.conftest import PROCESS, Measure
from tests.cli.conftest import Cli

PLAN = NeverSlower(NeverSlowerPlan(drafter="drafter", pace_drafter="1,0", tokens=32))


def test_every_kind_is_compared_on_every_prompt(
    measure: Measure,
    started: list[Served],
    drafter_folder: Path,
    prompts_file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda process, number: killed.append((process, number)))
    options = ("--drafter", drafter_folder, "--temperature", 1, "--tokens", 16, "--limit", 2)
    verdicts = measure("never-slower", "--prompts", prompts_file, *options)
    names = [verdict["drafter"] for verdict in verdicts]
    assert names == ["random weights", "500 ms an answer", "dead from the start", "killed in mid-stream"]
    assert all(len(verdict["ratios"]) == 2 for verdict in verdicts)
    drafters = started[1:]
    assert [served.pace for served in drafters] == [None, None, "500,0", "500,0", None, None]
    assert drafters[0].model != str(drafter_folder) == drafters[2].model
    assert killed == [(PROCESS, signal.SIGKILL)] * 2
    assert verdicts[2]["accepted"] == 0


async def test_nobody_listens_where_the_dead_one_is() -> None:
    async with dead(PLAN.drafter) as bad:
        host, _, port = bad.address.rpartition(":")
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(host, int(port))
        assert bad.process_to_kill is None


async def test_the_slow_one_is_the_good_one_with_another_pace(started: list[Served]) -> None:
    async with slow(PLAN.drafter):
        pass
    assert started == [Served("drafter", "500,0")]


def test_outputs_are_as_long_as_was_asked() -> None:
    request = PLAN.request(1.0, 1)
    assert (request.prompt, request.max_tokens, request.ignore_eos) == (PLAN.prompts[1], 32, True)


def test_wrong_options_are_refused_before_anything_starts(cli: Cli, started: list[Served]) -> None:
    outcome = cli("bench", "never-slower", "--temperature", -1)
    assert (outcome.code, started) == (2, [])
    assert "temperature must be 0 or more" in outcome.err

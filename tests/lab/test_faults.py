"""`crossdraft bench kills` and `cuts`: what counts as a pause, what as a broken stream, and services that come back."""

import os
import socket
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from crossdraft.cli.processes import Wanted
from crossdraft.cli.running import CommandFailed
from crossdraft.lab.faults import OutputStream, check_undisturbed, verdict_of
from crossdraft.lab.services import Killable
from tests.cli.conftest import Cli
from tests.lab.conftest import PROMPTS, Measure

LISTENS = """
import json, os, signal, socket, sys
listening = socket.create_server(("127.0.0.1", int(sys.argv[-1])))
print(json.dumps({"address": "127.0.0.1:%d" % listening.getsockname()[1]}), flush=True)
signal.pause()
"""


def test_the_next_token_after_a_moment() -> None:
    stream = OutputStream(0, [1.0, 2.0, 5.0])
    assert stream.next_token(2.0) == 3.0
    assert stream.next_token(0.25) == 0.75
    assert stream.next_token(5.0) is None


def test_the_longest_pause_is_counted_from_the_moment_and_may_begin_later() -> None:
    stream = OutputStream(0, [1.0, 1.5, 4.0, 9.0])
    assert stream.pause(0.5, 0.0) == 0.5
    assert stream.pause(0.5, 1.0) == 2.5
    assert stream.pause(2.0, 0.0) == 2.0  # under way: from the moment on
    assert stream.pause(0.5, 60.0) == 5.0
    assert stream.pause(9.0, 1.0) is None


def test_streams_that_broke_and_texts_that_differ_are_told_apart() -> None:
    undisturbed = [OutputStream(0, text="abc"), OutputStream(1, text="xyz")]
    ended = [
        OutputStream(0, text="abc"),
        OutputStream(1, text="xy"),
        OutputStream(0, text="axc"),
        OutputStream(1, error="no target"),
    ]
    broken, differ, faults = verdict_of(ended, undisturbed)
    assert (broken, differ) == (1, 2)
    assert faults == (
        "stream 1: no target",
        "stream 1: at character 2 '' instead of 'z'",
        "stream 0: at character 1 'xc' instead of 'bc'",
    )


def test_nothing_is_disturbed_where_a_stream_breaks_by_itself() -> None:
    assert check_undisturbed([OutputStream(0, [1.0, 2.0, 5.0]), OutputStream(1, [1.0, 2.0])]) == 1.0
    with pytest.raises(CommandFailed, match="no target"):
        check_undisturbed([OutputStream(0, [1.0, 2.0]), OutputStream(1, error="no target")])


@dataclass(frozen=True)
class Listener(Wanted):
    """In place of a service."""

    def command(self) -> list[str]:
        return [sys.executable, "-c", LISTENS, *self.more]


async def test_a_service_that_is_killed_comes_back_on_its_port() -> None:
    async with AsyncExitStack() as stack:
        first = await Killable.started(Listener("target", "", 1), stack)
        first.kill()
        second = await first.restarted()
        assert second.address == first.address
        assert second.running.process_id != first.running.process_id
        host, port = second.address.split(":")
        socket.create_connection((host, int(port))).close()
    with pytest.raises(ProcessLookupError):
        os.kill(second.running.process_id, 0)


@pytest.mark.full  # services start five times; tests/endtoend/test_failures.py kills too
def test_streams_come_through_kills(measure: Measure, target_folder: Path, drafter_folder: Path) -> None:
    found = measure(
        *("kills", "--prompts", PROMPTS, "--target", target_folder, "--drafter", drafter_folder),
        *("--limit", 2, "--tokens", 16, "--times", 1, "--quiet", 0, 0.1, "--pace-target", "100,0"),
    )
    assert [one["name"] for one in found] == ["drafter", "target"]
    assert [(one["broken"], one["differ"]) for one in found] == [(0, 0), (0, 0)]
    assert all(one["struck"] for one in found)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("kills", "--quiet", "2", "1"), "the shorter one first"),
        (("cuts", "--seconds", "0", "1"), "above 0"),
        (("cuts", "--delay-ms", "-1"), "--delay-ms must be between 0 and 60000"),
    ],
)
def test_what_means_nothing_is_refused(cli: Cli, options: tuple[str, ...], complaint: str) -> None:
    cli("bench", *options, "--prompts", PROMPTS).failed(complaint)

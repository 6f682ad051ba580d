"""The command in this process, and a pair of services in others."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from crossdraft.cli.app import main
from tests.client.conftest import nowhere, taken
from tests.services.conftest import drafter_folder, one_thread, target_folder, unhurried
from tests.serving.exposed import samples

__all__ = ["drafter_folder", "nowhere", "one_thread", "taken", "target_folder", "unhurried"]
COMMAND = [sys.executable, "-m", "crossdraft"]
SCRIPT = """
import sys
{}
from crossdraft.cli.app import main
for words in sys.argv[1:]:
    try:
        main(words.split())
    except SystemExit as ended:
        code = ended.code
sys.exit(code)
"""


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def records(self) -> list[dict[str, Any]]:
        """Its output as lines of JSON."""
        return [json.loads(line) for line in self.out.splitlines()]

    def failed(self, complaint: str, code: int = 2, lines: int | None = None) -> None:
        """Asserts that it ended with this code, printed nothing, and said this, in so many lines."""
        assert (self.code, self.out) == (code, "")
        assert complaint in self.err
        assert lines in (None, self.err.count("\n")), self.err

    def says(self, *parts: str, err: str = "", code: int = 0) -> None:
        """Asserts that it ended with this code, and had these in its output, and this in its errors."""
        assert self.code == code, self.err
        assert [part for part in parts if part not in self.out] == []
        assert err in self.err


Cli = Callable[..., Outcome]


@pytest.fixture(autouse=True)
def one_thread_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a command runs here would leave torch as many threads as there are cores, in all tests of this process."""
    monkeypatch.setattr("crossdraft.cli.serve.threads_each", lambda _: 1)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Runs the command in this process."""
    monkeypatch.setattr(os, "environ", os.environ.copy())

    def run(*arguments: object, stdin: bytes = b"") -> Outcome:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        code = ended.value.code
        return Outcome(code if isinstance(code, int) else 0, captured.out, captured.err)

    return run


def lacking(how: str, *commands: str) -> "subprocess.CompletedProcess[str]":
    """Commands in a Python that this line of code has taken something from; the status is the last one's."""
    return subprocess.run(
        [sys.executable, "-c", SCRIPT.format(how), *commands], capture_output=True, text=True, cwd="/"
    )


@contextmanager
def serving(*words: object, status: int = 0) -> Iterator[tuple["subprocess.Popen[str]", dict[str, Any]]]:
    """`crossdraft serve WORDS` and its ready line. It is ended with the block, and must end with this status, and
    without a further line. What it logs is read then: a pipe that is full would stop it."""
    command, pipe = [*COMMAND, "serve", *map(str, words)], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield process, json.loads(process.stdout.readline() or json.dumps({"error": process.communicate()[1]}))
        finally:
            process.terminate()
            out, log = process.communicate()
    assert (process.returncode, out, "Traceback" in log) == (status, "", False), log


def metric(address: str, name: str, **labels: str) -> float:
    """The sum of all samples with these labels that are shown there."""
    text = httpx.get(f"http://{address}/metrics", timeout=60).text
    return sum(value for others, value in samples(text, name) if labels.items() <= others.items())


@pytest.fixture(scope="session")
def served(target_folder: Path, drafter_folder: Path) -> Iterator[list[str]]:
    """Addresses of a running target, a slow one, and a drafter."""
    command = [sys.executable, "-m", "tests.cli.services", str(target_folder), str(drafter_folder)]
    pipe, repository = subprocess.PIPE, Path(__file__).parents[2]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=repository) as process:
        yield json.loads(process.stdout.readline())


@pytest.fixture(scope="session")
def target(served: list[str]) -> str:
    return served[0]


@pytest.fixture(scope="session")
def slow(served: list[str]) -> str:
    """A target whose outputs take some seconds, so that there is a middle to disturb."""
    return served[1]


@pytest.fixture(scope="session")
def pair(served: list[str]) -> tuple[str, ...]:
    """The options that name a running pair, whose vocabularies differ."""
    return "--target", served[0], "--drafter", served[2]

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

import pytest
import torch

from crossdraft.cli.app import main
from crossdraft.client import discovery
from crossdraft.rpc.clients import Patience
from tests.rpc.unhurried import unhurry
from tests.services.conftest import save
from tests.text.kinds import kind

COMMAND = [sys.executable, "-m", "crossdraft.cli"]


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """No service is taken for lost, or done without, because the machine stands still for seconds."""
    unhurry(monkeypatch)
    patience = Patience()
    monkeypatch.setattr(discovery, "OTHERS_SECONDS", patience.describe_seconds)


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


Cli = Callable[..., Outcome]


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


@contextmanager
def serving(role: str, folder: Path, *options: str) -> Iterator[tuple["subprocess.Popen[str]", dict[str, Any]]]:
    """A service's process and its ready line; it is ended with the block."""
    # Nobody reads what it logs of sessions while they run: a pipe that is full would stop the service.
    quiet = () if "--log-level" in options else ("--log-level", "warning")
    own = ("--model", str(folder), "--threads", "1", "--grace-seconds", "0", *quiet)
    command = [*COMMAND, "serve", role, *own, *options]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, json.loads(process.stdout.readline())
        finally:
            process.terminate()


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("target"), kind("gpt2"), 128)


@pytest.fixture(scope="session")
def drafter_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("drafter"), kind("llama2"), 64)


@pytest.fixture(scope="session")
def target(target_folder: Path) -> Iterator[str]:
    """The address of a running target."""
    with serving("target", target_folder) as (_, ready):
        yield ready["address"]


@pytest.fixture(scope="session")
def pair(target: str, drafter_folder: Path) -> Iterator[tuple[str, ...]]:
    """The options that name a running pair, whose vocabularies differ."""
    with serving("drafter", drafter_folder) as (_, ready):
        yield "--target", target, "--drafter", ready["address"]

"""The fronts and what bad clients leave behind: the right answers, and nothing of theirs stays in any process.

Equal rounds come after one that warms up; what a process keeps, it would keep of each. What is only not yet given back
after one of them is gone after another. The single answers are in tests/serving.
"""

import gc
import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from crossdraft.rpc.authority import Purpose, Subject, issue, new_authority
from crossdraft.rpc.errors import Unreachable
from tests.cli.bad_clients import CROWD, KEY, MALFORMED, SILENT, Grpc, Http, Statuses, idle
from tests.cli.conftest import COMMAND, serving
from tests.rpc.sessions import TargetClient
from tests.services.conftest import save
from tests.text.kinds import kind

CONTEXT = 2048  # tokens
CACHE = ("--cache-mib", "16")  # a small part of what the processes have
PLACES = 16  # outputs at once
MOST_GROWTH = 24.0  # MiB of one process, from one round to the next; what is free there goes up and down by 20
MOST_FILES = 2  # likewise
LEAST_ROUNDS, ROUNDS = 3, 6  # the third is the last unless more is kept after it than after the second
STALLED = "6"  # seconds; more than a machine may stand still
# torch keeps what it has prepared for each shape of a batch, up to a bound that takes many rounds to reach.
FORGETFUL = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "1", "LRU_CACHE_CAPACITY": "1"}
RIGHT: dict[str, dict[str, Any]] = {
    "http": {
        "wrong key": {"401 invalid_api_key": 20},
        "too large": {"413 request_too_large": 3},
        "too long": {"400 context_length_exceeded": 3},
        "silent": {"given up": SILENT},
    },
    "grpc": {
        "wrong key": {"KeyRefused": 20},
        "too large": {"TooLarge": 3},
        "too long": {"BadRequest": 3},
        "silent": {"CANCELLED": SILENT},
    },
}
CROWDED = {"http": ("200", "429 overloaded"), "grpc": ("OK", "Overloaded")}
REFUSALS = {"http": ("400", "401", "404", "405", "413", "closed"), "grpc": ("INVALID_ARGUMENT", "UNIMPLEMENTED")}


@dataclass(frozen=True)
class Process:
    """One process of all."""

    name: str
    id: int
    metrics: str  # host:port

    @property
    def mebibytes(self) -> float:
        """That it has in memory."""
        status = Path(f"/proc/{self.id}/status").read_text()
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:")) / 1024

    @property
    def files(self) -> int:
        """That it has open, sockets among them."""
        return len(list(Path(f"/proc/{self.id}/fd").iterdir()))


@dataclass(frozen=True)
class Stack:
    """A front with both APIs, and the services behind it."""

    clients: dict[str, Http | Grpc]
    processes: tuple[Process, ...]
    target: str


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    """Target and drafter with mutual TLS, and the front before them."""
    authority = new_authority(10)
    issued = issue(authority, Subject(("127.0.0.1",), Purpose.BOTH), 5)
    tls: list[str] = []
    for option, raw in (("ca", authority.certificate), ("cert", issued.certificate), ("key", issued.key)):
        (tmp_path / option).write_bytes(raw)
        tls += [f"--tls-{option}", str(tmp_path / option)]
    for name, some in (("target", "gpt2"), ("drafter", "llama2")):
        (tmp_path / name).mkdir()
        save(tmp_path / name, kind(some), CONTEXT)
    keys = tmp_path / "keys"
    keys.write_text(f"me {KEY}\n")
    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, FORGETFUL))
        one, target = stack.enter_context(serving("target", tmp_path / "target", *tls, *CACHE, "--metrics-port", "0"))
        two, drafter = stack.enter_context(
            serving("drafter", tmp_path / "drafter", *tls, *CACHE, "--metrics-port", "0")
        )
        where = ("--target", target["address"], "--drafter", f"small={drafter['address']}", *tls)
        pid, ready = stack.enter_context(front(keys, *where))
        address = ready["address"]
        processes = (
            Process("target", one.pid, target["metrics"]),
            Process("drafter", two.pid, drafter["metrics"]),
            Process("front", pid, address),
        )
        yield Stack({"http": Http(address), "grpc": Grpc(ready["grpc"], address)}, processes, target["address"])


@contextmanager
def front(keys: Path, *where: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """The process of a front, and its ready line."""
    limits = ("--max-outputs", str(PLACES), "--stalled-seconds", STALLED, "--grace-seconds", "0", "--log-level=error")
    ports = ("--port", "0", "--grpc-port", "0")
    command = [*COMMAND, "serve", "http", "--model", "toy", *ports, "--api-keys", str(keys), *where, *limits]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.pid, json.loads(process.stdout.readline())
        finally:
            process.terminate()
    assert process.returncode == 0


def grown(kept: Sequence[Sequence[tuple[float, int]]]) -> list[int]:
    """Places of the processes that have kept more MiB or files after each of the later rounds than after the second."""
    _, before, *later = kept
    return [
        place
        for place, (mebibytes, files) in enumerate(before)
        if min(one[place][0] for one in later) > mebibytes + MOST_GROWTH
        or min(one[place][1] for one in later) > files + MOST_FILES
    ]


@pytest.mark.full
async def test_bad_clients_are_answered_and_leave_nothing(stack: Stack) -> None:
    kept: list[list[tuple[float, int]]] = []  # after each round, of each process
    while len(kept) < LEAST_ROUNDS or (grown(kept) and len(kept) < ROUNDS):
        for api, clients in stack.clients.items():
            answered_right(api, await clients.round())
        async with TargetClient(stack.target) as stranger:
            with pytest.raises(Unreachable, match="takes only clients with a valid certificate"):
                await stranger.describe()
        await idle(*[one.metrics for one in stack.processes])
        gc.collect()
        kept.append([(one.mebibytes, one.files) for one in stack.processes])
    names = [one.name for one in stack.processes]
    assert [names[place] for place in grown(kept)] == [], kept


def answered_right(api: str, answers: dict[str, Statuses]) -> None:
    """Asserts that every client of a round was answered as it should be."""
    malformed, crowd = answers.pop("malformed"), answers.pop("crowd")
    assert answers == RIGHT[api]
    assert sum(malformed.values()) == MALFORMED
    assert all(status.startswith(REFUSALS[api]) for status in malformed), malformed
    assert set(crowd) <= set(CROWDED[api]), crowd
    assert crowd[CROWDED[api][0]] >= PLACES
    assert sum(crowd.values()) == CROWD

"""Minutes of all kinds of requests while services die: all texts are those of plain decoding, and nothing is left.

CROSSDRAFT_SOAK_SECONDS says how long; 60 shows whether it works at all.
"""

import ast
import asyncio
import os
import random
import re
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest

from crossdraft.cli.processes import Running, Wanted, running
from crossdraft.config.engine import EngineOptions
from crossdraft.text.letters import common_length
from tests import prompts
from tests.endtoend.stack import Copying
from tests.rpc.clock import HANGS
from tests.rpc.linked import News
from tests.started import Killable

pytestmark = pytest.mark.full
SECONDS = float(os.environ.get("CROSSDRAFT_SOAK_SECONDS", "420"))
WARM = 0.3  # of them, after which memory and connections have their level
WORKERS = 4
CLIENTS = 8
OUTPUTS = 10  # of a client's connection, which one worker serves; and between two kills
CANCELLED = 0.2  # of the outputs
PATIENT = "600"  # seconds: no service is lost because the machine is slow
ENGINE = EngineOptions(cache_mib=128)
GROWTH, SLACK = 1.05, 24 << 20  # of a process's memory: a factor, and bytes
SOCKETS = 2 * CLIENTS  # of clients that have just left, or are about to

# What an output is a function of, then the ways to it.
BODIES: tuple[dict[str, Any], ...] = (
    {"temperature": 0, "max_tokens": 48},
    {"temperature": 0, "max_tokens": 40, "frequency_penalty": 0.5, "logit_bias": {"300": 2.0}, "bad_words": ["the"]},
    {"seed": 5, "max_tokens": 48},
    {"seed": 6, "temperature": 0.8, "top_p": 0.95, "repetition_penalty": 1.1, "max_tokens": 32, "logprobs": 2},
)
ALWAYS: tuple[dict[str, Any], ...] = (
    {},
    {"overlap": "on"},
    {"overlap": "on", "branches": 2, "branch_width": 2},
    {"overlap": "off", "k": 4},
    {"overlap": "off", "k": 4, "tree_nodes": 12},
    {"drafter": "copying"},
    {"drafter": "none"},
)
GREEDY = (
    *ALWAYS,
    *({"method": method, "overlap": mode} for method in ("slem", "union", "tli", "coupled") for mode in ("on", "off")),
    {"method": "slrs", "overlap": "off", "k": 3},
)
VLLM_FIELDS = ("bad_words", "repetition_penalty")  # that OpenAI's client does not know
PROMPTS = prompts.PROMPTS[:6]


@dataclass(frozen=True)
class Front:
    """`crossdraft serve http` with several workers, which writes its log to a file."""

    options: Sequence[str]
    log: Path
    role: str = "front"

    def command(self) -> list[str]:
        """As it would be typed."""
        waits = ("--target-wait-seconds", PATIENT, "--reply-wait-seconds", PATIENT, "--stalled-seconds", PATIENT)
        own = ("--model", "toy", "--port", "0", "--workers", str(WORKERS), "--until-stdin-ends", *waits, *self.options)
        return [*logging_to(self.log), sys.executable, "-m", "crossdraft", "serve", "http", *own]


def logging_to(log: Path) -> tuple[str, ...]:
    """What stands before a command whose stderr goes to a file."""
    return ("sh", "-c", f'exec "$0" "$@" 2>>{log}')


@dataclass(frozen=True)
class Level:
    """What a process holds."""

    memory: int  # resident bytes
    sockets: int


def level_of(process: int) -> Level:
    proc = Path(f"/proc/{process}")
    pages = int((proc / "statm").read_text().split()[1])
    return Level(pages * os.sysconf("SC_PAGE_SIZE"), sum(name.startswith("socket:") for name in _files(proc)))


def _files(proc: Path) -> Iterator[str]:
    for file in (proc / "fd").iterdir():
        try:
            yield os.readlink(file)
        except FileNotFoundError:  # closed meanwhile
            continue


@dataclass
class Soak:
    """Clients of one server, and the services behind it.

    One target and one drafter are killed again and again; the others show whether anything grows.
    """

    url: str
    metrics: list[str]  # addresses of the services' that live on
    processes: dict[str, int]  # by name, that live on
    victims: list[Killable]
    rng: random.Random = field(default_factory=lambda: random.Random(38))
    texts: dict[tuple[int, int], str] = field(default_factory=dict)  # by body and prompt
    counts: Counter[str] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)
    news: News = field(default_factory=News)

    async def expect(self) -> None:
        """The texts of plain decoding."""
        pairs = [(body, prompt) for body in range(len(BODIES)) for prompt in range(len(PROMPTS))]
        async with self.client() as client:
            made = [self.text(client, body, prompt, {"drafter": "none"}, None) for body, prompt in pairs]
            self.texts = dict(zip(pairs, await asyncio.gather(*made), strict=True))

    def client(self) -> openai.AsyncOpenAI:
        """With connections of its own."""
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=float(PATIENT))

    async def text(
        self, client: openai.AsyncOpenAI, body: int, prompt: int, how: dict[str, Any], leaves_after: int | None
    ) -> str:
        """An output, perhaps only its beginning."""
        known = {name: value for name, value in BODIES[body].items() if name not in VLLM_FIELDS}
        more = {name: BODIES[body][name] for name in VLLM_FIELDS if name in BODIES[body]}
        extra = {**more, "speculative": how, "ignore_eos": True}
        parts: list[str] = []
        async with await client.completions.create(
            model="toy", prompt=PROMPTS[prompt], stream=True, extra_body=extra, **known
        ) as stream:
            async for chunk in stream:
                parts.append(chunk.choices[0].text)
                if leaves_after is not None and len(parts) >= leaves_after:
                    break
        return "".join(parts)

    async def one(self, client: openai.AsyncOpenAI) -> None:
        """An output of any kind, compared with plain decoding."""
        body, prompt = self.rng.randrange(len(BODIES)), self.rng.randrange(len(PROMPTS))
        how = self.rng.choice(ALWAYS if "seed" in BODIES[body] else GREEDY)
        leaves = self.rng.randint(1, 12) if self.rng.random() < CANCELLED else None
        text, due = await self.text(client, body, prompt, how, leaves), self.texts[body, prompt]
        self.counts["cancelled" if leaves else "finished"] += 1
        if text != (due[: len(text)] if leaves else due):
            at = common_length(text, due)
            self.differences.append(f"{BODIES[body]} {how} at {at}: {text[at:][:30]!r} instead of {due[at:][:30]!r}")
        self.news.changed()

    @property
    def outputs(self) -> int:
        return self.counts["finished"] + self.counts["cancelled"]

    async def soak(self, seconds: float) -> None:
        """Clients and kills for so long, and until nothing is under way."""
        until, over = time.monotonic() + seconds, asyncio.Event()
        async with asyncio.TaskGroup() as killing:
            killing.create_task(self._kill(over))
            async with asyncio.TaskGroup() as group:
                for _ in range(CLIENTS):
                    group.create_task(self._ask(until))
            over.set()
            self.news.changed()
        await self._settled()

    async def _ask(self, until: float) -> None:
        while time.monotonic() < until:
            async with self.client() as client:
                for _ in range(OUTPUTS):
                    await self.one(client)

    async def _kill(self, over: asyncio.Event) -> None:
        """One service after some outputs; the next when it is back, and some more were made."""
        while not over.is_set():
            due = self.outputs + OUTPUTS
            await self.news.until(lambda: self.outputs >= due or over.is_set())  # noqa: B023
            place = self.rng.randrange(len(self.victims))
            self.victims[place].kill()
            self.victims[place] = await self.victims[place].restarted()
            self.counts[f"killed {self.victims[place].wanted.role}"] += 1

    async def _settled(self) -> None:
        """Nothing is under way any more, in the server and in the services."""
        late = time.monotonic() + HANGS
        while left := [line async for line in self._left()]:
            assert time.monotonic() < late, left

    async def _left(self) -> AsyncIterator[str]:
        gauges = r"^crossdraft_(num_requests|service_open_sessions|kv_cache_usage).*"
        async with httpx.AsyncClient(timeout=float(PATIENT)) as client:
            for address in (self.url, *self.metrics):
                for line in (await client.get(f"{address}/metrics")).text.splitlines():
                    if re.match(gauges, line) and float(line.rpartition(" ")[2]):
                        yield f"{address} {line}"

    def levels(self) -> dict[str, Level]:
        return {name: level_of(process) for name, process in self.processes.items()}


async def started(stack: AsyncExitStack, logs: Path) -> Soak:
    """The services and the server; what they log is in files of a folder."""
    more = ("--log-level", "warning")
    kept = [
        Wanted(role, model, 1, (*more, "--metrics-port", "0"), logging_to(logs / f"{role}.log"), ENGINE)
        for role, model in (("target", "bundled:target"), ("drafter", "bundled:drafter-a"))
    ]
    found = await stack.enter_async_context(running([*kept, Copying(more)]))
    target, drafter, copying = found
    victims = [
        await Killable.started(replace(one, more=more, prefix=logging_to(logs / f"killed-{one.role}.log")), stack)
        for one in kept
    ]
    targets = ",".join((target.address, victims[0].address))
    drafters = ",".join((drafter.address, victims[1].address))
    names = ("--drafter", f"a={drafters}", "--drafter", f"copying={copying.address}")
    front = Front(("--target", targets, *names, *more), logs / "front.log")
    (server,) = await stack.enter_async_context(running([front]))
    metrics = [f"http://{one.ready['metrics']}" for one in (target, drafter)]
    return Soak(f"http://{server.address}", metrics, _processes(server, target, drafter), victims)


def _processes(server: Running, target: Running, drafter: Running) -> dict[str, int]:
    workers = ast.literal_eval(server.ready["workers"])
    assert len(workers) == WORKERS
    named = {f"worker {number}": process for number, process in enumerate(workers)}
    return {"target": target.process_id, "drafter": drafter.process_id, **named}


async def test_nothing_differs_and_nothing_is_left(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        soak = await started(stack, tmp_path)
        await soak.expect()
        await soak.soak(WARM * SECONDS)
        warm, before = soak.levels(), soak.outputs
        await soak.soak((1 - WARM) * SECONDS)
        end = soak.levels()
    print(dict(soak.counts), *(f"\n{name}: {warm[name]} {end[name]}" for name in warm))  # what `pytest -rP` shows
    assert soak.outputs > before
    assert not soak.differences
    for name, level in end.items():
        assert level.memory <= GROWTH * warm[name].memory + SLACK, name
        assert level.sockets <= warm[name].sockets + SOCKETS, name
    logs = await asyncio.to_thread(lambda: [file.read_text() for file in tmp_path.glob("*.log")])
    assert logs
    assert not [log for log in logs if "Traceback" in log]

"""Measures the n-gram drafter on repetitive text: edits of files, JSON, a chat of several turns.

    python -m tests.drafter.repetitive [--pace 20,0.05] [--turns 5] [--request JSON] [--memory-mib 32] [--json FILE]

The target is scripted: of each prompt in `repetitive.json` it knows the answer, and writes it greedily, token by token
of the bundled target's tokenizer. A pass takes at least A + B n ms, as with --pace. No model that does such tasks is
small enough to come along; what the drafter is good for depends on prompts, answers and tokenizer only, and it knows
nothing of the answers. All three processes are real services, connected as always.

Configurations take turns on the same prompts, within each turn one prompt after the other: no drafter; "alone", where
requests share nothing; "shared", where those of a turn have one scope (`cache_salt`), which has seen nothing before;
and "again", where those of all turns have one, so that each was asked before. With an older checkout that has no
scopes, give --memory-mib -1: there is no "shared" and no "again" then.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from crossdraft.client import GenerationRequest, SamplingOptions, connect
from crossdraft.client.api import Pipeline
from crossdraft.engine.loader import load_model
from crossdraft.lab.emulation.steps import Pace
from crossdraft.rpc.handlers import TARGET, Replies
from crossdraft.rpc.server import Listening, Server
from crossdraft.types.messages import Description, FetchRow, OpenTarget, Pass, PassDone, RowFetched, RunTo, Sample
from crossdraft.types.rows import Row

WRONG = 1  # the id that follows whatever is not in the script


@dataclass(frozen=True)
class Case:
    """A task whose answer repeats much of what was there before, and what a model that does it writes."""

    kind: str
    name: str
    prompt: str
    answer: str


CASES = tuple(Case(**case) for case in json.loads(Path(__file__).with_suffix(".json").read_text("utf-8")))


class ScriptedTarget:
    """A service whose model writes the answers of all cases."""

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self.description: Description = load_model("bundled:target", "float32").description
        tokenizer = Tokenizer.from_str(self.description.tokenizer_json)
        self.scripts: dict[tuple[int, ...], tuple[int, ...]] = {}
        for case in CASES:
            prompt, whole = (tuple(tokenizer.encode(text).ids) for text in (case.prompt, case.prompt + case.answer))
            if whole[: len(prompt)] != prompt:
                whole = prompt + tuple(tokenizer.encode(case.answer).ids)
            self.scripts[prompt] = (*whole[len(prompt) :], self.description.stops[0])

    async def open(self, request: OpenTarget, replies: Replies[Any]) -> "ScriptedSession":
        return ScriptedSession(self, request, replies)

    async def close(self) -> None:
        """Nothing runs."""


class ScriptedSession:
    """One output."""

    def __init__(self, target: ScriptedTarget, opening: OpenTarget, replies: Replies[Any]) -> None:
        self._target, self._replies = target, replies
        self._script = target.scripts[opening.prompt]
        self._text: tuple[int, ...] = ()
        self._known = 0  # tokens that were computed
        self._waiting: deque[Pass | FetchRow] = deque()
        self._busy: asyncio.Task[None] | None = None
        self._run = 0  # tokens of the run under way

    def receive(self, request: Pass | FetchRow | RunTo) -> None:
        if isinstance(request, RunTo):
            self._run = request.tokens
            return
        self._waiting.append(request)
        if self._busy is None:
            self._busy = asyncio.create_task(self._work())

    def left(self, reply: object) -> None:
        """It sends as much as it has."""

    def close(self) -> None:
        if self._busy is not None:
            self._busy.cancel()

    async def _work(self) -> None:
        while self._waiting:
            match self._waiting.popleft():
                case Pass(run=run) as request if run > 1:
                    await self._draw(request)
                case Pass() as request:
                    await self._pass(request)
                case FetchRow(number, node):
                    self._replies.send(RowFetched(number, node, self._latest[node]))
        self._busy = None

    def _next(self, path: tuple[int, ...]) -> int:
        before = self._text + path
        if len(before) < len(self._script) and self._script[: len(before)] == before:
            return self._script[len(before)]
        return WRONG

    async def _pass(self, request: Pass) -> None:
        self._text += request.committed
        computed = max(1, len(self._text) - self._known) + len(request.tree)
        seconds = await self._step(computed)
        paths = tuple(request.tree.paths())
        drawn = [self._next(paths[node]) for node in request.answered]
        self._latest = {node: Row.certain(token) for node, token in zip(request.answered, drawn, strict=True)}
        nodes = tuple(Sample(token, 0.0) if request.draws else Row.certain(token) for token in drawn)
        self._replies.send(PassDone(request.number, nodes, seconds, fed=computed))

    async def _draw(self, request: Pass) -> None:
        self._text += request.committed
        self._run, drawn, more = request.run, (), True
        while more:
            seconds = await self._step(1)
            token = self._next(drawn)
            drawn += (token,)
            more = len(drawn) < self._run and token not in self._target.description.stops and not self._waiting
            done = PassDone(request.number, (Sample(token, 0.0),), seconds, more=more, fed=1, first=len(drawn) - 1)
            self._replies.send(done)

    async def _step(self, tokens: int) -> float:
        """Seconds that a step of so many tokens took."""
        self._known = len(self._text)
        began = time.perf_counter()
        await asyncio.sleep(self._target.pace.seconds(tokens))
        return time.perf_counter() - began


async def serve(pace: str) -> None:
    async with Server(TARGET, ScriptedTarget(Pace.parsed(pace)), Listening()) as server:
        print(json.dumps({"address": server.address}), flush=True)
        await asyncio.Event().wait()


@asynccontextmanager
async def process(*command: str) -> AsyncIterator[str]:
    """A service as a process; its address."""
    pipe = asyncio.subprocess.PIPE
    started = await asyncio.create_subprocess_exec(sys.executable, "-m", *command, stdin=pipe, stdout=pipe)
    try:
        yield json.loads(await started.stdout.readline())["address"]
    finally:
        started.terminate()
        await started.wait()


async def measured(pipeline: Pipeline, case: Case, settings: dict[str, Any], explain: bool) -> dict[str, Any]:
    """One output; raises AssertionError if it is another text than the script's."""
    request = GenerationRequest.of(case.prompt, max_tokens=600, options=SamplingOptions(0), explain=explain, **settings)
    began, letters, text = time.monotonic(), pipeline.models.tokenization.vocabulary.letters, ""
    async with pipeline.run(request) as generation:
        async for token in generation:
            text += letters[token.id]
    seconds, figures = time.monotonic() - began, generation.statistics
    for decision in generation.decisions if explain else ():
        print(f"{case.name}: {decision}", file=sys.stderr)
    assert text.startswith(case.answer), text
    assert not figures.drafter_lost, figures.drafter_lost
    return {
        "tokens": figures.tokens,
        "seconds": seconds,
        "passes": figures.passes,
        "drafted": figures.draft_tokens,
        "judged": sum(figures.judged_at),
        "accepted": sum(figures.accepted_at),
        "aside": figures.stood_aside,
    }


async def measure(given: argparse.Namespace) -> list[dict[str, Any]]:
    asked, results = json.loads(given.request), []
    scoped = ("shared", "again") if given.memory_mib > 0 else ()
    memory = ("--memory-mib", str(given.memory_mib)) if given.memory_mib >= 0 else ()
    async with AsyncExitStack() as stack:
        start = stack.enter_async_context
        target = await start(process("tests.drafter.repetitive", "--serve", "--pace", given.pace))
        drafter = await start(process("crossdraft.cli", "serve", "ngram", *memory, "--log-level", "warning"))
        pipelines = {"no drafter": await start(connect(target))}
        for name in ("alone", *scoped):
            pipelines[name] = await start(connect(target, drafter, needs_drafter=True))
        for turn in range(-1, given.turns):  # the first one, in which controllers learn, is kept as well
            salts = {"shared": {"cache_salt": f"turn {turn}"}, "again": {"cache_salt": "all turns"}}
            for name, pipeline in pipelines.items():
                for case in CASES:
                    settings = {} if name == "no drafter" else asked | salts.get(name, {})
                    found = await measured(pipeline, case, settings, given.explain)
                    results.append({"turn": turn, "configuration": name, "kind": case.kind, **found})
    return results


def ratio(results: list[dict[str, Any]], turn: int, above: str, below: str) -> float:
    """Of two sums over a turn."""
    sums = [sum(one[field] for one in results if one["turn"] == turn) for field in (above, below)]
    return sums[0] / max(1e-9, sums[1])


def report(results: list[dict[str, Any]]) -> None:
    """Medians over turns, the first left out."""
    print("| prompts | configuration | tokens/pass | tokens/s | to no drafter | accepted of judged | drafted a token |")
    print("|---|---|---|---|---|---|---|")
    turns = sorted({one["turn"] for one in results} - {-1}) or [-1]
    for kind in (*dict.fromkeys(case.kind for case in CASES), "all"):
        plain: list[float] = []
        for name in dict.fromkeys(one["configuration"] for one in results):
            mine = [one for one in results if one["configuration"] == name and kind in (one["kind"], "all")]
            speeds = [ratio(mine, turn, "tokens", "seconds") for turn in turns]
            plain = plain or speeds
            passes, accepted, drafted = (
                statistics.median(ratio(mine, turn, *fields) for turn in turns)
                for fields in (("tokens", "passes"), ("accepted", "judged"), ("drafted", "tokens"))
            )
            gain = statistics.median(ours / others for ours, others in zip(speeds, plain, strict=True))
            speed = statistics.median(speeds)
            print(f"| {kind} | {name} | {passes:.2f} | {speed:.1f} | {gain:.2f} | {accepted:.0%} | {drafted:.1f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pace", default="20,0.05")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--request", default="{}")
    parser.add_argument("--memory-mib", type=int, default=32)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--explain", action="store_true", help="what controllers decided, on stderr")
    parser.add_argument("--serve", action="store_true", help="be the target")
    given = parser.parse_args()
    if given.serve:
        asyncio.run(serve(given.pace))
        return
    results = asyncio.run(measure(given))
    if given.json:
        given.json.write_text(json.dumps(results, indent=1))
    report(results)


if __name__ == "__main__":
    main()

"""transformers' own generation in a process of its own, to compare with: asked over a socket on loopback.

    python -m crossdraft.cli.transformers_process KIND TARGET ASSISTANT THREADS TEMPERATURE MIB DTYPE DEVICE

KIND is `batched` (continuous batching, greedy outputs of one length) or `assisted` (assisted generation, one at a
time). A question is a line of JSON, and so is its answer.
"""

import asyncio
import json
import sys
import time
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from threading import Thread
from typing import Any

from crossdraft.cli.failures import CommandFailed
from crossdraft.cli.serve import end_with_stdin
from crossdraft.cli.throughput_figures import Made
from crossdraft.rpc.heap import settle

BATCHED, ASSISTED = "batched", "assisted"
LONGEST_LINE = 1 << 28  # bytes


@dataclass(frozen=True)
class Question:
    """Outputs that are wanted."""

    prompts: tuple[tuple[int, ...], ...]  # ids
    tokens: int  # of each output
    at_once: int  # under way together; assisted generation makes one after another
    k: int | None = None  # drafted at once by assisted generation; None: its own rule


@dataclass(frozen=True)
class Answer:
    """All of them."""

    outputs: tuple[Made, ...]  # in the order of the prompts
    seconds: float  # from the question to the last token
    forwards: int  # of the target; 0: not known


Answering = Callable[[Question], Answer]


@dataclass(frozen=True)
class TransformersProcess:
    """What is to be started."""

    role: str  # BATCHED or ASSISTED
    target: str  # a model's name
    assistant: str
    threads: int
    temperature: float
    mib: int  # for keys and values of all outputs
    dtype: str = "float32"
    device: str = "cpu"
    prefix: tuple[str, ...] = ()  # what the command is run by: on a core

    def command(self) -> list[str]:
        """As it would be typed. It ends with its standard input."""
        numbers = [str(self.threads), str(self.temperature), str(self.mib), self.dtype, self.device]
        module = [sys.executable, "-m", "crossdraft.cli.transformers_process"]
        return [*self.prefix, *module, self.role, self.target, self.assistant, *numbers]


async def ask(address: str, question: Question) -> Answer:
    """What a process answers; raises CommandFailed."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=LONGEST_LINE)
    try:
        writer.write(json.dumps(asdict(question)).encode() + b"\n")
        line = await reader.readline()
    finally:
        writer.close()
    if not line:
        raise CommandFailed("transformers' process ended before it answered")
    found = json.loads(line)
    if "error" in found:
        raise CommandFailed(f"transformers failed: {found['error']}")
    return answer_of(found)


def answer_of(found: Mapping[str, Any]) -> Answer:
    """From what JSON makes of one."""
    outputs = (Made(tuple(one["ids"]), one["asked"], tuple(one["moments"])) for one in found["outputs"])
    return Answer(tuple(outputs), found["seconds"], found["forwards"])


@contextmanager
def _batched(asked: TransformersProcess) -> Iterator[Answering]:
    from crossdraft.models.batched import Batching, ContinuousBatching

    batching = Batching.best(asked.device, asked.mib)
    with ContinuousBatching(
        asked.target, batching, asked.temperature, asked.threads, asked.dtype, asked.device
    ) as running:

        def answer(question: Question) -> Answer:
            began, before = time.monotonic(), running.forwards
            found = running.generate(question.prompts, question.tokens, question.at_once)
            seconds = time.monotonic() - began
            outputs = tuple(Made(one.ids, one.asked, one.moments) for one in found)
            return Answer(outputs, seconds, running.forwards - before)

        yield answer


@contextmanager
def _assisted(asked: TransformersProcess) -> Iterator[Answering]:
    from crossdraft.models.assisted import AssistedGeneration

    pair = AssistedGeneration(asked.target, asked.assistant, asked.threads, asked.dtype, asked.device)

    def answer(question: Question) -> Answer:
        began = time.monotonic()
        outputs = []
        for prompt in question.prompts:
            at = time.monotonic() - began
            ids, moments = pair.timed(prompt, question.tokens, question.k, asked.temperature)
            outputs.append(Made(ids, at, tuple(at + moment for moment in moments)))
        return Answer(tuple(outputs), time.monotonic() - began, 0)

    yield answer


async def _serve(answering: Answering) -> None:
    """Says where it listens and answers, one question at a time, until the process is ended."""
    one_at_a_time = asyncio.Lock()

    async def connected(reader: StreamReader, writer: StreamWriter) -> None:
        asked = json.loads(await reader.readline())
        prompts = tuple(tuple(ids) for ids in asked["prompts"])
        async with one_at_a_time:
            question = Question(prompts, asked["tokens"], asked["at_once"], asked["k"])
            found = await asyncio.to_thread(_answered, answering, question)
        writer.write(json.dumps(found).encode() + b"\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0, limit=LONGEST_LINE)
    settle()  # as our services do
    port = server.sockets[0].getsockname()[1]
    print(json.dumps({"address": f"127.0.0.1:{port}"}), flush=True)
    await server.serve_forever()


def _answered(answering: Answering, question: Question) -> dict[str, object]:
    """What transformers fails with is the asker's to know."""
    try:
        return asdict(answering(question))
    except (RuntimeError, ValueError) as error:
        return {"error": str(error)}


def main(arguments: Sequence[str]) -> None:
    """Loads the models and serves until its standard input ends."""
    role, target, assistant, threads, temperature, mib, dtype, device = arguments
    Thread(target=end_with_stdin, daemon=True).start()
    asked = TransformersProcess(role, target, assistant, int(threads), float(temperature), int(mib), dtype, device)
    making = _batched(asked) if role == BATCHED else _assisted(asked)
    with making as answering:
        asyncio.run(_serve(answering))


if __name__ == "__main__":
    main(sys.argv[1:])

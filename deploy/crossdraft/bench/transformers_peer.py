"""transformers' assisted generation in a process of its own, to compare with: asked over a socket on loopback.

    python -m crossdraft.bench.transformers_peer JSON

JSON has the fields of `TransformersProcess`. A question is a line of JSON, and so is its answer.
"""

import asyncio
import copy
import json
import sys
import time
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from threading import Thread
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer
from transformers.generation.streamers import BaseStreamer

from crossdraft.console.processes import end_with_stdin
from crossdraft.console.running import CommandFailed
from crossdraft.engine.loader import load_model
from crossdraft.engine.names import source_of
from crossdraft.rpc.server import freeze_heap

LONGEST_LINE = 1 << 28  # bytes
NEVER = -1  # an end-of-text id that no model draws


class PeerFailedError(RuntimeError):
    """transformers cannot generate with this model or pair; the text says why."""


@dataclass(frozen=True)
class Made:
    """One output, with the times of its tokens."""

    ids: tuple[int, ...]  # of the target
    asked: float  # when it was asked for, in seconds since the run began
    moments: tuple[float, ...]  # when each token came, likewise


@dataclass(frozen=True)
class Question:
    """A request for outputs, made one after another, which no end of text ends."""

    prompts: tuple[tuple[int, ...], ...]  # ids
    tokens: int  # of each output
    k: int | None = None  # drafted at once; None: its own rule


@dataclass(frozen=True)
class Answer:
    """The outputs of a question."""

    outputs: tuple[Made, ...]  # in the order of the prompts
    seconds: float  # from the question to the last token


Answering = Callable[[Question], Answer]


@dataclass(frozen=True)
class TransformersProcess:
    """A process of transformers, to be started."""

    target: str  # a model's name
    assistant: str
    threads: int
    temperature: float
    dtype: str = "float32"
    device: str = "cpu"
    prefix: tuple[str, ...] = ()  # what the command is run by: on a core
    role: str = "transformers"  # in error texts

    def command(self) -> list[str]:
        """As it would be typed. It ends with its standard input."""
        return [*self.prefix, sys.executable, "-m", "crossdraft.bench.transformers_peer", json.dumps(asdict(self))]


async def ask(address: str, question: Question) -> Answer:
    """Asks a process over its socket; raises CommandFailed if it fails."""
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
    """An answer from its JSON."""
    outputs = (Made(tuple(one["ids"]), one["asked"], tuple(one["moments"])) for one in found["outputs"])
    return Answer(tuple(outputs), found["seconds"])


async def _serve(answering: Answering) -> None:
    """Prints its address and answers one question at a time until the process is ended."""
    one_at_a_time = asyncio.Lock()

    async def connected(reader: StreamReader, writer: StreamWriter) -> None:
        asked = json.loads(await reader.readline())
        asked["prompts"] = tuple(map(tuple, asked["prompts"]))
        async with one_at_a_time:
            found = await asyncio.to_thread(_answered, answering, Question(**asked))
        writer.write(json.dumps(found).encode() + b"\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0, limit=LONGEST_LINE)
    freeze_heap()  # as our services do
    port = server.sockets[0].getsockname()[1]
    print(json.dumps({"address": f"127.0.0.1:{port}"}), flush=True)
    await server.serve_forever()


def _answered(answering: Answering, question: Question) -> dict[str, object]:
    """The answer as JSON; errors of transformers are sent back, so that the benchmark can report them."""
    try:
        return asdict(answering(question))
    except (RuntimeError, ValueError) as error:
        return {"error": str(error)}


def main(arguments: str) -> None:
    """Loads the models and serves until its standard input ends."""
    asked = TransformersProcess(**json.loads(arguments))
    Thread(target=end_with_stdin, daemon=True).start()
    torch.set_num_threads(asked.threads)
    pair = AssistedGeneration(asked.target, asked.assistant, asked.dtype, asked.device)
    asyncio.run(_serve(partial(pair.answer, temperature=asked.temperature)))


def _drawing(temperature: float) -> dict[str, Any]:
    return {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}


class Moments(BaseStreamer):
    """When the tokens of an output came, in seconds of the monotonic clock; those of one round come together."""

    def __init__(self) -> None:
        self.found: list[float] = []
        self._began = False  # what comes first is the prompt

    def put(self, value: Tensor) -> None:
        self.found += [time.monotonic()] * value.numel() if self._began else []
        self._began = True

    def end(self) -> None:
        """As BaseStreamer: there are no more."""


class AssistedGeneration:
    """A target and an assistant with tokenizers of their own, one sequence at a time.

    At temperature above 0 transformers (5.23) has the assistant propose tokens of both vocabularies, as `tli` does.
    It draws with torch's global generator, and so does this.

    Raises:
        ModelLoadError: one of the models cannot be loaded.
    """

    def __init__(self, target: str, assistant: str, dtype: str = "float32", device: str = "cpu") -> None:
        self._target, self._assistant = (load_model(name, dtype, device).model for name in (target, assistant))
        self._tokenizer, self._assistant_tokenizer = (
            AutoTokenizer.from_pretrained(source_of(name), clean_up_tokenization_spaces=False)
            for name in (target, assistant)
        )
        self._settings = self._assistant.generation_config

    def continuation(self, prompt: str, tokens: int, k: int | None, temperature: float) -> tuple[int, ...]:
        """Target ids of one continuation of at most `tokens` tokens.

        Args:
            prompt: its text.
            tokens: at most so many.
            k: drafted at once, always; None: what transformers does by itself.
            temperature: 0 is greedy.

        Raises:
            PeerFailedError: transformers fails on this pair.
        """
        return self._generate(self._tokenizer(prompt).input_ids, tokens, k, temperature)

    def answer(self, question: Question, temperature: float) -> Answer:
        """One output after another; raises PeerFailedError."""
        began, outputs = time.monotonic(), []
        for prompt in question.prompts:
            asked, came = time.monotonic() - began, Moments()
            more = {"eos_token_id": NEVER, "streamer": came}
            ids = self._generate(prompt, question.tokens, question.k, temperature, **more)
            outputs.append(Made(ids, asked, tuple(moment - began for moment in came.found)))
        return Answer(tuple(outputs), time.monotonic() - began)

    def _draft(self, k: int | None) -> None:
        """Sets how many tokens the assistant drafts at once."""
        self._assistant.generation_config = settings = copy.deepcopy(self._settings)
        if k is not None:
            settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = k, "constant"
            settings.assistant_confidence_threshold = 0.0

    @torch.inference_mode()
    def _generate(
        self, prompt: Sequence[int], tokens: int, k: int | None, temperature: float, **more: Any
    ) -> tuple[int, ...]:
        self._draft(k)
        inputs = torch.tensor([list(prompt)], device=self._target.device)
        try:
            output: Tensor = self._target.generate(  # type: ignore[operator]  # torch says: a module or a tensor
                inputs,
                attention_mask=torch.ones_like(inputs),
                **({"do_sample": False} | _drawing(temperature)),
                max_new_tokens=tokens,
                assistant_model=self._assistant,
                tokenizer=self._tokenizer,
                assistant_tokenizer=self._assistant_tokenizer,
                pad_token_id=0,
                **more,
            )
        except AttributeError as error:  # 5.23, where every token of the assistant is shared
            raise PeerFailedError(f"transformers cannot generate with this pair: {error}") from error
        return tuple(output[0, inputs.shape[1] :].tolist())


if __name__ == "__main__":
    main(sys.argv[1])

"""transformers' own generation in a process of its own, to compare with: asked over a socket on loopback.

    python -m crossdraft.bench.transformers_peer JSON

JSON has the fields of `TransformersProcess`. A question is a line of JSON, and so is its answer.
"""

import asyncio
import copy
import json
import sys
import time
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from threading import Thread
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from crossdraft.console.processes import end_with_stdin
from crossdraft.console.running import CommandFailed
from crossdraft.engine.compatibility import layers_of
from crossdraft.engine.kv_cache import KVCache
from crossdraft.engine.loader import load_model
from crossdraft.engine.names import source_of
from crossdraft.rpc.server import freeze_heap

GENERATE_BATCH, ASSISTED = "generate_batch", "assisted"  # the latter makes one output at a time
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
    """A request for outputs, which no end of text ends."""

    prompts: tuple[tuple[int, ...], ...]  # ids
    tokens: int  # of each output
    at_once: int  # under way together; assisted generation makes one after another
    k: int | None = None  # drafted at once by assisted generation; None: its own rule


@dataclass(frozen=True)
class Answer:
    """The outputs of a question."""

    outputs: tuple[Made, ...]  # in the order of the prompts
    seconds: float  # from the question to the last token
    forwards: int  # of the target; 0: not known


Answering = Callable[[Question], Answer]


@dataclass(frozen=True)
class TransformersProcess:
    """A process of transformers, to be started."""

    role: str  # GENERATE_BATCH or ASSISTED
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
    return Answer(tuple(outputs), found["seconds"], found["forwards"])


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
    if asked.role == ASSISTED:
        pair = AssistedGeneration(asked.target, asked.assistant, asked.dtype, asked.device)
        asyncio.run(_serve(partial(pair.answer, temperature=asked.temperature)))
        return
    with continuous_batching(asked.target, asked.mib, asked.temperature, asked.dtype, asked.device) as answering:
        asyncio.run(_serve(answering))


def _drawing(temperature: float) -> dict[str, Any]:
    return {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}


# Assisted generation.


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
        return Answer(tuple(outputs), time.monotonic() - began, 0)

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


# Continuous batching: what `generate_batch` runs, kept between calls.

FAILED = "FAILED"  # of a request's status
MIB = 1 << 20


@contextmanager
def continuous_batching(
    name: str, mib: int, temperature: float = 0.0, dtype: str = "float32", device: str = "cpu"
) -> Iterator[Answering]:
    """Answers with a model that transformers serves by itself, without a network.

    On a CPU its settings are those that are fastest there, by processor time; elsewhere what transformers does itself.

    Args:
        name: of the model.
        mib: for keys and values of all requests.
        temperature: 0 is greedy.
        dtype: of the model.
        device: of the model.

    Raises:
        ModelLoadError: it cannot be loaded.
    """
    model = load_model(name, dtype, device).model
    model.set_attn_implementation("sdpa")
    drawing = {"do_sample": False} | _drawing(temperature)
    manager = model.init_continuous_batching(  # type: ignore[operator]  # torch says: a module or a tensor
        generation_config=GenerationConfig(**drawing, eos_token_id=NEVER, pad_token_id=0),
        continuous_batching_config=_configuration(model, mib, *((64, 512) if device == "cpu" else (256, None))),
    )
    manager.warmup()
    manager.start()
    try:
        yield partial(_batched, manager)
    finally:
        manager.destroy()


def _configuration(
    model: PreTrainedModel, mib: int, page_tokens: int, max_batch_tokens: int | None
) -> ContinuousBatchingConfig:
    place = KVCache.slot_bytes(layers_of(model).shapes, model.dtype)
    return ContinuousBatchingConfig(
        page_size=page_tokens,
        num_blocks=max(1, mib * MIB // (place * page_tokens)),
        max_batch_tokens=max_batch_tokens,
        allow_block_sharing=True,
        default_compile_level=0,
    )


def _batched(manager: Any, question: Question) -> Answer:
    """`at_once` outputs are under way as long as there are so many; raises PeerFailedError."""
    began = time.perf_counter()  # the clock that transformers' own moments are of
    forwards = getattr(manager, "current_batch", 0)  # it is there once the manager's thread runs
    waiting, numbers, outputs = enumerate(question.prompts), dict[str, int](), dict[int, Made]()

    def ask_next() -> None:
        for number, ids in waiting:
            request = manager.add_request(list(ids), max_new_tokens=question.tokens, record_timestamps=True)
            numbers[request] = number
            return

    for _ in range(question.at_once):
        ask_next()
    while len(outputs) < len(question.prompts):
        result = manager.get_result(timeout=1.0)
        if result is None:
            if not manager.is_running():
                raise PeerFailedError("transformers' generation thread ended")
            continue
        if result.status.name == FAILED:
            raise PeerFailedError(f"transformers failed on a request: {result.error}")
        asked, moments = result.created_time - began, tuple(moment - began for moment in result.timestamps)
        outputs[numbers[result.request_id]] = Made(tuple(result.generated_tokens), asked, moments)
        ask_next()
    ordered = tuple(outputs[number] for number in range(len(question.prompts)))
    return Answer(ordered, time.perf_counter() - began, int(manager.current_batch - forwards))


if __name__ == "__main__":
    main(sys.argv[1])

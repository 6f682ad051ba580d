"""transformers' own generation in a process of its own, to compare with: asked over a socket on loopback.

    python -m crossdraft.bench.transformers_peer KIND TARGET ASSISTANT THREADS TEMPERATURE MIB DTYPE DEVICE

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
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from transformers import AutoTokenizer, ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from crossdraft.console.processes import end_with_stdin
from crossdraft.console.running import CommandFailed
from crossdraft.engine.compatibility import layer_shapes
from crossdraft.engine.loader import load_model
from crossdraft.engine.names import source_of
from crossdraft.rpc.server import freeze_heap


@dataclass(frozen=True)
class Made:
    """One output, with the times of its tokens."""

    ids: tuple[int, ...]  # of the target
    asked: float  # when it was asked for, in seconds since the run began
    moments: tuple[float, ...]  # when each token came, likewise


BATCHED, ASSISTED = "batched", "assisted"
LONGEST_LINE = 1 << 28  # bytes


@dataclass(frozen=True)
class Question:
    """A request for outputs."""

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
        module = [sys.executable, "-m", "crossdraft.bench.transformers_peer"]
        return [*self.prefix, *module, self.role, self.target, self.assistant, *numbers]


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


@contextmanager
def _batched(asked: TransformersProcess) -> Iterator[Answering]:
    batching = Batching.best(asked.device, asked.mib)
    with ContinuousBatching(
        asked.target, batching, asked.temperature, asked.threads, asked.dtype, asked.device
    ) as running:

        def answer(question: Question) -> Answer:
            began, before = time.monotonic(), running.forwards
            found = running.generate(question.prompts, question.tokens, question.at_once)
            seconds = time.monotonic() - began
            return Answer(tuple(found), seconds, running.forwards - before)

        yield answer


@contextmanager
def _assisted(asked: TransformersProcess) -> Iterator[Answering]:
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
    """Prints its address and answers one question at a time until the process is ended."""
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


def main(arguments: Sequence[str]) -> None:
    """Loads the models and serves until its standard input ends."""
    role, target, assistant, threads, temperature, mib, dtype, device = arguments
    Thread(target=end_with_stdin, daemon=True).start()
    asked = TransformersProcess(role, target, assistant, int(threads), float(temperature), int(mib), dtype, device)
    making = _batched(asked) if role == BATCHED else _assisted(asked)
    with making as answering:
        asyncio.run(_serve(answering))


# transformers' own assisted generation, to compare with.

NEVER = -1  # an end-of-text id that no model draws


class AssistanceFailedError(RuntimeError):
    """transformers cannot generate with this pair."""


class Moments(BaseStreamer):
    """When the tokens of an output came, in seconds of the monotonic clock; those of one round come together."""

    def __init__(self) -> None:
        self.found: list[float] = []
        self._began = False  # what comes first is the prompt

    def put(self, value: Tensor) -> None:
        """As BaseStreamer: more tokens."""
        self.found += [time.monotonic()] * value.numel() if self._began else []
        self._began = True

    def end(self) -> None:
        """As BaseStreamer: there are no more."""


class AssistedGeneration:
    """A target and an assistant with tokenizers of their own, one sequence at a time.

    At temperature above 0 transformers (5.23) has the assistant propose tokens of both vocabularies, as `tli` does.
    It draws with torch's global generator, and so does this.
    """

    def __init__(
        self, target: str, assistant: str, threads: int | None = None, dtype: str = "float32", device: str = "cpu"
    ) -> None:
        """Loads both models; raises ModelLoadError. `threads` are torch's, in the whole process; None: as it is."""
        if threads is not None:
            torch.set_num_threads(threads)
        self._target, self._assistant = (load_model(name, dtype, device).model for name in (target, assistant))
        self._tokenizer, self._assistant_tokenizer = (
            AutoTokenizer.from_pretrained(source_of(name), clean_up_tokenization_spaces=False)
            for name in (target, assistant)
        )
        settings = self._assistant.generation_config
        self._own_k, self._own_schedule = settings.num_assistant_tokens, settings.num_assistant_tokens_schedule
        self._own_threshold = settings.assistant_confidence_threshold

    def continuations(self, prompt: str, count: int, tokens: int, k: int) -> Iterator[tuple[int, ...]]:
        """Target ids of `count` continuations at temperature 1, each of at most `tokens` tokens, `k` drafted at once.

        Raises:
            AssistanceFailedError: transformers fails on this pair.
        """
        for _ in range(count):
            yield self.continuation(prompt, tokens, k, 1.0)

    def continuation(
        self, prompt: str, tokens: int, k: int | None, temperature: float, threads: int | None = None
    ) -> tuple[int, ...]:
        """Target ids of one continuation of at most `tokens` tokens.

        Args:
            prompt: its text.
            tokens: at most so many.
            k: drafted at once, always; None: what transformers does by itself.
            temperature: 0 is greedy.
            threads: of torch, in the whole process and from now on; None: as many as it has.

        Raises:
            AssistanceFailedError: transformers fails on this pair.
        """
        if threads is not None:
            torch.set_num_threads(threads)
        inputs = self._tokenizer(prompt, return_tensors="pt").input_ids.to(self._target.device)
        output = self._generate(inputs, tokens, k, temperature)
        return tuple(output[0, inputs.shape[1] :].tolist())

    def timed(
        self, prompt: Sequence[int], tokens: int, k: int | None, temperature: float
    ) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Target ids of one continuation, which no end of text ends, and the seconds in which each of them came.

        Args:
            prompt: its target ids.
            tokens, k, temperature: as for `continuation`.

        Raises:
            AssistanceFailedError: transformers fails on this pair.
        """
        moments, began = Moments(), time.monotonic()
        inputs = torch.tensor([list(prompt)], device=self._target.device)
        output = self._generate(inputs, tokens, k, temperature, eos_token_id=NEVER, streamer=moments)
        return tuple(output[0, inputs.shape[1] :].tolist()), tuple(moment - began for moment in moments.found)

    def _draft(self, k: int | None) -> None:
        """Sets how many tokens the assistant drafts at once."""
        settings = self._assistant.generation_config
        if k is None:
            settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = self._own_k, self._own_schedule
            settings.assistant_confidence_threshold = self._own_threshold
        else:
            settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = k, "constant"
            settings.assistant_confidence_threshold = 0.0

    @torch.inference_mode()
    def _generate(self, inputs: Tensor, tokens: int, k: int | None, temperature: float, **more: Any) -> Tensor:
        self._draft(k)
        drawing = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        try:
            output: Tensor = self._target.generate(  # type: ignore[operator]  # torch says: a module or a tensor
                inputs,
                attention_mask=torch.ones_like(inputs),
                **(drawing if temperature > 0 else {"do_sample": False}),
                max_new_tokens=tokens,
                assistant_model=self._assistant,
                tokenizer=self._tokenizer,
                assistant_tokenizer=self._assistant_tokenizer,
                pad_token_id=0,
                **more,
            )
        except AttributeError as error:  # 5.23, where every token of the assistant is shared
            raise AssistanceFailedError(f"transformers cannot generate with this pair: {error}") from error
        return output


# transformers' own continuous batching, to compare with: what its `generate_batch` runs, kept between calls.

FAILED = "FAILED"  # of a request's status
MIB = 1 << 20


class BatchingFailedError(RuntimeError):
    """transformers cannot generate with this model; the text says why."""


@dataclass(frozen=True)
class Batching:
    """Settings of transformers' continuous batching."""

    attention: str = "sdpa"  # or eager
    budget: int = 512  # MiB for keys and values of all requests
    max_batch_tokens: int | None = 512  # in one forward; None: its own rule
    page_tokens: int = 64  # of a page of the KV cache
    compiled: int = 0  # its `default_compile_level`

    @staticmethod
    def best(device: str, budget: int) -> "Batching":
        """On a CPU what is fastest there, by processor time; elsewhere what transformers does by itself."""
        return (
            Batching(budget=budget)
            if device == "cpu"
            else Batching(budget=budget, max_batch_tokens=None, page_tokens=256)
        )


class ContinuousBatching:
    """A model that transformers serves by itself, without a network. Use it with `with`.

    Outputs do not stop at an end-of-text token: all of one call have the same length.

    Raises:
        ModelLoadError: it cannot be loaded.
    """

    def __init__(
        self,
        name: str,
        batching: Batching = Batching(),
        temperature: float = 0.0,
        threads: int = 1,
        dtype: str = "float32",
        device: str = "cpu",
    ) -> None:
        torch.set_num_threads(threads)
        model = load_model(name, dtype, device).model
        model.set_attn_implementation(batching.attention)
        self._manager: Any = model.init_continuous_batching(  # type: ignore[operator]  # torch says: or a tensor
            generation_config=_generation(temperature), continuous_batching_config=_configuration(model, batching)
        )

    def __enter__(self) -> Self:
        self._manager.warmup()
        self._manager.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._manager.destroy()

    @property
    def forwards(self) -> int:
        """Of the model, so far."""
        return int(self._manager.current_batch)

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int, at_once: int) -> list[Made]:
        """An output of `tokens` tokens for each prompt, `at_once` of them under way as long as there are so many.

        Raises:
            BatchingFailedError: a request failed.
        """
        began = time.perf_counter()  # the clock that transformers' own moments are of
        waiting = iter(enumerate(prompts))
        numbers: dict[str, int] = {}
        outputs: dict[int, Made] = {}
        for _ in range(at_once):
            self._ask(waiting, numbers, tokens)
        while len(outputs) < len(prompts):
            result = self._manager.get_result(timeout=1.0)
            if result is None:
                if not self._manager.is_running():
                    raise BatchingFailedError("transformers' generation thread ended")
                continue
            if result.status.name == FAILED:
                raise BatchingFailedError(f"transformers failed on a request: {result.error}")
            asked, moments = result.created_time - began, tuple(moment - began for moment in result.timestamps)
            outputs[numbers[result.request_id]] = Made(tuple(result.generated_tokens), asked, moments)
            self._ask(waiting, numbers, tokens)
        return [outputs[number] for number in range(len(prompts))]

    def _ask(self, waiting: Iterator[tuple[int, Sequence[int]]], numbers: dict[str, int], tokens: int) -> None:
        """Makes a request for the next prompt, if there is one."""
        found = next(waiting, None)
        if found is not None:
            number, ids = found
            name = self._manager.add_request(list(ids), max_new_tokens=tokens, record_timestamps=True)
            numbers[name] = number


def _generation(temperature: float) -> GenerationConfig:
    drawing = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    return GenerationConfig(
        **(drawing if temperature > 0 else {"do_sample": False}), eos_token_id=NEVER, pad_token_id=0
    )


def _configuration(model: PreTrainedModel, batching: Batching) -> ContinuousBatchingConfig:
    place = sum(shape.heads * (shape.key + shape.value) for shape in layer_shapes(model)) * model.dtype.itemsize
    return ContinuousBatchingConfig(
        page_size=batching.page_tokens,
        num_blocks=max(1, batching.budget * MIB // (place * batching.page_tokens)),
        max_batch_tokens=batching.max_batch_tokens,
        allow_block_sharing=True,
        default_compile_level=batching.compiled,
    )


if __name__ == "__main__":
    main(sys.argv[1:])

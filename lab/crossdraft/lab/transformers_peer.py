"""transformers' assisted generation, in a process of its own to compare with."""

import asyncio
import copy
import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
from torch import Tensor
from transformers import AutoTokenizer
from transformers.generation.streamers import BaseStreamer

from crossdraft.cli.running import CommandFailed
from crossdraft.engine.loader import LoadOptions, load_model
from crossdraft.engine.names import source_of
from crossdraft.lab.outputs import Output
from crossdraft.rpc.server import freeze_heap

NEVER = -1  # an end-of-text id that no model draws


@dataclass(frozen=True)
class Question:
    """A request for outputs, made one after another, which no end of text ends."""

    prompts: tuple[tuple[int, ...], ...]  # ids
    tokens: int  # of each output
    k: int | None = None  # drafted at once; None: its own rule


@dataclass(frozen=True)
class Assisting:
    """What a process of transformers runs."""

    target: str  # a model's name
    assistant: str
    threads: int
    temperature: float
    dtype: str = "float32"
    device: str = "cpu"
    alone: bool = False  # on the first core


class TransformersProcess:
    """The process, which answers one question at a time; it ends at the end of the block, or with this process."""

    def __init__(self, assisting: Assisting) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, self._far = context.Pipe()
        self._process = context.Process(target=_serve, args=(self._far, assisting), daemon=True)

    def __enter__(self) -> "TransformersProcess":
        self._process.start()
        self._far.close()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()

    @property
    def process_id(self) -> int:
        return self._process.pid or 0

    async def ask(self, question: Question) -> tuple[Output, ...]:
        """The outputs, in the order of the prompts; raises CommandFailed if transformers fails."""
        try:
            self._connection.send(question)
            found: tuple[Output, ...] | str = await asyncio.to_thread(self._connection.recv)
        except (EOFError, OSError) as error:
            raise CommandFailed("transformers' process ended before it answered") from error
        if isinstance(found, str):
            raise CommandFailed(f"transformers failed: {found}")
        return found


def _serve(connection: "Connection[tuple[Output, ...] | str, Question]", assisting: Assisting) -> None:
    """Answers until the other end is closed; errors of transformers are answers, too, for the benchmark to report."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the benchmark, which then ends this process
    if assisting.alone:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(assisting.threads)
    pair = AssistedGeneration(assisting.target, assisting.assistant, assisting.dtype, assisting.device)
    freeze_heap()  # as our services do
    with suppress(EOFError):
        while True:
            question = connection.recv()
            try:
                connection.send(pair.answer(question, assisting.temperature))
            except (RuntimeError, ValueError, AttributeError) as error:  # the last: where every token is shared (5.23)
                connection.send(str(error))


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
        self._target, self._assistant = (
            load_model(LoadOptions(name, dtype, device)).model for name in (target, assistant)
        )
        self._tokenizer, self._assistant_tokenizer = (
            AutoTokenizer.from_pretrained(source_of(name), clean_up_tokenization_spaces=False)
            for name in (target, assistant)
        )
        self._settings = self._assistant.generation_config

    def answer(self, question: Question, temperature: float) -> tuple[Output, ...]:
        """One output after another; raises what transformers raises where it fails."""
        outputs = []
        self._draft(question.k)
        for prompt in question.prompts:
            asked, came = time.monotonic(), Moments()
            ids = self._generate(prompt, question.tokens, temperature, came)
            outputs.append(Output(asked, tuple(came.found), came.found[-1], ids))
        return tuple(outputs)

    def _draft(self, k: int | None) -> None:
        """Sets how many tokens the assistant drafts at once."""
        self._assistant.generation_config = settings = copy.deepcopy(self._settings)
        if k is not None:
            settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = k, "constant"
            settings.assistant_confidence_threshold = 0.0

    @torch.inference_mode()
    def _generate(self, prompt: Sequence[int], tokens: int, temperature: float, came: Moments) -> tuple[int, ...]:
        inputs = torch.tensor([list(prompt)], device=self._target.device)
        drawing = {"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
        output: Tensor = self._target.generate(  # type: ignore[operator]  # torch says: a module or a tensor
            inputs,
            attention_mask=torch.ones_like(inputs),
            do_sample=temperature > 0,
            **drawing,
            max_new_tokens=tokens,
            assistant_model=self._assistant,
            tokenizer=self._tokenizer,
            assistant_tokenizer=self._assistant_tokenizer,
            pad_token_id=0,
            eos_token_id=NEVER,
            streamer=came,
        )
        return tuple(output[0, inputs.shape[1] :].tolist())

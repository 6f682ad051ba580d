"""transformers' own continuous batching, to compare with: what its `generate_batch` runs, kept between calls."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from crossdraft.models.loading import load_model
from crossdraft.models.support import layer_shapes

FAILED = "FAILED"  # of a request's status
MIB = 1 << 20
NEVER = -1  # an end that no model draws


class BatchingFailedError(RuntimeError):
    """transformers cannot generate with this model; the text says why."""


@dataclass(frozen=True)
class Batching:
    """How transformers is told to batch."""

    attention: str = "sdpa"  # or eager
    budget: int = 512  # MiB for keys and values of all requests
    most: int | None = 512  # tokens in one forward; None: its own rule
    page: int = 64  # tokens whose keys and values lie together
    compiled: int = 0  # its `default_compile_level`

    @staticmethod
    def best(device: str, budget: int) -> "Batching":
        """On a CPU what is fastest there, by processor time; elsewhere what transformers does by itself."""
        return Batching(budget=budget) if device == "cpu" else Batching(budget=budget, most=None, page=256)


@dataclass(frozen=True)
class BatchedOutput:
    """One output."""

    ids: tuple[int, ...]
    asked: float  # when its request was made, in seconds since the call
    moments: tuple[float, ...]  # when each token came, likewise


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

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int, at_once: int) -> list[BatchedOutput]:
        """An output of `tokens` tokens for each prompt, `at_once` of them under way as long as there are so many.

        Raises:
            BatchingFailedError: a request failed.
        """
        began = time.perf_counter()  # the clock that transformers' own moments are of
        waiting = iter(enumerate(prompts))
        numbers: dict[str, int] = {}
        outputs: dict[int, BatchedOutput] = {}
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
            outputs[numbers[result.request_id]] = BatchedOutput(tuple(result.generated_tokens), asked, moments)
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
        page_size=batching.page,
        num_blocks=max(1, batching.budget * MIB // (place * batching.page)),
        max_batch_tokens=batching.most,
        allow_block_sharing=True,
        default_compile_level=batching.compiled,
    )

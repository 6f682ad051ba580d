"""transformers' own assisted generation, to compare with."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer
from transformers.generation.streamers import BaseStreamer

from crossdraft.models.loading import load_model
from crossdraft.models.names import source_of

NEVER = -1  # an end of text that no model draws


class AssistanceFailedError(RuntimeError):
    """transformers cannot generate with this pair."""


class Moments(BaseStreamer):
    """When the tokens of an output came, in seconds of the monotonic clock; those of one round come together."""

    def __init__(self) -> None:
        self.found: list[float] = []
        self._began = False  # what comes first is the prompt

    def put(self, value: Tensor) -> None:
        """More tokens."""
        self.found += [time.monotonic()] * value.numel() if self._began else []
        self._began = True

    def end(self) -> None:
        """There are no more."""


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
        """How many tokens the assistant proposes at once from now on."""
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

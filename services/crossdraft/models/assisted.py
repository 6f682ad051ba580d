"""transformers' own assisted generation, to compare with."""

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import AutoTokenizer

from crossdraft.models.loading import load_model
from crossdraft.models.names import source_of


class AssistanceFailedError(RuntimeError):
    """transformers cannot generate with this pair."""


class AssistedGeneration:
    """A target and an assistant with tokenizers of their own, one sequence at a time, in float32.

    At temperature above 0 transformers (5.23) has the assistant propose tokens of both vocabularies, as `tli` does.
    It draws with torch's global generator, and so does this.
    """

    def __init__(self, target: str, assistant: str) -> None:
        """Loads both models; raises ModelLoadError."""
        self._target, self._assistant = load_model(target, "float32").model, load_model(assistant, "float32").model
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
        settings = self._assistant.generation_config
        if k is None:
            settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = self._own_k, self._own_schedule
            settings.assistant_confidence_threshold = self._own_threshold
        else:
            settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = k, "constant"
            settings.assistant_confidence_threshold = 0.0
        inputs = self._tokenizer(prompt, return_tensors="pt").input_ids
        try:
            output = self._generate(inputs, tokens, temperature)
        except AttributeError as error:  # 5.23, where every token of the assistant is shared
            raise AssistanceFailedError(f"transformers cannot generate with this pair: {error}") from error
        return tuple(output[0, inputs.shape[1] :].tolist())

    @torch.inference_mode()
    def _generate(self, inputs: Tensor, tokens: int, temperature: float) -> Tensor:
        drawing = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        output: Tensor = self._target.generate(  # type: ignore[operator]  # torch says: a module or a tensor
            inputs,
            attention_mask=torch.ones_like(inputs),
            **(drawing if temperature > 0 else {"do_sample": False}),
            max_new_tokens=tokens,
            assistant_model=self._assistant,
            tokenizer=self._tokenizer,
            assistant_tokenizer=self._assistant_tokenizer,
            pad_token_id=0,
        )
        return output

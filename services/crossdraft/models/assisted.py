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

    def continuations(self, prompt: str, count: int, tokens: int, k: int) -> Iterator[tuple[int, ...]]:
        """Target ids of `count` continuations at temperature 1, each of at most `tokens` tokens, `k` drafted at once.

        Raises:
            AssistanceFailedError: transformers fails on this pair.
        """
        inputs = self._tokenizer(prompt, return_tensors="pt").input_ids
        settings = self._assistant.generation_config
        settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = k, "constant"
        settings.assistant_confidence_threshold = 0.0
        for _ in range(count):
            try:
                output = self._generate(inputs, tokens)
            except AttributeError as error:  # 5.23, where every token of the assistant is shared
                raise AssistanceFailedError(f"transformers cannot generate with this pair: {error}") from error
            yield tuple(output[0, inputs.shape[1] :].tolist())

    @torch.inference_mode()
    def _generate(self, inputs: Tensor, tokens: int) -> Tensor:
        output: Tensor = self._target.generate(  # type: ignore[operator]  # torch says: a module or a tensor
            inputs,
            attention_mask=torch.ones_like(inputs),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=tokens,
            assistant_model=self._assistant,
            tokenizer=self._tokenizer,
            assistant_tokenizer=self._assistant_tokenizer,
            pad_token_id=0,
        )
        return output

"""transformers' assisted generation, to compare with."""

import copy
import time
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import AutoTokenizer
from transformers.generation.streamers import BaseStreamer

from crossdraft.engine.loader import LoadOptions, load_model
from crossdraft.engine.names import source_of
from crossdraft.lab.outputs import Output

NEVER = -1  # an end-of-text id that no model draws


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

    At temperature above 0 transformers (5.23) has the assistant propose tokens of both vocabularies, as `tli` does. It
    draws with torch's global generator, and so does this. Raises ModelLoadError: one of the models cannot be loaded."""

    def __init__(self, target: str, assistant: str, dtype: str = "float32", device: str = "cpu") -> None:
        self._target, self._assistant = (
            load_model(LoadOptions(name, dtype, device)).model for name in (target, assistant)
        )
        self._tokenizer, self._assistant_tokenizer = (
            AutoTokenizer.from_pretrained(source_of(name), clean_up_tokenization_spaces=False)
            for name in (target, assistant)
        )
        self._settings = self._assistant.generation_config

    def outputs(
        self, prompts: Sequence[Sequence[int]], tokens: int, k: int | None, temperature: float
    ) -> tuple[Output, ...]:
        """One after another, of so many tokens each, which no end of text ends; raises what transformers raises where
        it fails. `prompts`: ids. `k`: drafted at once; None: its own rule."""
        outputs = []
        self._draft(k)
        for prompt in prompts:
            asked, came = time.monotonic(), Moments()
            ids = self._generate(prompt, tokens, temperature, came)
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

"""A costlier model that computes the same function, made and saved: for measuring speed with real acceptance."""

import copy
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils.hub import cached_file

from crossdraft.models.growing import CannotInflateError, grown
from crossdraft.models.loading import load_model
from crossdraft.models.names import Size, source_of

TOLERANCE = 1e-4  # between two logits, in float32
PROBES, LENGTH = 4, 24  # random prompts that both models are compared on, and their tokens
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


@dataclass(frozen=True, eq=False)
class Inflated:
    """A model and the larger one that computes the same."""

    original: PreTrainedModel
    model: PreTrainedModel
    difference: float  # largest, between logits on random prompts

    def save(self, name: str, folder: Path) -> None:
        """Writes a folder as transformers does, with the tokenizer and the generation settings of `name`.

        In float16 where that loses nothing, as when `hidden` is 4 or 16 times what it was; else in float32.
        """
        exact = all(bool((tensor.half() == tensor).all()) for tensor in self.model.parameters())
        (copy.deepcopy(self.model).half() if exact else self.model).save_pretrained(folder)
        for file in TOKENIZER_FILES:
            found = cached_file(source_of(name), file, _raise_exceptions_for_missing_entries=False)
            if found is not None:
                shutil.copyfile(found, folder / file)


def inflate(name: str, size: Size) -> Inflated:
    """The model `name` (a folder, a hub id or `bundled:NAME`) in a larger shape, both in float32.

    Raises:
        ModelLoadError: it cannot be loaded.
        NumberOutOfRangeError: the shape is smaller than the model.
        CannotInflateError: its architecture is not Llama, or the larger model's logits are not the same.
    """
    original = load_model(name, "float32").model
    model = grown(original, size)
    difference = largest_difference(original, model)
    if not difference <= TOLERANCE:
        raise CannotInflateError(
            f"the larger model's logits differ from those of {name} by up to {difference:.2g}, and only {TOLERANCE:g} "
            "is allowed: something in its configuration is not known here"
        )
    return Inflated(original, model, difference)


@torch.inference_mode()
def largest_difference(one: PreTrainedModel, other: PreTrainedModel) -> float:
    """Between the logits of two models on the same random prompts."""
    return max(
        float((one(ids, use_cache=False).logits - other(ids, use_cache=False).logits).abs().max())
        for ids in _prompts(one.config.vocab_size)
    )


def _prompts(vocabulary: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(0)
    for _ in range(PROBES):
        yield torch.randint(vocabulary, (1, LENGTH), generator=generator)

"""`crossdraft bench inflate`: a costlier model with the same function, to measure speed with real acceptance."""

import copy
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils.hub import cached_file

from crossdraft.bench.harness import print_table
from crossdraft.console.running import CommandFailed, UsageError
from crossdraft.engine.engine import Engine
from crossdraft.engine.loader import CannotInflateError, grown, load_model
from crossdraft.engine.names import ModelLoadError, NumberOutOfRangeError, Size, source_of
from crossdraft.engine.packed_linear import pack
from crossdraft.engine.requests import ForwardRequest
from crossdraft.types.trees import ROOT, TokenTree

MILLISECONDS = 1000.0
TOKENS = (1, 2, 5, 9, 17)  # of a pass: one that was committed, and 0, 1, 4, 8, 16 nodes
TURNS = 15
TOLERANCE = 1e-4  # between two logits, in float32
PROBES, LENGTH = 4, 24  # random prompts that both models are compared on, and their tokens
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
PROMPT = 64  # tokens before a pass that is measured
COLUMNS = ("model", "parameters", *(f"{count} token{'s'[: count - 1]}" for count in TOKENS))


def make(name: str, size: Size, folder: Path) -> None:
    """Writes the larger model, and says how much it may differ and what its passes cost.

    Raises:
        UsageError: the folder holds something, or the shape is smaller than the model.
        CommandFailed: the model cannot be loaded, inflated or written.
    """
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise UsageError(f"{folder} holds something already: give a folder that is empty or new")
    with _failures():
        inflated = inflate(name, size)
        inflated.save(name, folder)
        rows = []
        for shown, model in (("original", inflated.original), ("larger", inflated.model)):
            parameters = sum(parameter.numel() for parameter in model.parameters())
            pack(model)  # as a service runs it
            times = pass_times(model, [count - 1 for count in TOKENS], TURNS)
            rows.append((shown, f"{parameters / 1e6:.1f}M", *(f"{MILLISECONDS * time:.1f}" for time in times)))
    print(f"Largest difference between logits on random prompts: {inflated.difference:.1e}")
    print_table("Processor milliseconds of a pass, one thread", COLUMNS, rows)


@contextmanager
def _failures() -> Iterator[None]:
    try:
        yield
    except NumberOutOfRangeError as error:
        raise UsageError(str(error)) from error
    except (ModelLoadError, CannotInflateError) as error:
        raise CommandFailed(str(error)) from error
    except OSError as error:
        raise CommandFailed(f"the larger model cannot be written: {error}") from error


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


def pass_times(model: PreTrainedModel, nodes: Sequence[int], turns: int) -> list[float]:
    """Median processor seconds of a pass of one committed token and a chain of so many nodes, for each number.

    All numbers take their turn, so that whatever else the machine does meets all of them. Torch has one thread from
    here on.

    Raises:
        ValueError: the engine cannot run this model.
    """
    torch.set_num_threads(1)
    engine = Engine(model, PROMPT + max(nodes) + 1)
    prompt = tuple(range(1, PROMPT + 1))
    engine.forward([ForwardRequest("pass", prompt)])
    found: list[list[float]] = [[] for _ in nodes]
    for turn in range(1 + turns):
        for count, times in zip(nodes, found, strict=True):
            tree = TokenTree((0,) * count, tuple(range(ROOT, count - 1)))
            began = time.thread_time()
            engine.forward([ForwardRequest("pass", (*prompt, turn % 2), tree)])
            times += [time.thread_time() - began] if turn else []  # the first turn warms up
            engine.forward([ForwardRequest("pass", prompt, wanted=())])
    return [median(times) for times in found]

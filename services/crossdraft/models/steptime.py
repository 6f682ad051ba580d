"""Where the time of a drafting step goes: layers, LM head, law, draw; with the whole head and with cut ones.

What is counted is the processor time of one thread, which other work on the machine hardly changes.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field, replace
from statistics import median

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from crossdraft.models.drawing import Draws, KeyedDraws, RandomDraws
from crossdraft.models.engine import Engine
from crossdraft.models.feeds import Work
from crossdraft.models.loading import load_model
from crossdraft.models.pruning import cut_of
from crossdraft.models.rows import drafting_laws
from crossdraft.models.shapes import random_model
from crossdraft.text.letters import Letters
from crossdraft.verification.exchange import NoiseKey, SamplingOptions
from crossdraft.verification.noise import KeyedNoise

RANDOM = "random:"  # before the name of a shape
PROMPT = 48  # tokens before the draft
STEPS = 5  # of a draft
OPTIONS = SamplingOptions()


@dataclass(frozen=True)
class StepTime:
    """Processor seconds of one drafting step."""

    layers: float  # all of the forward but the head
    head: float
    law: float  # softmax, order, rounding
    draw: float

    @property
    def total(self) -> float:
        """All parts."""
        return self.layers + self.head + self.law + self.draw

    @property
    def head_and_law(self) -> float:
        """Their share, which grows with the vocabulary."""
        return (self.head + self.law) / self.total


@dataclass(frozen=True, eq=False)
class Drawing:
    """How proposals are drawn."""

    row_width: int  # as in `OpenDrafter`
    draws: Draws

    @staticmethod
    def from_rows(row_width: int) -> "Drawing":
        """At random from the most probable ids, as for methods whose proposals carry rows."""
        return Drawing(row_width, RandomDraws(np.random.default_rng(0)))

    @staticmethod
    def keyed(size: int) -> "Drawing":
        """With noise of all of `size` ids, as for `seeded`."""
        return Drawing(
            0, KeyedDraws(KeyedNoise([Letters(str(token)) for token in range(size)], [0] * size), NoiseKey(0))
        )


def model_of(name: str) -> PreTrainedModel:
    """A model by its name, or one with random weights by `random:` and the name of a shape; raises ModelLoadError."""
    if name.startswith(RANDOM):
        return random_model(name.removeprefix(RANDOM))
    return load_model(name, "float32").model


def step_times(model: PreTrainedModel, keep: Sequence[int], drawing: Drawing, turns: int) -> list[StepTime]:
    """Medians over `turns` drafts, for each number of ids that the head keeps.

    Heads take turns, draft by draft, so that whatever else the machine does meets all of them; the layers are the same
    for all, and so is their median. Which ids are kept does not change the time: they are the first ones. Torch has one
    thread from here on.

    Raises:
        CannotPruneError: the head of this model cannot be cut.
        ValueError: the engine cannot run this model.
    """
    torch.set_num_threads(1)
    engine = Engine(model, PROMPT + STEPS)
    whole = model.get_output_embeddings()
    heads = [whole if size >= len(whole.weight) else cut_of(whole, np.arange(size)) for size in keep]
    found: list[list[StepTime]] = [[] for _ in heads]
    try:
        for turn in range(1 + turns):
            for head, times in zip(heads, found, strict=True):
                model.set_output_embeddings(head)
                steps = _draft(engine, head, drawing)
                times += steps if turn else []  # the first turn warms up
    finally:
        model.set_output_embeddings(whole)
    layers = median(one.layers for times in found for one in times)
    return [replace(_medians(times), layers=layers) for times in found]


def _draft(engine: Engine, head: nn.Module, drawing: Drawing) -> list[StepTime]:
    ids = [1] * PROMPT
    engine.forward([Work("draft", tuple(ids))])
    times = []
    for step in range(STEPS):
        with _timed(head) as spent:
            began = time.thread_time()
            (logits,) = engine.forward([Work("draft", tuple(ids))])
            forwarded = time.thread_time()
        ((columns, weights),) = drafting_laws(logits, OPTIONS, drawing.row_width)
        made = time.thread_time()
        ids.append(drawing.draws.draw(columns, weights, step))
        drawn = time.thread_time()
        times.append(StepTime(forwarded - began - spent.seconds, spent.seconds, made - forwarded, drawn - made))
    return times


def _medians(times: Sequence[StepTime]) -> StepTime:
    return StepTime(*(median(part) for part in zip(*map(astuple, times), strict=True)))


@dataclass
class _Spent:
    """Seconds in a module."""

    seconds: float = 0.0
    began: float = field(default=0.0, repr=False)


@contextmanager
def _timed(module: nn.Module) -> Iterator[_Spent]:
    spent = _Spent()

    def before(*_: object) -> None:
        spent.began = time.thread_time()

    def after(*_: object) -> None:
        spent.seconds += time.thread_time() - spent.began

    hooks = [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    try:
        yield spent
    finally:
        for hook in hooks:
            hook.remove()

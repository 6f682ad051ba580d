"""Where the time of a drafting step goes: layers, LM head, law, draw; with the whole head and with cut ones.

What is counted is the processor time of one thread, which other work on the machine hardly changes.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field, replace
from statistics import median
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from crossdraft.models.clocks import Clocks
from crossdraft.models.drawing import RandomDraws
from crossdraft.models.engine import Engine
from crossdraft.models.feeds import Work
from crossdraft.models.loading import load_model
from crossdraft.models.pruning import cut_of
from crossdraft.models.ranking import Law
from crossdraft.models.rows import drafting_laws
from crossdraft.models.sampling import tempered
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


class Drawing(Protocol):
    """How proposals are drawn."""

    def law(self, logits: Tensor) -> Any:
        """What is drawn from, of one row of logits (1, V)."""
        ...

    def draw(self, law: Any, offset: int) -> int:
        """A draw from it."""
        ...


class FromRows:
    """At random from the most probable ids, as for methods whose proposals carry rows."""

    def __init__(self, row_width: int) -> None:
        """`row_width`: as in `OpenDrafter`."""
        self._row_width = row_width
        self._draws = RandomDraws(np.random.default_rng(0))

    def law(self, logits: Tensor) -> Law:
        """As in `Drawing`."""
        (law,) = drafting_laws(logits, OPTIONS, self._row_width)
        return law

    def draw(self, law: Law, offset: int) -> int:
        """As in `Drawing`."""
        return self._draws.draw(*law, offset)


class Keyed:
    """With noise of all of `size` ids, as for `seeded`."""

    def __init__(self, size: int) -> None:
        """`size`: ids of the vocabulary."""
        noise = KeyedNoise([Letters(str(token)) for token in range(size)], [0] * size)
        self._clocks = Clocks(noise, torch.device("cpu"))

    def law(self, logits: Tensor) -> Tensor:
        """As in `Drawing`."""
        return tempered(logits, OPTIONS)

    def draw(self, law: Tensor, offset: int) -> int:
        """As in `Drawing`."""
        return int(self._clocks.arrivals(law, [(NoiseKey(0), offset)]).argmin())


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
        law = drawing.law(logits)
        made = time.thread_time()
        ids.append(drawing.draw(law, step))
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

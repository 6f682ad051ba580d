"""How long a pass takes, as a function of the nodes of its tree."""

import time
from collections.abc import Sequence
from statistics import median

import torch
from transformers import PreTrainedModel

from crossdraft.models.engine import Engine
from crossdraft.models.feeds import Work
from crossdraft.verification.trees import ROOT, TokenTree

PROMPT = 64  # tokens before the tree


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
    engine.forward([Work("pass", prompt)])
    found: list[list[float]] = [[] for _ in nodes]
    for turn in range(1 + turns):
        for count, times in zip(nodes, found, strict=True):
            tree = TokenTree((0,) * count, tuple(range(ROOT, count - 1)))
            began = time.thread_time()
            engine.forward([Work("pass", (*prompt, turn % 2), tree)])
            times += [time.thread_time() - began] if turn else []  # the first turn warms up
            engine.forward([Work("pass", prompt, wanted=())])
    return [median(times) for times in found]

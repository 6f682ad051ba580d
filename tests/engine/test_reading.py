"""Readings of many sessions: answered together they are what they are alone, bit by bit."""

from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
import torch

from crossdraft.engine import sampler
from crossdraft.engine.distributions import Columns, History, Nodes
from crossdraft.engine.sampler import (
    BatchKey,
    Clocks,
    DistributionRequest,
    DrawRequest,
    RowRequest,
    SampleRequest,
    SamplerRequest,
    TopRequest,
    batched,
)
from crossdraft.text.letters import Letters
from crossdraft.types.messages import NoiseKey, SamplingOptions
from crossdraft.types.rows import Row
from crossdraft.verification.noise import KeyedNoise

SIZES = (7, 256, 4099, 40_009)  # of vocabularies; of the last torch shares sums of a single row between threads
COUNTS = (1, 4, 0, 2, 1, 9, 1)  # rows of each reading
OPTIONS = (
    SamplingOptions(temperature=0),
    SamplingOptions(),
    SamplingOptions(0.7, top_k=20, min_p=0.01),
    SamplingOptions(1.3, top_p=0.95),
    SamplingOptions(0.9, repetition_penalty=1.3, presence_penalty=0.5, logit_bias=((3, 2.0),)),
)
DRAW = torch.Generator().manual_seed(11)


@pytest.fixture(params=[1, 2], autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def logits_of(size: int, flat: bool) -> list[torch.Tensor]:
    """Of one forward, as the engine gives them; flat ones, so that a nucleus has many ids."""
    whole = torch.randn(sum(COUNTS), size, generator=DRAW) * (0.1 if flat else 3)
    return list(whole.split(list(COUNTS)))


def nodes_of(logits: torch.Tensor, options: SamplingOptions) -> Nodes:
    path = tuple(torch.randint(0, logits.shape[-1], (3,), generator=DRAW).tolist())
    return Nodes(logits, options, History(path[:1], path[1:2], [path[2:]] * len(logits)))


def clocks_of(size: int) -> Clocks:
    return Clocks(KeyedNoise([Letters(str(token)) for token in range(size)], [0] * size), torch.device("cpu"))


def plain(found: object) -> object:
    """With `==` by value."""
    if isinstance(found, Row):
        return found.ids.tolist(), found.probabilities.tolist(), found.tail
    if isinstance(found, np.ndarray):
        return found.tolist()
    return tuple(map(plain, found)) if isinstance(found, tuple) else found


def check(readings: list[SamplerRequest]) -> None:
    together = readings[0].run(readings)
    assert len(together) == len(readings)
    for reading, found, count in zip(readings, together, COUNTS, strict=True):
        (alone,) = reading.run([reading])
        assert plain(found) == plain(alone)
        assert len(found) == count


@pytest.mark.parametrize(("size", "options"), list(product(SIZES, OPTIONS)))
@pytest.mark.parametrize("flat", [False, True])
def test_a_targets_answers_do_not_depend_on_others(size: int, options: SamplingOptions, flat: bool) -> None:
    clocks = clocks_of(size)
    every = [nodes_of(logits, options) for logits in logits_of(size, flat)]
    check(
        [
            SampleRequest(nodes, clocks, NoiseKey(place), range(len(nodes.logits)), 5)
            for place, nodes in enumerate(every)
        ]
    )
    check([RowRequest(nodes, 8) for nodes in every])
    check(
        [
            RowRequest(nodes, 8, [np.array([5, 0, 5])[: place + 1] for place, _ in enumerate(nodes.logits)])
            for nodes in every
        ]
    )


@pytest.mark.parametrize(("size", "options"), list(product(SIZES, OPTIONS)))
@pytest.mark.parametrize("some", [False, True])
def test_a_drafters_answers_do_not_depend_on_others(size: int, options: SamplingOptions, some: bool) -> None:
    clocks = clocks_of(size)
    allowed = Columns.of(np.arange(0, size, 2), torch.device("cpu")) if some else None
    every = logits_of(size, False)
    check([DistributionRequest(logits, options, 8, allowed) for logits in every])
    check([DistributionRequest(logits, options, 0, allowed) for logits in every])
    check([TopRequest(logits, 5, allowed) for logits in every])
    full = [(place, logits) for place, logits in enumerate(every) if len(logits)]
    for beside in (0, 4):
        keyed = [
            DrawRequest(logits, options, clocks, [(NoiseKey(place), at) for at in range(len(logits))], beside, allowed)
            for place, logits in full
        ]
        random = [
            DrawRequest(logits, options, clocks, [0.1 * at for at in range(len(logits))], beside, allowed)
            for _, logits in full
        ]
        for readings in (keyed, random):
            for reading, found in zip(readings, readings[0].run(readings), strict=True):
                assert reading.run([reading]) == [found]


def test_only_what_is_alike_is_answered_together(monkeypatch: pytest.MonkeyPatch) -> None:
    wide, narrow = torch.zeros(1, 6), torch.zeros(1, 5)
    columns = [Columns.of(np.array(numbers), torch.device("cpu")) for numbers in ([1, 2], [1, 2], [2, 3])]
    readings = [
        TopRequest(wide, 2),
        TopRequest(narrow, 2),
        DistributionRequest(wide, OPTIONS[0], 4),
        TopRequest(wide, 2, columns[0]),
        TopRequest(wide, 2),
        TopRequest(wide, 2, columns[1]),
        DistributionRequest(wide, OPTIONS[1], 4),
        TopRequest(wide, 2, columns[2]),
        DistributionRequest(wide, SamplingOptions(temperature=0), 4),
    ]
    assert sorted(batched(list(map(BatchKey.of, readings)))) == [[0, 4], [1], [2, 8], [3, 5], [6], [7]]
    monkeypatch.setattr(sampler, "CACHED", 12)
    sizes = [BatchKey.of(TopRequest(torch.zeros(rows, 6), 2)) for rows in (1, 1, 1, 1, 1, 9)]
    assert sorted(batched(sizes)) == [[0, 1], [2, 3], [4], [5]]

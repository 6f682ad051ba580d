"""What jobs want to know of their logits: found for several together, and who gets which error."""

from collections.abc import Iterator, Sequence

import pytest
import torch

from crossdraft.engine.engine import Engine
from crossdraft.engine.model_thread import ForwardResult, Job, ModelThread
from crossdraft.engine.requests import ForwardRequest as Request
from crossdraft.engine.sampler import SamplerRequest
from tests.engine.gathering import gathered
from tests.engine.tiny import tiny_llama

PROMPT = (5, 17, 3)


@pytest.fixture
def worker() -> Iterator[ModelThread]:
    thread = ModelThread(Engine(tiny_llama()))
    yield thread
    thread.close()


class Sizes(SamplerRequest[tuple[int, int]]):
    """How many rows a reading has, and how many readings were answered together."""

    def __init__(self, logits: torch.Tensor, kind: str = "", bad: bool = False) -> None:
        self._logits = logits
        self._kind = kind
        self._bad = bad

    @property
    def rows(self) -> torch.Tensor:
        return self._logits

    @property
    def kind(self) -> str:
        return self._kind

    def run(self, readings: "Sequence[Sizes]") -> list[tuple[int, int]]:
        if any(reading._bad for reading in readings):
            raise ValueError("no answer")
        return [(len(reading.rows), len(readings)) for reading in readings]


def reads(session: str, kinds: Sequence[str], bad: bool = False) -> Job[list[tuple[int, int]]]:
    """Asks the same thing of each of a few kinds, then goes on."""
    answer: ForwardResult = yield Request(session, PROMPT)
    found = []
    for kind in kinds:
        found.append((yield from Sizes(answer.logits, kind, bad).result()))
    yield Request(session, (*PROMPT, 1))
    return found


async def test_what_several_jobs_want_to_know_is_found_together(worker: ModelThread) -> None:
    results = await gathered(worker, reads("a", "xy"), reads("b", "xyx"), reads("c", "yx"), reads("d", ""))
    assert results == [[(1, 2), (1, 2)], [(1, 2), (1, 2), (1, 1)], [(1, 1), (1, 1)], []]
    assert worker.steps == 2


async def test_a_reading_without_an_answer_ends_only_its_job(worker: ModelThread) -> None:
    good, bad, other = await gathered(worker, reads("a", "x"), reads("b", "x", bad=True), reads("c", "x"))
    assert good == other == [(1, 1)]
    assert isinstance(bad, ValueError)
    assert await worker.run(reads("b", "x")) == [(1, 1)]


async def test_a_reading_that_is_like_nothing_ends_only_its_job(worker: ModelThread) -> None:
    good, bad = await gathered(worker, reads("a", "x"), reads("b", [["no hash"]]))
    assert good == [(1, 1)]
    assert isinstance(bad, TypeError)


async def test_a_job_may_read_before_its_first_work_or_without_any(worker: ModelThread) -> None:
    def early(works: int) -> Job[tuple[int, int]]:
        found = yield from Sizes(torch.zeros(3, 5)).result()
        for _ in range(works):
            yield Request("a", PROMPT)
        return found

    assert await worker.run(early(0)) == await worker.run(early(2)) == (3, 1)

"""The model thread: what is batched, who gets which error, cancelling and closing."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from crossdraft.engine.device import DeviceTimer, Fetching
from crossdraft.engine.engine import Engine
from crossdraft.engine.model_thread import ForwardResult, Job, ModelThread, ModelThreadClosedError
from crossdraft.engine.requests import ContextOverflowError
from crossdraft.engine.requests import ForwardRequest as Request
from crossdraft.engine.sampling.clocks import Clocks
from crossdraft.engine.sampling.paths import draw_path
from crossdraft.engine.sampling.sampler import SamplerRequest
from crossdraft.text.letters import Letters
from crossdraft.types.messages import NoiseKey, SamplingOptions
from crossdraft.verification.noise import KeyedNoise
from tests.engine.gathering import Gate, gathered, nothing, standing
from tests.engine.tiny import VOCABULARY, tiny_gemma2, tiny_llama

MODEL = tiny_llama()
PROMPT = (5, 17, 3)
LETTERS = [Letters(str(token)) for token in range(VOCABULARY)]
CLOCKS = Clocks(KeyedNoise(LETTERS, [0] * VOCABULARY), torch.device("cpu"), lengths=[*map(len, LETTERS)])
WINDOWED = tiny_gemma2(sliding_window=9, max_position_embeddings=2048)


def greedy(session: str, ids: tuple[int, ...], count: int) -> Job[tuple[int, ...]]:
    for _ in range(count):
        answer = yield Request(session, ids)
        ids = (*ids, int(answer.logits[0].argmax()))
    return ids


def alone(engine: Engine, job: Job[tuple[int, ...]]) -> tuple[int, ...]:
    """The result of a job that is the only one."""
    request = next(job)
    while True:
        try:
            timer = DeviceTimer(engine.device, lambda: 0.0)
            request = job.send(ForwardResult(engine.forward([request])[0], 0.0, 0.0, timer, 1, 0))
        except StopIteration as end:
            return end.value


@pytest.fixture
def worker() -> Iterator[ModelThread]:
    thread = ModelThread(Engine(MODEL))
    yield thread
    thread.close()


def greedy_path(session: str, ids: tuple[int, ...], count: int) -> Job[tuple[int, ...]]:
    options = SamplingOptions(temperature=0)
    found, _ = yield from draw_path(Request(session, ids, more=count - 1), options, CLOCKS, (NoiseKey(0), 0))
    return (*ids, *(one.token for one in found))


@pytest.mark.parametrize("make", [greedy, greedy_path])
async def test_jobs_that_wait_share_their_steps_and_find_what_they_find_alone(worker: ModelThread, make) -> None:
    cases = [("a", PROMPT, 6), ("b", (9,), 4), ("c", PROMPT[::-1], 6)]
    results = await gathered(worker, *(make(*case) for case in cases))
    assert worker.steps == 6
    assert results == [alone(Engine(MODEL), greedy(*case)) for case in cases]


@pytest.mark.parametrize("alone_for", range(5))
async def test_a_path_goes_on_where_others_have_interrupted_it(worker, alone_for, monkeypatch):
    waiting = chain([False] * alone_for, [True], repeat(False))
    monkeypatch.setattr(worker, "_others_wait", lambda jobs: next(waiting))
    cases = [("a", PROMPT, 6), ("b", (9,), 4), ("c", PROMPT[::-1], 6)]
    results = await gathered(worker, *(greedy_path(*case) for case in cases))
    assert results == [alone(Engine(MODEL), greedy(*case)) for case in cases]
    assert (worker.steps, worker.engine.computed) == (6, 2 * (3 + 5) + 1 + 3)  # no token is computed twice


async def test_a_path_that_fails_further_on_ends_only_itself(worker: ModelThread) -> None:
    good, bad = await gathered(worker, greedy_path("a", PROMPT, 5), greedy_path("b", (9,), 5))

    def spoil(module: torch.nn.Module, given: object, found: Any) -> None:
        if (found.logits[..., bad[2]] == found.logits.amax(-1)).any():
            found.logits[found.logits.argmax(-1) == bad[2]] = torch.nan

    hook = MODEL.register_forward_hook(spoil)
    again, spoilt = await gathered(worker, greedy_path("c", PROMPT, 5), greedy_path("d", (9,), 5))
    hook.remove()
    assert again == good
    assert isinstance(spoilt, ValueError)


async def test_a_path_that_does_not_fit_is_refused_before_it_begins(worker: ModelThread) -> None:
    fits, too_long = await gathered(worker, greedy_path("a", (1,) * 124, 5), greedy_path("b", (1,) * 125, 5))
    assert len(fits) == 129
    assert isinstance(too_long, ContextOverflowError)


async def test_errors_reach_only_their_submitter(worker: ModelThread) -> None:
    def broken() -> Job[tuple[int, ...]]:
        yield Request("x", PROMPT)
        raise KeyError("in the job")

    def broken_at_once() -> Job[tuple[int, ...]]:
        raise LookupError("at once")
        yield from ()

    bad = greedy("b", (VOCABULARY,), 1), greedy("c", (1,) * 127, 5), broken(), broken_at_once()
    results = await gathered(worker, greedy("a", PROMPT, 3), *bad, greedy("d", PROMPT, 3))
    good, bad_id, too_long, failed, failed_at_once, other = results
    assert good == other
    assert isinstance(bad_id, ValueError)
    assert isinstance(too_long, ContextOverflowError)
    assert isinstance(failed, KeyError)
    assert isinstance(failed_at_once, LookupError)
    assert await worker.submit(greedy("a", PROMPT, 3)) == good


async def test_a_forward_that_fails_for_the_batch_is_taken_one_by_one(worker: ModelThread) -> None:
    def fail(_: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        if (arguments[0] == 13).any():
            raise RuntimeError("no memory left")

    hook = MODEL.get_input_embeddings().register_forward_pre_hook(fail)
    good, bad = await gathered(worker, greedy("a", PROMPT, 2), greedy("b", (13,), 2))
    hook.remove()
    assert isinstance(bad, RuntimeError)
    assert worker.engine.slots_in_use == 64  # the one that failed keeps no places from others
    assert good == await worker.submit(greedy("c", PROMPT, 2))


async def test_a_cancelled_job_waits_for_no_more_of_its_prompt() -> None:
    engine = Engine(MODEL, chunk=8)
    entered, go_on = threading.Event(), threading.Event()

    def held(shares: Sequence[Request]) -> list[torch.Tensor | None]:
        entered.set()
        assert go_on.wait(120)
        return engine.step(shares)

    worker = ModelThread(engine, held)
    try:
        task = worker.submit(greedy("a", tuple(range(90)), 1))
        await asyncio.to_thread(entered.wait, 120)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on.set()
        worker.close_session("a")
        worker.close_session("never opened")
        await worker.submit(nothing())  # they are closed by then
        assert (worker.steps, engine.computed, engine.slots_in_use) == (1, 8, 0)
    finally:
        go_on.set()
        worker.close()


async def test_an_answer_says_who_shared_its_step_and_how_long_it_waited() -> None:
    now = [0.0]
    worker = ModelThread(Engine(MODEL), clock=lambda: now[0])
    answers: list[ForwardResult] = []

    def job(session: str) -> Job[tuple[int, ...]]:
        answers.append((yield Request(session, PROMPT)))
        return ()

    tasks = []
    async with standing(worker):
        for name in "abc":
            tasks.append(worker.submit(job(name)))
            now[0] += 1.0
    await asyncio.gather(*tasks)
    worker.close()
    assert [answer.queued for answer in answers] == [3.0, 2.0, 1.0]
    assert [(answer.sessions, answer.tokens, answer.seconds) for answer in answers] == [(3, 3 * len(PROMPT), 0.0)] * 3
    assert (worker.answers, worker.queued, dict(worker.batches)) == (3, 6.0, {3: 1})


async def test_more_sessions_than_have_room_all_come_to_their_end() -> None:
    worker = ModelThread(Engine(MODEL, budget=1))
    room = worker.engine.slots // 128
    cases = [(name, tuple(range(number % 20, number % 20 + 70)), 2) for number, name in enumerate(map(str, range(20)))]
    assert len(cases) > room
    results = await gathered(worker, *(greedy(*case) for case in cases))
    assert results == [alone(Engine(MODEL), greedy(*case)) for case in cases]
    assert worker.preemptions >= len(cases) - room  # none was closed: those that are done make room
    worker.close()


async def test_close_finishes_what_was_submitted_and_refuses_more(worker: ModelThread) -> None:
    tasks = [worker.submit(greedy(name, PROMPT, 5)) for name in "ab"]
    await asyncio.to_thread(worker.close)
    first, second = await asyncio.gather(*tasks)
    assert first == second
    assert len(first) == len(PROMPT) + 5
    with pytest.raises(ModelThreadClosedError):
        await worker.submit(greedy("c", PROMPT, 1))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_nobody_waits_for_a_thread_that_broke(worker: ModelThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker.engine, "remaining", None)  # a call fails
    results = await asyncio.wait_for(gathered(worker, greedy("a", PROMPT, 1), greedy("b", PROMPT, 1)), 120)
    assert all(isinstance(result, ModelThreadClosedError) for result in results)
    with pytest.raises(ModelThreadClosedError):
        await worker.submit(greedy("c", PROMPT, 1))


def test_a_submitter_whose_loop_is_gone_does_not_stop_the_thread(worker: ModelThread) -> None:
    gate = Gate()

    async def leave() -> None:
        task = worker.submit(gate.job())
        await asyncio.to_thread(gate.entered.wait, 120)
        task.cancel()

    async def come() -> tuple[int, ...]:
        return await worker.submit(greedy("a", PROMPT, 2))

    asyncio.run(leave())
    gate.let_go.set()
    assert len(asyncio.run(come())) == 5


@dataclass(eq=False)
class Sizes(SamplerRequest[tuple[int, int]]):
    """How many rows a request has, and how many requests were answered together."""

    rows: torch.Tensor | None = None
    kind: str = ""
    bad: bool = False

    def launch(self, requests: "Sequence[Sizes]") -> Fetching[list[tuple[int, int]]]:
        yield ()
        if any(request.bad for request in requests):
            raise ValueError("no answer")
        return [(len(request.rows), len(requests)) for request in requests]


def reads(session: str, kinds: Sequence[str], bad: bool = False) -> Job[list[tuple[int, int]]]:
    """Asks the same thing of each of a few kinds, then goes on."""
    answer: ForwardResult = yield Request(session, PROMPT)
    found = []
    for kind in kinds:
        found.append((yield Sizes(answer.logits, kind, bad)))
    yield Request(session, (*PROMPT, 1))
    return found


async def test_what_several_jobs_want_to_know_is_found_together(worker: ModelThread) -> None:
    results = await gathered(worker, reads("a", "xy"), reads("b", "xyx"), reads("c", "yx"), reads("d", ""))
    assert results == [[(1, 2), (1, 2)], [(1, 2), (1, 2), (1, 1)], [(1, 1), (1, 1)], []]
    assert worker.steps == 2


async def test_a_reading_without_an_answer_ends_only_its_job(worker: ModelThread) -> None:
    good, bad, other, alike_to_none = await gathered(
        worker, reads("a", "x"), reads("b", "x", bad=True), reads("c", "x"), reads("d", [["no hash"]])
    )
    assert good == other == [(1, 1)]
    assert isinstance(bad, ValueError)
    assert isinstance(alike_to_none, TypeError)
    assert await worker.submit(reads("b", "x")) == [(1, 1)]


async def test_a_job_may_read_before_its_first_work_or_without_any(worker: ModelThread) -> None:
    def early(requests: int) -> Job[tuple[int, int]]:
        found = yield Sizes(torch.zeros(3, 5))
        for _ in range(requests):
            yield Request("a", PROMPT)
        return found

    assert await worker.submit(early(0)) == await worker.submit(early(2)) == (3, 1)


@pytest.mark.parametrize(
    ("kind", "priority", "stream"), [("cuda", -1, ("cuda", -1)), ("cuda", 0, None), ("cpu", -1, None)]
)
async def test_a_thread_with_priority_has_a_stream_of_its_own(monkeypatch, kind, priority, stream):
    """On CUDA; whoever makes tensors for its steps does so there, too."""
    used: list[object] = []

    @contextmanager
    def entered(one: object) -> Iterator[None]:
        used.append(one)
        yield

    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: (device.type, priority))
    monkeypatch.setattr(torch.cuda, "stream", entered)
    engine = Engine(MODEL)
    monkeypatch.setattr(engine, "device", torch.device(kind))
    thread = ModelThread(engine, priority=priority)
    thread.close()
    assert used == [stream]
    with thread.on_stream():
        assert used == [stream, stream]


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("model", [MODEL, WINDOWED], ids=["whole", "windows"])
async def test_paths_are_the_same_in_windows_and_in_captured_forwards(model: PreTrainedModel, graphs: bool) -> None:
    worker = ModelThread(Engine(model, chunk=8, graphs=graphs))
    cases = [(name, tuple(range(3, 3 + size)), 20) for name, size in (("a", 3), ("b", 30), ("c", 61))]
    results = await gathered(worker, *(greedy_path(*case) for case in cases))
    names = [name for name, *_ in cases]
    again = await gathered(worker, *map(greedy_path, names, results, [30] * len(names)))
    worker.close()
    assert again == [alone(Engine(model), greedy(name, ids, 50)) for name, ids, _ in cases]


# Spans on a CPU, and on a device that works while the host goes on.


class Host:
    """A clock that is set."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


class Event:
    """A note of a device that requests for two seconds on what it is given; waiting for it is known."""

    host: Host
    device = 100.0  # when it is done with what it was given so far
    waits = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at = 0.0

    def record(self, stream: str) -> None:
        assert stream == "of cuda:1"
        self.at = max(Event.device, Event.host.now)

    def synchronize(self) -> None:
        Event.waits += 1

    def elapsed_time(self, later: "Event") -> float:
        return 1000 * (later.at - self.at)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    host = Host()
    monkeypatch.setattr(Event, "host", host, raising=False)
    monkeypatch.setattr(Event, "waits", 0)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"of {device}")
    return host


def test_a_cpu_is_done_when_the_call_returns() -> None:
    host = Host()
    span = DeviceTimer(torch.device("cpu"), host)
    host.now = 103.0
    span.end()
    host.now = 110.0
    assert (span.began, span.ended) == (100.0, 103.0)


def test_cuda_is_done_when_it_says_so_but_not_before_the_host(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host takes longer in a step that is made to take its time."""
    span = DeviceTimer(torch.device("cuda:1"), host)
    monkeypatch.setattr(Event, "device", 102.0)
    host.now = 100.5  # all is launched
    span.end()
    host.now = 105.0  # somebody asks much later
    assert Event.waits == 0
    assert (span.ended, span.ended) == (102.0, 102.0)
    assert Event.waits == 1
    slow = DeviceTimer(torch.device("cuda:1"), host)
    host.now = 109.0
    slow.end()
    assert slow.ended == 109.0

"""The ways that `crossdraft bench throughput` compares, each of which makes many outputs at once."""

import asyncio
import time
from asyncio import Task, TaskGroup
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

from crossdraft.cli.failures import CommandFailed
from crossdraft.cli.processes import Running
from crossdraft.cli.processor_time import processor_seconds
from crossdraft.cli.throughput_figures import Made, Model, Run, Spent
from crossdraft.cli.transformers_process import Question, ask
from crossdraft.pipeline import GenerationRequest, Pipeline, Statistics
from crossdraft.rpc.exposition import PREFIX

ALONE = 4  # outputs of a way that makes one at a time: more would only take longer
WARM_UP = 8  # tokens of each output
KS = (None, 1, 2, 3, 5)  # that assisted generation is tried with; None: its own rule

Ids = tuple[int, ...]


class Way(Protocol):
    """What makes outputs."""

    @property
    def name(self) -> str:
        """In tables."""
        ...

    async def warm_up(self, prompts: Sequence[Ids]) -> None:
        """Before anything is measured."""
        ...

    async def run(self, prompts: Sequence[Ids], tokens: int, at_once: int) -> Run:
        """An output for each prompt; raises CommandFailed."""
        ...


@dataclass(frozen=True, eq=False)
class Ours:
    """A pipeline in this process, with services in others."""

    name: str
    pipeline: Pipeline
    request: GenerationRequest  # its prompt and its number of tokens are replaced
    target: Running
    drafter: Running | None
    warm_ups: tuple[tuple[int, int], ...] = ((ALONE, WARM_UP),)  # outputs at once, and tokens of each

    async def warm_up(self, prompts: Sequence[Ids]) -> None:
        """A few outputs."""
        for at_once, tokens in self.warm_ups:
            await self.run(prompts[: max(at_once, ALONE)], tokens, at_once)

    async def run(self, prompts: Sequence[Ids], tokens: int, at_once: int) -> Run:
        """As Way says."""
        places = Places(self, prompts, tokens)
        model, spent = await counted(self.target.ready["metrics"]), self._spent()
        began = places.began = time.monotonic()
        await places.fill(at_once)
        seconds, after = time.monotonic() - began, self._spent()
        model = (await counted(self.target.ready["metrics"])).since(model)
        outputs, statistics = zip(*(places.found[number] for number in range(len(prompts))), strict=True)
        return Run(outputs, seconds, between(spent, after), model, statistics)

    def _spent(self) -> Spent:
        drafter = 0.0 if self.drafter is None else processor_seconds(self.drafter.process_id)
        target = processor_seconds(self.target.process_id)
        return Spent(target, drafter, time.process_time(), time.thread_time())


@dataclass(eq=False)
class Places:
    """Some places, in each of which an output follows the one before until there are no more prompts."""

    way: Ours
    prompts: Sequence[Ids]
    tokens: int

    def __post_init__(self) -> None:
        self.began = 0.0  # in seconds of the monotonic clock
        self.found: dict[int, tuple[Made, Statistics]] = {}
        self._waiting: Iterator[int] = iter(range(len(self.prompts)))

    async def fill(self, count: int) -> None:
        """Returns when all outputs are made; raises what the first failure raised."""
        places: list[Task[None]] = []
        try:
            async with TaskGroup() as group:
                places += [group.create_task(self._place()) for _ in range(count)]
        except ExceptionGroup as error:
            raise error.exceptions[0] from error

    async def _place(self) -> None:
        for number in self._waiting:
            request = replace(self.way.request, prompt=self.prompts[number], max_tokens=self.tokens, choice=number)
            asked, ids, moments = self._now(), [], []
            async with self.way.pipeline.run(request) as generation:
                async for token in generation:
                    ids.append(token.id)
                    moments.append(self._now())
            if generation.statistics is None or not ids:
                raise CommandFailed("an output ended without a token or without its statistics")
            self.found[number] = Made(tuple(ids), asked, tuple(moments)), generation.statistics

    def _now(self) -> float:
        return time.monotonic() - self.began


@dataclass(eq=False)
class Theirs:
    """transformers in a process of its own."""

    name: str
    process: Running
    alone: bool = False  # one output after another, and so only a few
    k: int | None = None  # drafted at once; None: its own rule

    async def warm_up(self, prompts: Sequence[Ids]) -> None:
        """A few outputs; where tokens are drafted, the fastest number of them is looked for."""
        seconds: dict[int | None, float] = {}
        for k in KS if self.alone else (None,):
            for tokens in (WARM_UP, 4 * WARM_UP) if self.alone else (WARM_UP,):
                answer = await ask(self.process.address, Question(tuple(prompts[:ALONE]), tokens, ALONE, k))
                seconds[k] = answer.seconds
        self.k = min(seconds, key=lambda k: seconds[k])
        if self.alone:
            self.name += f", {'its own K' if self.k is None else f'K = {self.k}'}"

    async def run(self, prompts: Sequence[Ids], tokens: int, at_once: int) -> Run:
        """As Way says."""
        before, here, loop = processor_seconds(self.process.process_id), time.process_time(), time.thread_time()
        asked = tuple(prompts[:ALONE] if self.alone else prompts)
        answer = await ask(self.process.address, Question(asked, tokens, at_once, self.k))
        target = processor_seconds(self.process.process_id) - before
        spent = Spent(target, 0.0, time.process_time() - here, time.thread_time() - loop)
        fed = sum(map(len, asked)) + sum(len(made.ids) - 1 for made in answer.outputs)
        jobs = sum(len(made.ids) for made in answer.outputs)
        known = answer.forwards > 0
        model = Model(answer.forwards, jobs, fed, answer.seconds) if known else Model()
        return Run(answer.outputs, answer.seconds, spent, model)


def between(before: Spent, after: Spent) -> Spent:
    """What was spent meanwhile."""
    return Spent(
        after.target - before.target,
        after.drafter - before.drafter,
        after.here - before.here,
        after.loop - before.loop,
    )


async def counted(address: str) -> Model:
    """What a service has counted so far; raises CommandFailed if it does not say."""
    return model_of(await asyncio.to_thread(_read, f"http://{address}/metrics"))


def _read(url: str) -> str:
    with urlopen(url, timeout=30) as answer:
        text: str = answer.read().decode("utf-8")
    return text


def model_of(text: str) -> Model:
    """From metrics as Prometheus reads them; raises CommandFailed if one is missing."""
    found = {sample.name: sample.value for one in text_string_to_metric_families(text) for sample in one.samples}
    names = ("model_steps_total", "batch_size_sum", "model_tokens_total", "model_seconds_total")
    try:
        return Model(*(found[f"{PREFIX}service_{name}"] for name in names))
    except KeyError as error:
        raise CommandFailed(f"the target's metrics have no {error.args[0]}") from error

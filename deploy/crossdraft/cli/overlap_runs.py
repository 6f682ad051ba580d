"""Generations of `crossdraft bench overlap`: one at a time, each way in its turn on each prompt."""

import time
from asyncio import to_thread
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from crossdraft.cli.failures import CommandFailed
from crossdraft.cli.overlap_ways import Task, Way
from crossdraft.cli.paired import Timed, rotated, speed_of
from crossdraft.models.assisted import AssistanceFailedError, AssistedGeneration
from crossdraft.pipeline import Pipeline, Statistics

WARM_UP_TOKENS = 16
ASSISTED_KS = (None, 1, 2, 3, 5)  # None: transformers' own rule


@dataclass(frozen=True)
class Outcome(Timed):
    """A generation that has ended."""

    figures: Statistics | None = None  # None: not one of ours


@dataclass(frozen=True)
class Assisted:
    """transformers' assisted generation as one more way, in this process."""

    k: int | None  # drafted at once; None: transformers' own rule
    threads: int  # of torch
    name: str = "transformers"

    @property
    def label(self) -> str:
        """Its name and numbers."""
        k = "its own K" if self.k is None else f"K = {self.k}"
        return f"{self.name}, {k}, {self.threads} {'threads' if self.threads > 1 else 'thread'}"


AnyWay = Way | Assisted


def assisted_ways(threads: Sequence[int]) -> tuple[Assisted, ...]:
    """What is tried."""
    return tuple(Assisted(k, count) for count in threads for k in ASSISTED_KS)


@dataclass(frozen=True, eq=False)
class Bench:
    """What generates, and what."""

    task: Task
    plain: Pipeline
    drafted: Pipeline
    assisted: AssistedGeneration | None = None
    advance: Callable[[], None] = field(default=lambda: None)  # called after each generation

    async def compare(
        self, ways: Sequence[AnyWay], prompts: int, repeat: int = 1, max_tokens: int | None = None
    ) -> Mapping[AnyWay, list[Outcome]]:
        """Each way on each of the first `prompts` prompts, `repeat` times; the ways take turns.

        Raises:
            CommandFailed: a service fails, or transformers cannot generate with this pair.
        """
        found: dict[AnyWay, list[Outcome]] = {way: [] for way in ways}
        for turn in range(repeat * prompts):
            for place in rotated(len(ways), turn):
                found[ways[place]].append(await self.run(ways[place], turn % prompts, max_tokens))
                self.advance()
        return found

    async def best(self, ways: Sequence[AnyWay], prompts: int, max_tokens: int) -> AnyWay:
        """The fastest of some ways on a few prompts."""
        if len(ways) == 1:
            return ways[0]
        found = await self.compare(ways, prompts, max_tokens=max_tokens)
        return max(ways, key=lambda way: speed_of(found[way]))

    async def warm_up(self, ways: Sequence[AnyWay]) -> None:
        """Each way once, briefly: code is loaded, and the services have seen such requests."""
        for way in ways:
            await self.run(way, 0, WARM_UP_TOKENS)

    async def run(self, way: AnyWay, number: int, max_tokens: int | None = None) -> Outcome:
        """One generation for the prompt of this number, to its end."""
        if isinstance(way, Assisted):
            return await to_thread(self._assisted, way, number, max_tokens or self.task.max_tokens)
        pipeline = self.drafted if way.drafts else self.plain
        generation = pipeline.run(self.task.request(way, number, max_tokens))
        async with generation:
            async for _ in generation:
                pass
        figures = generation.statistics
        if figures is None:
            raise CommandFailed("a generation ended without its statistics")
        return Outcome(figures.tokens, figures.seconds, figures)

    def _assisted(self, way: Assisted, number: int, max_tokens: int) -> Outcome:
        assert self.assisted is not None
        began = time.monotonic()
        try:
            ids = self.assisted.continuation(
                self.task.prompts[number], max_tokens, way.k, self.task.temperature, way.threads
            )
        except AssistanceFailedError as error:
            raise CommandFailed(str(error)) from error
        return Outcome(len(ids), time.monotonic() - began)

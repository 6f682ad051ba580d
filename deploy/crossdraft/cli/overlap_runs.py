"""Generations of `crossdraft bench overlap`: one at a time, each way in its turn on each prompt."""

import time
from asyncio import to_thread
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from crossdraft.cli.failures import CommandFailed
from crossdraft.cli.overlap_prediction import Watched, mean_of, predicted_ratio
from crossdraft.cli.overlap_ways import Task, Way
from crossdraft.cli.paired import Timed, rotated, speed_of
from crossdraft.models.assisted import AssistanceFailedError, AssistedGeneration
from crossdraft.pipeline import Generation, Statistics
from crossdraft.pipeline.assignment import Assignment
from crossdraft.pipeline.estimates import Estimates
from crossdraft.pipeline.experience import Experience
from crossdraft.pipeline.governing import Choice, Governor
from crossdraft.pipeline.learning import Learner
from crossdraft.pipeline.ports import Services
from crossdraft.pipeline.resolution import Models, resolve

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
class Side:
    """Where generations run: with a drafter or without."""

    models: Models
    services: Services


@dataclass(eq=False)
class Bench:
    """What generates, what is generated, and what is learnt meanwhile."""

    task: Task
    plain: Side
    drafted: Side
    assisted: AssistedGeneration | None = None
    advance: Callable[[], None] = field(default=lambda: None)  # called after each generation
    experience: Experience = field(default_factory=Experience)  # of governors, as a pipeline keeps it

    def __post_init__(self) -> None:
        self._method = self._assignment(Way("governed", None), 0, None).method
        self._learner = Learner(Estimates(), self._method.samples)
        self._believed: list[Estimates] = []

    async def compare(
        self, ways: Sequence[AnyWay], prompts: int, repeat: int = 1, max_tokens: int | None = None
    ) -> Mapping[AnyWay, list[Outcome]]:
        """Each way on each of the first `prompts` prompts, `repeat` times; the ways take turns.

        Raises:
            CommandFailed: a service fails, or transformers cannot generate with this pair.
        """
        found: dict[AnyWay, list[Outcome]] = {way: [] for way in ways}
        self._believed.clear()
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
        assignment = self._assignment(way, number, max_tokens)
        services = self.plain.services
        if way.drafts:
            self.experience.keep(self.task.request(way, number), assignment.governor)
            assignment = replace(assignment, governor=Watched(assignment.governor, self._learner))
            services = self.drafted.services
        async with Generation(assignment, services) as generation:
            async for _ in generation:
                pass
        figures = generation.statistics
        if figures is None:
            raise CommandFailed("a generation ended without its statistics")
        if way.drafts:
            self._believed.append(self._learner.estimates)
        return Outcome(figures.tokens, figures.seconds, figures)

    def predictions(self, ways: Sequence[AnyWay]) -> Mapping[str, float]:
        """What the simulator expects of each way since `compare` last began, by name; plain decoding is 1."""
        estimates = self.estimates
        if estimates is None or not estimates.known:
            return {}
        return {
            way.name: predicted_ratio(estimates, self._how(way, estimates), self._method.samples)
            for way in ways
            if isinstance(way, Way) and way.drafts
        }

    @property
    def estimates(self) -> Estimates | None:
        """What predictions start from; None before any drafter was used."""
        return mean_of(self._believed) if self._believed else None

    def _how(self, way: Way, estimates: Estimates) -> Choice | Governor:
        if way.choice is not None:
            return way.choice
        return resolve(self.task.request(way, 0), self.drafted.models, before=estimates).governor

    def _assignment(self, way: Way, number: int, max_tokens: int | None) -> Assignment:
        request = self.task.request(way, number, max_tokens)
        side = self.drafted if way.drafts else self.plain
        return resolve(request, side.models, before=self.experience.of(request))

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

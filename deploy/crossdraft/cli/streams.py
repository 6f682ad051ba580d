"""Seeded outputs that are generated over and over, all at once, while something happens to their services."""

import asyncio
import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from crossdraft.cli.benching import SEED
from crossdraft.cli.failures import CommandFailed
from crossdraft.pipeline import Generation, GenerationRequest, Statistics
from crossdraft.pipeline.ports import Services
from crossdraft.pipeline.resolution import Models, resolve
from crossdraft.rpc.errors import ServiceError


@dataclass(eq=False)
class Stream:
    """One output on its way."""

    number: int  # of its prompt
    moments: list[float] = field(default_factory=list)  # of its tokens, in seconds of the monotonic clock
    text: str = ""  # once it has ended
    error: str = ""  # why it broke; empty: it did not
    figures: Statistics | None = None

    def next_token(self, after: float) -> float | None:
        """Seconds from a moment to the next token; None if there is none."""
        place = bisect_right(self.moments, after)
        return self.moments[place] - after if place < len(self.moments) else None

    def pause(self, after: float, within: float) -> float | None:
        """Seconds of the longest time without a token, of those that begin in the `within` seconds after a moment (or
        before it: then they are counted from there); None if no token came since."""
        first = bisect_right(self.moments, after)
        tokens = [after, *self.moments[first:]]
        return max((end - begin for begin, end in pairwise(tokens) if begin <= after + within), default=None)


@dataclass(eq=False)
class Streams:
    """One place for each prompt; in each a stream follows the one before."""

    prompts: tuple[str, ...]
    max_tokens: int
    models: Models
    services: Services
    current: dict[int, Stream] = field(default_factory=dict)  # by number
    ended: list[Stream] = field(default_factory=list)

    async def undisturbed(self) -> list[Stream]:
        """Each once, all at the same time."""
        return list(await asyncio.gather(*(self._stream(number) for number in range(len(self.prompts)))))

    async def keep_on(self, until: asyncio.Event) -> None:
        """Each again and again, until the event is set and the streams under way then have ended."""
        await asyncio.gather(*(self._again(number, until) for number in range(len(self.prompts))))

    async def _again(self, number: int, until: asyncio.Event) -> None:
        while not until.is_set():
            self.ended.append(await self._stream(number))

    async def _stream(self, number: int) -> Stream:
        stream = self.current[number] = Stream(number)
        assignment = resolve(self._request(number), self.models, targets=len(self.services.targets))
        generation = Generation(assignment, self.services)
        try:
            async with generation:
                async for _ in generation:
                    stream.moments.append(time.monotonic())
        except ServiceError as error:
            stream.error = str(error)
            await asyncio.sleep(1)  # the next one would break as well
        stream.text, stream.figures = generation.text, generation.statistics
        return stream

    def _request(self, number: int) -> GenerationRequest:
        return GenerationRequest(
            self.prompts[number],
            "seeded",
            max_tokens=self.max_tokens,
            seed=SEED,
            choice=number,
            ignore_eos=True,
        )


def checked(undisturbed: Sequence[Stream]) -> float:
    """Seconds between tokens, the median; raises CommandFailed if a stream broke though nothing happened."""
    for one in undisturbed:
        if one.error:
            raise CommandFailed(f"a stream broke before anything was done to the services: {one.error}")
    return median(end - begin for one in undisturbed for begin, end in pairwise(one.moments))


@dataclass(frozen=True)
class Verdict:
    """Whether streams came through."""

    streams: int
    broken: int  # that ended with an error
    differ: int  # that ended with another text than the undisturbed ones
    faults: tuple[str, ...]  # what was wrong with the first few


def verdict_of(ended: Sequence[Stream], undisturbed: Sequence[Stream]) -> Verdict:
    """Compares each with the undisturbed stream of its prompt."""
    broken = [one for one in ended if one.error]
    differ = [one for one in ended if not one.error and one.text != undisturbed[one.number].text]
    faults = [f"stream {one.number}: {one.error}" for one in broken]
    faults += [f"stream {one.number}: {_difference(one.text, undisturbed[one.number].text)}" for one in differ]
    return Verdict(len(ended), len(broken), len(differ), tuple(faults[:10]))


def _difference(text: str, wanted: str) -> str:
    same = next((place for place, (one, other) in enumerate(zip(text, wanted, strict=False)) if one != other), None)
    place = min(len(text), len(wanted)) if same is None else same
    return f"at character {place} {text[place : place + 20]!r} instead of {wanted[place : place + 20]!r}"

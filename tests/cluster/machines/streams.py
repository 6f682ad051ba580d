"""Seeded streams through OpenAI's client, with the times of their pieces."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import httpx2
from openai import APIError, AsyncOpenAI

MODEL = "crossdraft-bundled"
PROMPT = "def fibonacci(n):\n"
CLIENT_SECONDS = 120.0
REPEATS = 100  # of a client whose front may be lost
AGAIN_SECONDS = 0.2  # before a client whose connection is lost asks again


@dataclass(eq=False)
class Stream:
    """One output as its client saw it."""

    seed: int
    text: str = ""
    tokens: int = 0  # as the server counts them
    ended: bool = False
    fault: str = ""  # what broke it; empty: nothing
    repeats: int = 0  # times that its client asked again, after the connection was lost
    times: list[float] = field(default_factory=list)  # when each piece came, seconds of the monotonic clock

    def pause(self, since: float) -> float | None:
        """The longest time without a piece that ended after `since`, seconds; None: there was none."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return max((after - before for before, after in pairs if after > since), default=None)


class Streams:
    """Clients that each ask for an output with their own seed, all at once.

    Args:
        client: OpenAI's.
        seeds: one for each client.
        tokens: of each output.
        repeats: times that a client whose connection is lost asks again, with the same id and seed.
    """

    def __init__(
        self, client: AsyncOpenAI, seeds: Sequence[int], tokens: int, repeats: int = 0, model: str = MODEL
    ) -> None:
        self._client = client
        self._tokens = tokens
        self._repeats = repeats
        self._model = model
        self.current = {seed: Stream(seed) for seed in seeds}
        self.ended: list[Stream] = []
        self._moved = asyncio.Event()  # whenever something has come

    async def run(self) -> list[Stream]:
        """Each once, to its end, broken or not."""
        await asyncio.gather(*(self._run(seed) for seed in self.current))
        return self.ended

    async def keep_on(self, over: asyncio.Event) -> list[Stream]:
        """Each again and again; those that run when it is over go on to their ends."""

        async def again(seed: int) -> None:
            while not over.is_set():
                await self._run(seed)

        await asyncio.gather(*(again(seed) for seed in self.current))
        return self.ended

    async def under_way(self, pieces: int = 3) -> None:
        """Returns once each has had this many pieces of an output, or has ended."""
        while True:
            self._moved.clear()
            if all(len(one.times) >= pieces or one.ended for one in self.current.values()):
                return
            await self._moved.wait()

    async def _run(self, seed: int) -> None:
        stream = self.current[seed] = Stream(seed)
        while not stream.tokens:
            try:
                await self._read(stream)
            except (APIError, httpx2.HTTPError) as error:
                if stream.repeats >= self._repeats:
                    stream.fault = f"{type(error).__name__}: {error}"
                    break
                stream.repeats += 1
                await asyncio.sleep(AGAIN_SECONDS)
        stream.ended = True
        self.ended.append(stream)
        self._moved.set()

    async def _read(self, stream: Stream) -> None:
        """What the client has already heard, and hears again, is no piece."""
        text = ""
        async for chunk in await self._client.completions.create(
            model=self._model,
            prompt=PROMPT,
            seed=stream.seed,
            temperature=0.8,
            max_tokens=self._tokens,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
            extra_headers={"x-request-id": f"stream-{stream.seed}"},
        ):
            if chunk.usage is not None:
                stream.tokens = chunk.usage.completion_tokens
            for choice in chunk.choices:
                text += choice.text
                if stream.text.startswith(text):
                    continue
                stream.text = text
                stream.times.append(time.monotonic())
                self._moved.set()


def client_of(url: str) -> AsyncOpenAI:
    """It does not try anything again by itself."""
    return AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=CLIENT_SECONDS)


async def first_piece(client: AsyncOpenAI) -> str:
    """The text of an output's first piece, as soon as it is there."""
    async with await client.completions.create(
        model=MODEL, prompt=PROMPT, seed=1, max_tokens=8, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        async for chunk in stream:
            if chunk.choices and chunk.choices[0].text:
                return chunk.choices[0].text
    raise AssertionError("the stream had no text")


def faults_of(streams: Sequence[Stream], undisturbed: Sequence[Stream]) -> list[str]:
    """What is wrong with streams, given the same ones undisturbed: a line each."""
    wanted: Mapping[int, Stream] = {one.seed: one for one in undisturbed}
    faults = []
    for one in streams:
        other = wanted[one.seed]
        if one.fault:
            faults.append(f"seed {one.seed} broke after {len(one.times)} pieces: {one.fault}")
        elif (one.text, one.tokens) != (other.text, other.tokens):
            faults.append(f"seed {one.seed}: {one.tokens} tokens {one.text!r}, not {other.tokens} {other.text!r}")
    return faults

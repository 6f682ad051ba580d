"""The Python API: connect to a target and a drafter, generate.

async with connect(target="127.0.0.1:7001", drafter="127.0.0.1:7002") as pipeline:
    async for token in pipeline.generate("def main(", method="seeded", seed=7):
        print(token.text, end="")
"""

import asyncio
from types import TracebackType
from typing import Any, Self
from weakref import WeakSet

from crossdraft.pipeline.generation import Generation
from crossdraft.pipeline.request import GenerationRequest
from crossdraft.pipeline.resolution import Models, resolve
from crossdraft.rpc.clients import DrafterClient, Patience, TargetClient
from crossdraft.rpc.errors import BadMessage
from crossdraft.text.letters import Side
from crossdraft.text.pairing import Pair
from crossdraft.text.tokenization import Tokenization
from crossdraft.text.vocabulary import Vocabulary
from crossdraft.verification.exchange import Description


class Pipeline:
    """Connections to a target and, unless decoding is plain, a drafter."""

    def __init__(self, target: str, drafter: str | None = None, patience: Patience | None = None) -> None:
        self._patience = patience or Patience()
        self._addresses = (target, drafter)
        self._target: TargetClient | None = None
        self._drafter: DrafterClient | None = None
        self._models: Models | None = None
        self._generations: WeakSet[Generation] = WeakSet()  # to close those that still run

    async def __aenter__(self) -> Self:
        """Connect and learn the two vocabularies.

        Raises:
            ServiceError: a service does not answer in time, or its tokenizer cannot be used; the text says which
                one and what to do.
        """
        target, drafter = self._addresses
        self._target = TargetClient(target, self._patience)
        self._drafter = None if drafter is None else DrafterClient(drafter, self._patience)
        try:
            self._models = await self._learn(self._target, self._drafter)
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()

    def generate(self, prompt: str, **settings: Any) -> Generation:
        """One output; `settings` are the fields of GenerationRequest.

        Raises:
            RequestError: the request cannot be served by this pair.
        """
        return self.run(GenerationRequest(prompt, **settings))

    def run(self, request: GenerationRequest) -> Generation:
        """The same for a request that is made already."""
        if self._models is None or self._target is None:
            raise RuntimeError("use the pipeline inside `async with connect(...)`")
        generation = Generation(resolve(request, self._models), self._target, self._drafter)
        self._generations.add(generation)
        return generation

    @property
    def models(self) -> Models:
        """The vocabularies of the pair, once connected."""
        if self._models is None:
            raise RuntimeError("use the pipeline inside `async with connect(...)`")
        return self._models

    async def _learn(self, target: TargetClient, drafter: DrafterClient | None) -> Models:
        asked = [target.describe()] + ([] if drafter is None else [drafter.describe()])
        about, *others = await asyncio.gather(*asked)
        # In a thread: with vocabularies of 128,000 tokens this takes a second.
        return await asyncio.to_thread(_models_of, about, others[0] if others else None)

    async def _close(self) -> None:
        for generation in list(self._generations):
            await generation.aclose()
        for client in (self._target, self._drafter):
            if client is not None:
                await client.close()


def connect(target: str, drafter: str | None = None, patience: Patience | None = None) -> Pipeline:
    """A pipeline to use with `async with`; addresses are host:port, no drafter means plain decoding."""
    return Pipeline(target, drafter, patience)


def _models_of(target: Description, drafter: Description | None) -> Models:
    tokenization = _learned(target, Side.TARGET)
    if drafter is None:
        return Models(target, tokenization)
    pair = Pair(tokenization.vocabulary, _learned(drafter, Side.DRAFTER).vocabulary)
    return Models(target, tokenization, drafter, pair).prepare()


def tokenization_of(description: Description, side: Side) -> Tokenization:
    """The tokenizer of a model that described itself.

    Raises:
        ValueError: there is none that could be used; the text says why.
    """
    vocabulary = Vocabulary.build(
        description.tokenizer_json, description.vocabulary_size, description.controls, description.stops, side
    )
    return Tokenization(description.tokenizer_json, vocabulary)


def _learned(description: Description, side: Side) -> Tokenization:
    """The same for a service that was asked: what it says may be anything. Raises BadMessage."""
    try:
        return tokenization_of(description, side)
    except ValueError as error:
        raise BadMessage(
            f"the tokenizer of the {side.name.lower()} {description.model!r} cannot be used: {error}"
        ) from error

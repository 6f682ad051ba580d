"""A pipeline that is opened when it is needed, by whoever needs it first."""

import asyncio
from collections.abc import Callable

from crossdraft.pipeline import Pipeline, RequestError
from crossdraft.rpc.errors import NotServed

Addresses = tuple[str, ...]
Make = Callable[[Addresses, Addresses], Pipeline]


class Connection:
    """One pipeline, shared by all outputs of its model and drafter.

    Args:
        make: a pipeline to such targets and drafters that is not open yet.
        targets: addresses.
        drafters: likewise.
    """

    def __init__(self, make: Make, targets: Addresses, drafters: Addresses) -> None:
        self._make = make
        self._addresses = (targets, drafters)
        self._pipeline: Pipeline | None = None
        self._opening: asyncio.Task[Pipeline] | None = None

    @property
    def pipeline(self) -> Pipeline | None:
        """Once it is open."""
        return self._pipeline

    async def open(self) -> Pipeline:
        """The pipeline. Those who ask while it is being opened wait for the same attempt.

        Raises:
            ServiceError: no target answers, or targets or drafters do not go together.
        """
        if self._pipeline is None:
            return await asyncio.shield(self._attempt())
        return self._pipeline

    def begin(self) -> None:
        """An attempt is under way from now on, unless it is open. How it ends is seen by `pipeline` alone."""
        if self._pipeline is None:
            self._attempt().add_done_callback(lambda attempt: attempt.cancelled() or attempt.exception())

    def _attempt(self) -> asyncio.Task[Pipeline]:
        if self._opening is None or self._opening.done():
            self._opening = asyncio.create_task(self._open())
        return self._opening

    async def follow(self, targets: Addresses, drafters: Addresses) -> None:
        """From now on these are the services; sessions that run elsewhere go on there."""
        self._addresses = (targets, drafters)
        if self._pipeline is not None:
            await self._pipeline.follow(targets, drafters)

    async def _open(self) -> Pipeline:
        used = self._addresses
        pipeline = self._make(*used)
        try:
            self._pipeline = await pipeline.__aenter__()
        except RequestError as error:  # nobody's request is wrong: the addresses are
            raise NotServed(str(error)) from error
        if used != self._addresses:
            await self._pipeline.follow(*self._addresses)
        return self._pipeline

    async def close(self) -> None:
        """Ends what runs on it."""
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait([self._opening])
        if self._pipeline is not None:
            await self._pipeline.__aexit__(None, None, None)

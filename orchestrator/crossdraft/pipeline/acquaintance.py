"""Gets to know services: each is asked to describe itself until it has, those that are down in the background.

Those that are known are watched, so that it is known at any time whether they can be reached.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import NoReturn, Protocol, TypeVar

from crossdraft.rpc.errors import ServiceError
from crossdraft.verification.exchange import Description

FIRST_PAUSE = 0.25  # seconds between two questions to a service that does not answer; it doubles
LONGEST_PAUSE = 4.0
WATCHED_EVERY = 0.25  # seconds between two looks at the connection to a service that is known

log = logging.getLogger(__name__)


class Described(Protocol):
    """A client of a service."""

    address: str

    @property
    def service(self) -> str:
        """What error texts call it."""
        ...

    async def describe(self) -> Description:
        """What the service says of its model; raises ServiceError."""
        ...

    def reachable(self) -> bool | None:
        """Whether it can be reached now; None: that is being found out."""
        ...


Client = TypeVar("Client", bound=Described)
Welcome = Callable[[Client, Description], Awaitable[None]]


class Strange(Exception):  # noqa: N818 - it says what is wrong
    """A service that describes itself, and cannot be used beside the others of its role; the text says why."""


class Acquaintance:
    """One service that is asked what it is. Make it in a running event loop, and `close` it.

    Args:
        client: of the service.
        welcome: called once with the client and its description; raises ServiceError if it cannot be used now, and
            Strange if it never can.
    """

    def __init__(self, client: Client, welcome: Welcome[Client]) -> None:
        self.error: ServiceError | None = None  # the latest, while it is not known
        self.there = False  # it is known, and could be reached when that was last found out
        self._warned = False
        self._client = client
        self.strange: Strange | None = None
        self.tried: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # once it was, in vain or not
        self._task = asyncio.create_task(self._meet(client, welcome))

    def warn(self) -> None:
        """Says so if it is not known yet."""
        self._warned = self.error is not None or not self.tried.done()
        if self._warned:
            log.warning("%s; it is tried again", self.error or f"{self._client.service} has not answered yet")

    async def close(self) -> None:
        """Asks and watches no more."""
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _meet(self, client: Client, welcome: Welcome[Client]) -> None:
        pause = FIRST_PAUSE
        try:
            while not await self._asked(client, welcome):
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
        finally:
            self._tried()
        if self.strange is None:
            await self._watch(client)

    async def _watch(self, client: Client) -> NoReturn:
        self.there = True
        while True:
            await asyncio.sleep(WATCHED_EVERY)
            reachable = client.reachable()
            self.there = self.there if reachable is None else reachable

    async def _asked(self, client: Client, welcome: Welcome[Client]) -> bool:
        """Whether there is nothing more to ask."""
        try:
            await welcome(client, await client.describe())
            self.error = None
            if self._warned:
                log.warning("%s is there now", client.service)
        except Strange as error:
            self.strange = error
            log.warning("%s is not used: %s", client.service, error)
        except ServiceError as error:
            self.error = error
            self._tried()
            return False
        return True

    def _tried(self) -> None:
        if not self.tried.done():
            self.tried.set_result(None)


async def all_tried(acquaintances: Sequence[Acquaintance], seconds: float) -> None:
    """Returns once each was asked at least once, or after this time."""
    if acquaintances:
        await asyncio.wait([one.tried for one in acquaintances], timeout=max(0.0, seconds))

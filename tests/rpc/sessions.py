"""Sessions for tests that wait for each reply; a pipeline's sessions tell a listener."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Self

from crossdraft.rpc import links
from crossdraft.rpc.errors import Closed, ServiceError
from crossdraft.rpc.links import LinkSession, Traffic
from crossdraft.types.messages import Draft, Drafted, FetchRow, Pass, PassDone, RowFetched, Score, Scored


class ServiceSession:
    """An open session for callers that wait for its replies. After any error it is closed."""

    def __init__(self, service: str) -> None:
        self.service = service  # what error texts call it
        self._came: asyncio.Queue[Any] = asyncio.Queue()  # replies, `True` when it is open, the error that ended it
        self._error: ServiceError | None = None
        self._link_session: LinkSession

    def begin(self, session: LinkSession) -> None:
        self._link_session = session

    def opened(self) -> None:
        self._came.put_nowait(True)

    def received(self, reply: Any) -> None:
        self._came.put_nowait(reply)

    def lost(self, error: ServiceError) -> None:
        self._error = error
        self._came.put_nowait(error)

    @property
    def traffic(self) -> Traffic:
        return self._link_session.traffic

    async def send(self, request: Any) -> None:
        """Sends one request; does not wait for a reply. Raises ServiceError if the session is over."""
        if self._error is not None:
            raise self._error
        self._link_session.send(request)

    async def receive(self) -> Any:
        """The next reply; raises ServiceError: Closed if the session was ended in order."""
        came = await self._came.get()
        if isinstance(came, ServiceError):
            self._came.put_nowait(came)
            raise came
        return came

    async def ask(self, request: Any) -> Any:
        """Sends a request and waits for the next reply; only for sessions that have no other request under way."""
        await self.send(request)
        return await self.receive()

    async def close(self) -> None:
        """Ends the session; the service frees what it held."""
        self._link_session.close()
        self.lost(self._error or Closed(f"the session with the {self.service} was ended"))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # As `ask`; the reply is checked against what was asked.

    async def run(self, request: Pass) -> PassDone:
        done = await self.ask(request)
        assert isinstance(done, PassDone), done
        assert (done.number, len(done.nodes)) == (request.number, len(request.answered))
        return done

    async def draw(self, request: Pass) -> AsyncGenerator[PassDone, None]:
        await self.send(request)
        more = True
        while more:
            done = await self.receive()
            assert isinstance(done, PassDone), done
            assert done.number == request.number
            more = done.more
            yield done

    async def fetch(self, request: FetchRow) -> RowFetched:
        """More of the row of one node of the latest pass."""
        fetched = await self.ask(request)
        assert isinstance(fetched, RowFetched), fetched
        assert fetched.node == request.node
        return fetched

    async def draft(self, request: Draft) -> Drafted:
        """The first reply of an epoch: all of it, unless the request asks for smaller chunks."""
        await self.send(request)
        drafted = await self.receive()
        while drafted.epoch < request.epoch:  # it was under way when the request was sent
            drafted = await self.receive()
        assert isinstance(drafted, Drafted), drafted
        assert drafted.epoch == request.epoch
        return drafted

    async def score(self, request: Score) -> Scored:
        """How probable strings are as the beginning of the epoch's draft."""
        scored = await self.ask(request)
        assert isinstance(scored, Scored), scored
        assert (scored.epoch, len(scored.probabilities)) == (request.epoch, len(request.strings))
        return scored


class Opening:
    async def open(self: Any, request: Any) -> ServiceSession:
        """An open session, to be used by one task; raises ServiceError. Close it, or use `session`."""
        if self.description is None:
            await self.describe()
        session = ServiceSession(self.service)
        session.begin(self.begin(request, session))
        try:
            await session.receive()  # that it is open
        except BaseException:
            await session.close()
            raise
        return session

    @asynccontextmanager
    async def session(self, request: Any) -> AsyncIterator[ServiceSession]:
        """An open session that is closed at the end of the block; raises ServiceError."""
        async with await self.open(request) as session:
            yield session


class TargetClient(Opening, links.TargetClient):
    """Opens sessions with a target."""


class DrafterClient(Opening, links.DrafterClient):
    """Opens sessions with a drafter."""

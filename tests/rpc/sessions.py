"""Sessions for tests that wait for each reply; a pipeline's sessions tell a listener."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Generic, Self, TypeVar

from crossdraft.rpc import links
from crossdraft.rpc.errors import Closed, ServiceError
from crossdraft.rpc.links import LinkSession, Traffic
from crossdraft.types.messages import (
    Draft,
    Drafted,
    FetchRow,
    OpenDrafter,
    OpenTarget,
    Pass,
    PassDone,
    RowFetched,
    Score,
    Scored,
)

Session = TypeVar("Session", bound="ServiceSession")


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
        """The next reply.

        Raises:
            TimedOut: it did not come in time.
            Closed: the session was ended in order, by the service or by `close`.
            ServiceError: the session or the link is broken, or the reply cannot be decoded.
        """
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


class TargetSession(ServiceSession):
    """An open session with a target. Each reply is checked against what was asked."""

    async def run(self, request: Pass) -> PassDone:
        """One pass; raises ServiceError."""
        done = await self.ask(request)
        assert isinstance(done, PassDone), done
        assert (done.number, len(done.nodes)) == (request.number, len(request.answered))
        return done

    async def draw(self, request: Pass) -> AsyncGenerator[PassDone, None]:
        """The replies to a run, as they come; raises ServiceError."""
        await self.send(request)
        more = True
        while more:
            done = await self.receive()
            assert isinstance(done, PassDone), done
            assert done.number == request.number
            more = done.more
            yield done

    async def fetch(self, request: FetchRow) -> RowFetched:
        """More of the row of one node of the latest pass; raises ServiceError."""
        fetched = await self.ask(request)
        assert isinstance(fetched, RowFetched), fetched
        assert fetched.node == request.node
        return fetched


class DrafterSession(ServiceSession):
    """An open session with a drafter. `draft` and `score` are for callers that wait for each reply."""

    async def draft(self, request: Draft) -> Drafted:
        """The first reply of an epoch: all of it, unless the request asks for smaller chunks; raises ServiceError."""
        await self.send(request)
        drafted = await self.receive()
        while drafted.epoch < request.epoch:  # it was under way when the request was sent
            drafted = await self.receive()
        assert isinstance(drafted, Drafted), drafted
        assert drafted.epoch == request.epoch
        return drafted

    async def score(self, request: Score) -> Scored:
        """How probable strings are as the beginning of the epoch's draft; raises ServiceError."""
        scored = await self.ask(request)
        assert isinstance(scored, Scored), scored
        assert (scored.epoch, len(scored.probabilities)) == (request.epoch, len(request.strings))
        return scored


class Opening(Generic[Session]):
    """A client that opens sessions of a kind."""

    kind: type[Session]

    async def open(self: Any, request: OpenTarget | OpenDrafter) -> Session:
        """An open session, to be used by one task; raises ServiceError. Close it, or use `session`."""
        if self.description is None:
            await self.describe()
        session = self.kind(self.service)
        session.begin(self.begin(request, session))
        try:
            await session.receive()  # that it is open
        except BaseException:
            await session.close()
            raise
        return session

    @asynccontextmanager
    async def session(self, request: OpenTarget | OpenDrafter) -> AsyncIterator[Session]:
        """An open session that is closed at the end of the block; raises ServiceError."""
        async with await self.open(request) as session:
            yield session


class TargetClient(Opening[TargetSession], links.TargetClient):
    kind = TargetSession


class DrafterClient(Opening[DrafterSession], links.DrafterClient):
    kind = DrafterSession

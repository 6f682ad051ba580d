"""Open sessions with a service: requests and replies as plain values, each reply checked against what was asked."""

from collections.abc import AsyncGenerator
from typing import TypeVar

from crossdraft.rpc import drafter_codec, target_codec
from crossdraft.rpc.codec import Opened
from crossdraft.rpc.errors import Internal, NotServed
from crossdraft.rpc.stream import Stream
from crossdraft.verification.exchange import Draft, Drafted, FetchRow, Pass, PassDone, RowFetched, Score, Scored

Expected = TypeVar("Expected")
Request = TypeVar("Request")
Reply = TypeVar("Reply")


class TargetSession(Stream[target_codec.Request, target_codec.Reply]):
    """An open session with a target."""

    async def run(self, request: Pass) -> PassDone:
        """One pass; raises ServiceError."""
        done = _expected(await self.ask(request), PassDone, self.service)
        _same(done.number, request.number, "pass", self.service)
        if len(done.nodes) != len(request.answered):
            raise Internal(f"{self.service} answered {len(done.nodes)} of {len(request.answered)} nodes")
        return done

    async def draw(self, request: Pass) -> AsyncGenerator[PassDone, None]:
        """The replies to a run, as they come; raises ServiceError."""
        await self.send(request)
        more = True
        while more:
            done = _expected(await self.receive(), PassDone, self.service)
            _same(done.number, request.number, "pass", self.service)
            more = done.more
            yield done

    async def fetch(self, request: FetchRow) -> RowFetched:
        """More of the row of one node of the latest pass; raises ServiceError."""
        fetched = _expected(await self.ask(request), RowFetched, self.service)
        _same(fetched.node, request.node, "node", self.service)
        return fetched


class DrafterSession(Stream[drafter_codec.Request, drafter_codec.Reply]):
    """An open session with a drafter. `draft` and `score` are for those who want one thing at a time."""

    async def draft(self, request: Draft) -> Drafted:
        """The first reply of an epoch: all of it, unless the request asks for smaller chunks; raises ServiceError."""
        await self.send(request)
        while True:
            drafted = _expected(await self.receive(), Drafted, self.service)
            if drafted.epoch >= request.epoch:  # else the drafter did not know yet
                break
        _same(drafted.epoch, request.epoch, "epoch", self.service)
        return drafted

    async def score(self, request: Score) -> Scored:
        """How probable strings are as the beginning of the epoch's draft; raises ServiceError."""
        scored = _expected(await self.ask(request), Scored, self.service)
        _same(scored.epoch, request.epoch, "epoch", self.service)
        if len(scored.probabilities) != len(request.strings):
            raise Internal(f"{self.service} scored {len(scored.probabilities)} of {len(request.strings)} strings")
        return scored


async def open_session(session: Stream[Request, Reply], request: Request, fingerprint: str) -> None:
    """Opens a session, and sees that the model is the one that was described."""
    try:
        opened = _expected(await session.ask(request), Opened, session.service)
        if opened.fingerprint != fingerprint:
            raise NotServed(f"{session.service} serves another model than it described; describe it again")
    except BaseException:
        await session.close()
        raise


def _expected(reply: object, kind: type[Expected], service: str) -> Expected:
    if not isinstance(reply, kind):
        raise Internal(f"{service} sent {type(reply).__name__} where {kind.__name__} was due")
    return reply


def _same(got: int, due: int, name: str, service: str) -> None:
    if got != due:
        raise Internal(f"{service} answered {name} {got} where {due} was due")

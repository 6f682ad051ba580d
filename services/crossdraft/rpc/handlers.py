"""The server's half of a stream: requests in as they arrive, replies out as they are made, errors as status codes."""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar, cast

import grpc
from google.protobuf.message import DecodeError, Message

from crossdraft.rpc import codec, drafter_codec, subject, target_codec
from crossdraft.rpc.activity import Activity, Tally, first_of
from crossdraft.rpc.admission import Admission, SessionLimits, ended_when_silent, peer_of
from crossdraft.rpc.codec import Opened
from crossdraft.rpc.errors import BadMessage, ProtocolBroken, ServiceError, to_status
from crossdraft.rpc.inbox import inbox
from crossdraft.v1 import drafter_pb2, target_pb2
from crossdraft.verification.exchange import (
    Advance,
    Description,
    Draft,
    Drafted,
    FetchRow,
    OpenDrafter,
    OpenTarget,
    Pass,
    PassDone,
    RowFetched,
    RunTo,
    Score,
    Scored,
)

Open = TypeVar("Open")  # the message that begins a session
Ask = TypeVar("Ask")
Answer = TypeVar("Answer")
Open_contra = TypeVar("Open_contra", contravariant=True)
Ask_contra = TypeVar("Ask_contra", contravariant=True)
Answer_co = TypeVar("Answer_co", covariant=True)

Context = grpc.aio.ServicerContext[bytes, bytes]


class Session(Protocol[Ask_contra, Answer_co]):
    """What a service keeps for one stream. Its methods raise ServiceError, alone or as the first of a task group's
    faults, which ends the stream and nothing else."""

    def converse(self, requests: AsyncIterator[Ask_contra]) -> AsyncGenerator[Answer_co, None]:
        """The replies, whenever one is ready. `requests` yields as they arrive, and ends with the client's half of the
        stream; what is still owed then is sent before the replies end."""
        ...

    async def close(self) -> None:
        """Gives back what the session holds; called once, when no reply is awaited any more, however that came."""
        ...


async def one_by_one(
    answer: Callable[[Ask], Awaitable[Answer]], requests: AsyncIterator[Ask]
) -> AsyncGenerator[Answer, None]:
    """A conversation in which each request has one reply, in order."""
    async for request in requests:
        yield await answer(request)


class Service(Protocol[Open_contra, Ask_contra, Answer_co]):
    """A model that is served."""

    @property
    def description(self) -> Description:
        """What it says of its model."""
        ...

    async def open(self, request: Open_contra) -> Session[Ask_contra, Answer_co]:
        """A new session; raises ServiceError."""
        ...

    async def close(self) -> None:
        """Ends what the service runs; called once, when no session is left."""
        ...


@dataclass(frozen=True)
class Role(Generic[Open, Ask, Answer]):
    """One of the two services as the protos have it."""

    name: str
    service: str  # full name in the protos
    stream: str  # name of its bidirectional method
    opening: type[Open]
    read: Callable[[bytes, int], Open | Ask]  # raises BadMessage, or protobuf's DecodeError
    write: Callable[[Opened | Answer], Message]


TARGET: Role[OpenTarget, Pass | FetchRow | RunTo, PassDone | RowFetched] = Role(
    name="target",
    service="crossdraft.v1.Target",
    stream="Verify",
    opening=OpenTarget,
    read=lambda raw, size: target_codec.decode_request(target_pb2.VerifyRequest.FromString(raw), size),
    write=target_codec.encode_reply,
)

DRAFTER: Role[OpenDrafter, Draft | Advance | Score, Drafted | Scored] = Role(
    name="drafter",
    service="crossdraft.v1.Drafter",
    stream="Draft",
    opening=OpenDrafter,
    read=lambda raw, size: drafter_codec.decode_request(drafter_pb2.DraftRequest.FromString(raw), size),
    write=drafter_codec.encode_reply,
)


class Handlers(Generic[Open, Ask, Answer]):
    """Answers a role's methods with a service. Messages come as bytes, so that their faults get the right status."""

    def __init__(
        self, role: Role[Open, Ask, Answer], service: Service[Open, Ask, Answer], limits: SessionLimits
    ) -> None:
        self._admission = Admission(limits)
        self._idle_seconds = limits.idle_seconds
        self._role = role
        self._service = service
        self._size = service.description.vocabulary_size
        self.activity = Activity(role.name)

    def registered(self) -> "grpc.GenericRpcHandler[bytes, bytes]":
        """As gRPC wants them."""
        return grpc.method_handlers_generic_handler(
            self._role.service,
            {
                "Describe": grpc.unary_unary_rpc_method_handler(self.describe),
                self._role.stream: grpc.stream_stream_rpc_method_handler(self.converse),
            },
        )

    async def describe(self, request: bytes, context: Context) -> bytes:
        """The description; the request has no fields."""
        return codec.encode_description(self._service.description).SerializeToString()

    async def converse(self, requests: AsyncIterator[bytes], context: Context) -> None:
        """One session. It ends with the client's half of the stream, with its cancellation, with an error, or when
        nothing was said for too long."""
        try:
            with self._admission.admitted(peer_of(context)):
                async with ended_when_silent(self._idle_seconds) as heard:
                    opening = await anext(requests, None)
                    if opening is not None:
                        request = _request_id(context)
                        with self.activity.session(request, context.peer()) as tally:
                            await self._converse(opening, requests, _Call(context, tally, heard))
        except (ServiceError, BaseExceptionGroup) as fault:
            error = first_of(fault)
            if not isinstance(error, ServiceError):
                raise error from None
            code, text = to_status(error)
            await context.abort(code, text)

    async def _converse(self, opening: bytes, requests: AsyncIterator[bytes], call: "_Call") -> None:
        call.received(opening)
        first = self._decoded(opening)
        if not isinstance(first, self._role.opening):
            raise ProtocolBroken(f"the first message was {type(first).__name__}; open the session first")
        session = await self._service.open(first)
        try:
            await self._send(Opened(self._service.description.fingerprint), call)
            async with inbox(self._asked(requests, call)) as asked, aclosing(session.converse(asked)) as replies:
                async for reply in replies:
                    await self._send(reply, call)
        finally:
            await session.close()

    async def _asked(self, requests: AsyncIterator[bytes], call: "_Call") -> AsyncIterator[Ask]:
        async for raw in requests:
            call.received(raw)
            request = self._decoded(raw)
            if isinstance(request, self._role.opening):
                raise ProtocolBroken("the session is open already; use another stream for another session")
            yield cast(Ask, request)

    def _decoded(self, raw: bytes) -> Open | Ask:
        try:
            return self._role.read(raw, self._size)
        except DecodeError as error:
            raise BadMessage(f"not a message of {self._role.service}/{self._role.stream}: {error}") from error

    async def _send(self, reply: Opened | Answer, call: "_Call") -> None:
        raw = self._role.write(reply).SerializeToString()
        call.tally.sent(reply, raw)
        await call.context.write(raw)
        call.heard()


def _request_id(context: Context) -> str:
    """The id of the client's request, or empty; raises BadMessage."""
    try:
        return subject.from_metadata(context.invocation_metadata())
    except subject.RequestIdError as error:
        raise BadMessage(str(error)) from error


@dataclass(frozen=True)
class _Call:
    """A session's stream, and what is noted of it."""

    context: Context
    tally: Tally
    heard: Callable[[], None]  # one of the sides has said something

    def received(self, raw: bytes) -> None:
        """A request came."""
        self.tally.received(raw)
        self.heard()

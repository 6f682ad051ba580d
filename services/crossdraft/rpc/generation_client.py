"""A client of Generation that speaks in plain values."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self, cast

import grpc
from google.protobuf.message import DecodeError

from crossdraft.rpc import generation_codec
from crossdraft.rpc.errors import (
    PUSHBACK,
    BadMessage,
    BadRequest,
    Cancelled,
    Internal,
    NotServed,
    TimedOut,
    from_status,
)
from crossdraft.rpc.generation import Generate, GenerationEnded, Reply, Served
from crossdraft.rpc.generation_handlers import KEY, SERVICE
from crossdraft.rpc.transport import FRONT_CLIENT_OPTIONS, MessageLimit
from crossdraft.v1 import generation_pb2 as pb


@dataclass(eq=False)
class GenerationClient:
    """One channel to a server of Generation. Must be made in a running event loop, and closed."""

    address: str  # host:port
    key: str = field(default="", repr=False)  # for the API; empty: none
    tls: grpc.ChannelCredentials | None = None  # of `security.trusting_credentials`; None: plaintext
    reply_seconds: float = 300.0  # without any reply, before the server is given up
    limit: MessageLimit = field(default_factory=MessageLimit)
    _channel: grpc.aio.Channel = field(init=False, repr=False)

    def __post_init__(self) -> None:
        options = FRONT_CLIENT_OPTIONS + self.limit.options()
        if self.tls is None:
            self._channel = grpc.aio.insecure_channel(self.address, options=options)
        else:
            self._channel = grpc.aio.secure_channel(self.address, self.tls, options=options)

    @property
    def server(self) -> str:
        """What error texts call it."""
        return f"server at {self.address}"

    async def models(self) -> tuple[Served, ...]:
        """What is served now; raises ServiceError."""
        method = self._channel.unary_unary(
            f"/{SERVICE}/Models", pb.ModelsRequest.SerializeToString, pb.ModelsReply.FromString
        )
        async with self._foreign_errors():
            call = method(pb.ModelsRequest(), timeout=self.reply_seconds, metadata=self._metadata)
            return generation_codec.decode_models(await call)

    async def generate(self, request: Generate, deadline_seconds: float | None = None) -> AsyncGenerator[Reply, None]:
        """One output: its tokens as they are committed, then its end. Closing it early cancels it.

        Args:
            request: what is asked for.
            deadline_seconds: for all of it; the server gives it up then, too.

        Raises:
            BadRequest: the request cannot be served; the text says what to change.
            NameUnknown, KeyRefused, Overloaded, TimedOut, ServiceError: as their names say.
        """
        try:
            message = generation_codec.encode_request(request)
        except ValueError as error:
            raise BadRequest(str(error)) from error
        method = self._channel.unary_stream(
            f"/{SERVICE}/Generate", pb.GenerateRequest.SerializeToString, pb.GenerateReply.FromString
        )
        call = method(message, timeout=deadline_seconds, metadata=self._metadata)
        try:
            while (reply := await self._read(call)) is not None:
                yield reply
                if isinstance(reply, GenerationEnded):
                    return
            raise Internal(f"{self.server} ended an output without a word")
        finally:
            call.cancel()

    async def close(self) -> None:
        """Closes the channel, and with it all its outputs."""
        await self._channel.close(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return ((KEY, f"Bearer {self.key}"),) if self.key else ()

    async def _read(self, call: "grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateReply]") -> Reply | None:
        async with self._foreign_errors(), asyncio.timeout(self.reply_seconds):
            message = await call.read()
            return generation_codec.decode_reply(message) if isinstance(message, pb.GenerateReply) else None

    @asynccontextmanager
    async def _foreign_errors(self) -> AsyncIterator[None]:
        """Turns what gRPC raises into what it means."""
        try:
            yield
        except TimeoutError as error:
            raise TimedOut(f"{self.server}: no reply within {self.reply_seconds:g} s") from error
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise NotServed(
                    f"what listens at {self.address} does not serve {SERVICE}; check the address"
                ) from error
            trailer = cast(Iterable[tuple[str, str | bytes]], error.trailing_metadata() or ())  # the stubs differ
            pushback = next((value for key, value in trailer if key == PUSHBACK), "")
            raise from_status(error.code(), error.details(), self.server, pushback) from error
        except (BadMessage, DecodeError) as error:
            raise Internal(f"{self.server} sent a reply that means nothing: {error}") from error
        except asyncio.CancelledError as error:
            # gRPC raises it, too, in a task that reads from a call that was ended elsewhere.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise Cancelled(f"{self.server}: the call was cancelled") from error

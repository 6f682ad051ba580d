"""The server's half of Generation: keys before anything else, replies as they are made, errors as status codes."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import NoReturn, Protocol

import grpc
from google.protobuf.message import DecodeError

from crossdraft.rpc import generation_codec, subject
from crossdraft.rpc.errors import BadMessage, Cancelled, ServiceError, to_status, to_trailer
from crossdraft.rpc.generation import Generate, Reply, Served
from crossdraft.rpc.subject import REQUEST_ID, RequestIdError
from crossdraft.v1 import generation_pb2 as pb

log = logging.getLogger(__name__)

SERVICE = "crossdraft.v1.Generation"
KEY = "authorization"  # in the metadata
Context = grpc.aio.ServicerContext[bytes, bytes]


class Generator(Protocol):
    """What makes outputs for clients."""

    def admit(self, authorization: str | None, peer: str) -> None:
        """Whether a client may ask at all; raises ServiceError if not.

        Args:
            authorization: what it says of itself, if anything.
            peer: its address, as gRPC has it.
        """
        ...

    async def models(self) -> tuple[Served, ...]:
        """What is served now."""
        ...

    def generate(self, request: Generate) -> AsyncGenerator[Reply, None]:
        """Tokens, then the end; closing it early gives everything back. Raises ServiceError."""
        ...


class GenerationHandlers:
    """Answers the methods of Generation. Messages come as bytes, so that their faults get the right status.

    Args:
        service: what makes the outputs.
        stalled_seconds: after which a client that does not read is given up.
    """

    def __init__(self, service: Generator, stalled_seconds: float) -> None:
        self._service = service
        self._stalled_seconds = stalled_seconds

    def registered(self) -> "grpc.GenericRpcHandler[bytes, bytes]":
        """As gRPC wants them."""
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Generate": grpc.unary_stream_rpc_method_handler(self.generate),
                "Models": grpc.unary_unary_rpc_method_handler(self.models),
            },
        )

    async def models(self, request: bytes, context: Context) -> bytes:
        """What is served; the request has no fields."""
        try:
            self._admit(context)
            return generation_codec.encode_models(await self._service.models()).SerializeToString()
        except ServiceError as error:
            await _abort(error, context)

    async def generate(self, request: bytes, context: Context) -> None:
        """One output. It ends with its last token, with the client's cancellation or deadline, or with an error."""
        try:
            self._admit(context)
            asked = _decoded(request, context)
            with subject.about(request=asked.id, peer=context.peer()):
                await context.send_initial_metadata(((REQUEST_ID, asked.id),))
                async with aclosing(self._service.generate(asked)) as replies:
                    async for reply in replies:
                        await self._write(reply, context)
        except ServiceError as error:
            await _abort(error, context)
        except grpc.aio.InternalError as error:  # what a write becomes when the client ends the call meanwhile
            log.debug("the client has gone: %s", error)

    def _admit(self, context: Context) -> None:
        self._service.admit(_metadata(context, KEY), context.peer())

    async def _write(self, reply: Reply, context: Context) -> None:
        """Waits while the client reads more slowly than replies are made."""
        raw = generation_codec.encode_reply(reply).SerializeToString()
        try:
            async with asyncio.timeout(self._stalled_seconds):
                await context.write(raw)
        except TimeoutError as error:
            raise Cancelled(f"nothing was read for {self._stalled_seconds:g} s") from error


def _decoded(raw: bytes, context: Context) -> Generate:
    """The request, with an id in any case; raises BadMessage."""
    try:
        asked = generation_codec.decode_request(pb.GenerateRequest.FromString(raw))
        return replace(asked, id=subject.request_id(asked.id or _metadata(context, REQUEST_ID)))
    except DecodeError as error:
        raise BadMessage(f"not a GenerateRequest: {error}") from error
    except RequestIdError as error:
        raise BadMessage(str(error)) from error


def _metadata(context: Context, name: str) -> str | None:
    found = next((value for key, value in context.invocation_metadata() or () if key == name), None)
    return found.decode("ascii", "replace") if isinstance(found, bytes) else found


async def _abort(error: ServiceError, context: Context) -> NoReturn:
    code, text = to_status(error)
    await context.abort(code, text, to_trailer(error))

"""The service crossdraft.v1.Generation in front of a `Backend`."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import replace
from typing import NoReturn

import grpc

from crossdraft.client import RequestError
from crossdraft.rpc import errors
from crossdraft.rpc.event_loop import Beside
from crossdraft.rpc.generation import (
    KEY,
    SERVICE,
    Committed,
    Generate,
    OutputEnded,
    PromptTokens,
    Reply,
    decode_request,
    encode_models,
    encode_reply,
    parse_request,
)
from crossdraft.rpc.logs import REQUEST_ID, about
from crossdraft.rpc.server import Endpoint, Listening, Serving
from crossdraft.rpc.transport import FRONT_SERVER_OPTIONS, MessageLimit
from crossdraft.serving.backend import MIN_RETRY_SECONDS, Backend, OutputRequest, UnknownModelError, model_of
from crossdraft.serving.limits import GenerationOptions, Rates, scope_of
from crossdraft.types.request import PromptTooLongError

Context = grpc.aio.ServicerContext[bytes, bytes]
log = logging.getLogger(__name__)
REQUEST_LIMIT = MessageLimit(4)  # MiB; enough for a prompt of a million tokens
REPORT_INTERVAL = 1.0  # seconds between two updates of the health service


@contextmanager
def _errors_of_clients() -> Iterator[None]:
    """Turns errors of the backend into those for clients, without the addresses of services."""
    try:
        yield
    except PromptTooLongError as error:
        raise errors.ContextTooLong(str(error)) from error
    except RequestError as error:
        raise errors.BadRequest(str(error)) from error
    except UnknownModelError as error:
        raise errors.NameUnknown(str(error)) from error
    except errors.Overloaded:
        raise
    except (errors.BadRequest, errors.ContextTooLong) as error:
        log.info("an output was refused: %s", error)
        raise type(error)(errors.without_addresses(str(error))) from error
    except errors.TooLarge as error:
        raise errors.TooLarge("the prompt is too large for the target; shorten it") from error
    except errors.Full as error:
        text = "all targets are at their limit of sessions; ask again later"
        raise errors.Overloaded(text, MIN_RETRY_SECONDS) from error
    except errors.ServiceError as error:
        log.info("an output failed: %s", error)
        raise errors.Unreachable("no target can make this output now; ask again later") from error


@asynccontextmanager
async def _aborted(context: Context) -> AsyncIterator[None]:
    """Ends the call with the status of an error."""
    try:
        yield
    except errors.ServiceError as error:
        code, text = errors.to_status(error)
        await context.abort(code, text, errors.to_trailer(error))


def _metadata(context: Context, name: str) -> str | None:
    found = next((value for key, value in context.invocation_metadata() or () if key == name), None)
    return found.decode("ascii", "replace") if isinstance(found, bytes) else found


class GenerationServer(Serving):
    """A gRPC server of Generation, health and reflection. Must be made in a running event loop.

    Messages come as bytes, so that malformed ones get the right status.
    """

    def __init__(
        self, backend: Backend, listening: Listening | None = None, options: GenerationOptions | None = None
    ) -> None:
        self._options = options or GenerationOptions()
        self._backend = backend
        self._rates = Rates(self._options.rates)
        self._beside = Beside("requests")
        self.running = 0  # outputs
        self.marks: dict[str, str] = {}  # further fields of the ready line
        self.metrics = ""  # host:port where Prometheus reads; empty: nowhere
        methods = {
            "Generate": grpc.unary_stream_rpc_method_handler(self._generate),
            "Models": grpc.unary_unary_rpc_method_handler(self._list_models),
        }
        served = {SERVICE: grpc.method_handlers_generic_handler(SERVICE, methods)}
        self._endpoint = Endpoint(listening or Listening(limit=REQUEST_LIMIT), served, FRONT_SERVER_OPTIONS)
        self._models: tuple[str, ...] = ()
        self._reporting: asyncio.Task[NoReturn] | None = None

    def _admit(self, context: Context) -> str | None:
        """Checks a client's key and rate, before everything else; raises KeyRefused or Overloaded. Returns the key."""
        authorization, peer = _metadata(context, KEY), context.peer()
        try:
            holder = self._options.keys.holder(authorization)
        except errors.KeyRefused as error:
            log.info("%s was refused: %s", peer, error)
            raise
        if wait := self._rates.take(holder or peer.rpartition(":")[0], time.monotonic()):
            raise errors.Overloaded("too many requests of this client", wait)
        return authorization

    async def _list_models(self, _: bytes, context: Context) -> bytes:
        """What is served; the request has no fields."""
        async with _aborted(context):
            self._admit(context)
            with _errors_of_clients():
                models = await self._backend.models()
            return encode_models(models).SerializeToString()

    async def _generate(self, request: bytes, context: Context) -> None:
        """One output. It ends with its last token, with the client's cancellation or deadline, or with an error."""
        try:
            async with _aborted(context):
                key = self._admit(context)
                message = await self._beside.run(len(request), parse_request, request, _metadata(context, REQUEST_ID))
                with about(request=message.id, peer=context.peer()):
                    await context.send_initial_metadata(((REQUEST_ID, message.id),))
                    asked = await self._beside.run(len(request), decode_request, message)
                    async with aclosing(self._replies(asked, key)) as replies:
                        async for reply in replies:
                            await self._write(reply, context)
        except grpc.aio.InternalError as error:  # what a write becomes when the client ends the call meanwhile
            log.debug("the client has gone: %s", error)

    async def _replies(self, asked: Generate, authorization: str | None) -> AsyncGenerator[Reply, None]:
        """Tokens, then the end; closing it early releases everything. Raises ServiceError."""
        began = time.monotonic()
        with self._counted(), _errors_of_clients():
            model = model_of(self._backend, asked.model)
            scope = scope_of(authorization, asked.request.cache_salt, self._options.keys)
            output = OutputRequest(asked.id, model, asked.request.unchecked(cache_salt=scope), asked.drafter)
            async with aclosing(self._backend.stream(output)) as items:
                async for item in items:
                    match item:
                        case PromptTokens():
                            yield item
                        case Committed():
                            milliseconds = 1000 * (time.monotonic() - began)
                            for tokens in (item.tokens,) if asked.together else zip(item.tokens):
                                yield Committed(tokens, milliseconds)
                        case OutputEnded():
                            yield replace(item, id=asked.id)

    async def _write(self, reply: Reply, context: Context) -> None:
        """Waits while the client reads slowly, up to `stalled_seconds`."""
        raw, seconds = encode_reply(reply).SerializeToString(), self._options.rates.stalled_seconds
        try:
            async with asyncio.timeout(seconds):
                await context.write(raw)
        except TimeoutError as error:
            raise errors.Cancelled(f"nothing was read for {seconds:g} s") from error

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1

    @property
    def address(self) -> str:
        return self._endpoint.address

    @property
    def work(self) -> tuple[int, float]:
        """Outputs that are being made, and the seconds of its model, which it has none of."""
        return self.running, 0.0

    async def start(self) -> str:
        """Begins to listen; returns the address; raises CannotListen."""
        models = await self._backend.models()
        self._models = tuple(model.name for model in models)
        address = await self._endpoint.start(any(model.there for model in models))
        self._reporting = asyncio.create_task(self._report())
        return address

    async def drain(self) -> None:
        """Reports NOT_SERVING, takes no new output, lets open ones go on for the grace period, and ends."""
        if self._reporting is not None:
            self._reporting.cancel()
            await asyncio.wait([self._reporting])
        await self._endpoint.drain()

    async def _report(self) -> NoReturn:
        """Keeps the health service at NOT_SERVING while no target of any model can be reached."""
        while True:
            await asyncio.sleep(REPORT_INTERVAL)
            await self._endpoint.report(any(model.there for model in await self._backend.models()))

    def ready(self) -> dict[str, object]:
        metrics = {"metrics": self.metrics} if self.metrics else {}
        return {"role": "generation", "address": self.address, "models": self._models, **self.marks, **metrics}

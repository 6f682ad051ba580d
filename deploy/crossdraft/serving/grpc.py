"""The service crossdraft.v1.Generation in front of a `Backend`."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import NoReturn

from crossdraft.client import RequestError
from crossdraft.rpc import errors
from crossdraft.rpc.generation import SERVICE, Committed, Generate, GenerationHandlers, OutputEnded, PromptTokens, Reply
from crossdraft.rpc.server import Endpoint, Listening, Serving
from crossdraft.rpc.transport import FRONT_SERVER_OPTIONS, MessageLimit
from crossdraft.serving.backend import (
    MIN_RETRY_SECONDS,
    Backend,
    OutputRequest,
    OverloadedError,
    UnknownModelError,
    model_of,
)
from crossdraft.serving.limits import GenerationOptions, KeyRefusedError, Rates, scope_of
from crossdraft.types.output import ServedModel
from crossdraft.types.request import PromptTooLongError

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
    except OverloadedError as error:
        raise errors.Overloaded(str(error), error.after) from error
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


class GenerationServer(Serving, GenerationHandlers):
    """A gRPC server of Generation, health and reflection. Must be made in a running event loop."""

    def __init__(
        self, backend: Backend, listening: Listening | None = None, options: GenerationOptions | None = None
    ) -> None:
        options = options or GenerationOptions()
        super().__init__(options.rates.stalled_seconds)
        self._backend = backend
        self._keys = options.keys
        self._rates = Rates(options.rates)
        self.running = 0  # outputs
        self.marks: dict[str, str] = {}  # further fields of the ready line
        self.metrics = ""  # host:port where Prometheus reads; empty: nowhere
        listening = listening or Listening(limit=REQUEST_LIMIT)
        self._endpoint = Endpoint(listening, {SERVICE: self.registered()}, FRONT_SERVER_OPTIONS)
        self._models: tuple[str, ...] = ()
        self._reporting: asyncio.Task[NoReturn] | None = None

    def admit(self, authorization: str | None, peer: str) -> None:
        """Checks a client's key and rate, before everything else; raises KeyRefused or Overloaded."""
        try:
            holder = self._keys.holder(authorization)
        except KeyRefusedError as error:
            log.info("%s was refused: %s", peer, error)
            raise errors.KeyRefused(str(error)) from error
        if wait := self._rates.take(holder or peer.rpartition(":")[0], time.monotonic()):
            raise errors.Overloaded("too many requests of this client", wait)

    async def models(self) -> tuple[ServedModel, ...]:
        with _errors_of_clients():
            return await self._backend.models()

    async def generate(self, request: Generate) -> AsyncGenerator[Reply, None]:
        """Tokens, then the end; closing it early releases everything. Raises ServiceError."""
        began = time.monotonic()
        with self._counted(), _errors_of_clients():
            model = model_of(self._backend, request.model)
            scope = scope_of(request.authorization, request.request.cache_salt, self._keys)
            output = OutputRequest(request.id, model, request.request.unchecked(cache_salt=scope), request.drafter)
            async with aclosing(self._backend.stream(output)) as items:
                async for item in items:
                    match item:
                        case PromptTokens():
                            yield item
                        case Committed():
                            milliseconds = 1000 * (time.monotonic() - began)
                            for tokens in (item.tokens,) if request.together else zip(item.tokens):
                                yield Committed(tokens, milliseconds)
                        case OutputEnded():
                            yield replace(item, id=request.id)

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

    def ready_line(self) -> str:
        line = {"ready": True, "role": "generation", "address": self.address, "models": self._models}
        return json.dumps(line | self.marks | ({"metrics": self.metrics} if self.metrics else {}))

"""Outputs made in this process, with services that run elsewhere."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Protocol, Self

from crossdraft.client import GenerationRequest, Pipeline, Reason, RequestError, Statistics, Token, connect
from crossdraft.rpc.clients import Patience
from crossdraft.rpc.errors import NotServed, ServiceError
from crossdraft.rpc.log_context import about
from crossdraft.rpc.security import TlsFiles
from crossdraft.session.resolution import fault_of_pair
from crossdraft.trace.live_spans import Span, Watch
from crossdraft.verification.methods import METHODS

log = logging.getLogger(__name__)
PLAIN = ""  # the name of no drafter
SHORTEST_WAIT = 1.0  # seconds that a client is asked to wait, at least
REMEMBERED = 0.9  # weight of earlier outputs in the mean of what one takes


@dataclass(frozen=True)
class NamedDrafter:
    """Drafters of one vocabulary, under one name.

    Raises:
        ValueError: the name is empty.
    """

    name: str
    addresses: tuple[str, ...]  # host:port; none: not there yet
    trusted: bool = (
        True  # else only methods are used whose output does not depend on what a drafter says of its distributions
    )

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a drafter needs a name")


@dataclass(frozen=True)
class LocalModel:
    """A model under a name, and where its services are.

    Raises:
        ValueError: there is no name or no target, or two drafters have the same name.
    """

    name: str
    targets: tuple[str, ...]  # host:port, all of the same model
    drafters: tuple[NamedDrafter, ...] = ()  # the default one first

    def __post_init__(self) -> None:
        if not self.name or not self.targets:
            raise ValueError(f"a model needs a name and at least one target, got {self.name!r} {self.targets}")
        if len(set(self.drafter_names)) < len(self.drafters):
            raise ValueError(f"drafters of {self.name!r} have the same name: {', '.join(self.drafter_names)}")

    @property
    def drafter_names(self) -> tuple[str, ...]:
        """In their order."""
        return tuple(drafter.name for drafter in self.drafters)

    @property
    def default_drafter(self) -> str:
        """Its name, or PLAIN."""
        return self.drafters[0].name if self.drafters else PLAIN


@dataclass(frozen=True)
class LocalOptions:
    """Limits of a process.

    Raises:
        ValueError: a value is out of its range.
    """

    most_outputs: int = 64  # at once
    patience: Patience = field(default_factory=Patience)
    tls: TlsFiles | None = None  # what is shown to services, and whose certificates are taken; None: plaintext

    def __post_init__(self) -> None:
        if self.most_outputs < 1:
            raise ValueError(f"most_outputs must be at least 1, got {self.most_outputs}")


# What passes between those who speak with clients and those who make outputs, as plain values.
#
# A front (HTTP, gRPC) makes `Order`s and hands them to `Outputs`, which may be in the same process (`local`) or
# replicas on other nodes. Values can be pickled: inside a cluster they travel through Ray.


@dataclass(frozen=True)
class ServedModel:
    """A model that outputs can be ordered of."""

    name: str
    created: int  # seconds since 1970, when it began to be served
    context: int  # tokens, prompt and output together
    drafters: tuple[str, ...]  # names that an order may ask for, the default first; none: decoding is plain
    methods: tuple[str, ...]  # that its pairs allow, of `verification.methods.METHODS`
    chats: bool  # it has a chat template of its own
    there: bool = True  # a target of it can be reached now; else orders fail until one is back


@dataclass(frozen=True)
class Order:
    """One output that a client asked for."""

    id: str  # of the client's request; in every log line that concerns it, and the name of its journal
    model: str  # name of a ServedModel
    request: GenerationRequest  # `committed` in it: what was delivered already
    drafter: str | None = None  # name of one of the model's drafters; None: its default one; "": plain decoding
    trace: bool = False  # what the session does is wanted, too, as it happens


@dataclass(frozen=True)
class Traced:
    """What a session did, before the token or the end that comes next; only in an order with `trace`."""

    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Ended:
    """The end of an output, after its tokens."""

    reason: Reason
    statistics: Statistics


# A pipeline that is opened when it is needed, by whoever needs it first.

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


class LocalOutputs:
    """`Outputs` over one pipeline for each model and drafter. Use it with `async with`.

    Pipelines of default drafters are opened at the start, others when an order asks for them. One that cannot be
    opened is tried again with the next order for it, or question what is served.

    Args:
        models: what is served.
        options: limits.

    Raises:
        ValueError: there is no model, or two have the same name.
    """

    def __init__(self, models: Sequence[LocalModel], options: LocalOptions | None = None) -> None:
        self._options = options or LocalOptions()
        self._models = {model.name: model for model in models}
        if not models or len(self._models) < len(models):
            raise ValueError("give at least one model, and each a name of its own")
        self._created = int(time.time())
        self._connections = {
            (model.name, PLAIN if drafter is None else drafter.name): self._connection_to(model, drafter)
            for model in models
            for drafter in (None, *model.drafters)
        }
        self.running = 0  # outputs
        self._mean_seconds = 0.0  # that an output takes

    async def __aenter__(self) -> Self:
        """Tries to connect; what fails is logged."""
        await asyncio.gather(*(self._begin(model) for model in self._models.values()))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connection in self._connections.values():
            await connection.close()

    async def models(self) -> tuple[ServedModel, ...]:
        """Those whose target has been there; the others are asked for again, which nobody waits for."""
        for model in self._models.values():
            self._default(model).begin()
        found = ((model, self._default(model).pipeline) for model in self._models.values())
        return tuple(_served(model, pipeline, self._created) for model, pipeline in found if pipeline is not None)

    async def stream(self, order: Order) -> AsyncGenerator[Token | Traced | Ended, None]:
        """As `Outputs.stream`."""
        connection = self._connection(order)
        with self._place():
            pipeline = await connection.open()
            watch = Watch() if order.trace else None
            with about(request=order.id):
                running = pipeline.run(order.request, watch)
            async with running as generation:
                async for token in generation:
                    if watch is not None:
                        yield Traced(watch.take())
                    yield token
            if watch is not None:
                yield Traced(watch.take())
            assert generation.reason is not None
            assert generation.statistics is not None
            yield Ended(generation.reason, generation.statistics)

    async def follow(self, model: LocalModel) -> None:
        """From now on its services have these addresses; sessions that run elsewhere go on there.

        Raises:
            ValueError: a model or a drafter has a name that was not served before.
        """
        drafters = {PLAIN: (), **{drafter.name: drafter.addresses for drafter in model.drafters}}
        known = {name for served, name in self._connections if served == model.name}
        if known != set(drafters):
            raise ValueError(f"{model.name!r} is served with the drafters {sorted(known)}, not {sorted(drafters)}")
        self._models[model.name] = model
        for name, addresses in drafters.items():
            await self._connections[model.name, name].follow(model.targets, addresses)

    def _connection_to(self, model: LocalModel, drafter: NamedDrafter | None) -> Connection:
        addresses, trusted = ((), True) if drafter is None else (drafter.addresses, drafter.trusted)
        options = self._options
        make = partial(connect, patience=options.patience, tls=options.tls, trusted=trusted)
        return Connection(make, model.targets, addresses)

    def _connection(self, order: Order) -> Connection:
        model = self._models.get(order.model)
        if model is None:
            raise UnknownModelError(f"there is no model {order.model!r}; there is {', '.join(self._models)}")
        name = model.default_drafter if order.drafter is None else order.drafter
        connection = self._connections.get((model.name, name))
        if connection is None:
            there = ", ".join(model.drafter_names) or "none"
            raise UnknownDrafterError(f"{model.name!r} has no drafter {name!r}; there is {there}")
        return connection

    def _default(self, model: LocalModel) -> Connection:
        return self._connections[model.name, model.default_drafter]

    async def _begin(self, model: LocalModel) -> None:
        try:
            await self._default(model).open()
        except ServiceError as error:
            log.warning("%s cannot be served yet: %s", model.name, error)

    @contextmanager
    def _place(self) -> Iterator[None]:
        most = self._options.most_outputs
        if self.running >= most:
            raise OverloadedError(
                f"{most} outputs are being made, the most at once", max(SHORTEST_WAIT, self._mean_seconds / most)
            )
        self.running += 1
        began = time.monotonic()
        try:
            yield
        finally:
            self.running -= 1
            took = time.monotonic() - began
            self._mean_seconds = REMEMBERED * self._mean_seconds + (1 - REMEMBERED) * took


def _served(model: LocalModel, pipeline: Pipeline, created: int) -> ServedModel:
    known = pipeline.models
    methods = tuple(method.name for method in METHODS.values() if not fault_of_pair(method, known))
    return ServedModel(
        model.name,
        created,
        known.context,
        model.drafter_names,
        methods,
        chats=known.target.chat_template is not None,
        there=pipeline.target_there,
    )


class Outputs(Protocol):
    """What makes outputs."""

    async def models(self) -> tuple[ServedModel, ...]:
        """What is served now."""
        ...

    def stream(self, order: Order) -> AsyncGenerator[Token | Traced | Ended, None]:
        """The tokens of one output as they are committed, then its end. Closing it early releases everything.

        Raises:
            RequestError: the order cannot be served; the text says what to change.
            UnknownModelError: no model has this name.
            UnknownDrafterError: no drafter of the model has this name.
            OverloadedError: there is no room for another output now.
            ServiceError: no target is left.
        """
        ...


class UnknownModelError(LookupError):
    """Nothing of this name is served; the text lists what is."""


class UnknownDrafterError(UnknownModelError):
    """The same of a model's drafters."""


class OverloadedError(Exception):
    """There is no room for another output now; ask again later."""

    def __init__(self, text: str, after: float) -> None:
        super().__init__(text)
        self.after = after  # seconds until it may be asked again

"""What a front (HTTP, gRPC) hands requests to, and the backend that runs pipelines in this process.

A front turns a client's request into `OutputRequest`s. A `Backend` answers each with tokens and an end: `LocalBackend`
here, orchestrators on other nodes in a cluster. All values can be pickled: inside a cluster they travel through Ray.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol, Self

from crossdraft.client.api import Pipeline, connect
from crossdraft.config.request import AUTO, NO_DRAFTER
from crossdraft.rpc.errors import REPLACED, NotServed, Overloaded, Replaced, ServiceError
from crossdraft.rpc.generation import Committed, OutputEnded, PromptTokens, Reply
from crossdraft.rpc.links import Patience
from crossdraft.rpc.logs import about
from crossdraft.rpc.security import TlsFiles
from crossdraft.session.models import fault_of_pair, requested_method
from crossdraft.speculation.selection import EARNED, MARGIN
from crossdraft.text.answers import format_of
from crossdraft.trace.timeline import Span, Watch
from crossdraft.types.output import ServedModel, Written
from crossdraft.types.request import Asked, GenerationRequest, RequestError
from crossdraft.verification.methods import METHODS

log = logging.getLogger(__name__)
DECODE_PLAINLY = ""  # in place of the name of a drafter
MIN_RETRY_SECONDS = 1.0  # that a client is asked to wait, at least
PIECE = 256  # tokens of a prompt that travel together
SMOOTHING = 0.9  # weight of earlier outputs in the moving average of an output's duration
Addresses = tuple[str, ...]  # host:port


@dataclass(frozen=True)
class OutputRequest:
    """One output of one served model, as a client asked for it. Raises RequestError: the method contradicts another
    field; an unknown one is refused when its models are known."""

    id: str  # of the client's request; in every log line that concerns it, and the name of its journal
    model: str  # name of a ServedModel
    generation: GenerationRequest  # its `committed` are the ids that were delivered already
    drafter: str | None = None  # name of one of the model's; NO_DRAFTER, DECODE_PLAINLY: none; AUTO, None: the fastest
    trace: bool = False  # stream TraceSpans, too, and each token by itself
    target: str = ""  # fingerprint of the model that made what is committed; no other one goes on with it; "": any

    def __post_init__(self) -> None:
        if self.generation.method in METHODS:
            requested_method(self.generation)
        if self.drafter == NO_DRAFTER:
            object.__setattr__(self, "drafter", DECODE_PLAINLY)


@dataclass(frozen=True)
class TraceSpans:
    """What the session did before the token or the end that follows; only for a request with `trace`."""

    spans: tuple[Span, ...]


OutputItem = Reply | TraceSpans


class Backend(Protocol):
    """Makes outputs for fronts."""

    @property
    def names(self) -> Mapping[str, str]:
        """Of its models, also of those that cannot be served now; to each name, further ones too, the model's own."""

    @property
    def absent(self) -> Mapping[str, str]:
        """By name, why a model is not among `models`, if it is not; without the addresses of its services."""

    async def models(self) -> tuple[ServedModel, ...]:
        """What is served now."""

    async def written(self, model: str, asked: Asked, special: bool = True) -> Written:
        """As `session.resolution.written`, by the tokenizer of a model; raises as `stream`."""

    def stream(self, request: OutputRequest) -> AsyncGenerator[OutputItem, None]:
        """The tokens of one output as they are committed, then its end. Closing it early releases everything. Raises
        RequestError, UnknownModelError, UnknownDrafterError; ServiceError: Overloaded, or no target is left."""


def model_of(backend: Backend, name: str | None) -> str:
    """The model that a request names, or the only one, there or not. Raises RequestError: there are several."""
    own = tuple(dict.fromkeys(backend.names.values()))
    if not name and len(own) != 1:
        raise RequestError(f"name the model; there are {', '.join(own)}", "model")
    return name or own[0]


OverloadedError = Overloaded  # by this name orchestrators of before an upgrade send it


class UnknownModelError(LookupError):
    """No model of this name is served; the text lists those that are."""


class UnknownDrafterError(UnknownModelError):
    """The model has no drafter of this name; the text lists those that it has."""


@dataclass(frozen=True)
class NamedDrafter:
    """Drafters of one vocabulary, under one name. Raises ValueError: the name is empty, AUTO or NO_DRAFTER."""

    name: str
    addresses: Addresses  # none: not there yet
    # Untrusted: only methods whose output does not depend on the distributions that the drafter reports.
    trusted: bool = True

    def __post_init__(self) -> None:
        if self.name in ("", AUTO, NO_DRAFTER):
            raise ValueError(f"a drafter needs a name: {AUTO!r} stands for the fastest, {NO_DRAFTER!r} for none")


@dataclass(frozen=True)
class LocalModel:
    """A model's services. Raises ValueError: there is no name or no target, or two drafters have the same name."""

    name: str
    targets: Addresses  # all of the same model
    drafters: tuple[NamedDrafter, ...] = ()  # the default one first
    aliases: tuple[str, ...] = ()  # further names of it

    def __post_init__(self) -> None:
        if not all(self.names) or not self.targets:
            raise ValueError(f"no name may be empty, and at least one target is needed: {self.names} {self.targets}")
        if len(set(self.drafter_names)) < len(self.drafters):
            raise ValueError(f"drafters of {self.name!r} have the same name: {', '.join(self.drafter_names)}")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((self.name, *self.aliases)))

    @property
    def drafter_names(self) -> tuple[str, ...]:
        return tuple(drafter.name for drafter in self.drafters)

    @property
    def default_drafter(self) -> str:
        return self.drafters[0].name if self.drafters else DECODE_PLAINLY


@dataclass(frozen=True)
class LocalOptions:
    """Limits of a process."""

    max_outputs: int = 64  # at once
    patience: Patience = field(default_factory=Patience)
    tls: TlsFiles | None = None  # shown to services, whose certificates must be of the same CA; None: plaintext
    updated: bool = False  # as of `Pipeline`


# By drafter, the default one first: how many times as fast as without one outputs were; 0: nothing was seen.
Gains = Mapping[str, float]


class DrafterChoice:
    """Which of several drafters of one model a new output gets.

    The one whose outputs are the fastest, by what its own controller has measured at this load. The others are tried in
    turn, each by one output at a time: at once what was not seen, by every second output what is within MARGIN as fast,
    and by EARNED of the outputs what is slower. Beside no drafter each controller bounds the loss by itself.
    """

    def __init__(self) -> None:
        self.latest = ""  # what most outputs get
        self._trials = 0.0  # of slower ones that may begin
        self._turn = False  # the usual one was begun since the latest trial
        self._turns: dict[str, bool] = {}  # the one that was tried last is the last; whether an output is trying it

    def usual(self, gains: Gains) -> str:
        """The fastest; the one before where another one is hardly faster, and at first the default one."""
        before = self.latest if self.latest in gains else next(iter(gains))
        best = max(gains, key=lambda name: gains[name])
        self.latest = best if gains[best] > MARGIN * gains[before] else before
        return self.latest

    def begun(self, gains: Gains) -> tuple[str, bool]:
        """The drafter of a new output, of at least one; and whether this is a trial of it."""
        usual = self.usual(gains)
        self._turns = dict.fromkeys(gains, False) | self._turns
        self._trials = min(1.0, self._trials + EARNED)
        for name, busy in self._turns.items() if gains[usual] else ():
            if name in gains and name != usual and not busy:
                slower = 0 < MARGIN * gains[name] < gains[usual]
                if self._trials >= 1 if slower else not gains[name] or self._turn:
                    self._trials -= slower
                    self._turn = False
                    del self._turns[name]
                    self._turns[name] = True
                    return name, True
        self._turn = True
        return usual, False

    def ended(self, name: str, trial: bool) -> None:
        """An output that began so is over."""
        if trial:
            self._turns[name] = False


class LocalBackend:
    """A `Backend` of one model, with one pipeline for each drafter. Use it with `async with`.

    That of the default drafter also makes outputs without one. Services that are not there at the start are asked on in
    the background, and with each request for them.
    """

    def __init__(self, model: LocalModel, options: LocalOptions | None = None) -> None:
        self._options = options or LocalOptions()
        self._model = model
        self._created = int(time.time())
        named = {drafter.name: self._to(drafter.addresses, drafter.trusted) for drafter in model.drafters}
        self._pipelines = named or {DECODE_PLAINLY: self._to()}
        self._choice = DrafterChoice()
        self.running = 0  # outputs
        self._mean_seconds = 0.0  # moving average of an output's duration

    async def __aenter__(self) -> Self:
        """Tries to connect; logs what fails."""
        await asyncio.gather(*map(self._try, self._pipelines.values()))
        return self

    async def __aexit__(self, *_: object) -> None:
        for pipeline in self._pipelines.values():
            await pipeline.__aexit__()

    async def _try(self, pipeline: Pipeline) -> None:
        try:
            await self._ready(pipeline)
        except ServiceError as error:
            if pipeline is self._default:
                log.warning("%s cannot be served yet: %s", self._model.name, error)

    @property
    def names(self) -> Mapping[str, str]:
        return dict.fromkeys(self._model.names, self._model.name)

    @property
    def absent(self) -> Mapping[str, str]:
        return {self._model.name: f"targets: {self._default.target_fault}"}

    async def models(self) -> tuple[ServedModel, ...]:
        """The model by all of its names, once outputs of it can be made."""
        pipeline = self._default
        return tuple(self._served(name, pipeline) for name in self._model.names) if pipeline.usable else ()

    def _served(self, name: str, pipeline: Pipeline) -> ServedModel:
        model, models, template = self._model, pipeline.models, pipeline.models.target.chat_template
        return ServedModel(
            name,
            self._created,
            models.context,
            model.drafter_names,
            methods=tuple(method.name for method in METHODS.values() if not fault_of_pair(method, models)),
            chats=template is not None,
            tool_format="" if template is None else format_of(template.source),
            root="" if name == model.name else model.name,
            detail=self._detail(pipeline),
            there=pipeline.target_there,
            auto=self._choice.latest or model.default_drafter,
        )

    def _detail(self, default: Pipeline) -> tuple[str, ...]:
        """What is not as it should be, in sentences."""
        faults = [f"targets: {default.target_fault}" if default.target_fault else ""]
        for drafter in self._model.drafters:
            pipeline = self._pipelines[drafter.name]
            fault = "none there" if not drafter.addresses else pipeline.drafter_fault if pipeline.usable else ""
            faults.append(f"drafter {drafter.name}: {fault}" if fault else "")
        return tuple(filter(None, faults))

    async def written(self, model: str, asked: Asked, special: bool = True) -> Written:
        self._check(model)
        return await (await self._ready(self._default)).written(asked, special)

    async def stream(self, request: OutputRequest) -> AsyncGenerator[OutputItem, None]:
        self._of(request)  # raises if there is none
        with self._admitted(), self._choosing(request) as request:
            pipeline, begun = await self._ready(self._of(request)), False
            while True:
                try:
                    async with aclosing(self._made(request, pipeline)) as items:
                        async for item in items:
                            begun = True
                            yield item
                    return
                except Replaced:
                    if begun or request.target:
                        raise

    @contextmanager
    def _choosing(self, request: OutputRequest) -> Iterator[OutputRequest]:
        """The request with the name of its drafter, for the time of the output."""
        name, trial = request.drafter, False
        if name in (None, AUTO):
            gains = self._gains(request.generation)
            name, trial = self._choice.begun(gains) if gains else (self._model.default_drafter, False)
        try:
            yield replace(request, drafter=name)
        finally:
            self._choice.ended(name or "", trial)

    def _gains(self, asked: GenerationRequest) -> Gains:
        """Of the drafters that can draft for a request now."""
        there = {name: one for name in self._model.drafter_names if (one := self._pipelines[name]).usable}
        load = max((one.load for one in there.values()), default=1.0)
        return {name: gain for name, one in there.items() if (gain := one.gain(asked, load)) is not None}

    async def _made(self, request: OutputRequest, pipeline: Pipeline) -> AsyncGenerator[OutputItem, None]:
        """By the model that is served when it begins; raises Replaced if another one has begun it, or takes over."""
        watch = Watch() if request.trace else None
        prepared = await pipeline.prepared(request.generation)
        target = pipeline.models.target.fingerprint
        if request.target not in ("", target):
            raise Replaced(REPLACED.format(repr(request.model)))
        with about(request=request.id):
            running = pipeline.run(request.generation, watch, prepared, request.drafter != DECODE_PLAINLY)
        async with running as generation:
            await generation.read()
            for first in range(0, len(generation.prompt_tokens), PIECE):
                yield PromptTokens(tuple(generation.prompt_tokens[first : first + PIECE]), first)
            if watch is None:
                while tokens := await generation.together():
                    yield Committed(tuple(tokens), target=target)
            else:
                async for token in generation:
                    yield TraceSpans(watch.take())
                    yield Committed((token,), target=target)
                yield TraceSpans(watch.take())
        pipeline.note_idle()
        assert generation.reason is not None
        assert generation.statistics is not None
        yield OutputEnded(generation.reason, replace(generation.statistics, drafter=request.drafter or ""))

    async def follow(self, model: LocalModel) -> None:
        """Uses these addresses of the model's services from now on; sessions that run on others move there. Raises
        ValueError: the model or one of its drafters has a name that was not served before."""
        drafters = {drafter.name: drafter.addresses for drafter in model.drafters} or {DECODE_PLAINLY: ()}
        known = sorted(self._pipelines)
        if model.name != self._model.name or known != sorted(drafters):
            raise ValueError(f"{self._model.name!r} is served with {known}, not {model.name!r} with {sorted(drafters)}")
        self._model = model
        for name, addresses in drafters.items():
            await self._pipelines[name].follow(model.targets, addresses)

    def _to(self, drafters: Addresses = (), trusted: bool = True) -> Pipeline:
        options = self._options
        return connect(
            self._model.targets, drafters, options.patience, tls=options.tls, trusted=trusted, updated=options.updated
        )

    @staticmethod
    async def _ready(pipeline: Pipeline) -> Pipeline:
        """Once outputs can be made with it. Raises ServiceError: no target answers, or the services do not fit."""
        try:
            await pipeline.ready()
        except RequestError as error:  # the addresses are wrong, not anybody's request
            raise NotServed(str(error)) from error
        return pipeline

    def _of(self, request: OutputRequest) -> Pipeline:
        self._check(request.model)
        model, name = self._model, request.drafter
        name = model.default_drafter if name in (None, AUTO, DECODE_PLAINLY) else name
        if name not in self._pipelines:
            there = ", ".join(model.drafter_names) or "none"
            raise UnknownDrafterError(f"{model.name!r} has no drafter {name!r}; there is {there}")
        return self._pipelines[name]

    def _check(self, name: str) -> None:
        if name not in self._model.names:
            raise UnknownModelError(f"there is no model {name!r}; there is {', '.join(self._model.names)}")

    @property
    def _default(self) -> Pipeline:
        return self._pipelines[self._model.default_drafter]

    @contextmanager
    def _admitted(self) -> Iterator[None]:
        """Counts the block as one running output; raises Overloaded at the limit."""
        limit = self._options.max_outputs
        if self.running >= limit:
            # With `limit` outputs under way, one ends every mean / limit seconds.
            after = max(MIN_RETRY_SECONDS, self._mean_seconds / limit)
            raise Overloaded(f"{limit} outputs are being generated, which is the limit", after)
        self.running += 1
        began = time.monotonic()
        try:
            yield
        finally:
            self.running -= 1
            took = time.monotonic() - began
            self._mean_seconds = SMOOTHING * self._mean_seconds + (1 - SMOOTHING) * took

"""Outputs that are measured and logged while somebody else makes them: for HTTP, gRPC and replicas alike."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from types import TracebackType
from typing import Self

from crossdraft.pipeline import RequestError, Statistics, Token
from crossdraft.rpc.errors import ServiceError, name_of
from crossdraft.rpc.subject import about
from crossdraft.serving.metrics import Metrics, Took
from crossdraft.serving.orders import Ended, Order, Outputs, OverloadedError, ServedModel, Traced, UnknownModelError

log = logging.getLogger(__name__)

UNKNOWN = "unknown"  # a label's value for what a client named and nobody has: clients must not make labels
PLAIN = "none"  # ... for no drafter
DEFAULT = "default"  # ... for the method of an output that ended before it was known
UNWANTED = (GeneratorExit, asyncio.CancelledError)  # what ends a stream that nobody listens to any more
CAUSES: tuple[tuple[type[Exception], str], ...] = (
    (RequestError, "bad_request"),
    (UnknownModelError, "unknown_model"),
    (OverloadedError, "overloaded"),
)


class Measured:
    """`Outputs` that are made by others.

    Args:
        outputs: who makes them.
        metrics: where they are counted.
        clock: seconds.
    """

    def __init__(self, outputs: Outputs, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._outputs = outputs
        self._metrics = metrics
        self._clock = clock
        self._known: dict[str, ServedModel] = {}

    async def models(self) -> tuple[ServedModel, ...]:
        """As `Outputs.models`."""
        models = await self._outputs.models()
        self._known = {model.name: model for model in models}
        return models

    async def stream(self, order: Order) -> AsyncGenerator[Token | Traced | Ended, None]:
        """As `Outputs.stream`."""
        began = self._clock()
        if order.model not in self._known:
            await self.models()
        with Course(self._metrics, order, self._known.get(order.model), self._clock, began) as course:
            async with aclosing(self._outputs.stream(order)) as made:
                async for what in made:
                    course.saw(what)
                    yield what


class Course:
    """One output from its order to its end."""

    def __init__(
        self, metrics: Metrics, order: Order, model: ServedModel | None, clock: Callable[[], float], began: float
    ) -> None:
        self._metrics = metrics
        self._order = order
        self._clock = clock
        self._began = began
        self._model = UNKNOWN if model is None else model.name
        self._drafter = drafter_of(order, model)
        self._live = metrics.live(self._model, self._drafter)
        self._tokens = 0
        self._first: float | None = None
        self._latest = 0.0
        self._ended = False

    def saw(self, what: Token | Traced | Ended) -> None:
        """The next part of it came."""
        match what:
            case Token():
                self._token(self._clock() - self._began)
            case Ended():
                self._ended = True
                self._finish(what, self._clock() - self._began)

    def __enter__(self) -> Self:
        self._metrics.waiting.labels(self._model).inc()
        self._metrics.running.labels(self._model).inc(0)  # it is there to be read, if only as 0
        with about(request=self._order.id):
            log.info("output ordered: model %s, drafter %s", self._model, self._drafter)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        waits = self._first is None
        (self._metrics.waiting if waits else self._metrics.running).labels(self._model).dec()
        seconds = self._clock() - self._began
        if self._ended:
            return
        with about(request=self._order.id):
            if error is None or isinstance(error, UNWANTED):
                self._metrics.aborted(self._labels(), seconds)
                log.info("output aborted after %.3f s, %d tokens", seconds, self._tokens)
            else:
                cause = cause_of(error)
                self._metrics.failed(self._labels(), cause)
                log.warning("output failed (%s) after %.3f s, %d tokens: %s", cause, seconds, self._tokens, error)

    def _token(self, now: float) -> None:
        if self._first is None:
            self._first = now
            self._metrics.waiting.labels(self._model).dec()
            self._metrics.running.labels(self._model).inc()
            self._live.first_token(now)
        else:
            self._live.token(now - self._latest)
        self._tokens += 1
        self._latest = now

    def _finish(self, ended: Ended, seconds: float) -> None:
        figures = ended.statistics
        took = Took(seconds, self._first, self._latest, self._tokens)
        self._metrics.finished((self._model, figures.method, self._drafter), ended.reason.value, figures, took)
        with about(request=self._order.id):
            log.info(
                "output ended (%s) after %.3f s: %s, %d tokens, %.2f a pass, acceptance %.2f%s",
                ended.reason.value,
                seconds,
                figures.method,
                self._tokens,
                figures.tokens_per_pass,
                figures.acceptance,
                _losses(figures),
            )

    def _labels(self) -> tuple[str, str, str]:
        return self._model, self._order.request.method or DEFAULT, self._drafter


def _losses(figures: Statistics) -> str:
    """Which services failed in an output that was made nevertheless, and how."""
    gone = [(lane.address, lane.lost) for lane in figures.lanes if lane.role == "target" and lane.lost]
    told = "".join(f"; target at {address} lost: {how}" for address, how in dict.fromkeys(gone) if address)
    return told + (f"; drafter lost: {figures.drafter_lost}" if figures.drafter_lost else "")


def drafter_of(order: Order, model: ServedModel | None) -> str:
    """The label for an order's drafter, one of those that the model has."""
    if model is None:
        return UNKNOWN
    if order.drafter is None:
        return model.drafters[0] if model.drafters else PLAIN
    if not order.drafter:
        return PLAIN
    return order.drafter if order.drafter in model.drafters else UNKNOWN


def cause_of(error: BaseException) -> str:
    """The label for what an output failed of."""
    for kind, cause in CAUSES:
        if isinstance(error, kind):
            return cause
    return f"service_{name_of(error)}" if isinstance(error, ServiceError) else "internal"

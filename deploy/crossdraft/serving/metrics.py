"""Metrics of the outputs that a process makes, for Prometheus.

Names are vLLM's, with PREFIX where vLLM has `vllm:`, as far as vLLM has the same thing; docs/metrics.md lists them.
What is known while an output is being made has no label for the method, which the services decide.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import accumulate
from types import TracebackType
from typing import Self

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.metrics_core import HistogramMetricFamily, Metric

from crossdraft.client import Kind, RequestError, Statistics, Token
from crossdraft.rpc.errors import ServiceError, name_of
from crossdraft.rpc.log_context import about
from crossdraft.rpc.metrics import PREFIX, Registry, exposition
from crossdraft.serving.outputs import Ended, Order, Outputs, OverloadedError, ServedModel, Traced, UnknownModelError
from crossdraft.types.statistics import BOUNDS, LaneFigures

LIVE = ("model_name", "drafter")
LABELS = ("model_name", "method", "drafter")
MOST_POSITIONS = 32  # of draft tokens in a round that have a label each; the rest have one together
FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
BETWEEN_TOKENS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5, 10)
WHOLE = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)  # seconds
QUEUED = (0.001, 0.005, 0.01, 0.05, 0.1, 0.3, 0.5, 1, 2.5, 5, 10, 20, 40, 80)
LENGTHS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)  # tokens
# What an output's statistics add to, by LABELS.
TOTALS: tuple[tuple[str, str, Callable[[Statistics], float]], ...] = (
    ("prompt_tokens", "Tokens of prompts.", lambda one: one.prompt_tokens),
    (
        "spec_decode_num_drafts",
        "Epochs that had a draft token.",
        lambda one: one.proposed_at[0] if one.proposed_at else 0,
    ),
    ("spec_decode_num_draft_tokens", "Draft tokens, in tokens of the drafter.", lambda one: one.draft_tokens),
    ("spec_decode_num_accepted_tokens", "Draft tokens that are wholly in an output.", lambda one: sum(one.accepted_at)),
    ("epochs", "Drafts that were begun.", lambda one: one.epochs),
    ("target_passes", "Forwards of targets, row misses included.", lambda one: one.passes),
    ("speculated_passes", "Passes that began while another one was in flight.", lambda one: one.speculated),
    ("row_misses", "Passes for a row that no pass over the same draft had fetched.", lambda one: one.row_misses),
    ("rows_fetched", "Whole rows, because a head was not enough.", lambda one: one.rows_fetched),
    ("stalls", "Times that a target stood idle for draft tokens until patience ended.", lambda one: one.stalls),
    ("stood_aside", "Epochs in which the drafter proposed fewer than asked for.", lambda one: one.stood_aside),
    ("branches", "Prepared continuations that came.", lambda one: one.branches),
    ("branches_tried", "Refusals that met prepared continuations.", lambda one: one.branches_tried),
    ("branches_hit", "Refusals that were continued by one.", lambda one: one.branches_hit),
    ("fallbacks", "Outputs that lost a drafter, or had none where one was due.", lambda one: bool(one.drafter_lost)),
    ("target_open_seconds", "Seconds that sessions with targets were open.", lambda one: one.target_lane_seconds),
    ("target_idle_seconds", "Seconds of them without a pass in flight.", lambda one: one.idle_seconds),
    ("target_model_seconds", "Seconds in targets' models.", lambda one: one.target_seconds),
    ("drafter_model_seconds", "Seconds in drafters' models.", lambda one: one.drafter_seconds),
    ("orchestrator_cpu_seconds", "CPU time in the state machine.", lambda one: one.verification_seconds),
)


@dataclass(frozen=True)
class Took:
    """When things of an output happened, in seconds since it was ordered."""

    seconds: float  # its end
    first_token: float | None  # None: it has no token
    last_token: float
    tokens: int


@dataclass(frozen=True)
class Live:
    """What an output counts while it is being made: found once, as looking labels up takes longer than counting."""

    tokens: Counter
    to_first: Histogram  # seconds
    between: Histogram  # seconds

    def first_token(self, seconds: float) -> None:
        """The first one, so long after the order."""
        self.tokens.inc()
        self.to_first.observe(seconds)

    def token(self, seconds: float) -> None:
        """Another one, so long after the one before."""
        self.tokens.inc()
        self.between.observe(seconds)


class Metrics:
    """All metrics of a process's outputs, in a registry of their own; methods observe, and are cheap."""

    def __init__(self) -> None:
        self.registry = Registry()
        self.running = self._gauge("num_requests_running", "Outputs that have had their first token.")
        self.waiting = self._gauge("num_requests_waiting", "Outputs that wait for a place or for their first token.")
        self._tokens = self._counter("generation_tokens", "Tokens of outputs.", LIVE)
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "Seconds from the order to the first token.", FIRST_TOKEN, LIVE
        )
        self._between = self._histogram(
            "inter_token_latency_seconds", "Seconds between two tokens of an output.", BETWEEN_TOKENS, LIVE
        )
        self._totals = [(self._counter(name, text, LABELS), value) for name, text, value in TOTALS]
        self._success = self._counter(
            "request_success",
            "Outputs, by how they ended; abort: nobody wanted the rest.",
            (*LABELS, "finished_reason"),
        )
        self._failures = self._counter("request_failures", "Outputs that failed, by cause.", (*LABELS, "cause"))
        self._accepted = self._counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Accepted draft tokens by place in the epoch.",
            (*LABELS, "position"),
        )
        self._kinds = self._counter("emitted_tokens", "Tokens of outputs, by kind.", (*LABELS, "kind"))
        self._latency = self._histogram(
            "e2e_request_latency_seconds", "Seconds from the order to the end.", WHOLE, LABELS
        )
        self._queued = self._histogram(
            "request_queue_time_seconds", "Seconds from the order to the opening of sessions.", QUEUED, LABELS
        )
        self._each = self._histogram(
            "request_time_per_output_token_seconds",
            "Seconds per token after the first, the mean of each output.",
            BETWEEN_TOKENS,
            LABELS,
        )
        self._prompts = self._histogram("request_prompt_tokens", "Tokens of a prompt.", LENGTHS, LABELS)
        self._lengths = self._histogram("request_generation_tokens", "Tokens of an output.", LENGTHS, LABELS)
        self._wire = self._counter(
            "wire_bytes", "Serialized messages of sessions with services.", ("role", "peer", "direction")
        )
        self._lost = self._counter("services_lost", "Sessions that a service failed in, by cause.", ("role", "cause"))
        self._trips = TripHistogram()
        self.registry.register(self._trips)

    def text(self, accept: str = "") -> tuple[bytes, str]:
        """What `GET /metrics` answers, and its content type; `accept` is the request's header."""
        return exposition(self.registry, accept)

    def live(self, model: str, drafter: str) -> Live:
        """What is told of each token of an output."""
        labels = (model, drafter)
        return Live(self._tokens.labels(*labels), self._first_token.labels(*labels), self._between.labels(*labels))

    def finished(self, labels: Sequence[str], reason: str, figures: Statistics, took: Took) -> None:
        """An output has come to its end.

        Args:
            labels: values of LABELS.
            reason: `stop` or `length`.
            figures: of its session.
            took: when things happened.
        """
        self._success.labels(*labels, reason).inc()
        self._observe(labels, figures, took)
        for counter, value in self._totals:
            counter.labels(*labels).inc(value(figures))
        for kind, count in zip(Kind, (figures.accepted, figures.corrected, figures.bonus), strict=True):
            self._kinds.labels(*labels, kind.value).inc(count)
        for place, count in enumerate(figures.accepted_at):
            self._accepted.labels(*labels, position_of(place)).inc(count)
        for lane in figures.lanes:
            self._count(lane)

    def aborted(self, labels: Sequence[str], seconds: float) -> None:
        """Nobody wants the rest of an output; what it cost is not known."""
        self._success.labels(*labels, "abort").inc()
        self._latency.labels(*labels).observe(seconds)

    def failed(self, labels: Sequence[str], cause: str) -> None:
        """An output ends in an error. `cause` is one of a few words."""
        self._failures.labels(*labels, cause).inc()

    def _observe(self, labels: Sequence[str], figures: Statistics, took: Took) -> None:
        self._latency.labels(*labels).observe(took.seconds)
        self._prompts.labels(*labels).observe(figures.prompt_tokens)
        self._lengths.labels(*labels).observe(took.tokens)
        if took.first_token is not None:
            self._queued.labels(*labels).observe(max(0.0, took.first_token - figures.first_token_seconds))
            if took.tokens > 1:
                self._each.labels(*labels).observe((took.last_token - took.first_token) / (took.tokens - 1))

    def _count(self, lane: LaneFigures) -> None:
        if lane.lost:
            self._lost.labels(lane.role, lane.lost).inc()
        if lane.address:
            self._wire.labels(lane.role, lane.address, "sent").inc(lane.bytes_sent)
            self._wire.labels(lane.role, lane.address, "received").inc(lane.bytes_received)
            self._trips.add(lane)

    def _counter(self, name: str, text: str, labels: Sequence[str]) -> Counter:
        return Counter(PREFIX + name, text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(PREFIX + name, text, ("model_name",), registry=self.registry)

    def _histogram(self, name: str, text: str, bounds: Sequence[float], labels: Sequence[str]) -> Histogram:
        return Histogram(PREFIX + name, text, labels, buckets=bounds, registry=self.registry)


def position_of(place: int) -> str:
    """The label of a draft token's place in its epoch, from 0."""
    return str(place) if place < MOST_POSITIONS else f"{MOST_POSITIONS}+"


# Outputs that are measured and logged while somebody else makes them: for HTTP, gRPC and replicas alike.

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


# A histogram whose observations come counted already: round trips of lanes.

UPPER = (*map(str, BOUNDS), "+Inf")


@dataclass
class _Trips:
    counts: list[int] = field(default_factory=lambda: [0] * len(UPPER))
    seconds: float = 0.0


class TripHistogram:
    """A Prometheus collector of `round_trip_seconds`, by role and address of the service."""

    def __init__(self) -> None:
        self._peers: dict[tuple[str, str], _Trips] = {}

    def add(self, lane: LaneFigures) -> None:
        """Counts the round trips of one session."""
        peer = self._peers.setdefault((lane.role, lane.address), _Trips())
        peer.counts = [before + more for before, more in zip(peer.counts, lane.trips.counts, strict=True)]
        peer.seconds += lane.trips.seconds

    def collect(self) -> Iterator[Metric]:
        """As prometheus_client wants it."""
        family = HistogramMetricFamily(
            f"{PREFIX}round_trip_seconds",
            "Seconds from a question to a service to its first answer, less those in its model.",
            labels=("role", "peer"),
        )
        for labels, peer in sorted(self._peers.items()):
            family.add_metric(labels, list(zip(UPPER, map(float, accumulate(peer.counts)), strict=True)), peer.seconds)
        yield family

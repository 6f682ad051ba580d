"""Prometheus metrics and log lines of the outputs that a process makes, for HTTP, gRPC and replicas alike.

Names are vLLM's, with PREFIX in place of `vllm:`, as far as vLLM has the same metric; docs/metrics.md lists them.
What is counted while an output is being made has no label for the method, which is known at the end.
"""

import asyncio
import logging
import os
import time
from bisect import bisect_left
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import chain
from types import TracebackType
from typing import Self

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.multiprocess import MultiProcessCollector

from crossdraft.client import Kind, RequestError, Statistics
from crossdraft.rpc.errors import ServiceError, name_of
from crossdraft.rpc.event_loop import LoopLag
from crossdraft.rpc.generation import Committed, OutputEnded
from crossdraft.rpc.log_context import about
from crossdraft.rpc.metrics import PREFIX, Registry, exposition
from crossdraft.serving.backend import AUTO, Backend, OutputItem, OutputRequest, OverloadedError, UnknownModelError
from crossdraft.types.output import ServedModel, Written
from crossdraft.types.request import Asked
from crossdraft.types.statistics import COARSE, LaneFigures

log = logging.getLogger(__name__)
LIVE = ("model_name", "drafter")
LABELS = ("model_name", "method", "drafter")
SHARED_FOLDER = "PROMETHEUS_MULTIPROC_DIR"  # prometheus_client reads it when it is imported
MAX_POSITIONS = 32  # of draft tokens in a round with a label each; the others share one
FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
BETWEEN_TOKENS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5, 10)
WHOLE = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)  # seconds
QUEUED = (0.001, 0.005, 0.01, 0.05, 0.1, 0.3, 0.5, 1, 2.5, 5, 10, 20, 40, 80)
LENGTHS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)  # tokens
# Counters by LABELS: name, help, and what the statistics of an output add.
TOTALS: tuple[tuple[str, str, Callable[[Statistics], float]], ...] = (
    ("prompt_tokens", "Tokens of prompts.", lambda one: one.prompt_tokens),
    ("spec_decode_num_drafts", "Epochs with a draft token.", lambda one: one.drafted_at[0] if one.drafted_at else 0),
    ("spec_decode_num_draft_tokens", "Draft tokens, in tokens of the drafter.", lambda one: one.draft_tokens),
    ("spec_decode_num_accepted_tokens", "Draft tokens that are wholly in an output.", lambda one: sum(one.accepted_at)),
    ("epochs", "Drafts that were started.", lambda one: one.epochs),
    ("target_passes", "Forwards of targets, row misses included.", lambda one: one.passes),
    ("speculated_passes", "Passes that began while another one was in flight.", lambda one: one.speculated),
    ("row_misses", "Passes for a row that no pass over the same draft had fetched.", lambda one: one.row_misses),
    ("rows_fetched", "Full rows fetched, because the head of a row was not enough.", lambda one: one.rows_fetched),
    ("stalls", "Times that a target waited idle for draft tokens until the time limit.", lambda one: one.stalls),
    ("stood_aside", "Epochs in which the drafter drafted fewer tokens than requested.", lambda one: one.stood_aside),
    ("branches", "Prepared continuations received.", lambda one: one.branches),
    ("branches_tried", "Rejections for which continuations were prepared.", lambda one: one.branches_tried),
    ("branches_hit", "Rejections continued by a prepared continuation.", lambda one: one.branches_hit),
    ("fallbacks", "Outputs that lost their drafter, or lacked one that was due.", lambda one: bool(one.drafter_lost)),
    ("target_open_seconds", "Seconds that sessions with targets were open.", lambda one: one.target_lane_seconds),
    ("target_idle_seconds", "Seconds of them without a request in flight.", lambda one: one.idle_seconds),
    ("target_model_seconds", "Seconds in targets' models.", lambda one: one.target_seconds),
    ("drafter_model_seconds", "Seconds in drafters' models.", lambda one: one.drafter_seconds),
    ("orchestrator_cpu_seconds", "CPU time in the state machine.", lambda one: one.verification_seconds),
)


@dataclass(frozen=True)
class Timings:
    """When things of an output happened, in seconds since its request."""

    end: float
    first_token: float | None  # None: it has no token
    last_token: float
    tokens: int


def registry_of_all(folder: str) -> Registry:
    """A registry that adds up what the processes that share this folder have counted."""
    registry = Registry()
    MultiProcessCollector(registry, folder)  # type: ignore[no-untyped-call]
    return registry


class Metrics:
    """All metrics of a process's outputs, in a registry of their own.

    Where prometheus_client shares metrics among processes (PROMETHEUS_MULTIPROC_DIR), the text is of all of them.
    """

    def __init__(self) -> None:
        self.registry = Registry()
        shared = os.environ.get(SHARED_FOLDER)
        self.exported = self.registry if shared is None else registry_of_all(shared)
        self.lag = LoopLag(self.registry, "front")  # to be started in the event loop
        self.running = self._gauge("num_requests_running", "Outputs that have had their first token.")
        self.waiting = self._gauge("num_requests_waiting", "Outputs that wait for their first token.")
        self._make_live()
        self._make_ended()
        self._make_services()

    @property
    def outputs(self) -> int:
        """Of this process, that are being made."""
        gauges = chain(self.running.collect(), self.waiting.collect())
        return int(sum(sample.value for gauge in gauges for sample in gauge.samples))

    def _make_live(self) -> None:
        self._tokens = self._counter("generation_tokens", "Tokens of outputs.", LIVE)
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "Seconds from the request to the first token.", FIRST_TOKEN, LIVE
        )
        self._between = self._histogram(
            "inter_token_latency_seconds", "Seconds between two tokens; 0 if one pass made both.", BETWEEN_TOKENS, LIVE
        )

    def _make_ended(self) -> None:
        self._totals = [(self._counter(name, text, LABELS), value) for name, text, value in TOTALS]
        self._success = self._counter(
            "request_success", "Outputs, by how they ended; abort: the client left.", (*LABELS, "finished_reason")
        )
        self._failures = self._counter("request_failures", "Outputs that failed, by cause.", (*LABELS, "cause"))
        self._accepted = self._counter(
            "spec_decode_num_accepted_tokens_per_pos", "Accepted draft tokens by position.", (*LABELS, "position")
        )
        self._kinds = self._counter("emitted_tokens", "Tokens of outputs, by kind.", (*LABELS, "kind"))
        self._latency = self._histogram(
            "e2e_request_latency_seconds", "Seconds from the request to the end.", WHOLE, LABELS
        )
        self._queued = self._histogram(
            "request_queue_time_seconds", "Seconds from the request to the opening of sessions.", QUEUED, LABELS
        )
        self._each = self._histogram(
            "request_time_per_output_token_seconds", "Mean seconds per token after the first.", BETWEEN_TOKENS, LABELS
        )
        self._prompts = self._histogram("request_prompt_tokens", "Tokens of a prompt.", LENGTHS, LABELS)
        self._lengths = self._histogram("request_generation_tokens", "Tokens of an output.", LENGTHS, LABELS)

    def _make_services(self) -> None:
        self._wire = self._counter(
            "wire_bytes", "Serialized messages of sessions with services.", ("role", "peer", "direction")
        )
        self._lost = self._counter("services_lost", "Sessions whose service failed, by cause.", ("role", "cause"))
        self._trips = self._histogram(
            "round_trip_seconds", "Seconds to a service's first reply, less its model's.", COARSE, ("role", "peer")
        )

    def text(self, accept: str = "") -> tuple[bytes, str]:
        """The text of `GET /metrics` and its content type, for the request's header `Accept`."""
        return exposition(self.exported, accept)

    def live(self, model: str, drafter: str) -> "tuple[Counter, BatchHistogram, BatchHistogram]":
        """Tokens, time to the first, and times between two, of outputs with these labels.

        Looked up once for each output: finding labels takes longer than counting.
        """
        return (
            self._tokens.labels(model, drafter),
            self._first_token.labels(model, drafter),
            self._between.labels(model, drafter),
        )

    def finished(self, labels: Sequence[str], reason: str, figures: Statistics, timings: Timings) -> None:
        self._success.labels(*labels, reason).inc()
        self._observe(labels, figures, timings)
        for counter, value in self._totals:
            counter.labels(*labels).inc(value(figures))
        for kind, count in zip(Kind, (figures.accepted, figures.corrected, figures.bonus), strict=True):
            self._kinds.labels(*labels, kind.value).inc(count)
        for index, count in enumerate(figures.accepted_at):
            self._accepted.labels(*labels, position_of(index)).inc(count)
        for lane in figures.lanes:
            self._count(lane)

    def aborted(self, labels: Sequence[str], seconds: float) -> None:
        """Counts an output that was cancelled; its statistics are not known."""
        self._success.labels(*labels, "abort").inc()
        self._latency.labels(*labels).observe(seconds)

    def failed(self, labels: Sequence[str], cause: str) -> None:
        self._failures.labels(*labels, cause).inc()

    def _observe(self, labels: Sequence[str], figures: Statistics, timings: Timings) -> None:
        self._latency.labels(*labels).observe(timings.end)
        self._prompts.labels(*labels).observe(figures.prompt_tokens)
        self._lengths.labels(*labels).observe(timings.tokens)
        if timings.first_token is not None:
            self._queued.labels(*labels).observe(max(0.0, timings.first_token - figures.first_token_seconds))
            if timings.tokens > 1:
                mean = (timings.last_token - timings.first_token) / (timings.tokens - 1)
                self._each.labels(*labels).observe(mean)

    def _count(self, lane: LaneFigures) -> None:
        if lane.lost:
            self._lost.labels(lane.role, lane.lost).inc()
        if lane.address:
            self._wire.labels(lane.role, lane.address, "sent").inc(lane.bytes_sent)
            self._wire.labels(lane.role, lane.address, "received").inc(lane.bytes_received)
            self._trips.labels(lane.role, lane.address).merge(lane.trips.coarse, lane.trips.seconds)

    def _counter(self, name: str, text: str, labels: Sequence[str]) -> Counter:
        return Counter(PREFIX + name, text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(PREFIX + name, text, ("model_name",), registry=self.registry, multiprocess_mode="livesum")

    def _histogram(self, name: str, text: str, bounds: Sequence[float], labels: Sequence[str]) -> "BatchHistogram":
        return BatchHistogram(PREFIX + name, text, labels, buckets=bounds, registry=self.registry)


def position_of(index: int) -> str:
    """The label of a draft token's position in its epoch, from 0."""
    return str(index) if index < MAX_POSITIONS else f"{MAX_POSITIONS}+"


UNKNOWN = "unknown"  # label of a model or drafter that does not exist: clients must not be able to add labels
NONE = "none"  # label of outputs without a drafter
DEFAULT = "default"  # label of a method or drafter that was not named, of an output that ended before it was known
CANCELLED = (GeneratorExit, asyncio.CancelledError)  # what ends a stream that nobody reads any more
CAUSES: tuple[tuple[type[Exception], str], ...] = (
    (RequestError, "bad_request"),
    (UnknownModelError, "unknown_model"),
    (OverloadedError, "overloaded"),
)


class MeasuredBackend:
    """A `Backend` that counts and logs the outputs of another one."""

    def __init__(self, backend: Backend, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._backend = backend
        self._metrics = metrics
        self._clock = clock
        self._known: dict[str, ServedModel] = {}

    @property
    def names(self) -> Mapping[str, str]:
        return self._backend.names

    async def models(self) -> tuple[ServedModel, ...]:
        models = await self._backend.models()
        self._known = {model.name: model for model in models}
        return models

    async def written(self, model: str, asked: Asked, special: bool = True) -> Written:
        return await self._backend.written(model, asked, special)

    async def stream(self, request: OutputRequest) -> AsyncGenerator[OutputItem, None]:
        began = self._clock()
        if request.model not in self._known:
            await self.models()
        model = self._known.get(request.model)
        # One that is configured, but cannot be reached yet, is known by its name alone.
        name = self._backend.names.get(request.model, UNKNOWN)
        labels = name if model is None else model.root or model.name, drafter_of(request, model)
        with _Measurement(self._metrics, request, labels, self._clock, began) as measurement:
            async with aclosing(self._backend.stream(request)) as items:
                async for item in items:
                    measurement.saw(item)
                    yield item


class _Measurement:
    """One output from its request to its end."""

    def __init__(
        self,
        metrics: Metrics,
        request: OutputRequest,
        labels: tuple[str, str],
        clock: Callable[[], float],
        began: float,
    ) -> None:
        self._metrics = metrics
        self._request = request
        self._clock = clock
        self._began = began
        self._model, self._drafter = labels
        self._live = metrics.live(self._model, self._drafter)
        self._tokens = 0
        self._first: float | None = None  # seconds from the request to the first token
        self._latest = 0.0  # ... to the latest token
        self._ended = False

    def saw(self, item: OutputItem) -> None:
        match item:
            case Committed():
                self._committed(len(item.tokens), self._clock() - self._began)
            case OutputEnded():
                self._ended = True
                self._finish(item, self._clock() - self._began)

    def __enter__(self) -> Self:
        self._metrics.waiting.labels(self._model).inc()
        self._metrics.running.labels(self._model).inc(0)  # so that it is exported, if only as 0
        with about(request=self._request.id):
            log.info("output requested: model %s, drafter %s", self._model, self._drafter)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        waits = self._first is None
        (self._metrics.waiting if waits else self._metrics.running).labels(self._model).dec()
        seconds = self._clock() - self._began
        if self._ended:
            return
        labels = (self._model, self._request.generation.method or DEFAULT, self._drafter)
        with about(request=self._request.id):
            if error is None or isinstance(error, CANCELLED):
                self._metrics.aborted(labels, seconds)
                log.info("output aborted after %.3f s, %d tokens", seconds, self._tokens)
            else:
                cause = cause_of(error)
                self._metrics.failed(labels, cause)
                log.warning("output failed (%s) after %.3f s, %d tokens: %s", cause, seconds, self._tokens, error)

    def _committed(self, count: int, now: float) -> None:
        tokens, to_first, between = self._live
        if self._first is None:
            self._first = now
            self._metrics.waiting.labels(self._model).dec()
            self._metrics.running.labels(self._model).inc()
            to_first.observe(now)
        else:
            between.observe(now - self._latest)
        if count > 1:
            between.repeat(0.0, count - 1)
        tokens.inc(count)
        self._tokens += count
        self._latest = now

    def _finish(self, ended: OutputEnded, seconds: float) -> None:
        figures = ended.statistics
        timings = Timings(seconds, self._first, self._latest, self._tokens)
        labels = self._model, figures.method, figures.drafter or self._drafter
        self._metrics.finished(labels, ended.reason.value, figures, timings)
        with about(request=self._request.id):
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


def _losses(figures: Statistics) -> str:
    lost = [(lane.address, lane.lost) for lane in figures.lanes if lane.role == "target" and lane.lost]
    targets = "".join(f"; target at {address} lost: {how}" for address, how in dict.fromkeys(lost) if address)
    return targets + (f"; drafter lost: {figures.drafter_lost}" if figures.drafter_lost else "")


def drafter_of(request: OutputRequest, model: ServedModel | None) -> str:
    if model is None:
        return {None: DEFAULT, "": NONE}.get(request.drafter, UNKNOWN)
    if request.drafter in (None, AUTO):
        return AUTO if len(model.drafters) > 1 else model.drafters[0] if model.drafters else NONE
    if not request.drafter:
        return NONE
    return request.drafter if request.drafter in model.drafters else UNKNOWN


def cause_of(error: BaseException) -> str:
    for kind, cause in CAUSES:
        if isinstance(error, kind):
            return cause
    return f"service_{name_of(error)}" if isinstance(error, ServiceError) else "internal"


class BatchHistogram(Histogram):
    """A histogram that also takes several observations at once.

    prometheus_client's own takes single ones, at some microseconds each, which for eight tokens of a pass is more than
    making their message.
    """

    def repeat(self, value: float, times: int) -> None:
        self._buckets[bisect_left(self._upper_bounds, value)].inc(times)
        self._sum.inc(value * times)

    def merge(self, counts: Sequence[int], sum: float) -> None:
        for bucket, count in zip(self._buckets, counts, strict=True):
            bucket.inc(count)
        self._sum.inc(sum)

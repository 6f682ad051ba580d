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
from dataclasses import dataclass, field
from itertools import chain
from types import TracebackType
from typing import Self

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.multiprocess import MultiProcessCollector

from crossdraft.client import Kind, RequestError, Statistics
from crossdraft.config.request import AUTO, NO_DRAFTER
from crossdraft.rpc.errors import Overloaded, ServiceError, name_of
from crossdraft.rpc.event_loop import LoopLag
from crossdraft.rpc.generation import Committed, OutputEnded
from crossdraft.rpc.logs import about
from crossdraft.rpc.metrics import PREFIX, exposition
from crossdraft.serving.backend import Backend, OutputItem, OutputRequest, UnknownModelError
from crossdraft.types.output import ServedModel, Written
from crossdraft.types.request import Asked
from crossdraft.types.statistics import COARSE

log = logging.getLogger(__name__)
LIVE = ("model_name", "drafter")
LABELS = ("model_name", "method", "drafter")
PAIR = ("role", "peer")
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
    ("spec_decode_num_draft_tokens", "Draft tokens, in tokens of the drafter.", lambda one: sum(one.drafted_at)),
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
# Other counters, and histograms: name, help, bounds of these, labels.
COUNTERS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("generation_tokens", "Tokens of outputs.", LIVE),
    ("request_success", "Outputs, by how they ended; abort: the client left.", (*LABELS, "finished_reason")),
    ("request_failures", "Outputs that failed, by cause.", (*LABELS, "cause")),
    ("spec_decode_num_accepted_tokens_per_pos", "Accepted draft tokens by position.", (*LABELS, "position")),
    ("emitted_tokens", "Tokens of outputs, by kind.", (*LABELS, "kind")),
    ("wire_bytes", "Serialized messages of sessions with services.", (*PAIR, "direction")),
    ("services_lost", "Sessions whose service failed, by cause.", ("role", "cause")),
)
HISTOGRAMS: tuple[tuple[str, str, tuple[float, ...], tuple[str, ...]], ...] = (
    ("time_to_first_token_seconds", "Seconds from the request to the first token.", FIRST_TOKEN, LIVE),
    ("inter_token_latency_seconds", "Seconds between two tokens; 0 if one pass made both.", BETWEEN_TOKENS, LIVE),
    ("e2e_request_latency_seconds", "Seconds from the request to the end.", WHOLE, LABELS),
    ("request_queue_time_seconds", "Seconds from the request to the opening of sessions.", QUEUED, LABELS),
    ("request_time_per_output_token_seconds", "Mean seconds per token after the first.", BETWEEN_TOKENS, LABELS),
    ("request_prompt_tokens", "Tokens of a prompt.", LENGTHS, LABELS),
    ("request_generation_tokens", "Tokens of an output.", LENGTHS, LABELS),
    ("round_trip_seconds", "Seconds to a service's first reply, less its model's.", COARSE, PAIR),
)


def registry_of_all(folder: str) -> CollectorRegistry:
    """A registry that adds up what the processes that share this folder have counted."""
    registry = CollectorRegistry()
    MultiProcessCollector(registry, folder)  # type: ignore[no-untyped-call]
    return registry


class Metrics:
    """All metrics of a process's outputs, in a registry of their own.

    Where prometheus_client shares metrics among processes (PROMETHEUS_MULTIPROC_DIR), the text is of all of them.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        shared = os.environ.get(SHARED_FOLDER)
        self.exported = self.registry if shared is None else registry_of_all(shared)
        self.lag = LoopLag(self.registry, "front")  # to be started in the event loop
        self.running = self._gauge("num_requests_running", "Outputs that have had their first token.")
        self.waiting = self._gauge("num_requests_waiting", "Outputs that wait for their first token.")
        counters = (*((name, text, LABELS) for name, text, _ in TOTALS), *COUNTERS)
        self._counters = {
            name: Counter(PREFIX + name, text, labels, registry=self.registry) for name, text, labels in counters
        }
        self._histograms = {
            name: BatchHistogram(PREFIX + name, text, labels, buckets=bounds, registry=self.registry)
            for name, text, bounds, labels in HISTOGRAMS
        }

    @property
    def outputs(self) -> int:
        """Of this process, that are being made."""
        gauges = chain(self.running.collect(), self.waiting.collect())
        return int(sum(sample.value for gauge in gauges for sample in gauge.samples))

    def text(self, accept: str = "") -> tuple[bytes, str]:
        """The text of `GET /metrics` and its content type, for the request's header `Accept`."""
        return exposition(self.exported, accept)

    def count(self, name: str, *labels: str) -> Counter:
        """One of the counters; it has another one by itself for each of its labels."""
        return self._counters[name].labels(*labels)

    def times(self, name: str, *labels: str) -> "BatchHistogram":
        """One of the histograms, likewise."""
        return self._histograms[name].labels(*labels)

    def finished(self, labels: Sequence[str], reason: str, figures: Statistics) -> None:
        self.count("request_success", *labels, reason).inc()
        self.times("request_prompt_tokens", *labels).observe(figures.prompt_tokens)
        for name, _, value in TOTALS:
            self.count(name, *labels).inc(value(figures))
        for kind, count in zip(Kind, (figures.accepted, figures.corrected, figures.bonus), strict=True):
            self.count("emitted_tokens", *labels, kind.value).inc(count)
        for index, count in enumerate(figures.accepted_at):
            position = str(index) if index < MAX_POSITIONS else f"{MAX_POSITIONS}+"
            self.count("spec_decode_num_accepted_tokens_per_pos", *labels, position).inc(count)
        for lane in figures.lanes:
            if lane.lost:
                self.count("services_lost", lane.role, lane.lost).inc()
            if lane.address:
                self.count("wire_bytes", lane.role, lane.address, "sent").inc(lane.bytes_sent)
                self.count("wire_bytes", lane.role, lane.address, "received").inc(lane.bytes_received)
                trips = self.times("round_trip_seconds", lane.role, lane.address)
                trips.merge(lane.trips.coarse, lane.trips.seconds)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(PREFIX + name, text, ("model_name",), registry=self.registry, multiprocess_mode="livesum")


UNKNOWN = "unknown"  # label of a model or drafter that does not exist: clients must not be able to add labels
DEFAULT = "default"  # label of a method or drafter that was not named, of an output that ended before it was known
CANCELLED = (GeneratorExit, asyncio.CancelledError)  # what ends a stream that nobody reads any more
CAUSES = {RequestError: "bad_request", UnknownModelError: "unknown_model", Overloaded: "overloaded"}


@dataclass(eq=False)
class MeasuredBackend:
    """A `Backend` that counts and logs the outputs of another one."""

    backend: Backend
    metrics: Metrics
    clock: Callable[[], float] = time.monotonic  # seconds
    _known: dict[str, ServedModel] = field(default_factory=dict)

    @property
    def names(self) -> Mapping[str, str]:
        return self.backend.names

    @property
    def absent(self) -> Mapping[str, str]:
        return self.backend.absent

    async def models(self) -> tuple[ServedModel, ...]:
        models = await self.backend.models()
        self._known = {model.name: model for model in models}
        return models

    async def written(self, model: str, asked: Asked, special: bool = True) -> Written:
        return await self.backend.written(model, asked, special)

    async def stream(self, request: OutputRequest) -> AsyncGenerator[OutputItem, None]:
        began = self.clock()
        if request.model not in self._known:
            await self.models()
        model = self._known.get(request.model)
        # One that is configured, but cannot be reached yet, is known by its name alone.
        name = self.backend.names.get(request.model, UNKNOWN)
        labels = name if model is None else model.root or model.name, drafter_of(request, model)
        with _Measurement(self.metrics, request, *labels, self.clock, began) as measurement:
            async with aclosing(self.backend.stream(request)) as items:
                async for item in items:
                    measurement.saw(item)
                    yield item


@dataclass
class _Measurement:
    """One output from its request to its end."""

    metrics: Metrics
    request: OutputRequest
    model: str
    drafter: str
    clock: Callable[[], float]
    began: float
    tokens: int = 0
    first: float | None = None  # seconds from the request to the first token
    latest: float = 0.0  # ... to the latest token
    ended: bool = False

    def __post_init__(self) -> None:
        """Looks labels up that each token needs: finding them takes longer than counting."""
        labels = self.model, self.drafter
        self._counted = self.metrics.count("generation_tokens", *labels)
        self._between = self.metrics.times("inter_token_latency_seconds", *labels)

    def saw(self, item: OutputItem) -> None:
        match item:
            case Committed():
                self._committed(len(item.tokens), self.clock() - self.began)
            case OutputEnded():
                self.ended = True
                self._finish(item, self.clock() - self.began)

    def __enter__(self) -> Self:
        self.metrics.waiting.labels(self.model).inc()
        self.metrics.running.labels(self.model).inc(0)  # so that it is exported, if only as 0
        with about(request=self.request.id):
            log.info("output requested: model %s, drafter %s", self.model, self.drafter)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        metrics, seconds = self.metrics, self.clock() - self.began
        (metrics.waiting if self.first is None else metrics.running).labels(self.model).dec()
        if self.ended:
            return
        labels = (self.model, self.request.generation.method or DEFAULT, self.drafter)
        with about(request=self.request.id):
            if error is None or isinstance(error, CANCELLED):  # its statistics are not known
                metrics.count("request_success", *labels, "abort").inc()
                metrics.times("e2e_request_latency_seconds", *labels).observe(seconds)
                log.info("output aborted after %.3f s, %d tokens", seconds, self.tokens)
            else:
                cause = cause_of(error)
                metrics.count("request_failures", *labels, cause).inc()
                log.warning("output failed (%s) after %.3f s, %d tokens: %s", cause, seconds, self.tokens, error)

    def _committed(self, count: int, now: float) -> None:
        if self.first is None:
            self.first = now
            self.metrics.waiting.labels(self.model).dec()
            self.metrics.running.labels(self.model).inc()
            self.metrics.times("time_to_first_token_seconds", self.model, self.drafter).observe(now)
        else:
            self._between.repeat(now - self.latest, 1)
        if count > 1:
            self._between.repeat(0.0, count - 1)
        self._counted.inc(count)
        self.tokens += count
        self.latest = now

    def _finish(self, ended: OutputEnded, seconds: float) -> None:
        figures, reason = ended.statistics, ended.reason.value
        labels = self.model, figures.method, figures.drafter or self.drafter
        self.metrics.finished(labels, reason, figures)
        observed = {"e2e_request_latency_seconds": seconds, "request_generation_tokens": self.tokens}
        if self.first is not None:
            observed["request_queue_time_seconds"] = max(0.0, self.first - figures.first_token_seconds)
            if self.tokens > 1:
                mean = (self.latest - self.first) / (self.tokens - 1)
                observed["request_time_per_output_token_seconds"] = mean
        for name, value in observed.items():
            self.metrics.times(name, *labels).observe(value)
        made = f"{self.tokens} tokens, {figures.tokens_per_pass:.2f} a pass, acceptance {figures.acceptance:.2f}"
        with about(request=self.request.id):
            log.info(
                "output ended (%s) after %.3f s: %s, %s%s", reason, seconds, figures.method, made, _losses(figures)
            )


def _losses(figures: Statistics) -> str:
    lost = [(lane.address, lane.lost) for lane in figures.lanes if lane.role == "target" and lane.lost]
    targets = "".join(f"; target at {address} lost: {how}" for address, how in dict.fromkeys(lost) if address)
    return targets + (f"; drafter lost: {figures.drafter_lost}" if figures.drafter_lost else "")


def drafter_of(request: OutputRequest, model: ServedModel | None) -> str:
    if model is None:
        return {None: DEFAULT, "": NO_DRAFTER}.get(request.drafter, UNKNOWN)
    if request.drafter in (None, AUTO):
        return AUTO if len(model.drafters) > 1 else model.drafters[0] if model.drafters else NO_DRAFTER
    if not request.drafter:
        return NO_DRAFTER
    return request.drafter if request.drafter in model.drafters else UNKNOWN


def cause_of(error: BaseException) -> str:
    other = f"service_{name_of(error)}" if isinstance(error, ServiceError) else "internal"
    return next((cause for kind, cause in CAUSES.items() if isinstance(error, kind)), other)


class BatchHistogram(Histogram):
    """A histogram that also takes several observations at once.

    prometheus_client's own, of single ones, looks at each bucket: it takes longer than making a token's message.
    """

    def repeat(self, value: float, times: int) -> None:
        self._buckets[bisect_left(self._upper_bounds, value)].inc(times)
        self._sum.inc(value * times)

    def merge(self, counts: Sequence[int], sum: float) -> None:
        for bucket, count in zip(self._buckets, counts, strict=True):
            bucket.inc(count)
        self._sum.inc(sum)

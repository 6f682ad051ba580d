"""Metrics for Prometheus: those of one service (its sessions and its model), a registry, and a port that serves them.

They are computed when they are scraped.
"""

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from itertools import accumulate
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, disable_created_metrics, start_http_server
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from crossdraft.rpc.errors import CannotListen
from crossdraft.rpc.handlers import Activity, Tally
from crossdraft.types.statistics import ModelStatistics

# Metrics that vLLM has too are named as there, after this prefix in place of `vllm:`. The colon is for recording rules,
# and promtool refuses it.
PREFIX = "crossdraft_"
disable_created_metrics()  # type: ignore[no-untyped-call]  # of the time that each was made, which doubles the text
LABELS = ("model_name", "role")
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)  # bounds of the histogram, sessions
TOTALS = {count.name: count.metadata["text"] for count in fields(Tally) if count.metadata}
MODEL_TOTALS: tuple[tuple[str, str, Callable[[ModelStatistics], float]], ...] = (
    ("model_steps", "Batched forwards of the model.", lambda model: model.steps),
    ("model_seconds", "Seconds in the model's forwards, and in sampling.", lambda model: model.seconds),
    ("model_tokens", "Tokens that were fed to the model.", lambda model: model.tokens),
    ("model_answers", "Answered forward requests, such as passes and steps of a draft.", lambda model: model.requests),
    ("model_queue_seconds", "Seconds that forward requests waited for the model.", lambda model: model.queued_seconds),
    ("model_evictions", "Sessions whose KV slots were given to others.", lambda model: model.evictions),
)


def exposition(registry: CollectorRegistry, accept: str = "") -> tuple[bytes, str]:
    """The text of all metrics, and its content type, for what the header `Accept` says."""
    try:
        encode, content_type = choose_encoder(accept)
    except TypeError:  # it compares a version that is not made of numbers with one that is
        encode, content_type = choose_encoder("")
    return encode(registry), content_type


class Exporter:
    """Answers `GET /metrics` on a port of its own, in threads of its own: a slow reader delays no session."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._server: WSGIServer | None = None

    def start(self, host: str, port: int) -> str:
        """Begins to listen on a port, 0 being any that is free; returns host:port. Raises CannotListen."""
        try:
            self._server, _ = start_http_server(port, host.strip("[]"), self._registry)
        except OSError as error:
            raise CannotListen.at(f"{host}:{port}", error, "--metrics-port") from error
        return f"{host}:{self._server.server_port}"

    async def stop(self) -> None:
        """Frees the port; may be called again."""
        server, self._server = self._server, None
        if server is not None:
            await asyncio.to_thread(server.shutdown)
            server.server_close()


class ServiceMetrics:
    """A Prometheus collector."""

    def __init__(
        self, role: str, model: str, activity: Activity, statistics: Callable[[], ModelStatistics] | None = None
    ) -> None:
        self._labels = (model, role)
        self._activity = activity
        self._statistics = statistics

    def collect(self) -> Iterator[Metric]:
        yield from self._sessions()
        total = self._activity.total()
        for name, text in TOTALS.items():
            yield self._counter(name, text, getattr(total, name))
        wire = {"received": total.bytes_received, "sent": total.bytes_sent}
        yield self._counter("bytes", "Serialized messages of sessions, by direction.", wire, "direction")
        if self._statistics is not None:
            yield from self._model(self._statistics())

    def _sessions(self) -> Iterator[Metric]:
        activity = self._activity
        yield self._gauge("service_open_sessions", "Sessions that are open.", activity.open)
        yield self._counter("sessions", "Sessions that were opened.", activity.opened)
        ended = dict(sorted(activity.ended.items()))
        text = "Sessions that ended, by how: closed, or the class of an error."
        yield self._counter("sessions_ended", text, ended, "outcome")
        yield self._counter("session_seconds", "Seconds that sessions were open which have ended.", activity.seconds)

    def _model(self, statistics: ModelStatistics) -> Iterator[Metric]:
        for name, text, value in MODEL_TOTALS:
            yield self._counter(name, text, value(statistics))
        text = "KV-cache usage, as the share of KV slots that open sessions hold. 1 means 100 percent usage."
        yield self._gauge("kv_cache_usage_perc", text, statistics.kv_slots_used / statistics.kv_slots)
        batches = HistogramMetricFamily(f"{PREFIX}service_batch_size", "Sessions in one forward.", labels=LABELS)
        sizes = dict(statistics.batches)
        sessions = sum(size * count for size, count in sizes.items())
        batches.add_metric(self._labels, cumulative(sizes), sessions)
        yield batches

    def _counter(self, name: str, text: str, value: float | Mapping[str, float], by: str = "") -> CounterMetricFamily:
        """Of one value, or of several by a further label."""
        family = CounterMetricFamily(f"{PREFIX}service_{name}", text, labels=(*LABELS, by) if by else LABELS)
        for label, number in value.items() if isinstance(value, Mapping) else [("", value)]:
            family.add_metric((*self._labels, label) if by else self._labels, number)
        return family

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(f"{PREFIX}{name}", text, labels=LABELS)
        family.add_metric(self._labels, value)
        return family


def cumulative(sizes: Mapping[int, int]) -> list[tuple[str, float]]:
    counts = [0] * (len(BATCHES) + 1)
    for size, count in sizes.items():
        counts[bisect_left(BATCHES, size)] += count
    bounds = (*(f"{bound}.0" for bound in BATCHES), "+Inf")
    return list(zip(bounds, map(float, accumulate(counts)), strict=True))

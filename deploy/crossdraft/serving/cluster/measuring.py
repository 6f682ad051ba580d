"""What clients speak with, in a cluster: outputs of orchestrators, measured, with keys and limits."""

from fastapi import FastAPI
from ray import serve

from crossdraft.rpc.exposition import Exporter
from crossdraft.serving.cluster.figures import LossMetrics
from crossdraft.serving.cluster.handles import ServeOrchestrators
from crossdraft.serving.cluster.naming import APPLICATION, orchestrator_name
from crossdraft.serving.cluster.outputs import ClusterOutputs
from crossdraft.serving.cluster.told import Fronted
from crossdraft.serving.configuration import Front, Http
from crossdraft.serving.http import HttpOptions, RateLimit, make_app
from crossdraft.serving.measured import Measured
from crossdraft.serving.metrics import Metrics

MIB = 2**20


class Measuring:
    """The outputs of a front's process, and their metrics. Made in a process of the cluster."""

    def __init__(self, told: Fronted) -> None:
        self.metrics = Metrics()
        handles = {model: _orchestrators(model) for model in told.models}
        outputs = ClusterOutputs(handles, LossMetrics(self.metrics.registry))
        self.outputs = Measured(outputs, self.metrics)
        self.exporter = Exporter(self.metrics.registry)


def http_app(told: Fronted, http: Http, measuring: Measuring) -> FastAPI:
    """The ingress's application."""
    options = HttpOptions(
        keys=told.keys,
        rate=rate_of(http),
        most_bytes=http.max_request_mib * MIB,
        most_choices=http.max_choices,
        stalled_seconds=http.stalled_seconds,
        metrics=measuring.metrics.text,
    )
    return make_app(measuring.outputs, options)


def _orchestrators(model: str) -> ServeOrchestrators:
    return ServeOrchestrators(serve.get_deployment_handle(orchestrator_name(model), APPLICATION))


def rate_of(front: Front) -> RateLimit | None:
    """Of clients; None: as many as they like."""
    return None if front.requests_per_minute is None else RateLimit(front.requests_per_minute, front.burst)

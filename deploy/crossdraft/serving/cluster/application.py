"""The Serve application: the HTTP front as ingress, an orchestrator deployment for each model behind it."""

from functools import partial

from fastapi import FastAPI
from ray import serve
from ray.serve import Application, Deployment

from crossdraft.rpc.security import TlsFiles
from crossdraft.serving.cluster.handles import ServeOrchestrators
from crossdraft.serving.cluster.naming import APPLICATION, INGRESS, orchestrator_name
from crossdraft.serving.cluster.orchestrating import Orchestrator
from crossdraft.serving.cluster.outputs import ClusterOutputs
from crossdraft.serving.configuration import Configuration, Resources, ServedService
from crossdraft.serving.http import HttpOptions, RateLimit, make_app
from crossdraft.serving.keys import Keys
from crossdraft.serving.measured import Measured
from crossdraft.serving.metrics import Metrics

MIB = 2**20
BESIDE_OUTPUTS = 16  # calls of a replica at once besides its outputs: questions for models and health
MOST_STREAMS = 4096  # requests of one ingress at once
HEALTH_SECONDS = 2.0  # between two questions


def application(configuration: Configuration) -> Application:
    """What `serve.run` is given."""
    tls, form = tls_of(configuration), configuration.log_format
    behind = [_orchestrators(model, configuration).bind(model, tls, form) for model in configuration.models]
    return _ingress(configuration).bind(*behind)


def tls_of(configuration: Configuration) -> TlsFiles | None:
    """What services show each other."""
    tls = configuration.security.tls
    return None if tls is None else TlsFiles(tls.ca, tls.certificate, tls.key)


def outputs_of(configuration: Configuration) -> ClusterOutputs:
    """What fronts hand their orders to; in a process of the cluster, once the application runs."""
    return ClusterOutputs({model.name: _handle(model) for model in configuration.models})


def _orchestrators(model: ServedService, configuration: Configuration) -> Deployment:
    return serve.deployment(
        name=orchestrator_name(model.name),
        num_replicas=model.orchestrators,
        max_ongoing_requests=model.outputs + BESIDE_OUTPUTS,
        ray_actor_options=_actor_options(model.orchestrator_resources),
        health_check_period_s=HEALTH_SECONDS,
        graceful_shutdown_timeout_s=configuration.grace_seconds,
    )(Orchestrator)


def _ingress(configuration: Configuration) -> Deployment:
    front = serve.ingress(partial(_front, configuration))()
    return serve.deployment(
        name=INGRESS,
        num_replicas=configuration.http.replicas,
        max_ongoing_requests=MOST_STREAMS,
        ray_actor_options=_actor_options(configuration.http.resources),
        health_check_period_s=HEALTH_SECONDS,
        graceful_shutdown_timeout_s=configuration.grace_seconds,
    )(front)


def _front(configuration: Configuration) -> FastAPI:
    """Called in the ingress's replica."""
    metrics = Metrics()
    http, keys = configuration.http, configuration.security.api_keys
    rate = None if http.requests_per_minute is None else RateLimit(http.requests_per_minute, http.burst)
    options = HttpOptions(
        keys=Keys() if keys is None else Keys.read(keys),
        rate=rate,
        most_bytes=http.max_request_mib * MIB,
        metrics=metrics.text,
    )
    return make_app(Measured(outputs_of(configuration), metrics), options)


def _handle(model: ServedService) -> ServeOrchestrators:
    return ServeOrchestrators(serve.get_deployment_handle(orchestrator_name(model.name), APPLICATION))


def _actor_options(resources: Resources) -> dict[str, object]:
    return {"num_cpus": resources.cpus, "num_gpus": resources.gpus, "resources": dict(resources.custom)}

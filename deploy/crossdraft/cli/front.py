"""`crossdraft serve http`: the API over outputs that are made in this process."""

from dataclasses import dataclass, replace
from pathlib import Path

from crossdraft.cli.front_services import Services
from crossdraft.cli.running import checked_options
from crossdraft.cli.serve import Log, Where, run_service
from crossdraft.rpc.server import Listening
from crossdraft.rpc.server import serve as serve_until_signalled
from crossdraft.serving.generation import REQUEST_LIMIT, GenerationOptions, serve_generation
from crossdraft.serving.http import HttpOptions, RateLimit, make_app
from crossdraft.serving.http.server import HttpServer
from crossdraft.serving.keys import Keys
from crossdraft.serving.local import LocalModel, LocalOptions, LocalOutputs
from crossdraft.serving.measured import Measured
from crossdraft.serving.metrics import Metrics
from crossdraft.serving.together import Together

__all__ = ["Limits", "Log", "Services", "Where", "serve"]

MIB = 2**20


@dataclass(frozen=True)
class Limits:
    """The options that limit clients, as they were typed."""

    most_outputs: int
    most_choices: int
    body_mib: float
    rate: tuple[float, int] | None  # requests a minute, and at once
    stalled_seconds: float


def serve(
    services: Services, api_keys: Path | None, limits: Limits, where: Where, grpc_port: int | None = None
) -> None:
    """Serves until SIGTERM or SIGINT, then drains; one line of JSON on stdout says when it is ready.

    Args:
        services: what is served.
        api_keys: file of the keys; None: everybody may ask.
        limits: of clients.
        where: over HTTP.
        grpc_port: of the same host, for gRPC beside it; None: nowhere.

    Raises:
        Misused: a value is out of its range, or the keys cannot be used.
        CommandFailed: the address cannot be had.
    """
    with checked_options():
        metrics = Metrics()
        local = LocalOptions(limits.most_outputs, tls=services.tls)
        options = HttpOptions(
            Keys() if api_keys is None else Keys.read(api_keys),
            None if limits.rate is None else RateLimit(*limits.rate),
            int(limits.body_mib * MIB),
            min(limits.most_choices, limits.most_outputs),
            limits.stalled_seconds,
            metrics.text,
        )
        grpc = None if grpc_port is None else replace(where.listening, port=grpc_port, limit=REQUEST_LIMIT)
    run_service(_serve(services.local, local, options, metrics, where.listening, grpc), where)


async def _serve(
    model: LocalModel,
    local: LocalOptions,
    options: HttpOptions,
    metrics: Metrics,
    listening: Listening,
    grpc: Listening | None,
) -> None:
    async with LocalOutputs((model,), local) as outputs:
        measured = Measured(outputs, metrics)
        http = HttpServer(make_app(measured, options), listening, {"model": model.name})
        others = {}
        if grpc is not None:
            limited = GenerationOptions(options.keys, options.rate, options.stalled_seconds)
            others["grpc"] = serve_generation(measured, grpc, limited)
        await serve_until_signalled(Together(http, others))

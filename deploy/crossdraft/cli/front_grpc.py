"""`crossdraft serve grpc`: crossdraft.v1.Generation over outputs that are made in this process."""

from dataclasses import dataclass
from pathlib import Path

from crossdraft.cli.front_services import Services
from crossdraft.cli.running import checked_options
from crossdraft.cli.serve import Log, Where, run_service
from crossdraft.rpc.exposition import Exporter
from crossdraft.rpc.server import Listening
from crossdraft.rpc.server import serve as serve_until_signalled
from crossdraft.serving.generation import GenerationOptions, serve_generation
from crossdraft.serving.keys import Keys
from crossdraft.serving.local import LocalModel, LocalOptions, LocalOutputs
from crossdraft.serving.measured import Measured
from crossdraft.serving.metrics import Metrics
from crossdraft.serving.rates import RateLimit

__all__ = ["Limits", "Log", "Services", "Where", "serve"]


@dataclass(frozen=True)
class Limits:
    """The options that limit clients, as they were typed."""

    most_outputs: int
    rate: tuple[float, int] | None  # requests a minute, and at once
    stalled_seconds: float


def serve(
    services: Services, api_keys: Path | None, limits: Limits, where: Where, metrics_port: int | None = None
) -> None:
    """Serves until SIGTERM or SIGINT, then drains; one line of JSON on stdout says when it is ready.

    Args:
        services: what is served.
        api_keys: file of the keys; None: everybody may ask.
        limits: of clients.
        where: over gRPC.
        metrics_port: of the same host, for Prometheus; None: nowhere.

    Raises:
        Misused: a value is out of its range, or the keys cannot be used.
        CommandFailed: the address cannot be had.
    """
    with checked_options():
        keys = Keys() if api_keys is None else Keys.read(api_keys)
        rate = None if limits.rate is None else RateLimit(*limits.rate)
        options = GenerationOptions(keys, rate, limits.stalled_seconds)
        local = LocalOptions(limits.most_outputs, tls=services.tls)
    run_service(_serve(services.local, local, options, where.listening, metrics_port), where)


async def _serve(
    model: LocalModel, local: LocalOptions, options: GenerationOptions, listening: Listening, metrics_port: int | None
) -> None:
    metrics = Metrics()
    exporter = Exporter(metrics.registry)
    async with LocalOutputs((model,), local) as outputs:
        server = serve_generation(Measured(outputs, metrics), listening, options)
        if metrics_port is not None:
            server.marks["metrics"] = exporter.start(listening.host, metrics_port)
        try:
            await serve_until_signalled(server)
        finally:
            await exporter.stop()

"""Metrics as Prometheus reads them: a registry, its text, and a port that answers with it."""

import asyncio
from collections.abc import Iterable
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric

from crossdraft.rpc.errors import CannotListen

# The names after it are those that vLLM's have after `vllm:`. The colon is for names of recording rules, and promtool
# refuses it.
PREFIX = "crossdraft_"


class Registry(CollectorRegistry):
    """Metrics that are asked for together; without the time that each was made, which doubles the text."""

    def collect(self) -> Iterable[Metric]:
        """As Collector says."""
        for family in super().collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family


def exposition(registry: Registry, accept: str = "") -> tuple[bytes, str]:
    """The text of all metrics, and its content type, for what the header `Accept` says."""
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


class Exporter:
    """Answers `GET /metrics` on a port of its own, in threads of its own: a slow reader delays no session."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._server: WSGIServer | None = None

    def start(self, host: str, port: int) -> str:
        """Begins to listen on a port, 0 being any that is free; returns host:port. Raises CannotListen."""
        try:
            self._server, _ = start_http_server(port, host, self._registry)
        except OSError as error:
            raise CannotListen(
                f"cannot listen for metrics on {host}:{port}: {error.strerror}; choose another port (--metrics-port)"
            ) from error
        return f"{host}:{self._server.server_port}"

    async def stop(self) -> None:
        """Frees the port; may be called again."""
        server, self._server = self._server, None
        if server is not None:
            await asyncio.to_thread(server.shutdown)
            server.server_close()

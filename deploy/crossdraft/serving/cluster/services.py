"""Targets and drafters, as what actors host."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crossdraft.drafter.servicer import ServeDrafter, drafter_server
from crossdraft.models.pruning import Pruning
from crossdraft.models.running import ModelOptions
from crossdraft.rpc.admission import SessionLimits
from crossdraft.rpc.security import TlsFiles
from crossdraft.rpc.server import Listening, Server
from crossdraft.serving.cluster.directory import Role
from crossdraft.serving.cluster.files import contents, tls_paths
from crossdraft.serving.cluster.naming import version_of
from crossdraft.serving.configuration import DrafterService, Resources, Service
from crossdraft.serving.logs import LogFormat
from crossdraft.target.servicer import ServeTarget, target_server

ANY_PORT = 0


@dataclass(frozen=True)
class HostedService:
    """One replica of a target or a drafter."""

    model: str  # name of the served model
    service: Service  # a DrafterService for a drafter
    tls: TlsFiles | None
    grace_seconds: float  # for open sessions, when it is to stop
    metrics: bool  # it answers Prometheus
    log_format: LogFormat

    @property
    def name(self) -> str:
        """As Hosted.name."""
        return self.service.name if isinstance(self.service, DrafterService) else ""

    @property
    def role(self) -> Role:
        """As Hosted.role."""
        return Role.DRAFTER if self.name else Role.TARGET

    @property
    def port(self) -> int:
        """As Hosted.port."""
        return self.service.port

    @property
    def resources(self) -> Resources:
        """As Hosted.resources."""
        return self.service.resources

    @property
    def digest(self) -> str:
        """As Hosted.digest; how many there are makes no difference."""
        alone = self.service.model_copy(update={"replicas": 1})
        rest = (self.model, self.tls, self.grace_seconds, self.metrics, self.log_format)
        return version_of(alone, rest, contents((*self._files(), *tls_paths(self.tls))))

    def _files(self) -> Iterator[Path]:
        if isinstance(self.service, DrafterService):
            yield from (path for path in (self.service.frequencies, self.service.affinity) if path is not None)

    async def server(self, host: str) -> Server[Any, Any, Any]:
        """As Hosted.server; loads the model."""
        service, limits = self.service, self.service.sessions
        sessions = SessionLimits(limits.most, limits.per_peer, limits.idle_seconds)
        port = ANY_PORT if self.metrics else None
        listening = Listening(
            host, service.port, grace_seconds=self.grace_seconds, tls=self.tls, sessions=sessions, metrics_port=port
        )
        model = ModelOptions(
            name=service.model,
            dtype=service.dtype,
            device=service.device,
            budget=service.cache_mib,
            max_length=service.max_model_len,
            trust_remote_code=service.trust_remote_code,
            threads=service.threads,
            pruning=_pruning(service),
            reuse=service.enable_prefix_caching,
            eager=service.enforce_eager,
        )
        if isinstance(service, DrafterService):
            return await drafter_server(ServeDrafter(model, listening, service.affinity))
        return await target_server(ServeTarget(model, listening))


def _pruning(service: Service) -> Pruning | None:
    if isinstance(service, DrafterService) and service.vocab_keep is not None and service.frequencies is not None:
        return Pruning(service.vocab_keep, service.frequencies)
    return None

"""Targets and drafters, as actors run them. Apart from `actors`, so that only their processes import torch."""

from dataclasses import dataclass
from typing import Any

from crossdraft.cluster.actors import ServerConfig
from crossdraft.cluster.config import (
    ANY_PORT,
    Configuration,
    DrafterService,
    Service,
    contents,
    tls_of,
    tls_paths,
    version_of,
)
from crossdraft.cluster.directory import Role
from crossdraft.drafter.service import ServeDrafter, drafter_server
from crossdraft.engine.loader import Pruning
from crossdraft.engine.served_model import ModelOptions
from crossdraft.rpc.handlers import SessionLimits
from crossdraft.rpc.security import TlsFiles
from crossdraft.rpc.server import Listening, Server
from crossdraft.target.service import ServeTarget, target_server


@dataclass(frozen=True)
class ModelServerConfig(ServerConfig):
    """One replica of a target or a drafter."""

    service: Service  # a DrafterService for a drafter
    tls: TlsFiles | None
    grace_seconds: float  # for open sessions, when it is stopped
    serve_metrics: bool

    @staticmethod
    def of(model: str, service: Service, configuration: Configuration) -> "ModelServerConfig":
        """That of a service of the served model with this name."""
        tls, grace, metrics = tls_of(configuration), configuration.grace_seconds, configuration.metrics
        alone = service.model_copy(update={"replicas": 1})  # their number replaces none of them
        files = list(tls_paths(tls))
        drafter = service if isinstance(service, DrafterService) else None
        if drafter is not None:
            files += [path for path in (drafter.frequencies, drafter.affinity) if path is not None]
        return ModelServerConfig(
            role=Role.TARGET if drafter is None else Role.DRAFTER,
            model=model,
            name="" if drafter is None else drafter.name,
            port=service.port,
            resources=service.resources,
            log_format=configuration.log_format,
            digest=version_of(model, alone, tls, grace, metrics, configuration.log_format, contents(files)),
            service=service,
            tls=tls,
            grace_seconds=grace,
            serve_metrics=metrics,
        )

    async def server(self, host: str) -> Server[Any, Any, Any]:
        """As `ServerConfig.server`; loads the model."""
        service, limits = self.service, self.service.sessions
        sessions = SessionLimits(limits.most, limits.per_peer, limits.idle_seconds)
        port = ANY_PORT if self.serve_metrics else None
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

"""What a configuration tells each process of Serve's and each front. Pure."""

from dataclasses import dataclass
from pathlib import Path

from crossdraft.rpc.security import TlsFiles
from crossdraft.serving.cluster.files import contents, tls_paths
from crossdraft.serving.cluster.naming import digest_of, version_of
from crossdraft.serving.configuration import Configuration, ServedService, Service
from crossdraft.serving.keys import Keys
from crossdraft.serving.logs import LogFormat


@dataclass(frozen=True)
class Guessing:
    """Drafters of one name."""

    name: str
    trusted: bool
    model: str  # what they run, in one word: an orchestrator learns a vocabulary once


@dataclass(frozen=True)
class Orchestrated:
    """What an orchestrator is told. Where any of it differs, another orchestrator is needed."""

    model: str  # name of the served model
    target: str  # what its targets run, in one word: an output cannot go on with another model
    drafters: tuple[Guessing, ...]  # the default one first
    most_outputs: int  # at once
    tls: TlsFiles | None  # what it shows to services
    metrics: bool  # it answers Prometheus
    log_format: LogFormat

    @property
    def digest(self) -> str:
        """Differs when any of it does, the files and the package included."""
        return version_of(self, contents(tls_paths(self.tls)))


@dataclass(frozen=True)
class Fronted:
    """What every front is told. Where any of it differs, another front is needed."""

    models: tuple[str, ...]  # names of the served models
    api_keys: Path | None
    metrics: bool  # it answers Prometheus on a port of its own
    log_format: LogFormat

    @property
    def keys(self) -> Keys:
        """Of clients; raises KeysError."""
        return Keys() if self.api_keys is None else Keys.read(self.api_keys)

    @property
    def digest(self) -> str:
        """Differs when any of it does, the keys and the package included."""
        return version_of(self, contents(() if self.api_keys is None else (self.api_keys,)))


def tls_of(configuration: Configuration) -> TlsFiles | None:
    """What services show each other."""
    tls = configuration.security.tls
    return None if tls is None else TlsFiles(tls.ca, tls.certificate, tls.key)


def fronted(configuration: Configuration) -> Fronted:
    """What fronts are told."""
    models = tuple(model.name for model in configuration.models)
    return Fronted(models, configuration.security.api_keys, configuration.metrics, configuration.log_format)


def orchestrated(model: ServedService, configuration: Configuration) -> Orchestrated:
    """What a model's orchestrators are told."""
    drafters = tuple(Guessing(one.name, one.trusted, _runs(one)) for one in model.drafters)
    tls, form = tls_of(configuration), configuration.log_format
    return Orchestrated(model.name, _runs(model.target), drafters, model.outputs, tls, configuration.metrics, form)


def _runs(service: Service) -> str:
    """What decides the model's answers."""
    return digest_of(service.model, service.dtype, service.trust_remote_code)

"""The file of a cluster: what is served, by which processes, and where. Services, fronts and limits have the options of
the command line by the same names."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from crossdraft.config.api import GrpcSettings, HttpSettings, KeyOptions, OutputOptions, RateOptions
from crossdraft.config.engine import DrafterOptions, ModelSettings, NgramOptions, TargetOptions
from crossdraft.config.fields import Checked, option
from crossdraft.config.request import AUTO, NO_DRAFTER
from crossdraft.config.service import HostOptions, ProcessOptions, ServerCertificate, SessionOptions, Waits

MAX_COUNT = 1024
NAME = {"pattern": r"^[A-Za-z0-9][A-Za-z0-9._:/-]{0,99}$"}
# Keys of older files, by where they stand, and what they are now; they are taken with a warning.
OLD = {
    "models.outputs": "max_outputs",
    "http.requests_per_minute": "rate",
    "http.max_request_mib": "max_body_mib",
    "http.max_requests_mib": "max_bodies_mib",
    "grpc.requests_per_minute": "rate",
    "grpc.max_request_mib": "max_message_mib",
    "grpc.certificate": "ssl_certfile",
    "grpc.key": "ssl_keyfile",
    "security.tls.certificate": "cert",
}
OLD |= {
    f"models.{role}.sessions.{old}": new
    for role in ("target", "drafters")
    for old, new in (("most", "max_sessions"), ("per_peer", "max_sessions_per_peer"), ("idle_seconds", "idle_seconds"))
}
LIFTED = ("models.target.sessions", "models.drafters.sessions")  # groups whose keys now stand beside them


class PartError(ValueError):
    """What is wrong with a part because of one value in it."""

    def __init__(self, location: tuple[str, ...], message: str) -> None:
        super().__init__(message)
        self.location = location  # of that value, from the part on


class Part(Checked):
    """A part of the file; unknown names and values of other types are errors. Its paths begin at the file's folder."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "strict": True, "allow_inf_nan": False}


@dataclass(frozen=True, kw_only=True)
class Resources(Part):
    """Of one replica, in Ray's units."""

    cpus: float = option(1.0, "CPUs.", min=0)
    gpus: float = option(0.0, "GPUs; with one a model is never computed on the CPU.", min=0)
    custom: dict[str, float] = field(default_factory=dict)  # as nodes offer when started: {"target": 1}

    def divided(self, parts: int) -> "Resources":
        """Of one of so many equal parts."""
        custom = {name: amount / parts for name, amount in self.custom.items()}
        return Resources(cpus=self.cpus / parts, gpus=self.gpus / parts, custom=custom)

    def _fault(self) -> str:
        wrong = [name for name, amount in self.custom.items() if not amount > 0]
        return f"custom: {wrong[0]} must be above 0" if wrong else ""


@dataclass(frozen=True, kw_only=True)
class Scale(Part):
    """Replicas by load, which Serve starts and ends; a number in the file is the least and the most of them."""

    min: int = option(1, "The least.", min=1, max=MAX_COUNT)
    max: int = option(1, "The most.", min=1, max=MAX_COUNT)
    outputs: int = option(16, "Outputs of one at once that are aimed at.", min=1)
    up_seconds: float = option(15.0, "Seconds of more outputs, until there are more replicas.", min=0)
    down_seconds: float = option(300.0, "Seconds of fewer outputs, until there are fewer replicas.", min=0)

    def _fault(self) -> str:
        return f"min, {self.min}, must not be above max, {self.max}" if self.min > self.max else ""


@dataclass(frozen=True, kw_only=True)
class Service(ModelSettings, SessionOptions, Part):
    """Replicas of one model, each with its own gRPC server."""

    model: str  # a folder, a hub id, or bundled:NAME, on every node where it may run
    replicas: Scale = Scale()  # or their number
    port: int = option(0, "Of every replica, each on a node of its own then; 0: any free one.", min=0, max=65535)
    resources: Resources = Resources()
    tensor_parallel_size: int  # of a target: processes that share a replica's model, and its resources

    def _fault(self) -> str:
        if self.resources.gpus and self.device == "cpu":
            raise PartError(("device",), "resources reserve a GPU, which cpu leaves idle: leave device out")
        return ""

    @property
    def settings(self) -> Self:
        """The same, on one of the GPUs that are reserved: `auto` would fall back to the CPU where torch sees none."""
        return replace(self, device="cuda") if self.resources.gpus and self.device == "auto" else self


@dataclass(frozen=True, kw_only=True)
class TargetService(TargetOptions, Service):
    """Replicas of a target."""

    def _fault(self) -> str:
        if self.tensor_parallel_size > 1 and self.resources.gpus % self.tensor_parallel_size:
            return "tensor_parallel_size must divide gpus"
        if self.tensor_parallel_size > 1 and (self.port or self.quantization):
            return "with tensor_parallel_size port and quantization are left out: any free port is taken"
        return ""


@dataclass(frozen=True, kw_only=True)
class DrafterService(DrafterOptions, NgramOptions, Service):
    """Replicas of a drafter; the model `ngram` copies from the text (prompt lookup)."""

    name: str = field(metadata=NAME)  # that requests may choose
    tensor_parallel_size: Literal[1] = 1  # it has one device
    trusted: bool = option(True, "false: only methods whose output no drafter can change.")


@dataclass(frozen=True, kw_only=True)
class ServedService(OutputOptions, Part):
    """One model as clients see it: a target, drafters for it, and the orchestrators between them, each of which has so
    many outputs at once."""

    name: str = field(metadata=NAME)
    target: TargetService
    drafters: tuple[DrafterService, ...] = ()  # the default one first; none: plain decoding
    orchestrators: Scale = Scale()  # beside the targets; or their number
    orchestrator_resources: Resources = Resources()

    def _fault(self) -> str:
        names = [drafter.name for drafter in self.drafters]
        if repeated := _repeated(names):
            return f"two drafters of model {self.name!r} have the name {repeated!r}"
        reserved = f"no drafter of model {self.name!r} may be called {AUTO!r} (the fastest) or {NO_DRAFTER!r} (none)"
        return reserved if {AUTO, NO_DRAFTER} & {*names} else ""


@dataclass(frozen=True, kw_only=True)
class Front(HostOptions, RateOptions, Part):
    """A server for clients."""

    port: int
    replicas: int | None = option(None, "By default one on each node that has room.", min=1, max=MAX_COUNT)
    resources: Resources = Resources(cpus=0.1)


@dataclass(frozen=True, kw_only=True)
class Http(HttpSettings, Front):
    """HTTP; the port is that of Serve's proxies, on every node with a replica of Serve's. The limits of connections are
    of each proxy, from its start on."""


@dataclass(frozen=True, kw_only=True)
class Grpc(GrpcSettings, ServerCertificate, Front):
    """gRPC; several replicas with a fixed port are on different nodes."""

    def _fault(self) -> str:
        together = (self.ssl_certfile is None) == (self.ssl_keyfile is None)
        return "" if together else "ssl_certfile and ssl_keyfile go together"


@dataclass(frozen=True, kw_only=True)
class Tls(Part):
    """Mutual TLS between services: files that are on every node (`crossdraft certs` makes them), as --tls-ca etc."""

    ca: Path
    cert: Path
    key: Path


@dataclass(frozen=True, kw_only=True)
class Security(KeyOptions, Part):
    """Keys of clients, and TLS between services."""

    tls: Tls | None = None  # None: plaintext


@dataclass(frozen=True, kw_only=True)
class Configuration(ProcessOptions, Waits, Part):
    """The whole file."""

    models: tuple[ServedService, ...]  # at least one
    http: Http = Http()
    grpc: Grpc | None = None  # None: no gRPC API
    security: Security = Security()
    metrics: bool = option(True, "Every process serves Prometheus on a port of its own; `crossdraft status` shows it.")
    metrics_port: int | None = option(
        None, "Of each node, where one process answers for all of it; by default, or with 0, none.", min=0, max=65535
    )

    def _fault(self) -> str:
        if not self.models:
            return "models is empty; name at least one"
        if repeated := _repeated([model.name for model in self.models]):
            return f"two models have the name {repeated!r}"
        if self.metrics_port and self.metrics_port in (self.http.port, self.grpc and self.grpc.port):
            raise PartError(("metrics_port",), f"a front has the same port, {self.metrics_port}")
        if self.grpc is not None and self.grpc.port == self.http.port != 0:
            front = "grpc" if self.http.port == HttpSettings.port else "http"
            message = f"http and grpc have the same port, {self.http.port}: a node has a front of each"
            raise PartError((front, "port"), message)
        return ""


def _repeated(names: list[str]) -> str:
    """The first name that occurs twice; empty if none does."""
    return next((name for index, name in enumerate(names) if name in names[:index]), "")

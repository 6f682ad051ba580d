"""What a cluster serves, from one YAML file: models, replicas, resources, limits, security.

A file is read once, before anything is started; whatever is wrong is said together, each with its line.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Literal, Self

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, model_validator
from yaml.nodes import MappingNode, Node, SequenceNode

from crossdraft.cluster.installed import installed
from crossdraft.engine.names import BUNDLED_PREFIX, INFLATED_PREFIX, size_of, source_of
from crossdraft.rpc.security import TlsFiles
from crossdraft.serving.limits import Keys
from crossdraft.serving.logs import LogFormat

Port = Annotated[int, Field(ge=0, le=65535)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]{0,99}$")]
Count = Annotated[int, Field(ge=1, le=1024)]


def _absolute(path: Path, info: ValidationInfo) -> Path:
    return Path(info.context or ".") / path


def _spelled(name: str) -> str:
    """A bundled model is looked up, and a shape read; where a folder is, only its nodes know."""
    size_of(name)
    if name.startswith((BUNDLED_PREFIX, INFLATED_PREFIX)) and BUNDLED_PREFIX in name:
        source_of(name)
    return name


Model = Annotated[str, AfterValidator(_spelled)]  # a folder, a hub id, or bundled:NAME
File = Annotated[Path, AfterValidator(_absolute)]  # relative to the folder of the configuration


class ConfigurationError(ValueError):
    """The file cannot be used; the text has a line for each fault."""


class Part(BaseModel):
    """A part of the file: unknown names are faults, values stay as they were read."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Resources(Part):
    """What one replica takes of its node, in Ray's units."""

    cpus: Annotated[float, Field(ge=0)] = 1.0
    gpus: Annotated[float, Field(ge=0)] = 0.0
    custom: dict[str, Annotated[float, Field(gt=0)]] = {}  # such as {"target": 1}, as the node's start command has it


class Sessions(Part):
    """What orchestrators may take of one replica."""

    most: Annotated[int, Field(ge=1)] = 1024  # open at once
    per_peer: Annotated[int, Field(ge=1)] | None = None  # ... with one orchestrator's node; None: no limit of its own
    idle_seconds: Annotated[float, Field(gt=0, le=86400)] = 600.0  # after which a silent one is ended

    @model_validator(mode="after")
    def _order(self) -> Self:
        if self.per_peer is not None and self.per_peer > self.most:
            raise ValueError(f"per_peer, {self.per_peer}, must not be above most, {self.most}")
        return self


class Service(Part):
    """Replicas of one model, each with its own gRPC server."""

    model: Model  # on every node where it may run
    replicas: Count = 1
    port: Port = 0  # of every replica, which then are on different nodes; 0: any free one
    resources: Resources = Resources()
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "cpu"  # as torch names it, such as cuda:0
    cache_mib: Annotated[int, Field(ge=1)] = 512  # for keys and values of all sessions
    enable_prefix_caching: bool = True  # a session may begin with what another one has fed of the same text
    enforce_eager: bool = False  # capture no forwards as CUDA graphs
    max_model_len: Annotated[int, Field(ge=2)] | None = None  # tokens of a session; by default all of a context
    threads: Count | None = None  # of torch; by default torch decides
    trust_remote_code: bool = False
    sessions: Sessions = Sessions()


class DrafterService(Service):
    """A model that guesses."""

    name: Name  # that requests may ask for
    trusted: bool = True  # else only methods whose output does not depend on what it says
    vocab_keep: Annotated[int, Field(ge=1)] | None = None  # ids that its head keeps
    frequencies: File | None = None  # which: a file of `crossdraft frequencies`
    affinity: File | None = None  # for rdk: a file of `crossdraft affinity`

    @model_validator(mode="after")
    def _together(self) -> Self:
        if (self.frequencies is None) != (self.vocab_keep is None):
            raise ValueError("vocab_keep, a number of ids, and frequencies, the file that ranks them, go together")
        return self


class ServedService(Part):
    """One model as clients see it: a target, drafters for it, and the orchestrators between them."""

    name: Name
    target: Service
    drafters: tuple[DrafterService, ...] = ()  # the default one first; none: plain decoding
    orchestrators: Count = 1  # replicas, beside the targets
    orchestrator_resources: Resources = Resources()
    outputs: Annotated[int, Field(ge=1)] = 64  # of one orchestrator at once

    @model_validator(mode="after")
    def _names(self) -> Self:
        repeated = _repeated([drafter.name for drafter in self.drafters])
        if repeated:
            raise ValueError(f"two drafters of model {self.name!r} have the name {repeated!r}")
        return self


class Front(Part):
    """What clients speak with."""

    host: str = "127.0.0.1"
    port: Port = 0
    replicas: Count = 1
    resources: Resources = Resources(cpus=0.1)
    requests_per_minute: Annotated[float, Field(gt=0)] | None = None  # of one client; None: as many as it likes
    burst: Count = 10  # ... that it may send at once
    stalled_seconds: Annotated[float, Field(gt=0, le=3600)] = 60.0  # after which one that does not read is given up


class Http(Front):
    """The front for browsers and OpenAI's clients; the port is Serve's, on every node with a replica of Serve's."""

    port: Port = 8000
    max_request_mib: Count = 4
    max_choices: Count = 32  # outputs that one request may ask for


class Grpc(Front):
    """The front for gRPC clients; several replicas with one port are on different nodes."""

    port: Port = 9000
    max_request_mib: Count = 4
    certificate: File | None = None  # that clients see; None: nothing is encrypted
    key: File | None = None

    @model_validator(mode="after")
    def _together(self) -> Self:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("certificate and key go together")
        return self


class Tls(Part):
    """Mutual TLS between all services: files that are on every node (`crossdraft certs` makes them)."""

    ca: File
    certificate: File
    key: File


class Security(Part):
    """Who may do what."""

    api_keys: File | None = None  # a file with one key a line; None: everybody may ask
    tls: Tls | None = None  # None: services trust their network


class Configuration(Part):
    """The whole file."""

    models: tuple[ServedService, ...]  # at least one
    http: Http = Http()
    grpc: Grpc | None = None  # None: no gRPC for clients
    security: Security = Security()
    metrics: bool = True  # every process answers Prometheus on a port of its own; `crossdraft status` says where
    log_format: LogFormat = LogFormat.JSON
    grace_seconds: Annotated[float, Field(ge=0, le=3600)] = 30.0  # for open outputs when something is stopped

    @model_validator(mode="after")
    def _names(self) -> Self:
        if not self.models:
            raise ValueError("models is empty; name at least one")
        repeated = _repeated([model.name for model in self.models])
        if repeated:
            raise ValueError(f"two models have the name {repeated!r}")
        return self


def load(path: Path) -> Configuration:
    """Reads a file; paths in it are relative to its folder.

    Raises:
        ConfigurationError: it cannot be read, is no YAML, or something in it is wrong.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read the configuration {path}: {error}") from error
    return parse(text, str(path), path.absolute().parent)


def parse(text: str, name: str = "configuration", folder: Path | None = None) -> Configuration:
    """The same of a text; `name` is what its faults are said of, `folder` where its paths begin.

    Raises:
        ConfigurationError: it is no YAML, or something in it is wrong.
    """
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        values = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark is not None else 1
        raise ConfigurationError(f"{name}, line {line}: {error.problem}") from error
    if not isinstance(root, MappingNode):
        raise ConfigurationError(f"{name}, line 1: a configuration begins with `models:`")
    try:
        return Configuration.model_validate_json(json.dumps(values, default=str), context=folder)
    except ValidationError as error:
        faults = (fault_of(name, root, one["loc"], one["msg"]) for one in error.errors())
        raise ConfigurationError("\n".join(faults)) from error


def _repeated(names: Sequence[str]) -> str:
    """The first name that is there twice; empty if none is."""
    return next((name for place, name in enumerate(names) if name in names[:place]), "")


# Where in a YAML file something is wrong.


def fault_of(name: str, root: Node, place: tuple[int | str, ...], complaint: str) -> str:
    """One fault with its line: of the value itself, or of what it is missing from."""
    path = ".".join(str(step) for step in place)
    said = complaint.removeprefix("Value error, ")
    return f"{name}, line {_line(root, place)}: {path + ': ' if path else ''}{said}"


def _line(node: Node, place: tuple[int | str, ...]) -> int:
    """Where a value is, or, if it is not there, where the part begins that lacks it; counts from 1."""
    line = node.start_mark.line + 1
    for step in place:
        found = _step(node, step)
        if found is None:
            break
        node, line = found
    return line


def _step(node: Node, step: int | str) -> tuple[Node, int] | None:
    """The value that one step leads to, and the line where it is named."""
    if isinstance(node, SequenceNode) and isinstance(step, int) and step < len(node.value):
        return node.value[step], node.value[step].start_mark.line + 1
    if isinstance(node, MappingNode):
        for key, value in node.value:
            if key.value == str(step):
                return value, key.start_mark.line + 1
    return None


# What a configuration tells each process of Serve's and each front. Pure.


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
    max_outputs: int  # at once
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


# What a cluster's actors and deployments are called.

NAMESPACE = "crossdraft"
DIRECTORY = "directory"
APPLICATION = "crossdraft"  # of Serve
INGRESS = "Ingress"
SHOWN = 12  # characters of a digest
# Of a front's process: which orchestrator gets an order is asked anew each time. What Serve remembers of one that has
# fallen silent is that it has nothing to do, so it would be chosen again and again until Ray knows that it is lost.
ASKING = {"env_vars": {"RAY_SERVE_QUEUE_LENGTH_CACHE_TIMEOUT_S": "0"}}


def slot_name(model: str, role: str, name: str, number: int) -> str:
    """The place of one replica: of a model's target or of its drafter with this name, or of a front (no model)."""
    return "/".join(one for one in (model, role, name, str(number)) if one)


def actor_name(slot: str, digest: str) -> str:
    """Of the actor that hosts a replica: another one as soon as what it hosts differs."""
    return f"{slot}@{digest}"


def slot_of(actor: str) -> str:
    """The place that an actor has by its name; empty if it has none."""
    return actor.rpartition("@")[0]


def orchestrator_name(model: str) -> str:
    """Of the deployment that makes a model's outputs: Serve takes letters, digits, - and _ only."""
    return "Orchestrator-" + "".join(one if one.isalnum() else f"_{ord(one):x}" for one in model)


def digest_of(*parts: object) -> str:
    """Tells values apart that are shown differently; all of them are shown in full (dataclasses, bytes)."""
    return sha256(repr(parts).encode()).hexdigest()[:SHOWN]


def version_of(*parts: object) -> str:
    """Of a process that is told these, as `digest_of`; with another crossdraft it is another process."""
    return digest_of(installed(), *parts)


# Files that a configuration names, as they are where it is deployed from: other contents make another service.

ABSENT = ""  # in place of the digest of a file that is on other nodes only


def contents(paths: Iterable[Path]) -> tuple[str, ...]:
    """The digest of each file, not of its name."""
    return tuple(_digest(path) for path in paths)


def tls_paths(tls: TlsFiles | None) -> tuple[Path, ...]:
    """The files, if there are any."""
    return () if tls is None else (tls.ca, tls.certificate, tls.key)


def _digest(path: Path) -> str:
    try:
        return sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ABSENT

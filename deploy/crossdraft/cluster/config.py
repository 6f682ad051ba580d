"""The configuration of a cluster: a YAML file, and what each kind of process gets of it.

The file is checked before anything is started; all errors are reported together, each with its line. Digests of what a
process gets decide whether it must be replaced when another configuration is deployed.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Literal, Self, get_args

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import ErrorDetails
from yaml.nodes import MappingNode, Node, SequenceNode

from crossdraft.cluster.installed import installed
from crossdraft.engine.names import BUNDLED_PREFIX, INFLATED_PREFIX, size_of, source_of
from crossdraft.rpc.clients import Patience
from crossdraft.rpc.security import TlsFiles
from crossdraft.serving.backend import AUTO
from crossdraft.serving.limits import ConnectionLimits, Keys, KeysError
from crossdraft.serving.logs import LogFormat
from crossdraft.types.messages import checked_settings

Port = Annotated[int, Field(ge=0, le=65535)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]{0,99}$")]
Count = Annotated[int, Field(ge=1, le=1024)]


def _resolved(path: Path, info: ValidationInfo) -> Path:
    return Path(info.context or ".") / path


def _checked_name(name: str) -> str:
    """Checks names of bundled models and sizes of inflated ones; folders are known to the nodes only."""
    size_of(name)
    if name.startswith((BUNDLED_PREFIX, INFLATED_PREFIX)) and BUNDLED_PREFIX in name:
        source_of(name)
    return name


Model = Annotated[str, AfterValidator(_checked_name)]  # a folder, a hub id, or bundled:NAME
File = Annotated[Path, AfterValidator(_resolved)]  # relative to the folder of the configuration


class ConfigurationError(ValueError):
    """The file cannot be used; the text has one line for each error."""


class _PartError(ValueError):
    """What is wrong with a part because of one value in it."""

    def __init__(self, location: tuple[str, ...], message: str) -> None:
        super().__init__(message)
        self.location = location  # of that value, from the part on


class Part(BaseModel):
    """A part of the file; unknown names and values of other types are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Resources(Part):
    """Of one replica, in Ray's units."""

    cpus: Annotated[float, Field(ge=0)] = 1.0
    gpus: Annotated[float, Field(ge=0)] = 0.0
    custom: dict[str, Annotated[float, Field(gt=0)]] = {}  # as nodes offer when started: {"target": 1}

    def divided(self, parts: int) -> "Resources":
        """Of one of so many equal parts."""
        custom = {name: amount / parts for name, amount in self.custom.items()}
        return Resources(cpus=self.cpus / parts, gpus=self.gpus / parts, custom=custom)


class Sessions(Part):
    """Limits of the sessions of one replica."""

    most: Annotated[int, Field(ge=1)] = 1024  # open at once
    per_peer: Annotated[int, Field(ge=1)] | None = None  # ... from one orchestrator's node; None: `most`
    idle_seconds: Annotated[float, Field(gt=0, le=86400)] = 600.0  # after which a session without messages is ended

    @model_validator(mode="after")
    def _order(self) -> Self:
        if self.per_peer is not None and self.per_peer > self.most:
            raise ValueError(f"per_peer, {self.per_peer}, must not be above most, {self.most}")
        return self


class Scale(Part):
    """Replicas by load, which Serve starts and ends."""

    min: Count = 1
    max: Count
    outputs: Annotated[int, Field(ge=1)] = 16  # of one replica at once that are aimed at
    up_seconds: Annotated[float, Field(ge=0)] = 15.0  # of more outputs, until there are more replicas
    down_seconds: Annotated[float, Field(ge=0)] = 300.0  # of fewer, until there are fewer

    @model_validator(mode="after")
    def _order(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min, {self.min}, must not be above max, {self.max}")
        return self


def _scale(given: object) -> object:
    """A number of replicas is the least and the most of them."""
    if isinstance(given, dict | Scale):
        return given
    if type(given) is not int or given < 1:
        raise ValueError("write a number of replicas above 0, or {min: …, max: …}")
    return {"min": given, "max": given}


class Service(Part):
    """Replicas of one model, each with its own gRPC server."""

    model: Model  # on every node where it may run
    replicas: Annotated[Scale, BeforeValidator(_scale)] = Scale(max=1)  # or their number
    port: Port = 0  # of every replica, each on a node of its own then; 0: any free one
    resources: Resources = Resources()
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    quantization: Literal["int8"] | None = None  # of weights when they are loaded (torchao); None: as they are
    device: str = "cpu"  # as torch names it, such as cuda:0
    cache_mib: Annotated[int, Field(ge=1)] = 512  # for keys and values of all sessions
    enable_prefix_caching: bool = True  # share KV cache blocks between sessions with a common prefix
    enforce_eager: bool = False  # no compiled layers, no CUDA graphs
    # Tokens of the forwards that are captured as CUDA graphs at start; by default as memory allows.
    cuda_graph_sizes: tuple[Annotated[int, Field(ge=1, le=8192)], ...] = ()
    max_model_len: Annotated[int, Field(ge=2)] | None = None  # tokens of a session; by default the model's context
    threads: Count | None = None  # of torch; by default torch decides
    tensor_parallel_size: Count = 1  # of a target: processes that share a replica's model, and its resources
    trust_remote_code: bool = False
    chat_template: File | None = None  # a file with Jinja, on every node where it may run; None: the model's own
    sessions: Sessions = Sessions()

    @model_validator(mode="after")
    def _divisible(self) -> Self:
        if self.tensor_parallel_size > 1 and self.resources.gpus % self.tensor_parallel_size:
            raise ValueError("tensor_parallel_size must divide gpus")
        if self.tensor_parallel_size > 1 and (self.port or self.quantization):
            raise ValueError("with tensor_parallel_size port and quantization are left out: any free port is taken")
        return self


class TargetService(Service):
    """Replicas of a target."""

    # As in `serve target`: whose sampling settings requests get that leave them out, and settings in place of these.
    generation_config: str = "auto"  # or vllm, or a folder
    override_generation_config: Annotated[dict[str, int | float], AfterValidator(checked_settings)] = {}


class DrafterService(Service):
    """Replicas of a drafter."""

    name: Name  # that requests may choose
    tensor_parallel_size: Literal[1] = 1  # it has one device
    trusted: bool = True  # False: only methods whose output does not depend on the rows it sends
    vocab_keep: Annotated[int, Field(ge=1)] | None = None  # rows of its output layer that are kept
    frequencies: File | None = None  # which ones: a file of `crossdraft frequencies`
    affinity: File | None = None  # for rdk: a file of `crossdraft affinity`

    @model_validator(mode="after")
    def _together(self) -> Self:
        if (self.frequencies is None) != (self.vocab_keep is None):
            raise ValueError("vocab_keep, a number of ids, and frequencies, the file that ranks them, go together")
        return self


class ServedService(Part):
    """One model as clients see it: a target, drafters for it, and the orchestrators between them."""

    name: Name
    target: TargetService
    drafters: tuple[DrafterService, ...] = ()  # the default one first; none: plain decoding
    orchestrators: Annotated[Scale, BeforeValidator(_scale)] = Scale(max=1)  # beside the targets; or their number
    orchestrator_resources: Resources = Resources()
    outputs: Annotated[int, Field(ge=1)] = 64  # of one orchestrator at once

    @model_validator(mode="after")
    def _names(self) -> Self:
        repeated = _repeated([drafter.name for drafter in self.drafters])
        if repeated:
            raise ValueError(f"two drafters of model {self.name!r} have the name {repeated!r}")
        if AUTO in (drafter.name for drafter in self.drafters):
            raise ValueError(f"a drafter of model {self.name!r} has the name {AUTO!r}, which stands for the fastest")
        return self


class Front(Part):
    """A server for clients."""

    host: str = "127.0.0.1"
    port: Port = 0
    replicas: Count | None = None  # None: one on each node that has room for it
    resources: Resources = Resources(cpus=0.1)
    requests_per_minute: Annotated[float, Field(gt=0)] | None = None  # of one client; None: unlimited
    burst: Count = 10  # ... of which so many may come at once
    stalled_seconds: Annotated[float, Field(gt=0, le=3600)] = (
        60.0  # after which the stream of a client that does not read is ended
    )


class Http(Front):
    """HTTP; the port is that of Serve's proxies, on every node with a replica of Serve's."""

    port: Port = 8000
    max_request_mib: Count = 4
    max_requests_mib: Count = 256  # of all requests that one front holds; beyond it only small ones are taken
    max_choices: Count = 32  # outputs of one request
    # Of each of Serve's proxies, from its start on.
    max_header_kib: Count = 64
    header_seconds: Annotated[float, Field(gt=0, le=3600)] = 20.0
    body_seconds: Annotated[float, Field(gt=0, le=3600)] = 120.0
    max_connections_per_address: Count = 512
    allowed_origins: tuple[str, ...] = ()  # of pages that may use the API; "*": all
    allowed_methods: tuple[str, ...] = ("*",)  # for these
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False

    @property
    def connections(self) -> ConnectionLimits:
        return ConnectionLimits(**{name: getattr(self, name) for name in vars(ConnectionLimits())})

    @property
    def cors(self) -> dict[str, object]:
        """As in `HttpOptions`."""
        names = ("origins", "methods", "headers")
        lists: dict[str, object] = {f"allow_{name}": getattr(self, f"allowed_{name}") for name in names}
        return lists | {"allow_credentials": self.allow_credentials} if self.allowed_origins else {}


class Grpc(Front):
    """gRPC; several replicas with a fixed port are on different nodes."""

    port: Port = 9000
    max_request_mib: Count = 4
    certificate: File | None = None  # for clients; None: plaintext
    key: File | None = None

    @model_validator(mode="after")
    def _together(self) -> Self:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("certificate and key go together")
        return self


class Tls(Part):
    """Mutual TLS between services: files that are on every node (`crossdraft certs` makes them)."""

    ca: File
    certificate: File
    key: File


class Security(Part):
    """Keys of clients, and TLS between services."""

    api_keys: File | None = None  # as `serving.limits.Keys.read` says; None: everybody may use the API
    tls: Tls | None = None  # None: plaintext


class Configuration(Part):
    """The whole file."""

    models: tuple[ServedService, ...]  # at least one
    http: Http = Http()
    grpc: Grpc | None = None  # None: no gRPC API
    security: Security = Security()
    metrics: bool = True  # every process serves Prometheus on a port of its own; `crossdraft status` shows it
    metrics_port: Port = 0  # of each node, where one process answers for all of the node; 0: none does
    log_format: LogFormat = LogFormat.JSON
    grace_seconds: Annotated[float, Field(ge=0, le=3600)] = 30.0  # for open outputs when a process is stopped
    target_wait_seconds: Annotated[float, Field(gt=0, le=3600)] = 30.0  # of an output without a target until it fails
    reply_wait_seconds: Annotated[float, Field(gt=0, le=3600)] = 30.0  # of a service that owes a reply

    @model_validator(mode="after")
    def _names(self) -> Self:
        if not self.models:
            raise ValueError("models is empty; name at least one")
        repeated = _repeated([model.name for model in self.models])
        if repeated:
            raise ValueError(f"two models have the name {repeated!r}")
        if self.metrics_port and self.metrics_port in (self.http.port, self.grpc and self.grpc.port):
            raise _PartError(("metrics_port",), f"a front has the same port, {self.metrics_port}")
        if self.grpc is not None and self.grpc.port == self.http.port != 0:
            front = "http" if "port" in self.http.model_fields_set else "grpc"
            message = f"http and grpc have the same port, {self.http.port}: a node has a front of each"
            raise _PartError((front, "port"), message)
        return self


SERVED_AT = ("applications", 0, "args")  # of a file of Serve's


def load(path: Path) -> Configuration:
    """Reads a file; paths in it are relative to its folder.

    Raises:
        ConfigurationError: it cannot be read, is not YAML, or has errors.
    """
    return parse(_text(path), str(path), path.absolute().parent)


def check_security(path: Path, configuration: Configuration) -> None:
    """Whether keys and certificates, which every node has, are here, too, and can be used.

    Args:
        path: the file that the configuration is from.
        configuration: what it says.

    Raises:
        ConfigurationError: one is missing or cannot be used.
    """
    security, faults = configuration.security, list[tuple[str, str]]()
    if security.api_keys is not None:
        try:
            Keys.read(security.api_keys)
        except KeysError as error:
            faults.append(("api_keys", str(error)))
    for name, file in () if security.tls is None else security.tls:
        if not file.is_file():
            faults.append((f"tls.{name}", f"there is no file {file}: put it there, or correct its name"))
    if faults:
        root = yaml.compose(_text(path), Loader=yaml.SafeLoader)
        assert root is not None  # the configuration is from it
        lines = (fault_of(str(path), root, ("security", *where.split(".")), why) for where, why in faults)
        raise ConfigurationError("\n".join(lines))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read the configuration {path}: {error}") from error


def parse(text: str, name: str = "configuration", folder: Path | None = None) -> Configuration:
    """Reads a text, which may be a file of Serve's, with the configuration as `args` of its first application.

    Errors call it `name`, and its paths are relative to `folder`.

    Raises:
        ConfigurationError: it is not YAML, or has errors.
    """
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        values = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark is not None else 1
        raise ConfigurationError(f"{name}, line {line}: {error.problem}") from error
    if not isinstance(root, MappingNode):
        raise ConfigurationError(f"{name}, line 1: a configuration begins with `models:`")
    for step in SERVED_AT if "applications" in values else ():
        found = _step(root, step)
        if found is None:
            raise ConfigurationError(f"{name}, line {root.start_mark.line + 1}: there is no `{step}`")
        root, values = found[0], values[step]
    try:
        return Configuration.model_validate_json(json.dumps(values, default=str), context=folder)
    except ValidationError as error:
        raise ConfigurationError("\n".join(fault_of(name, root, *_told(one)) for one in error.errors())) from error


def _told(error: ErrorDetails) -> tuple[tuple[int | str, ...], str]:
    """Location and text of an error of pydantic's."""
    location, cause = error["loc"], error.get("ctx", {}).get("error")
    if error["type"] == "extra_forbidden":
        return location, f"there is no such field; {_instead(location)}"
    return location + (cause.location if isinstance(cause, _PartError) else ()), error["msg"]


def _instead(location: tuple[int | str, ...]) -> str:
    """The field that may be meant by one that there is not."""
    part: type[Part] = Configuration
    for step in location[:-1]:
        if isinstance(step, str):
            part = next(_parts(part.model_fields[step].annotation))
    near = get_close_matches(str(location[-1]), part.model_fields, 1)
    return f"did you mean {near[0]!r}?" if near else f"there are {', '.join(part.model_fields)}"


def _parts(annotation: object) -> Iterator[type[Part]]:
    """The parts that a type may hold."""
    if isinstance(annotation, type) and issubclass(annotation, Part):
        yield annotation
    for one in get_args(annotation):
        yield from _parts(one)


def _repeated(names: Sequence[str]) -> str:
    """The first name that occurs twice; empty if none does."""
    return next((name for index, name in enumerate(names) if name in names[:index]), "")


def fault_of(name: str, root: Node, location: tuple[int | str, ...], message: str) -> str:
    """One error with its line: that of the value, or, if it is missing, of the part that lacks it."""
    path = ".".join(str(step) for step in location)
    return f"{name}, line {_line(root, location)}: {path + ': ' if path else ''}{message.removeprefix('Value error, ')}"


def _line(node: Node, location: tuple[int | str, ...]) -> int:
    """Counts from 1."""
    line = node.start_mark.line + 1
    for step in location:
        found = _step(node, step)
        if found is None:
            break
        node, line = found
    return line


def _step(node: Node, step: int | str) -> tuple[Node, int] | None:
    """The value that one step leads to, and the line of its key."""
    if isinstance(node, SequenceNode) and isinstance(step, int) and step < len(node.value):
        return node.value[step], node.value[step].start_mark.line + 1
    if isinstance(node, MappingNode):
        for key, value in node.value:
            if key.value == str(step):
                return value, key.start_mark.line + 1
    return None


ANY_PORT = 0
NAMESPACE = "crossdraft"  # of all actors
DIRECTORY = "directory"  # an actor
APPLICATION = "crossdraft"  # of Serve
DIGEST_LENGTH = 12  # characters


@dataclass(frozen=True)
class DrafterConfig:
    """Drafters of one name, for an orchestrator."""

    name: str
    trusted: bool
    model: str  # digest of what they run: an orchestrator reads a vocabulary once


@dataclass(frozen=True)
class OrchestratorConfig:
    """Of an orchestrator; another one replaces it when anything in here changes."""

    model: str  # name of the served model
    target: str  # digest of what its targets run
    drafters: tuple[DrafterConfig, ...]  # the default one first
    max_outputs: int  # at once
    tls: TlsFiles | None  # for sessions with services
    metrics: bool  # serve Prometheus
    log_format: LogFormat
    patience: Patience  # with services

    @staticmethod
    def of(model: ServedService, configuration: Configuration) -> "OrchestratorConfig":
        """That of a model's orchestrators."""
        drafters = tuple(DrafterConfig(one.name, one.trusted, _runs(one)) for one in model.drafters)
        runs, tls = _runs(model.target), tls_of(configuration)
        metrics, form, wait = configuration.metrics, configuration.log_format, configuration.target_wait_seconds
        patience = Patience(reply_seconds=configuration.reply_wait_seconds, target_seconds=wait)
        return OrchestratorConfig(model.name, runs, drafters, model.outputs, tls, metrics, form, patience)

    @property
    def digest(self) -> str:
        """Of all fields, the files, and the package."""
        return version_of(self, contents(tls_paths(self.tls)))


@dataclass(frozen=True)
class FrontConfig:
    """What all fronts have in common; others replace them when anything in here changes."""

    models: tuple[str, ...]  # names of the served models
    api_keys: Path | None
    metrics: bool  # serve Prometheus on a port of its own
    log_format: LogFormat
    target_wait_seconds: float  # of an output without an orchestrator until it fails

    @staticmethod
    def of(configuration: Configuration) -> "FrontConfig":
        """That of a cluster's fronts."""
        models = tuple(model.name for model in configuration.models)
        keys, wait = configuration.security.api_keys, configuration.target_wait_seconds
        return FrontConfig(models, keys, configuration.metrics, configuration.log_format, wait)

    @property
    def keys(self) -> Keys:
        """Of clients; raises KeysError."""
        return Keys() if self.api_keys is None else Keys.read(self.api_keys)

    @property
    def digest(self) -> str:
        """Of all fields, the keys, and the package."""
        return version_of(self, contents(() if self.api_keys is None else (self.api_keys,)))


def tls_of(configuration: Configuration) -> TlsFiles | None:
    """For sessions between orchestrators and services."""
    tls = configuration.security.tls
    return None if tls is None else TlsFiles(tls.ca, tls.certificate, tls.key)


def tls_paths(tls: TlsFiles | None) -> tuple[Path, ...]:
    """The files, if there are any."""
    return () if tls is None else (tls.ca, tls.certificate, tls.key)


def _runs(service: Service) -> str:
    """Digest of what decides the outputs of a service's model."""
    deciding = {"model", "dtype", "trust_remote_code", "generation_config", "override_generation_config"}
    return digest_of(service.model_dump(include=deciding))


def deployment_name(role: str, *names: str) -> str:
    """Of Serve: Target-small, Drafter-small-byte; Serve allows letters, digits, - and _ only."""
    written = ("".join(one if one.isalnum() else f"_{ord(one):x}" for one in name) for name in names if name)
    return "-".join((role.capitalize(), *written))


def digest_of(*parts: object) -> str:
    """Of the `repr` of these values, which must show them in full (dataclasses, pydantic models, bytes)."""
    written = repr(parts)
    assert " at 0x" not in written, written  # an address differs between processes
    return sha256(written.encode()).hexdigest()[:DIGEST_LENGTH]


def version_of(*parts: object) -> str:
    """The same with the installed crossdraft: another package means another process."""
    return digest_of(installed(), *parts)


def contents(paths: Iterable[Path]) -> tuple[str, ...]:
    """The digest of each file's content; empty for one that is on other nodes only."""
    return tuple(_digest(path) for path in paths)


def _digest(path: Path) -> str:
    try:
        return sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""

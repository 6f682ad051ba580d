"""The configuration of a cluster: a YAML file, and what each kind of process gets of it.

The file is checked before anything is started; all errors are reported together, each with its line. Digests of what a
process gets decide whether it must be replaced when another configuration is deployed.
"""

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Literal, Self, get_args, get_type_hints

import yaml
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic.dataclasses import dataclass as part
from pydantic_core import ErrorDetails
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from crossdraft.cluster.installed import installed
from crossdraft.config.api import (
    BodyOptions,
    ConnectionOptions,
    CorsOptions,
    GrpcListening,
    HttpListening,
    KeyOptions,
    OutputOptions,
    RateOptions,
)
from crossdraft.config.cluster import (
    LIFTED,
    OLD,
    ClusterOptions,
    FrontReplicas,
    Replicas,
    ResourceOptions,
    ScaleOptions,
    Trust,
)
from crossdraft.config.engine import DrafterOptions, ModelSettings, NgramOptions, TargetOptions
from crossdraft.config.fields import part_of
from crossdraft.config.service import HostOptions, LogFormat, ServerCertificate, SessionOptions
from crossdraft.engine.names import BUNDLED_PREFIX, INFLATED_PREFIX, size_of, source_of
from crossdraft.rpc.clients import Patience
from crossdraft.rpc.security import TlsFiles
from crossdraft.serving.backend import AUTO
from crossdraft.serving.limits import Keys, KeysError
from crossdraft.types.messages import checked_settings

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]{0,99}$")]
STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)  # unknown names and other types are errors
log = logging.getLogger(__name__)


def _checked_name(name: str) -> str:
    """Checks names of bundled models and sizes of inflated ones; folders are known to the nodes only."""
    size_of(name)
    if name.startswith((BUNDLED_PREFIX, INFLATED_PREFIX)) and BUNDLED_PREFIX in name:
        source_of(name)
    return name


Model = Annotated[str, AfterValidator(_checked_name)]  # a folder, a hub id, or bundled:NAME


def _as_json(given: object) -> object:
    return given if isinstance(given, str) else json.dumps(given)


def _checked_settings(text: str) -> str:
    checked_settings(json.loads(text))
    return text


class ConfigurationError(ValueError):
    """The file cannot be used; the text has one line for each error."""


class _PartError(ValueError):
    """What is wrong with a part because of one value in it."""

    def __init__(self, location: tuple[str, ...], message: str) -> None:
        super().__init__(message)
        self.location = location  # of that value, from the part on


@part(frozen=True, kw_only=True, config=STRICT)
class Part:
    """A part of the file; its paths are relative to the file's folder."""

    @model_validator(mode="after")
    def _resolved(self, info: ValidationInfo) -> Self:
        for one in fields(self):
            if isinstance(path := getattr(self, one.name), Path):
                object.__setattr__(self, one.name, Path(info.context or ".") / path)
        return self


@part(frozen=True, kw_only=True, config=STRICT)
class Resources(ResourceOptions, Part):
    """Of one replica, in Ray's units."""

    custom: dict[str, Annotated[float, Field(gt=0)]] = field(default_factory=dict)  # as nodes offer: {"target": 1}

    def divided(self, parts: int) -> "Resources":
        """Of one of so many equal parts."""
        custom = {name: amount / parts for name, amount in self.custom.items()}
        return Resources(cpus=self.cpus / parts, gpus=self.gpus / parts, custom=custom)


@part(frozen=True, kw_only=True, config=STRICT)
class Scale(ScaleOptions, Part):
    """Replicas by load; a number in the file is the least and the most of them."""

    @model_validator(mode="after")
    def _order(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min, {self.min}, must not be above max, {self.max}")
        return self


@part(frozen=True, kw_only=True, config=STRICT)
class Service(ModelSettings, SessionOptions, Replicas, Part):
    """Replicas of one model, each with its own gRPC server."""

    model: Model  # on every node where it may run
    resources: Resources = Resources()
    tensor_parallel_size: int  # of a target: processes that share a replica's model, and its resources

    @model_validator(mode="after")
    def _computes_on_its_gpus(self) -> Self:
        if self.resources.gpus and self.device == "cpu":
            raise _PartError(("device",), "resources reserve a GPU, which cpu leaves idle: leave device out")
        return self

    @property
    def settings(self) -> Self:
        """The same, on one of the GPUs that are reserved: `auto` would fall back to the CPU where torch sees none."""
        return replace(self, device="cuda") if self.resources.gpus and self.device == "auto" else self


@part(frozen=True, kw_only=True, config=STRICT)
class TargetService(TargetOptions, Service):
    """Replicas of a target."""

    override_generation_config: Annotated[str, BeforeValidator(_as_json), AfterValidator(_checked_settings)] = "{}"

    @model_validator(mode="after")
    def _divisible(self) -> Self:
        if self.tensor_parallel_size > 1 and self.resources.gpus % self.tensor_parallel_size:
            raise ValueError("tensor_parallel_size must divide gpus")
        if self.tensor_parallel_size > 1 and (self.port or self.quantization):
            raise ValueError("with tensor_parallel_size port and quantization are left out: any free port is taken")
        return self


@part(frozen=True, kw_only=True, config=STRICT)
class DrafterService(DrafterOptions, NgramOptions, Trust, Service):
    """Replicas of a drafter; the model `ngram` copies from the text."""

    name: Name  # that requests may choose
    tensor_parallel_size: Literal[1] = 1  # it has one device


@part(frozen=True, kw_only=True, config=STRICT)
class ServedService(OutputOptions, Part):
    """One model as clients see it: a target, drafters for it, and the orchestrators between them, each of which has so
    many outputs at once."""

    name: Name
    target: TargetService
    drafters: tuple[DrafterService, ...] = ()  # the default one first; none: plain decoding
    orchestrators: Scale = Scale()  # beside the targets; or their number
    orchestrator_resources: Resources = Resources()

    @model_validator(mode="after")
    def _names(self) -> Self:
        repeated = _repeated([drafter.name for drafter in self.drafters])
        if repeated:
            raise ValueError(f"two drafters of model {self.name!r} have the name {repeated!r}")
        if AUTO in (drafter.name for drafter in self.drafters):
            raise ValueError(f"a drafter of model {self.name!r} has the name {AUTO!r}, which stands for the fastest")
        return self


@part(frozen=True, kw_only=True, config=STRICT)
class Front(HostOptions, RateOptions, FrontReplicas, Part):
    """A server for clients."""

    port: int
    resources: Resources = Resources(cpus=0.1)


@part(frozen=True, kw_only=True, config=STRICT)
class Http(HttpListening, BodyOptions, ConnectionOptions, CorsOptions, Front):
    """HTTP; the port is that of Serve's proxies, on every node with a replica of Serve's. The limits of connections are
    of each proxy, from its start on."""

    @property
    def connections(self) -> ConnectionOptions:
        return part_of(ConnectionOptions, self)


@part(frozen=True, kw_only=True, config=STRICT)
class Grpc(GrpcListening, ServerCertificate, Front):
    """gRPC; several replicas with a fixed port are on different nodes."""

    @model_validator(mode="after")
    def _together(self) -> Self:
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ValueError("ssl_certfile and ssl_keyfile go together")
        return self


@part(frozen=True, kw_only=True, config=STRICT)
class Tls(Part):
    """Mutual TLS between services: files that are on every node (`crossdraft certs` makes them), as --tls-ca etc."""

    ca: Path
    cert: Path
    key: Path


@part(frozen=True, kw_only=True, config=STRICT)
class Security(KeyOptions, Part):
    """Keys of clients, and TLS between services."""

    tls: Tls | None = None  # None: plaintext


@part(frozen=True, kw_only=True, config=STRICT)
class Configuration(ClusterOptions, Part):
    """The whole file."""

    models: tuple[ServedService, ...]  # at least one
    http: Http = Http()
    grpc: Grpc | None = None  # None: no gRPC API
    security: Security = Security()

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
            front = "grpc" if self.http == replace(self.http, port=HttpListening.port) else "http"
            message = f"http and grpc have the same port, {self.http.port}: a node has a front of each"
            raise _PartError((front, "port"), message)
        return self


WHOLE = TypeAdapter(Configuration)
STRING = "tag:yaml.org,2002:str"


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
    for name, file in {} if security.tls is None else vars(security.tls).items():
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
    """Reads a text; errors call it `name`, and its paths are relative to `folder`.

    Raises:
        ConfigurationError: it is not YAML, or has errors.
    """
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        _rename(root, name)
        values = None if root is None else loader.construct_document(root)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark is not None else 1
        raise ConfigurationError(f"{name}, line {line}: {error.problem}") from error
    if not isinstance(root, MappingNode):
        raise ConfigurationError(f"{name}, line 1: a configuration begins with `models:`")
    try:
        return WHOLE.validate_json(json.dumps(values, default=str), context=folder)
    except ValidationError as error:
        raise ConfigurationError("\n".join(fault_of(name, root, *_told(one)) for one in error.errors())) from error


def _told(error: ErrorDetails) -> tuple[tuple[int | str, ...], str]:
    """Location and text of an error of pydantic's."""
    location, cause = error["loc"], error.get("ctx", {}).get("error")
    if error["type"] == "dataclass_type" and location[-1] == "orchestrators":
        return location, "write a number of replicas, or {min: …, max: …}"
    if error["type"] == "unexpected_keyword_argument":
        return location, f"there is no such field; {_instead(location)}"
    return location + (cause.location if isinstance(cause, _PartError) else ()), error["msg"]


def _instead(location: tuple[int | str, ...]) -> str:
    """The field that may be meant by one that there is not."""
    at: type[Part] = Configuration
    for step in location[:-1]:
        if isinstance(step, str):
            at = next(_parts(get_type_hints(at)[step]))
    own = vars(at).get("__annotations__", {})  # these first
    names = sorted((one.name for one in fields(at)), key=lambda name: name not in own)
    near = get_close_matches(str(location[-1]), names, 1)
    return f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names)}"


def _parts(annotation: object) -> Iterator[type[Part]]:
    """The parts that a type may hold."""
    if isinstance(annotation, type) and issubclass(annotation, Part):
        yield annotation
    for one in get_args(annotation):
        yield from _parts(one)


def _rename(node: Node | None, file: str, where: str = "") -> None:
    """Gives keys of older files their names of now, with a warning for each; a number of orchestrators becomes both
    their least and their most."""
    if isinstance(node, SequenceNode):
        for one in node.value:
            _rename(one, file, where)
    if not isinstance(node, MappingNode):
        return
    pairs: list[tuple[Node, Node]] = []
    for key, value in node.value:
        path = f"{where}{key.value}"
        if path in OLD:
            log.warning("%s, line %d: %s is called %s now", file, key.start_mark.line + 1, path, OLD[path])
            key.value = OLD[path]
        if path == "models.orchestrators" and value.tag == "tag:yaml.org,2002:int":
            bounds = [(ScalarNode(STRING, name, key.start_mark, key.end_mark), value) for name in ("min", "max")]
            value = MappingNode("tag:yaml.org,2002:map", bounds, value.start_mark, value.end_mark)
        _rename(value, file, f"{path}.")
        pairs += value.value if path in LIFTED and isinstance(value, MappingNode) else [(key, value)]
    node.value = pairs


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
INGRESS = "Ingress"  # a deployment
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
        return OrchestratorConfig(model.name, runs, drafters, model.max_outputs, tls, metrics, form, patience)

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
    return None if tls is None else TlsFiles(tls.ca, tls.cert, tls.key)


def tls_paths(tls: TlsFiles | None) -> tuple[Path, ...]:
    """The files, if there are any."""
    return () if tls is None else (tls.ca, tls.certificate, tls.key)


def _runs(service: Service) -> str:
    """Digest of what decides the outputs of a service's model."""
    deciding = ["model", "dtype", "trust_remote_code", "lora_modules"]
    deciding += ["generation_config", "override_generation_config"] * isinstance(service, TargetService)
    return digest_of({name: getattr(service, name) for name in deciding})


def slot_name(model: str, role: str, name: str, number: int) -> str:
    """The slot of one replica: of a model's target, of its drafter with this name, or of a front (no model)."""
    return "/".join(one for one in (model, role, name, str(number)) if one)


def actor_name(slot: str, digest: str) -> str:
    """Of the actor in a slot; another digest means another actor in the same slot."""
    return f"{slot}@{digest}"


def slot_of(actor: str) -> str:
    """The slot in an actor's name; empty if it has none."""
    return actor.rpartition("@")[0]


def orchestrator_name(model: str) -> str:
    """Of the deployment of a model's orchestrators: Serve allows letters, digits, - and _ only."""
    return "Orchestrator-" + "".join(one if one.isalnum() else f"_{ord(one):x}" for one in model)


def digest_of(*parts: object) -> str:
    """Of the `repr` of these values, which must show them in full (dataclasses, pydantic models, bytes)."""
    return sha256(repr(parts).encode()).hexdigest()[:DIGEST_LENGTH]


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

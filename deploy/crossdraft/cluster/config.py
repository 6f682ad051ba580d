"""The configuration of a cluster: a YAML file, and what each kind of process gets of it.

The file is checked before anything is started; all errors are reported together, each with its line. Digests of what a
process gets decide whether it must be replaced when another configuration is deployed.
"""

import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from difflib import get_close_matches
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import yaml
from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from crossdraft.cluster.installed import installed
from crossdraft.config.cluster import LIFTED, OLD, SCALED, Part, PartError
from crossdraft.config.cluster import Configuration as Configuration
from crossdraft.config.cluster import DrafterService as DrafterService
from crossdraft.config.cluster import Front as Front
from crossdraft.config.cluster import Grpc as Grpc
from crossdraft.config.cluster import Http as Http
from crossdraft.config.cluster import Resources as Resources
from crossdraft.config.cluster import Scale as Scale
from crossdraft.config.cluster import ServedService as ServedService
from crossdraft.config.cluster import Service as Service
from crossdraft.config.cluster import TargetService as TargetService
from crossdraft.config.service import LogFormat
from crossdraft.engine.names import BUNDLED_PREFIX, INFLATED_PREFIX, larger_of, source_of
from crossdraft.rpc.clients import Patience
from crossdraft.rpc.security import TlsFiles
from crossdraft.serving.limits import Keys, KeysError
from crossdraft.types.messages import checked_settings

log = logging.getLogger(__name__)
PartT = TypeVar("PartT", bound=Part)


class ConfigurationError(ValueError):
    """The file cannot be used; the text has one line for each error."""


WHOLE = TypeAdapter(Configuration)
STRING, WHOLE_NUMBER = "tag:yaml.org,2002:str", "tag:yaml.org,2002:int"
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
    for name, file in {} if security.tls is None else vars(security.tls).items():
        if not file.is_file():
            faults.append((f"tls.{name}", f"there is no file {file}: put it there, or correct its name"))
    if faults:
        root = _configured(yaml.compose(_text(path), Loader=yaml.SafeLoader), str(path))
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
        loader = yaml.SafeLoader(text)
        root = _configured(loader.get_single_node(), name)
        _rename(root, name)
        values = loader.construct_document(root)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark is not None else 1
        raise ConfigurationError(f"{name}, line {line}: {error.problem}") from error
    try:
        configuration = _resolved(WHOLE.validate_json(json.dumps(values, default=str)), folder or Path())
        _check_models(configuration)
        return configuration
    except PartError as error:
        raise ConfigurationError(fault_of(name, root, error.location, str(error))) from error
    except ValidationError as error:
        faults = sorted(error.errors(), key=lambda one: _line(root, one["loc"]))
        raise ConfigurationError("\n".join(fault_of(name, root, *_told(one)) for one in faults)) from error


def _configured(root: Node | None, name: str) -> Node:
    """The configuration in a text; raises ConfigurationError if there is none."""
    if not isinstance(root, MappingNode):
        raise ConfigurationError(f"{name}, line 1: a configuration begins with `models:`")
    node: Node = root
    for step in SERVED_AT if _step(root, SERVED_AT[0]) else ():
        found = _step(node, step)
        if found is None:
            raise ConfigurationError(f"{name}, line {node.start_mark.line + 1}: there is no `{step}`")
        node, _ = found
    return node


def _resolved(part: PartT, folder: Path) -> PartT:
    """With paths from this folder on."""
    changed: dict[str, Any] = {}
    for name, value in vars(part).items():
        if isinstance(value, Path):
            changed[name] = folder / value
        elif isinstance(value, Part):
            changed[name] = _resolved(value, folder)
        elif isinstance(value, tuple) and value and isinstance(value[0], Part):
            changed[name] = tuple(_resolved(one, folder) for one in value)
    return replace(part, **changed) if changed else part  # type: ignore[type-var]  # each part is a dataclass


def _check_models(configuration: Configuration) -> None:
    """Checks names of bundled models, sizes of inflated ones, and settings of generations; folders are known to the
    nodes only. Raises PartError."""
    for place, served in enumerate(configuration.models):
        services = [("target", served.target), *((f"drafters.{one}", each) for one, each in enumerate(served.drafters))]
        for where, service in services:
            option = "model"
            try:
                larger_of(name := service.model)
                if name.startswith((BUNDLED_PREFIX, INFLATED_PREFIX)) and BUNDLED_PREFIX in name:
                    source_of(name)
                if isinstance(service, TargetService):
                    option = "override_generation_config"
                    checked_settings(json.loads(service.override_generation_config))
            except ValueError as error:
                raise PartError(("models", str(place), *where.split("."), option), str(error)) from error


def _told(error: ErrorDetails) -> tuple[tuple[int | str, ...], str]:
    """Location and text of an error of pydantic's."""
    location, cause = error["loc"], error.get("ctx", {}).get("error")
    if error["type"] == "dataclass_type" and location[-1] in ("orchestrators", "replicas"):
        return location, "write a number of replicas above 0, or {min: …, max: …}"
    if error["type"] == "unexpected_keyword_argument":
        return location, f"there is no such field; {_instead(location)}"
    return location + (cause.location if isinstance(cause, PartError) else ()), error["msg"]


def _instead(location: tuple[int | str, ...]) -> str:
    """The field that may be meant by one that there is not."""
    at: type[Part] = Configuration
    for step in location[:-1]:
        if isinstance(step, str):
            at = next(_parts(get_type_hints(at)[step]))
    own = vars(at).get("__annotations__", {})  # these first
    names = sorted(vars(at)["__dataclass_fields__"], key=lambda name: name not in own)
    near = get_close_matches(str(location[-1]), names, 1)
    return f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names)}"


def _parts(annotation: object) -> Iterator[type[Part]]:
    """The parts that a type may hold."""
    if isinstance(annotation, type) and issubclass(annotation, Part):
        yield annotation
    for one in get_args(annotation):
        yield from _parts(one)


def _rename(node: Node | None, file: str, where: str = "") -> None:
    """Gives keys of older files their names of now, with a warning for each; a number of replicas that may be
    a range becomes both their least and their most. Raises ConfigurationError if one key stands twice then."""
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
        if path == "models.target.override_generation_config" and isinstance(value, MappingNode):
            settings = json.dumps(yaml.SafeLoader("").construct_document(value))  # as the command line has it
            value = ScalarNode(STRING, settings, value.start_mark, value.end_mark)
        if path in SCALED and value.tag == WHOLE_NUMBER and not value.value.startswith(("0", "-")):
            bounds = [(ScalarNode(STRING, name, key.start_mark, key.end_mark), value) for name in ("min", "max")]
            value = MappingNode("tag:yaml.org,2002:map", bounds, value.start_mark, value.end_mark)
        _rename(value, file, f"{path}.")
        pairs += value.value if path in LIFTED and isinstance(value, MappingNode) else [(key, value)]
    lines: dict[str, int] = {}
    for key, _ in pairs:
        line = key.start_mark.line + 1
        if key.value in lines:
            there = f"line {lines[key.value]}"
            raise ConfigurationError(f"{file}, line {line}: {where}{key.value} is in {there} already: leave out one")
        lines[key.value] = line
    node.value = pairs


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
    if isinstance(node, SequenceNode) and str(step).isdigit() and int(step) < len(node.value):
        return node.value[int(step)], node.value[int(step)].start_mark.line + 1
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

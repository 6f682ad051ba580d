"""The configuration of a cluster: a YAML file, and the processes that it asks for.

The file is checked before anything is started; all errors are reported together, each with its line. Digests of what a
process gets decide whether it must be replaced when another configuration is deployed.
"""

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from difflib import get_close_matches
from hashlib import sha256
from math import inf
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import yaml
from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from crossdraft.cluster.status import Role, installed
from crossdraft.config.cluster import (
    LIFTED,
    OLD,
    Configuration,
    DrafterService,
    Front,
    Part,
    PartError,
    Resources,
    Scale,
    ServedService,
    Service,
)
from crossdraft.config.fields import part_of
from crossdraft.config.service import LogFormat, Waits
from crossdraft.rpc.security import TlsFiles
from crossdraft.serving.limits import Keys
from crossdraft.types.messages import checked_settings

log = logging.getLogger(__name__)
PartT = TypeVar("PartT", bound=Part)


class ConfigurationError(ValueError):
    """The file cannot be used; the text has one line for each error."""


WHOLE = TypeAdapter(Configuration)
STRING, WHOLE_NUMBER, MERGE, TIME = (f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "merge", "timestamp"))
SERVED_AT = ("applications", 0, "args")  # of a file of Serve's
SCALED = ("models.orchestrators", "models.target.replicas", "models.drafters.replicas")  # where a number is a Scale
SETTINGS = "models.target.override_generation_config"
MAX_VALUES = 100_000  # of a file, those of aliases each time again


class Loader(yaml.SafeLoader):
    """Values as YAML has them; dates are text. What is not of its type is an error with its line, which the library
    leaves to whatever reads it."""

    def construct_object(self, node: Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, ArithmeticError, LookupError, AttributeError) as error:
            what = f"{str(node.value)[:50]!r} is no {node.tag.rpartition(':')[2]}"
            raise yaml.constructor.ConstructorError(None, None, what, node.start_mark) from error


Loader.add_constructor(TIME, Loader.construct_yaml_str)  # type: ignore[type-var]  # it is a loader, too


def load(path: Path) -> Configuration:
    """Reads a file; paths in it are relative to its folder. Raises ConfigurationError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read the configuration {path}: {error}") from error
    return parse(text, str(path), path.absolute().parent)


def parse(text: str, name: str = "configuration", folder: Path | None = None) -> Configuration:
    """Reads YAML, which may be a file of Serve's, with the configuration as `args` of its first application.

    Paths are relative to the folder. Raises ConfigurationError, which has lines if there is a name.
    """
    try:
        root = _configured(Loader(text).get_single_node(), name)
        for mapping, where in _mappings(root, iter(range(MAX_VALUES))):
            _restate(mapping, where, name)
            _check_keys(mapping, where, name)
        values = _json(root)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark is not None else 1
        raise ConfigurationError(f"{name}, line {line}: {error.problem}") from error
    except (yaml.YAMLError, RecursionError) as error:
        why = error if isinstance(error, yaml.YAMLError) else "it is nested too deeply, or contains itself"
        raise ConfigurationError(f"{name}: {why}") from error
    try:
        configuration = _resolved(WHOLE.validate_json(values), folder or Path())
        _check_settings(configuration)
        return configuration
    except PartError as error:
        raise ConfigurationError(fault_of(name, root, error.location, str(error))) from error
    except ValidationError as error:
        faults = sorted(error.errors(), key=lambda fault: _line(root, fault["loc"]))
        raise ConfigurationError("\n".join(fault_of(name, root, *_told(fault)) for fault in faults)) from error


def _configured(root: Node | None, name: str) -> Node:
    """The configuration in a text; raises ConfigurationError if there is none."""
    node, line = root, 1
    for step in SERVED_AT if _step(root, SERVED_AT[0]) else ():
        found = _step(node, step)
        if found is None:
            raise ConfigurationError(f"{name}, line {line}: there is no `{step}`")
        node, line = found
    if not isinstance(node, MappingNode):
        raise ConfigurationError(f"{name}, line {line}: a configuration begins with `models:`")
    return node


def _json(node: Node) -> str:
    return json.dumps(Loader("").construct_document(node), default=str)


def _resolved(part: PartT, folder: Path) -> PartT:
    """With paths from this folder on."""
    changed: dict[str, Any] = {}
    for name, value in vars(part).items():
        if isinstance(value, Path):
            changed[name] = folder / value
        elif isinstance(value, Part):
            changed[name] = _resolved(value, folder)
        elif isinstance(value, tuple) and value and isinstance(value[0], Part):
            changed[name] = tuple(_resolved(part, folder) for part in value)
    return replace(part, **changed) if changed else part  # type: ignore[type-var]  # each part is a dataclass


def _check_settings(configuration: Configuration) -> None:
    """Of generations; raises PartError. Models are known to the nodes only."""
    for place, served in enumerate(configuration.models):
        try:
            checked_settings(json.loads(served.target.override_generation_config))
        except (ValueError, RecursionError) as error:
            raise PartError(("models", str(place), *SETTINGS.split(".")[1:]), str(error)) from error


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
    for inner in get_args(annotation):
        yield from _parts(inner)


def _mappings(node: Node, room: Iterator[int], where: str = "") -> Iterator[tuple[MappingNode, str]]:
    """All mappings, those within others first, and what the paths of their keys begin with: of one that another merges
    the same as of that. Raises YAMLError: there is no `room` for so many values."""
    if next(room, None) is None:
        raise yaml.YAMLError(f"it has over {MAX_VALUES} values: leave out aliases of aliases")
    if isinstance(node, SequenceNode):
        for entry in node.value:
            yield from _mappings(entry, room, where)
    if isinstance(node, MappingNode):
        for key, value in node.value:
            if isinstance(key, ScalarNode):  # of others `_check_keys` says that they must be text
                yield from _mappings(value, room, where if key.tag == MERGE else f"{where}{key.value}.")
        yield node, where


def _restate(mapping: MappingNode, where: str, file: str) -> None:
    """Gives keys of older files their names of now, with a warning for each; groups of theirs become keys beside each
    other, settings a text, as the command line has them, and a number of replicas both the least and the most."""
    pairs: list[tuple[Node, Node]] = []
    for key, value in mapping.value:
        if new := OLD.get(path := f"{where}{key.value}"):
            log.warning("%s, line %d: %s is called %s now", file, key.start_mark.line + 1, path, new)
            key.value = new
        if path == SETTINGS and isinstance(value, MappingNode):
            value = ScalarNode(STRING, _json(value), value.start_mark, value.end_mark)
        if path in SCALED and value.tag == WHOLE_NUMBER and not value.value.startswith(("0", "-")):
            bounds = [(ScalarNode(STRING, name, key.start_mark, key.end_mark), value) for name in ("min", "max")]
            value = MappingNode("tag:yaml.org,2002:map", bounds, value.start_mark, value.end_mark)
        pairs += value.value if path in LIFTED and isinstance(value, MappingNode) else [(key, value)]
    mapping.value = pairs


def _check_keys(mapping: MappingNode, where: str, file: str) -> None:
    """Makes keys text, whatever YAML takes them for. Raises ConfigurationError: one cannot be, or stands twice."""
    lines: dict[str, int] = {}
    for key, _ in mapping.value:
        line = key.start_mark.line + 1
        if not isinstance(key, ScalarNode):
            raise ConfigurationError(f"{file}, line {line}: a key must be text")
        if key.value in lines:
            there = f"{where}{key.value} is in line {lines[key.value]} already"
            raise ConfigurationError(f"{file}, line {line}: {there}: leave out one")
        key.tag, lines[key.value] = MERGE if key.tag == MERGE else STRING, line


def fault_of(name: str, root: Node, location: tuple[int | str, ...], message: str) -> str:
    """One error with its line, if the text has a name: that of the value, or, if it is missing, of what lacks it."""
    path = ".".join(str(step) for step in location)
    line = f"{name}, line {_line(root, location)}: " if name else ""
    return f"{line}{path + ': ' if path else ''}{message.removeprefix('Value error, ')}"


def _line(node: Node, location: tuple[int | str, ...]) -> int:
    """Counts from 1."""
    line = node.start_mark.line + 1
    for step in location:
        found = _step(node, step)
        if found is None:
            break
        node, line = found
    return line


def _step(node: Node | None, step: int | str) -> tuple[Node, int] | None:
    """The value that one step leads to, and the line of its key."""
    if isinstance(node, SequenceNode) and str(step).isdigit() and int(step) < len(node.value):
        return node.value[int(step)], node.value[int(step)].start_mark.line + 1
    if isinstance(node, MappingNode):
        for key, value in reversed(node.value):  # those of other parts, which it merges, come first
            if key.value == str(step):
                return value, key.start_mark.line + 1
    return None


ANY_PORT = 0
DIGEST_LENGTH = 12  # characters
CPUS, GPUS = "CPU", "GPU"  # as Ray names them
HEAD = "node:__internal_head__"  # Ray's resource of the head node
ONLY = 0.6  # of a resource of which a node has 1
# What decides the outputs of a service's model, and what orchestrators must know of it.
DECIDING = ("model", "dtype", "trust_remote_code", "lora_modules", "generation_config", "override_generation_config")
KNOWN = (*DECIDING, "name", "trusted")


@dataclass(frozen=True)
class Process:
    """Replicas of a deployment of Serve's: what each of them gets, and no more, as a change replaces them."""

    role: Role
    own: Service | ServedService | Front | int  # its part of the file, without numbers; of the directory a port
    replicas: Scale
    model: str = ""  # name of the served model; empty for fronts
    name: str = ""  # of a drafter, else empty
    models: tuple[str, ...] = ()  # names of the served models, for a front
    metrics: bool = False  # serve Prometheus
    log_format: LogFormat = LogFormat.PLAIN
    grace_seconds: float = 0.0  # for what is open, when one is stopped
    tls: TlsFiles | None = None  # for sessions between orchestrators and services
    api_keys: Path | None = None  # of clients
    target_wait_seconds: float = 0.0  # of an output without any target
    reply_wait_seconds: float = 0.0  # for services
    everywhere: bool = False  # one on each node that has room
    most: float = inf  # on one node
    version: str = ""  # another one, and Serve replaces them

    @property
    def deployment(self) -> str:
        """Of Serve: Target-small, Drafter-small-byte."""
        return deployment_name(self.role, self.model, self.name)

    @property
    def what(self) -> str:
        """Shown to users."""
        drafter = f" {self.name!r}" if self.name else ""
        return f"{self.role}{drafter} of {self.model!r}" if self.model else f"{self.role} front"

    @property
    def ranks(self) -> int:
        """Processes of a replica, of which the first serves."""
        return getattr(self.own, "tensor_parallel_size", 1)

    @property
    def count(self) -> int:
        """Processes of all replicas, at most."""
        return self.replicas.max * self.ranks

    @property
    def amounts(self) -> dict[str, float]:
        """Its resources by Ray's names, without zeros."""
        amounts = {CPUS: self.resources.cpus, GPUS: self.resources.gpus, **self.resources.custom}
        return {name: amount for name, amount in amounts.items() if amount > 0}

    @property
    def resources(self) -> Resources:
        """Of each process of a replica."""
        if isinstance(self.own, int):
            return Resources(cpus=0, custom={HEAD: ONLY})  # with the head the cluster ends anyway
        if isinstance(self.own, ServedService):
            return self.own.orchestrator_resources
        return self.own.resources.divided(self.ranks)

    @property
    def port(self) -> int:
        """Of its server; 0: any free one, or it has none of its own."""
        return getattr(self.own, "port", 0) if self.role is not Role.HTTP else 0

    def keys(self) -> Keys:
        """Of clients; raises KeysError."""
        return Keys() if self.api_keys is None else Keys.read(self.api_keys)

    @property
    def files(self) -> tuple[Path, ...]:
        """All that it reads, but for models."""
        tls = () if self.tls is None else vars(self.tls).values()
        own = () if isinstance(self.own, int) else vars(self.own).values()
        return tuple(path for path in (*tls, self.api_keys, *own) if isinstance(path, Path))

    @property
    def digest(self) -> str:
        """Of all fields but the number, of the files, and of the package.

        Services of a fixed number never tell Serve of their sessions: where it becomes a range they are replaced.
        """
        alone = replace(self, replicas=Scale(), everywhere=False, most=inf, version="")
        counted = isinstance(self.own, Service) and self.replicas.min < self.replicas.max
        shown = repr((installed(), alone, counted, [_digest(path) for path in self.files]))
        assert " at 0x" not in shown, shown  # an address differs between processes
        return sha256(shown.encode()).hexdigest()[:DIGEST_LENGTH]


def processes_of(configuration: Configuration) -> tuple[Process, ...]:
    """All that a configuration asks for: the directory first, the HTTP front last."""
    return tuple(replace(process, version=process.digest) for process in _processes(configuration))


def _processes(of: Configuration) -> Iterator[Process]:
    common: dict[str, Any] = {"metrics": of.metrics, "log_format": of.log_format, "grace_seconds": of.grace_seconds}
    tls = of.security.tls
    between: dict[str, Any] = {"tls": None if tls is None else TlsFiles(tls.ca, tls.cert, tls.key), **common}
    yield Process(Role.DIRECTORY, (of.metrics_port or 0) if of.metrics else 0, Scale())
    for model in of.models:
        for service in (model.target, *model.drafters):
            role, name = (Role.DRAFTER, service.name) if isinstance(service, DrafterService) else (Role.TARGET, "")
            most = 1 if service.port else inf
            own = replace(service, replicas=Scale())
            yield Process(role, own, service.replicas, model.name, name, most=most, **between)
        waits: dict[str, Any] = vars(part_of(Waits, of))
        yield Process(Role.ORCHESTRATOR, _known(model), model.orchestrators, model.name, **waits, **between)
    fronts: dict[str, Any] = {"models": tuple(model.name for model in of.models), "api_keys": of.security.api_keys}
    fronts |= common | {"target_wait_seconds": of.target_wait_seconds}
    for role, front in ((Role.GRPC, of.grpc), (Role.HTTP, of.http)):
        if front is not None:
            number, most = front.replicas or 1, 1 if role is Role.GRPC and front.port else inf
            alone, every = replace(front, replicas=None), front.replicas is None
            yield Process(role, alone, Scale(min=number, max=number), everywhere=every, most=most, **fronts)


def _known(model: ServedService) -> ServedService:
    """What its orchestrators must know: of services who they are, and what decides the outputs of their models."""

    def known(service: Any) -> Any:
        return type(service)(**{name: getattr(service, name) for name in KNOWN if hasattr(service, name)})

    drafters = tuple(map(known, model.drafters))
    return replace(model, target=known(model.target), drafters=drafters, orchestrators=Scale())


def deployment_name(role: str, *names: str) -> str:
    """Of Serve: Target-small, Drafter-small-byte; Serve allows letters, digits, - and _ only."""
    written = ("".join(sign if sign.isalnum() else f"_{ord(sign):x}" for sign in name) for name in names if name)
    return "-".join((role.capitalize(), *written))


def _digest(path: Path) -> str:
    """Of a file's content; empty for one that is on other nodes only."""
    try:
        return sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""

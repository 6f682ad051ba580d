"""An option has one name, default and range wherever it can be written; and a wrong value is told alike everywhere."""

import logging
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import typer

from crossdraft.cli.app import app
from crossdraft.cluster.config import Configuration, ConfigurationError, parse
from crossdraft.config.fields import PREFIX, LeftOut, check, default_of, fault_of, option, range_of
from crossdraft.serving.http.requests import ChatBody, CompletionBody, Speculative
from crossdraft.types.messages import SamplingOptions
from crossdraft.types.request import GenerationRequest
from tests.cli.conftest import Cli, cli
from tests.cluster.test_config import SMALLEST

__all__ = ["cli"]
# What these words mean depends on whose they are, as the help says.
OF_EACH = {"port", "max_message_mib", "metrics_port", "replicas"}
OF_EACH |= {"model", "target", "drafter", "untrusted_drafter", "api_key"}
STATED = [
    kind
    for name in ("engine", "service", "api", "request", "cluster")
    for kind in vars(import_module(f"crossdraft.config.{name}")).values()
    if isinstance(kind, type) and is_dataclass(kind) and kind.__module__ == f"crossdraft.config.{name}"
]


def stated() -> dict[str, set[tuple[Any, str]]]:
    """By name, each default and range that an option is stated with."""
    found: dict[str, set[tuple[Any, str]]] = defaultdict(set)
    for kind in STATED:
        for one in fields(kind):
            if "description" in one.metadata:
                default = default_of(one)
                found[one.name].add((tuple(default) if isinstance(default, list) else default, range_of(one.metadata)))
    return found


OPTIONS = {name: next(iter(ways)) for name, ways in stated().items() if name not in OF_EACH}


def test_an_option_is_stated_with_one_default_and_one_range() -> None:
    assert len(OPTIONS) > 90
    assert {name: ways for name, ways in stated().items() if len(ways) > 1 and name not in OF_EACH} == {}


def commands(group: Any) -> Iterator[Any]:
    for one in group.commands.values():
        yield from commands(one) if hasattr(one, "commands") else (one,)


EVERY = {"target", "drafter", "ngram", "http", "grpc", "generate"}
COMMANDS = [one for one in commands(typer.main.get_command(app)) if one.name in EVERY]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda one: str(one.name))
def test_the_command_line_has_these_names_defaults_and_variables(command: Any) -> None:
    shared = [one for one in command.params if one.name in OPTIONS]
    assert len(shared) > 10 or command.name == "ngram"
    for one in shared:
        default, _ = OPTIONS[one.name]
        given = tuple(one.default) if isinstance(one.default, list) else one.default
        assert given in (default, None if isinstance(default, LeftOut) else default, default or None), one.name
        assert f"--{one.name.replace('_', '-')}" in one.opts, one.opts
        assert one.envvar in (None, f"{PREFIX}{one.name.upper()}")
    assert {one.envvar for one in command.params} >= ({"CROSSDRAFT_CACHE_MIB"} if command.name != "ngram" else set())


def parts(kind: type) -> Iterator[type]:
    yield kind
    for type_ in get_type_hints(kind).values():
        for one in (type_, *get_args(type_)):
            if is_dataclass(one):
                yield from parts(one)  # type: ignore[arg-type]  # it is a type


def test_the_file_of_a_cluster_has_these_names_and_defaults() -> None:
    found = [one for kind in {*parts(Configuration)} for one in fields(kind)]
    shared = [one for one in found if one.name in OPTIONS]
    assert len({one.name for one in shared}) > 50
    for one in shared:
        assert default_of(one) == OPTIONS[one.name][0], one.name


@pytest.mark.parametrize("body", [CompletionBody, ChatBody, Speculative])
def test_bodies_have_these_names_and_defaults(body: Any) -> None:
    named = OPTIONS.keys() - {"model", "drafter"}
    shared = {name: one for name, one in body.model_fields.items() if name in named}
    assert len(shared) > 9
    for name, one in shared.items():
        if name != "max_tokens":  # as OpenAI has it
            default = OPTIONS[name][0]
            assert one.default == (None if isinstance(default, LeftOut) else default), name


def test_requests_of_python_have_these_names_and_defaults() -> None:
    for record in (GenerationRequest, SamplingOptions):
        for one in fields(record):
            if one.name in OPTIONS:
                assert one.default == OPTIONS[one.name][0], one.name


# Each command with the option, and what else it must be given.
GIVEN = {"audit": ["--url", "http://127.0.0.1:1"], "target": ["--model", "m"], "drafter": ["--model", "m"]}
WRONG = [
    ("--threads", "0", "must be at least 1, got 0"),
    ("--gpu-memory-utilization", "1.5", "must be above 0 and at most 1, got 1.5"),
    ("--cuda-graph-sizes", "1,9000", "must be between 1 and 8192, got 9000"),
    ("--max-model-len", "1", "must be at least 2, got 1"),
    ("--temperature", "-1", "must be"),
    ("--temperature", "nan", "must be"),
    ("--max-tokens", "-1", "must be"),
    ("--idle-seconds", "0", "must be above 0 and at most 86400, got 0.0"),
    ("--port", "70000", "must be between 0 and 65535, got 70000"),
    ("--grace-seconds", "inf", "must be between 0 and 3600, got inf"),
    ("--num-speculative-tokens", "0", "must be between 1 and 64, got 0"),
    ("--rate", "0", "must be above 0, got 0.0"),
]


@pytest.mark.parametrize(("flag", "value", "fault"), WRONG)
def test_a_wrong_value_is_told_alike_by_every_command(cli: Cli, flag: str, value: str, fault: str) -> None:
    lines = [(group, name) for group, names in LINES.items() for name, flags in names.items() if flag in flags]
    for group, command in lines:
        arguments = ["x", "y"] if command == "inspect" else ["m"] if command == "check" else []
        ended = cli(*group, command, *arguments, *GIVEN.get(command, []), f"{flag}={value}")
        assert (ended.code, ended.out) == (2, ""), (command, ended)
        assert ended.err.startswith(f"crossdraft: {flag} {fault}"), (command, ended.err)
    assert lines


def below_ranges() -> Iterator[tuple[str, Any, str]]:
    """Of each option with a least value, one that is less, and what is said of it."""
    for one in (one for kind in STATED for one in fields(kind) if "description" in one.metadata):
        bounds = [bound for bound in ("ge", "gt", "each_ge", "each_gt") if bound in one.metadata]
        least = one.metadata[bounds[0]] if bounds else None
        if least is not None:
            yield f"--{one.name.replace('_', '-')}", least - 1, fault_of(one.metadata, type(least)(least - 1))


@pytest.mark.parametrize(("flag", "value", "fault"), sorted({*below_ranges()}))
def test_a_value_below_its_range_is_refused(cli: Cli, flag: str, value: float, fault: str) -> None:
    """By the first command that takes the option; a demonstration has ranges of its own."""
    lines = [(group, name, flags) for group, names in LINES.items() for name, flags in names.items() if name != "demo"]
    for group, command, _ in [line for line in lines if flag in line[2]][:1]:
        ended = cli(*group, command, *GIVEN.get(command, []), f"{flag}={value}")
        assert (ended.code, ended.out) == (2, "")
        assert f"{flag} {fault.split(', got')[0]}" in ended.err


MAIN = typer.main.get_command(app)
LINES: dict[tuple[str, ...], dict[str, set[str]]] = {
    group: {one.name: {flag for param in one.params for flag in param.opts} for one in within.commands.values()}
    for group, within in (((), MAIN), (("serve",), MAIN.commands["serve"]))  # type: ignore[attr-defined]
}
LINES[()] = {name: flags for name, flags in LINES[()].items() if name not in ("affinity", "bench", "serve")}


OLD = (
    SMALLEST
    + """\
      sessions: {most: 7, per_peer: 3, idle_seconds: 5.0}
    outputs: 9
http: {requests_per_minute: 30, max_request_mib: 2, max_requests_mib: 3}
grpc: {requests_per_minute: 40, max_request_mib: 5, certificate: c.pem, key: k.pem}
security: {tls: {ca: a, certificate: b, key: c}}
"""
)


def test_keys_of_older_files_are_taken_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "crossdraft"):
        made = parse(OLD, "old.yaml")
    (model,) = made.models
    assert (model.target.max_sessions, model.target.max_sessions_per_peer, model.target.idle_seconds) == (7, 3, 5.0)
    assert (model.max_outputs, made.http.rate, made.http.max_body_mib, made.http.max_bodies_mib) == (9, 30, 2, 3)
    assert (made.grpc.rate, made.grpc.max_message_mib) == (40, 5)
    assert (made.grpc.ssl_certfile, made.grpc.ssl_keyfile, made.security.tls.cert) == (
        *map(Path, ("c.pem", "k.pem", "b")),
    )
    assert len(caplog.messages) == 12
    assert caplog.messages[0] == "old.yaml, line 5: models.target.sessions.most is called max_sessions now"


def test_a_fault_in_an_older_key_is_said_with_its_line() -> None:
    with pytest.raises(ConfigurationError, match=r"line 6: models\.0\.max_outputs: .*greater than or equal to 1"):
        parse(OLD.replace("outputs: 9", "outputs: 0"))


def test_a_gpu_that_is_reserved_is_computed_on() -> None:
    reserved = SMALLEST + "      resources: {gpus: 1}\n"
    assert parse(reserved).models[0].target.settings.device == "cuda"
    assert parse(SMALLEST).models[0].target.settings.device == "auto"
    with pytest.raises(ConfigurationError, match=r"line 6: .*device: resources reserve a GPU"):
        parse(reserved + "      device: cpu\n")


def test_an_ngram_drafter_is_configured_by_the_names_of_serve_ngram() -> None:
    text = SMALLEST + "    drafters: [{name: copy, model: ngram, max_ngram: 16, memory_mib: 0}]\n"
    (drafter,) = parse(text).models[0].drafters
    assert (drafter.model, drafter.max_ngram, drafter.min_ngram, drafter.memory_mib) == ("ngram", 16, 4, 0)
    with pytest.raises(ConfigurationError, match="min_ngram, 9, must not be above max_ngram, 8"):
        parse(text.replace("max_ngram: 16", "max_ngram: 8, min_ngram: 9"))


@pytest.mark.parametrize(
    ("limits", "value", "fault"),
    [
        ({"min": 1, "max": 3}, 4, "must be between 1 and 3, got 4"),
        ({"min": 0}, -1, "must be 0 or more, got -1"),
        ({"above": 0, "max": 1}, 0, "must be above 0 and at most 1, got 0"),
        ({"min": 0, "max": 2**64 - 1}, 2**64, f"must be between 0 and 2**64 - 1, got {2**64}"),
        ({}, float("nan"), "must be a finite number, got nan"),
        ({"min": 1}, None, ""),
        ({"min": 1}, True, ""),
    ],
)
def test_what_is_said_of_a_value(limits: dict[str, Any], value: object, fault: str) -> None:
    assert fault_of(option(MISSING, "Help.", **limits).metadata, value) == fault


def test_values_of_other_types_are_refused() -> None:
    with pytest.raises(ValueError, match="max_tokens must be a whole number, got True"):
        check(GenerationRequest("x").unchecked(max_tokens=True))

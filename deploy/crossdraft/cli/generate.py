"""`crossdraft generate`: one continuation, shown as it comes."""

import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from crossdraft.cli.display import JsonScreen, Screen, TextScreen
from crossdraft.client import Generation, GenerationRequest, Pipeline, connect
from crossdraft.console.processes import ModelNames, Wanted, services, threads_each
from crossdraft.console.running import CommandFailed, Misused, checked_options, run_to_end
from crossdraft.engine.names import ModelLoadError, source_of
from crossdraft.rpc.errors import NameUnknown
from crossdraft.rpc.security import TlsFiles, trusting_credentials
from crossdraft.serving.client import Client

NO_DRAFTER = "none"
DEFAULT_PROMPT = "def read_lines(path, encoding='utf-8'):\n"


@dataclass(frozen=True)
class Given:
    """The services, as they were typed."""

    target: str | None  # host:port, several with commas between; None: a bundled one runs as long as this command
    drafter: str | None  # likewise, or "none"; None: the bundled drafter, or none beside a given target
    tls: TlsFiles | None = None
    trusted: bool = True  # the drafter, to say the distributions that it drew from


def generate(request: GenerationRequest, given: Given, as_json: bool, models: ModelNames | None = None) -> None:
    """Generates and shows it.

    Args:
        request: what to generate.
        given: where with what.
        as_json: whether to write JSON.
        models: what to run where no address is given.

    Raises:
        Misused: options do not go together or are out of their range.
        CommandFailed: a service cannot be reached or started, or fails.
    """
    target, drafter = given.target, given.drafter
    for name, address in (("--target", target), ("--drafter", drafter)):
        if address is not None and not (name == "--drafter" and address == NO_DRAFTER):
            for one in address.split(","):
                check_address(name, one.strip())
    if target is None and drafter not in (None, NO_DRAFTER):
        raise Misused("--drafter has an address and --target has none: give both, or neither for the bundled pair")
    if target is None and given.tls is not None:
        raise Misused("--tls-ca is for services that run already: give --target, or leave it out for the bundled pair")
    alone = drafter == NO_DRAFTER or (target is not None and drafter is None)
    notes = without_effect(request, 1 if target is None else len(target.split(",")), alone)
    notes += ["--untrusted-drafter changes nothing without a drafter"] * (alone and not given.trusted)
    for note in notes:
        print(f"crossdraft: {note}", file=sys.stderr)
    screen = JsonScreen() if as_json else TextScreen(audit=request.audit)
    run_to_end(_generate(request, given, screen, models or ModelNames()))


def without_effect(request: GenerationRequest, targets: int, alone: bool) -> list[str]:
    """What was asked for and changes nothing, in lines for people; `alone`: without a drafter."""
    notes = ["--speculation changes nothing with fewer than two targets"] * (request.speculation and targets < 2)
    if alone:
        given = ("window", request.window), ("wait", request.wait), ("branches", request.branches)
        names = [f"--{name}" for name, value in given if value is not None] + ["--explain"] * request.explain
        notes += [f"{name} changes nothing without a drafter" for name in names]
    return notes


async def _generate(request: GenerationRequest, given: Given, screen: Screen, models: ModelNames) -> None:
    async with (
        addresses(given.target, given.drafter, models) as (target, drafter),
        connect(target, drafter, tls=given.tls, trusted=given.trusted) as pipeline,
    ):
        await show(pipeline, request, screen)


async def show(pipeline: Pipeline, request: GenerationRequest, screen: Screen) -> Generation:
    """Generates to the end, and shows it on the way."""
    async with pipeline.run(request) as generation:
        screen.begin(str(request.prompt))
        async for token in generation:
            screen.token(token)
        screen.end(generation)
    return generation


@asynccontextmanager
async def addresses(
    target: str | None, drafter: str | None, models: ModelNames
) -> AsyncIterator[tuple[str, str | None]]:
    """Where target and drafter are; starts those that are not given, for the time of the block.

    Raises:
        CommandFailed: there is no such model, or a service does not start.
    """
    if target is not None:
        if drafter is None:
            print("crossdraft: no --drafter, so the target decodes alone", file=sys.stderr)
        yield target, None if drafter in (None, NO_DRAFTER) else drafter
        return
    names = [("target", models.target)]
    if drafter is None:
        names.append(("drafter", models.drafter))
    for _, model in names:
        _check_model(model)
    wanted = [Wanted(role, model, threads_each(len(names))) for role, model in names]
    async with services(wanted) as started:
        yield started[0], started[1] if len(started) > 1 else None


def _check_model(name: str) -> None:
    """Said now, and not after the seconds that a service takes to say it."""
    try:
        source_of(name)
    except ModelLoadError as error:
        raise CommandFailed(f"{error}; or give --target and --drafter") from error


def check_address(option: str, address: str) -> None:
    """Raises Misused unless it is host:port."""
    if not address:
        raise Misused(f"{option} has an empty address: leave out the comma that is too many")
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise Misused(f"{option} must be HOST:PORT, such as 127.0.0.1:7001, got {address!r}")


def read_prompt(given: str | None) -> str:
    """The prompt; `-` is standard input as it is, nothing the default one.

    Raises:
        Misused: it is not UTF-8.
    """
    if given is None:
        return DEFAULT_PROMPT
    try:
        return sys.stdin.buffer.read().decode() if given == "-" else checked_text(given)
    except UnicodeError as error:
        raise Misused(f"the prompt is not UTF-8: {error}") from error


def checked_text(given: str) -> str:
    """Raises UnicodeError if an argument was not UTF-8."""
    given.encode()
    return given


def logit_biases(given: Sequence[str]) -> tuple[tuple[int, float], ...]:
    """The pairs of `--logit-bias ID:BIAS`.

    Raises:
        Misused: one of them is not of this form.
    """
    biases = []
    for one in given:
        token, _, bias = one.partition(":")
        try:
            biases.append((int(token), float(bias)))
        except ValueError:
            raise Misused(f"--logit-bias must be ID:BIAS, such as 42:-100, got {one!r}") from None
    return tuple(biases)


# `crossdraft generate --server`: one continuation that a server makes, shown as it comes.


@dataclass(frozen=True)
class Asked:
    """The server, as it was typed."""

    server: str  # host:port
    model: str  # empty: its only one
    drafter: str | None  # name of one of its drafters, or "none"; None: the default one
    key: str = field(repr=False)  # empty: none
    ca: Path | None = None  # of the server's certificate; None: nothing is encrypted

    @property
    def drafter_name(self) -> str | None:
        """As orders have it."""
        return "" if self.drafter == NO_DRAFTER else self.drafter


def remote_generate(request: GenerationRequest, asked: Asked, as_json: bool) -> None:
    """Has it generated, and shows it.

    Args:
        request: what to generate.
        asked: where.
        as_json: whether to write JSON.

    Raises:
        Misused: the server cannot serve the request, or knows no such model or drafter.
        CommandFailed: the server cannot be reached, refuses, or fails.
    """
    check_address("--server", asked.server)
    screen = JsonScreen() if as_json else TextScreen(audit=request.audit)
    run_to_end(_remote_generate(request, asked, screen))


async def _remote_generate(request: GenerationRequest, asked: Asked, screen: Screen) -> None:
    with checked_options():
        tls = None if asked.ca is None else trusting_credentials(asked.ca)
    try:
        async with (
            Client(asked.server, asked.key, tls) as client,
            client.run(request, asked.model, asked.drafter_name) as generation,
        ):
            screen.begin(str(request.prompt))
            async for token in generation:
                screen.token(token)
            screen.end(generation)
    except NameUnknown as error:
        raise Misused(str(error)) from error

"""`crossdraft generate`: one continuation, shown as it comes; made by services, by a server, or by bundled models."""

import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import fields, replace
from typing import Any

from crossdraft.cli.display import Generated, JsonScreen, Screen, TextScreen
from crossdraft.cli.processes import check_address, checked_addresses, patience
from crossdraft.cli.running import CommandFailed, UsageError, checked_options, flag_of, run_to_end
from crossdraft.cli.serve import check_engine, faults_of_models, own_services, tls_files
from crossdraft.client import GenerationRequest, Overlap, SamplingOptions, connect
from crossdraft.client.api import Addresses
from crossdraft.config.commands import DEFAULT_DRAFTER, DEFAULT_TARGET, RequestOptions, WhereToGenerate
from crossdraft.config.request import METHODS, NO_DRAFTER
from crossdraft.config.service import SessionOptions
from crossdraft.rpc.errors import NameUnknown
from crossdraft.rpc.security import trusting_credentials
from crossdraft.rpc.server import Listening
from crossdraft.serving.grpc_client import Client
from crossdraft.session.models import requested_method
from crossdraft.trace.timeline import Watch

# An output has one session of each, and another after a loss. What they can use bounds a cache whose size is not named.
NOWHERE = Listening(port=None, grace_seconds=0, sessions=SessionOptions(max_sessions=4))
DEFAULT_PROMPT = "def read_lines(path, encoding='utf-8'):\n"


def request_of(prompt: str | None, options: RequestOptions, running: bool = False) -> GenerationRequest:
    """What the options ask for; `running` services say which methods they know. Raises UsageError."""
    given = {name: value for name, value in vars(options).items() if value is not None}
    with checked_options():
        changed = {
            "stop": tuple(options.stop or ()),
            "stop_token_ids": tuple(options.stop_token_ids or ()),
            "bad_words": tuple(options.bad_words or ()),
            "options": SamplingOptions(
                **named(SamplingOptions, given | {"logit_bias": _biases(options.logit_bias or ())})
            ),
        }
        request = GenerationRequest(read_prompt(prompt), **named(GenerationRequest, given | changed))
        if not (running and request.method not in METHODS):
            requested_method(request)  # refuses, before anything is started, what no pair of models could do
    return request


def named(record: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Those values whose names are fields of a dataclass."""
    return {one.name: given[one.name] for one in fields(record) if one.name in given}


def generate(request: GenerationRequest, where: WhereToGenerate, as_json: bool, verbose: bool = False) -> None:
    """Generates and shows it, with `verbose` also what the figures mean, and what became of each draft token."""
    screen = JsonScreen() if as_json else TextScreen(audit=request.audit, verbose=verbose)
    if where.server is None:
        _check_for_services(where)
        where = _with_bundled(where)
    else:
        _check_for_server(where, where.server)
    check_engine(where)
    for note in notes_of(request, where):
        print(f"crossdraft: {note}", file=sys.stderr)
    run_to_end((_with_services if where.server is None else _on_server)(request, where, screen))


def _check_for_server(where: WhereToGenerate, server: str) -> None:
    if where.target is not None or where.untrusted_drafter:
        raise UsageError(
            "a server has its own targets and says which drafters it trusts: leave out --target and "
            "--untrusted-drafter, or --server"
        )
    if where.tls_cert is not None or where.tls_key is not None:
        raise UsageError("a server takes no client certificates: of --tls-... give only --tls-ca, and use --api-key")
    check_address("--server", server)


def _check_for_services(where: WhereToGenerate) -> None:
    target, drafter = where.target, where.drafter
    if where.model is not None:
        raise UsageError("--model names a model of a server: give --server, or the addresses of services with --target")
    for own, elsewhere in (("target", target), ("drafter", drafter)):
        if elsewhere is not None and getattr(where, f"{own}_model") is not None:
            raise UsageError(f"--{own} and --{own}-model do not go together: give the one or the other")
    if target is not None:
        checked_addresses("--target", target)
    if drafter is not None and drafter != [NO_DRAFTER]:
        checked_addresses("--drafter", drafter)
        if target is None and where.target_model is None:
            raise UsageError("--drafter is given without a target: give --target or --target-model, too, or neither")
    if target is None and drafter in (None, [NO_DRAFTER]) and tls_files(where) is not None:
        raise UsageError("--tls-ca is for services that run already: give --target, or leave out --tls-...")


def notes_of(request: GenerationRequest, where: WhereToGenerate) -> Iterator[str]:
    """What is done in place of what was left out, and what was asked for and changes nothing, in lines for people."""
    alone = where.drafter == [NO_DRAFTER] or (where.server is None and not (where.drafter or where.drafter_model))
    if alone and where.drafter is None:
        yield "no --drafter and no --drafter-model, so the target decodes alone"
    if request.prompt == DEFAULT_PROMPT:
        yield f"the prompt is the default one, {DEFAULT_PROMPT!r}"
    if request.speculation and where.server is None and len(where.target or ()) < 2:
        yield "--speculation has no effect with fewer than two targets"
    rounds = request.num_speculative_tokens != GenerationRequest.num_speculative_tokens
    if rounds and request.overlap is Overlap.AUTO and not alone:
        yield "-k has no effect with --overlap auto, where a controller decides: see --max-draft-tokens"
    if alone:
        limits = ("max_draft_tokens", "min_draft_tokens", "branches", "tree_nodes")
        given = ["-k"] * rounds + [flag_of(name) for name in limits if getattr(request, name) is not None]
        given += ["--explain"] * request.explain + ["--untrusted-drafter"] * where.untrusted_drafter
        yield from (f"{flag} has no effect without a drafter" for flag in given)


async def _with_services(request: GenerationRequest, where: WhereToGenerate, screen: Screen) -> None:
    with checked_options():
        waiting = patience(reply_seconds=where.reply_wait_seconds, target_seconds=where.target_wait_seconds)
    watch = Watch() if isinstance(screen, TextScreen) and screen.verbose else None
    async with (
        services(where) as (target, drafter),
        connect(target, drafter, waiting, tls=tls_files(where), trusted=not where.untrusted_drafter) as pipeline,
        pipeline.run(request, watch) as generation,
    ):
        await _show(request, generation, screen)
        if watch is not None and isinstance(screen, TextScreen):
            screen.rounds(watch.take())
    if generation.unrecorded:  # a warning has said why
        raise CommandFailed("the output is whole, its record is not: name a file that can be written with --record")


async def _on_server(request: GenerationRequest, where: WhereToGenerate, screen: Screen) -> None:
    with checked_options():
        tls = None if where.tls_ca is None else trusting_credentials(where.tls_ca)
        connection = Client(where.server or "", where.api_key, tls)
    named = None if where.drafter is None else ",".join(where.drafter)
    try:
        async with connection as client, client.run(request, where.model or "", named) as generation:
            await _show(request, generation, screen)
    except NameUnknown as error:
        raise UsageError(str(error)) from error


async def _show(request: GenerationRequest, generation: Generated, screen: Screen) -> None:
    screen.begin(str(request.prompt))
    async for token in generation:
        screen.token(token)
    screen.end(generation)


def _with_bundled(where: WhereToGenerate) -> WhereToGenerate:
    """With the bundled pair where no target is named; without its drafter where that is not wanted."""
    if where.target is not None or where.target_model is not None:
        return where
    drafter = where.drafter_model or (DEFAULT_DRAFTER if where.drafter is None else None)
    return replace(where, target_model=DEFAULT_TARGET, drafter_model=drafter)


@asynccontextmanager
async def services(where: WhereToGenerate) -> AsyncIterator[tuple[Addresses, Addresses | None]]:
    """Addresses of target and drafter; models of this process run for the time of the block. Raises UsageError,
    CommandFailed: there is no such model, or it cannot be run so."""
    drafter = None if where.drafter == [NO_DRAFTER] else where.drafter
    async with AsyncExitStack() as stack:
        with faults_of_models():
            servers = await stack.enter_async_context(own_services(where, NOWHERE))
        here = {role: server.here for role, server in servers.items()}
        yield here.get("target") or where.target or (), here.get("drafter", drafter)


def read_prompt(given: str | None) -> str:
    """The prompt; `-` is standard input as it is, None the default one. Raises UsageError: it is not UTF-8."""
    if given is None:
        return DEFAULT_PROMPT
    try:  # an argument may not be UTF-8, either
        return sys.stdin.buffer.read().decode() if given == "-" else given.encode().decode()
    except UnicodeError as error:
        raise UsageError(f"the prompt is not UTF-8: {error}") from error


def _biases(given: Sequence[str]) -> tuple[tuple[int, float], ...]:
    """The pairs of `--logit-bias ID:BIAS`. Raises UsageError: one of them is not of this form."""
    biases = []
    for one in given:
        token, _, bias = one.partition(":")
        try:
            biases.append((int(token), float(bias)))
        except ValueError:
            raise UsageError(f"--logit-bias must be ID:BIAS, such as 42:-100, got {one!r}") from None
    return tuple(biases)

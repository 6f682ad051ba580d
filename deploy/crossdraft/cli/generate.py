"""`crossdraft generate`: one continuation, shown as it comes; made by services, by a server, or by bundled models."""

import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import fields

from crossdraft.cli.display import Generated, JsonScreen, Screen, TextScreen
from crossdraft.cli.options import NO_DRAFTER, RequestOptions, WhereToGenerate, check_address, check_addresses, named
from crossdraft.client import GenerationRequest, Overlap, SamplingOptions, connect
from crossdraft.console.processes import STARTED, EngineOptions, ModelNames, Wanted, patience, running, threads_each
from crossdraft.console.running import METHODS, CommandFailed, UsageError, checked_options, run_to_end
from crossdraft.engine.names import ModelLoadError, source_of
from crossdraft.rpc.errors import NameUnknown
from crossdraft.rpc.security import trusting_credentials
from crossdraft.serving.grpc_client import Client
from crossdraft.session.resolution import requested_method

DEFAULT_PROMPT = "def read_lines(path, encoding='utf-8'):\n"


def request_of(prompt: str | None, options: RequestOptions, running: bool = False) -> GenerationRequest:
    """What the options ask for; `running` services say which methods they know. Raises UsageError."""
    given = {name: value for name, value in vars(options).items() if value is not None}
    with checked_options():
        changed = {
            "overlap": Overlap(options.overlap),
            "stop": tuple(map(_checked_text, options.stop or ())),
            "stop_token_ids": tuple(options.stop_token_ids or ()),
            "bad_words": tuple(map(_checked_text, options.bad_words or ())),
            "options": SamplingOptions(
                **named(SamplingOptions, given | {"logit_bias": _biases(options.logit_bias or ())})
            ),
        }
        request = GenerationRequest(read_prompt(prompt), **named(GenerationRequest, given | changed))
        if not (running and request.method not in METHODS):
            requested_method(request)  # refuses, before anything is started, what no pair of models could do
    return request


def generate(
    request: GenerationRequest,
    where: WhereToGenerate,
    as_json: bool,
    models: ModelNames | None = None,
    rounds: bool = False,
    verbose: bool = False,
) -> None:
    """Generates and shows it.

    Args:
        request: what.
        where: by which services or server.
        as_json: print JSON.
        models: that are started if no address is given.
        rounds: -k was given.
        verbose: say what the figures mean.

    Raises:
        UsageError: options do not go together or are out of their range; a server cannot serve the request, or knows no
            such model or drafter.
        CommandFailed: a service or server cannot be reached or started, or fails.
    """
    screen = JsonScreen() if as_json else TextScreen(audit=request.audit, verbose=verbose)
    if where.server is None:
        _check_for_services(where)
        work = _with_services(request, where, screen, models or ModelNames())
    else:
        _check_for_server(where, where.server)
        work = _on_server(request, where, where.server, screen)
    alone = where.drafter == NO_DRAFTER or (where.target is not None and where.drafter is None)
    notes = [f"the prompt is the default one, {DEFAULT_PROMPT!r}"] * (request.prompt == DEFAULT_PROMPT)
    for note in [*notes, *without_effect(request, where, alone, rounds)]:
        print(f"crossdraft: {note}", file=sys.stderr)
    run_to_end(work)


def _check_for_server(where: WhereToGenerate, server: str) -> None:
    if where.target is not None or where.untrusted_drafter:
        raise UsageError(
            "a server has its own targets and says which drafters it trusts: leave out --target and "
            "--untrusted-drafter, or --server"
        )
    if where.tls.tls_cert is not None or where.tls.tls_key is not None:
        raise UsageError("a server takes no client certificates: of --tls-... give only --tls-ca, and use --api-key")
    check_address("--server", server)


def _check_for_services(where: WhereToGenerate) -> None:
    target, drafter = where.target, where.drafter
    if where.model is not None:
        raise UsageError("--model names a model of a server: give --server, or the addresses of services with --target")
    if target is not None:
        check_addresses("--target", target)
    if drafter is not None and drafter != NO_DRAFTER:
        check_addresses("--drafter", drafter)
        if target is None:
            raise UsageError("--drafter is given without --target: give both, or neither for the bundled models")
    if target is None and where.tls.files() is not None:
        raise UsageError("--tls-ca is for services that run already: give --target, or leave out --tls-...")


def without_effect(request: GenerationRequest, where: WhereToGenerate, alone: bool, rounds: bool = False) -> list[str]:
    """What was asked for and changes nothing, in lines for people; `alone`: without a drafter, `rounds`: with -k."""
    few_targets = request.speculation and where.server is None and "," not in (where.target or "")
    notes = ["--speculation has no effect with fewer than two targets"] * few_targets
    if rounds and request.overlap is Overlap.AUTO and not alone:
        notes.append("-k has no effect with --overlap auto, where a controller decides: see --max-draft-tokens")
    if engine := _engine_options(where):
        there = "--server" if where.target is None else "--target"
        notes.append(f"no effect with {there}, as the services run already: {', '.join(engine)}")
    if alone:
        given = (
            ("max-draft-tokens", request.max_draft_tokens),
            ("min-draft-tokens", request.min_draft_tokens),
            ("branches", request.branches),
            ("tree-nodes", request.tree_nodes),
        )
        names = ["-k"] * rounds + [f"--{name}" for name, value in given if value is not None]
        names += ["--explain"] * request.explain + ["--untrusted-drafter"] * where.untrusted_drafter
        notes += [f"{name} has no effect without a drafter" for name in names]
    return notes


def _engine_options(where: WhereToGenerate) -> list[str]:
    """Options for services that are started, where none is; what comes from the environment is left out."""
    if where.target is None and where.server is None:
        return []
    names = [one.name for one in fields(EngineOptions) if getattr(where.engine, one.name) != getattr(STARTED, one.name)]
    return [f"--{name.replace('_', '-')}" for name in names if f"CROSSDRAFT_{name.upper()}" not in os.environ]


async def _with_services(
    request: GenerationRequest, where: WhereToGenerate, screen: Screen, models: ModelNames
) -> None:
    with checked_options():
        waiting = patience(reply_seconds=where.reply_wait_seconds, target_seconds=where.target_wait_seconds)
    async with (
        addresses(where.target, where.drafter, models, where.engine) as (target, drafter),
        connect(target, drafter, waiting, tls=where.tls.files(), trusted=not where.untrusted_drafter) as pipeline,
        pipeline.run(request) as generation,
    ):
        await _show(request, generation, screen)


async def _on_server(request: GenerationRequest, where: WhereToGenerate, server: str, screen: Screen) -> None:
    with checked_options():
        tls = None if where.tls.tls_ca is None else trusting_credentials(where.tls.tls_ca)
    drafter = "" if where.drafter == NO_DRAFTER else where.drafter
    try:
        async with (
            Client(server, where.api_key, tls) as client,
            client.run(request, where.model or "", drafter) as generation,
        ):
            await _show(request, generation, screen)
    except NameUnknown as error:
        raise UsageError(str(error)) from error


async def _show(request: GenerationRequest, generation: Generated, screen: Screen) -> None:
    screen.begin(str(request.prompt))
    async for token in generation:
        screen.token(token)
    screen.end(generation)


@asynccontextmanager
async def addresses(
    target: str | None, drafter: str | None, models: ModelNames, engine: EngineOptions = STARTED
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
    try:  # said now, and not after the seconds that a service takes to say it
        for _, model in names:
            source_of(model)
    except ModelLoadError as error:
        raise CommandFailed(f"{error}; or give --target and --drafter") from error
    wanted = [Wanted(role, model, threads_each(len(names)), engine=engine) for role, model in names]
    async with running(wanted) as started:
        yield started[0].address, started[1].address if len(started) > 1 else None


def read_prompt(given: str | None) -> str:
    """The prompt; `-` is standard input as it is, None the default one.

    Raises:
        UsageError: it is not UTF-8.
    """
    if given is None:
        return DEFAULT_PROMPT
    try:
        return sys.stdin.buffer.read().decode() if given == "-" else _checked_text(given)
    except UnicodeError as error:
        raise UsageError(f"the prompt is not UTF-8: {error}") from error


def _checked_text(given: str) -> str:
    """Raises UnicodeError if an argument was not UTF-8."""
    given.encode()
    return given


def _biases(given: Sequence[str]) -> tuple[tuple[int, float], ...]:
    """The pairs of `--logit-bias ID:BIAS`.

    Raises:
        UsageError: one of them is not of this form.
    """
    biases = []
    for one in given:
        token, _, bias = one.partition(":")
        try:
            biases.append((int(token), float(bias)))
        except ValueError:
            raise UsageError(f"--logit-bias must be ID:BIAS, such as 42:-100, got {one!r}") from None
    return tuple(biases)

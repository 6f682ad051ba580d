"""The options of `crossdraft loadtest`. Its modules are imported when it runs."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from crossdraft.cli.options import TlsCa, TlsCert, TlsKey, tls_of
from crossdraft.console.processes import ModelNames
from crossdraft.console.running import Misused

if TYPE_CHECKING:
    from crossdraft.loadtest.runner import Load

BUNDLED = ModelNames()
DEFAULT_CLIENTS = 2
MAX_OUTPUTS = 64  # that a started server makes at once, at least


class Far(StrEnum):
    """Services that can be on a host of their own."""

    TARGET = "target"
    DRAFTER = "drafter"


class Over(StrEnum):
    """Protocols of a server that the test starts."""

    HTTP = "http"
    GRPC = "grpc"


def loadtest(
    url: Annotated[str, typer.Option(help="URL of an HTTP server, such as http://127.0.0.1:8000.")] = "",
    server: Annotated[str, typer.Option(metavar="HOST:PORT", help="Address of a gRPC server.")] = "",
    target: Annotated[str, typer.Option(metavar="HOST:PORT,...", help="Targets of a pipeline in this process.")] = "",
    drafter: Annotated[str, typer.Option(metavar="HOST:PORT,...", help="Drafters of that pipeline.")] = "",
    api_key: Annotated[
        str, typer.Option(metavar="KEY", envvar="CROSSDRAFT_API_KEY", help="API key of the servers.", show_envvar=True)
    ] = "",
    delay_ms: Annotated[
        str | None,
        typer.Option(metavar="MS,MS", help="One-way delays to started services, on an emulated network; each in turn."),
    ] = None,
    far: Annotated[list[Far], typer.Option(help="Services at that distance; repeatable.")] = [Far.DRAFTER],  # noqa: B006
    over: Annotated[list[Over], typer.Option(help="Protocols of the started server; repeatable.")] = [Over.HTTP],  # noqa: B006
    compare: Annotated[
        bool, typer.Option("--compare", help="Measure a pipeline in this process beside the started server.")
    ] = False,
    target_model: Annotated[
        str, typer.Option(help="Target to start: a folder, a hub id, or bundled:NAME.")
    ] = BUNDLED.target,
    drafter_model: Annotated[str, typer.Option(help="Drafter to start.")] = BUNDLED.drafter,
    pace_target: Annotated[
        str | None, typer.Option(metavar="A,B", help="A pass of the target over n tokens takes at least A + B n ms.")
    ] = None,
    pace_drafter: Annotated[str | None, typer.Option(metavar="A,B", help="The same for a step of the drafter.")] = None,
    rate: Annotated[
        float | None, typer.Option(help="Requests a second, at random moments, however long others take.")
    ] = None,
    clients: Annotated[int | None, typer.Option(help="Concurrent clients without --rate; by default 2.")] = None,
    most_at_once: Annotated[
        int | None, typer.Option(help="With --rate: further requests wait, and their latencies include it.")
    ] = None,
    requests: Annotated[int, typer.Option(help="Requests of each configuration under each delay.")] = 24,
    warm_up: Annotated[int, typer.Option(help="Requests before, which do not count.")] = 2,
    repeat: Annotated[int, typer.Option(help="Repetitions of all requests; configurations take turns.")] = 1,
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSON lines with text, turns or messages; by default 36 of six categories."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Max tokens of an output.")] = 64,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy.")] = 0.0,
    method: Annotated[str | None, typer.Option(help="Verification method; by default the server's.")] = None,
    model: Annotated[str, typer.Option(metavar="NAME", help="Model of the server; by default its only one.")] = "",
    use_drafter: Annotated[
        str | None, typer.Option(metavar="NAME", help="Drafter of the server, or none; by default its first one.")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Outputs go on to --max-tokens.")] = False,
    trace: Annotated[
        bool,
        typer.Option(
            "--trace/--no-trace", help="Ask for the costs of outputs; servers other than crossdraft refuse that."
        ),
    ] = True,
    seed: Annotated[int, typer.Option(help="Seed of arrivals, and of outputs whose --method takes one.")] = 0,
    ttft_ms: Annotated[
        float | None, typer.Option(help="Goodput counts requests with a first token in at most so many ms.")
    ] = None,
    tpot_ms: Annotated[float | None, typer.Option(help="The same for each token after the first.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds after which a request is cancelled.")] = 120.0,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the report there.")] = None,
    csv_file: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", help="Write a line for each request there.")
    ] = None,
    picture: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Write a picture there.")] = None,
) -> None:
    """Measure latencies, throughput, acceptance and where time goes between services, under load.

    Without --url, --server and --target it starts services and a server, and stops them at the end.
    """
    from crossdraft.bench.services import Served, delays_of
    from crossdraft.cli import loadtest as command
    from crossdraft.console.running import checked_options
    from crossdraft.loadtest.requests import RequestOptions
    from crossdraft.loadtest.summary import Goal

    with checked_options():
        load = _load_of(rate, clients, most_at_once)
        named = "" if use_drafter == "none" else use_drafter
        options = RequestOptions(max_tokens, temperature, method, named, model, ignore_eos, seed, trace)
        goal = Goal(ttft_ms, tpot_ms)
    plan = command.Plan(load, options, goal, *command.prompts_of(prompts), requests, warm_up, repeat, seed, timeout)
    files = command.Files(json_file, csv_file, picture)
    tested: command.Addressed | command.Started
    if url or server or target or drafter:
        if compare or delay_ms is not None:
            raise Misused("--compare and --delay-ms are for services that are started; give --target beside --url")
        ca, tls = (None, tls_of(tls_ca, tls_cert, tls_key)) if target else (tls_ca, None)
        tested = command.Addressed(url, server, target, drafter, api_key, ca, tls)
    else:
        paced = Served(target_model, pace_target), Served(drafter_model, pace_drafter)
        protocols = frozenset(command.HTTP if one is Over.HTTP else command.GRPC for one in over)
        delays = delays_of(delay_ms or "0")
        tested = command.Started(*paced, delays, frozenset(far), protocols, compare, max(MAX_OUTPUTS, requests))
    command.run(plan, tested, files)


def _load_of(rate: float | None, clients: int | None, most_at_once: int | None) -> "Load":
    """What --rate, --clients and --most-at-once say together. Raises Misused and ValueError."""
    from crossdraft.loadtest.runner import ClosedLoop, OpenLoop

    if rate is not None and clients is not None:
        raise Misused("--rate and --clients are two kinds of load: give one of them")
    if rate is not None:
        return OpenLoop(rate, most_at_once)
    if most_at_once is not None:
        raise Misused("--most-at-once is for --rate; without it, --clients says how many requests are under way")
    return ClosedLoop(DEFAULT_CLIENTS if clients is None else clients)

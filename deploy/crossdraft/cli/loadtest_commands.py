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
    url: Annotated[str, typer.Option(help="Of an HTTP server, such as http://127.0.0.1:8000.")] = "",
    server: Annotated[str, typer.Option(metavar="HOST:PORT", help="A gRPC server.")] = "",
    target: Annotated[str, typer.Option(metavar="HOST:PORT,...", help="Targets, for a pipeline in this process.")] = "",
    drafter: Annotated[str, typer.Option(metavar="HOST:PORT,...", help="Drafters for it.")] = "",
    api_key: Annotated[
        str, typer.Option(metavar="KEY", envvar="CROSSDRAFT_API_KEY", help="Of the servers.", show_envvar=True)
    ] = "",
    delay_ms: Annotated[
        str | None,
        typer.Option(metavar="MS,MS", help="Of started services, one way, on an emulated network; each in turn."),
    ] = None,
    far: Annotated[list[Far], typer.Option(help="What is so far away; repeatable.")] = [Far.DRAFTER],  # noqa: B006
    over: Annotated[list[Over], typer.Option(help="How started fronts are asked; repeatable.")] = [Over.HTTP],  # noqa: B006
    compare: Annotated[
        bool, typer.Option("--compare", help="Beside started fronts, a pipeline in this process, too.")
    ] = False,
    target_model: Annotated[str, typer.Option(help="To start: a folder, a hub id, or bundled:NAME.")] = BUNDLED.target,
    drafter_model: Annotated[str, typer.Option(help="Likewise.")] = BUNDLED.drafter,
    pace_target: Annotated[
        str | None, typer.Option(metavar="A,B", help="Its pass over n tokens takes at least A + B n ms.")
    ] = None,
    pace_drafter: Annotated[str | None, typer.Option(metavar="A,B", help="Likewise a step of the drafter.")] = None,
    rate: Annotated[
        float | None, typer.Option(help="Requests a second, at random moments whatever became of the others.")
    ] = None,
    clients: Annotated[
        int | None, typer.Option(help="Ask again when they have their answer; by default 2, without --rate.")
    ] = None,
    most_at_once: Annotated[int | None, typer.Option(help="With --rate: further requests wait, and count so.")] = None,
    requests: Annotated[int, typer.Option(help="In each way, under each delay.")] = 24,
    warm_up: Annotated[int, typer.Option(help="Requests before, which do not count.")] = 2,
    repeat: Annotated[int, typer.Option(help="Of all requests, the ways taking turns.")] = 1,
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSON lines with text, turns or messages; by default 36 of six categories."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest output.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    method: Annotated[str | None, typer.Option(help="By default the server's choice.")] = None,
    model: Annotated[str, typer.Option(metavar="NAME", help="Of the server; by default its only one.")] = "",
    use_drafter: Annotated[
        str | None, typer.Option(metavar="NAME", help="One of the server's, or none; by default its first one.")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Outputs go on to --max-tokens.")] = False,
    trace: Annotated[
        bool, typer.Option("--trace/--no-trace", help="Ask what outputs cost; other servers than crossdraft refuse.")
    ] = True,
    seed: Annotated[int, typer.Option(help="Of arrivals, and of outputs whose --method takes one.")] = 0,
    ttft_ms: Annotated[float | None, typer.Option(help="Goal for the first token; see goodput.")] = None,
    tpot_ms: Annotated[float | None, typer.Option(help="Goal for each token after the first.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds after which a request is given up.")] = 120.0,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all of it there.")] = None,
    csv_file: Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="A line for each request.")] = None,
    picture: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Write a picture there.")] = None,
) -> None:
    """Measure latencies, throughput, acceptance and where time goes between services, under load.

    Without --url, --server and --target it starts services and a front for as long as it takes.
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

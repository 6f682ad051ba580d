"""`crossdraft serve http` and its options. What it needs is imported when it runs."""

from pathlib import Path
from typing import Annotated

import typer

from crossdraft.cli.failures import CommandFailed
from crossdraft.cli.observing import LogFormat, LogLevel, LogLevelOption, LogLines
from crossdraft.cli.security import FrontCertificate, FrontKey, TlsCa, TlsCert, TlsKey, front_of, tls_of

MISSING = "HTTP needs the extra `serve`: install crossdraft with it (pip install -c constraints.txt '.[serve]')"


def http(
    target: Annotated[
        list[str], typer.Option(metavar="HOST:PORT,...", help="Targets of the model; with commas, or repeated.")
    ],
    model: Annotated[str, typer.Option(metavar="NAME", help="The name that clients ask for.")],
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=HOST:PORT,...", help="Drafters under a name; repeatable, the first is the default one."
        ),
    ] = None,
    untrusted: Annotated[
        list[str] | None,
        typer.Option(
            "--untrusted-drafter", metavar="NAME", help="One that only serves methods which nothing it says can bend."
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is all of this machine's.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 is any free one; the ready line says which.")] = 8000,
    grpc_port: Annotated[
        int | None, typer.Option(help="Serve crossdraft.v1.Generation there, too; 0 is any free one.")
    ] = None,
    api_keys: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Lines of a name and a key; without it everybody may ask.")
    ] = None,
    max_outputs: Annotated[int, typer.Option(help="At once; more are refused with 429.")] = 64,
    max_choices: Annotated[int, typer.Option(help="Outputs that one request may ask for.")] = 32,
    max_body_mib: Annotated[float, typer.Option(help="Largest request, in MiB.")] = 4.0,
    rate: Annotated[float | None, typer.Option(help="Requests a minute of each key, or else address.")] = None,
    burst: Annotated[int, typer.Option(help="Requests that may come at once within the rate.")] = 10,
    stalled_seconds: Annotated[float, typer.Option(help="After which a client that does not read is given up.")] = 60.0,
    grace_seconds: Annotated[float, typer.Option(help="For open requests, after SIGTERM.")] = 30.0,
    ssl_certfile: FrontCertificate = None,
    ssl_keyfile: FrontKey = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    log_format: LogLines = LogFormat.PLAIN,
    log_level: LogLevelOption = LogLevel.INFO,
    until_stdin_ends: Annotated[bool, typer.Option("--until-stdin-ends", hidden=True)] = False,
) -> None:
    """Serve OpenAI's HTTP API before targets and drafters. --ssl-... is for clients, --tls-... for services."""
    try:
        from crossdraft.cli import front as command
    except ModuleNotFoundError as error:
        raise CommandFailed(MISSING) from error

    tls = tls_of(tls_ca, tls_cert, tls_key)
    services = command.Services(model, tuple(target), tuple(drafter or ()), frozenset(untrusted or ()), tls)
    rates = None if rate is None else (rate, burst)
    limits = command.Limits(max_outputs, max_choices, max_body_mib, rates, stalled_seconds)
    log = command.Log(log_format, log_level)
    shown = front_of(ssl_certfile, ssl_keyfile)
    where = command.Where(host, port, 1, grace_seconds, until_stdin_ends, shown, log=log)
    command.serve(services, api_keys, limits, where, grpc_port)

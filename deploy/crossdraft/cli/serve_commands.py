"""`crossdraft serve`: the services, and their options."""

from pathlib import Path
from typing import Annotated

import typer

from crossdraft.cli.options import (
    FrontCertificate,
    FrontKey,
    LogLevelOption,
    LogLines,
    MetricsPort,
    TlsCa,
    TlsCert,
    TlsKey,
    front_of,
    tls_of,
)
from crossdraft.console.running import CommandFailed
from crossdraft.serving.logs import LogFormat, LogLevel

app = typer.Typer(
    name="serve",
    help="Serve a target or a drafter over gRPC, or OpenAI's API before them over HTTP; "
    "one line of JSON on standard output says when it is ready.",
    rich_markup_mode=None,
    no_args_is_help=True,
)
Model = Annotated[str, typer.Option(help="A folder, a hub id, or bundled:NAME.")]
Host = Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is all of this machine's.")]
Port = Annotated[int, typer.Option(help="0 is any free one; the ready line says which.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
Device = Annotated[str, typer.Option(help="As torch names it, such as cuda:0.")]
CacheMib = Annotated[
    int,
    typer.Option(
        envvar="CROSSDRAFT_CACHE_MIB", help="MiB for keys and values of all sessions, taken at start.", show_envvar=True
    ),
]
MaxModelLen = Annotated[int | None, typer.Option(help="Tokens of a session; by default all of a context.")]
MaxMessageMib = Annotated[int, typer.Option(help="Largest message, in MiB.")]
GraceSeconds = Annotated[float, typer.Option(help="For open sessions, after SIGTERM.")]
MaxSessions = Annotated[int, typer.Option(help="Open at once; who wants another is refused.")]
MaxSessionsPerPeer = Annotated[
    int | None, typer.Option(help="Of one certificate, or of one address without TLS; by default as many as of all.")
]
IdleSeconds = Annotated[float, typer.Option(help="A session in which nothing is said for so long is ended.")]
PrefixCaching = Annotated[
    bool,
    typer.Option(
        "--enable-prefix-caching/--no-enable-prefix-caching",
        help="A session may begin with the keys and values of another one whose text begins in the same way.",
    ),
]
EnforceEager = Annotated[bool, typer.Option("--enforce-eager", help="Capture no forwards as CUDA graphs.")]
Threads = Annotated[int | None, typer.Option(help="Threads of torch; by default torch decides.")]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run the model's own code.")]
Paced = Annotated[
    str | None,
    typer.Option("--pace", metavar="A,B", help="For benchmarks: a step of n tokens takes at least A + B n ms."),
]
UntilStdinEnds = Annotated[bool, typer.Option("--until-stdin-ends", hidden=True)]


@app.command()
def target(
    model: Model,
    host: Host = "127.0.0.1",
    port: Port = 0,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    cache_mib: CacheMib = 512,
    enable_prefix_caching: PrefixCaching = True,
    enforce_eager: EnforceEager = False,
    max_model_len: MaxModelLen = None,
    max_message_mib: MaxMessageMib = 32,
    grace_seconds: GraceSeconds = 10.0,
    threads: Threads = None,
    trust_remote_code: TrustRemoteCode = False,
    pace: Paced = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    max_sessions: MaxSessions = 1024,
    max_sessions_per_peer: MaxSessionsPerPeer = None,
    idle_seconds: IdleSeconds = 600.0,
    metrics_port: MetricsPort = None,
    log_format: LogLines = LogFormat.PLAIN,
    log_level: LogLevelOption = LogLevel.INFO,
    until_stdin_ends: UntilStdinEnds = False,
) -> None:
    """Serve the model whose distribution comes out."""
    from crossdraft.cli import serve as command
    from crossdraft.engine.served_model import ModelOptions

    emulation = command.emulation_of(pace)
    options = ModelOptions(
        model,
        dtype,
        device,
        cache_mib,
        max_model_len,
        trust_remote_code,
        threads,
        None,
        emulation,
        enable_prefix_caching,
        enforce_eager,
    )
    tls, limits = (
        tls_of(tls_ca, tls_cert, tls_key),
        command.limits_of(max_sessions, max_sessions_per_peer, idle_seconds),
    )
    log = command.Log(log_format, log_level)
    where = command.Where(host, port, max_message_mib, grace_seconds, until_stdin_ends, tls, limits, metrics_port, log)
    command.serve_the_target(options, where)


@app.command()
def drafter(
    model: Model,
    host: Host = "127.0.0.1",
    port: Port = 0,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    cache_mib: CacheMib = 512,
    enable_prefix_caching: PrefixCaching = True,
    enforce_eager: EnforceEager = False,
    max_model_len: MaxModelLen = None,
    max_message_mib: MaxMessageMib = 32,
    grace_seconds: GraceSeconds = 10.0,
    threads: Threads = None,
    trust_remote_code: TrustRemoteCode = False,
    vocab_keep: Annotated[int | None, typer.Option(metavar="N", help="Ids that its head keeps.")] = None,
    frequencies: Annotated[Path | None, typer.Option(help="Which: a file of `crossdraft frequencies`.")] = None,
    affinity: Annotated[Path | None, typer.Option(help="For rdk: a file of `crossdraft affinity`.")] = None,
    pace: Paced = None,
    logit_noise: Annotated[
        float, typer.Option(metavar="SIGMA", help="For benchmarks: standard deviation of noise on its logits.")
    ] = 0.0,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    max_sessions: MaxSessions = 1024,
    max_sessions_per_peer: MaxSessionsPerPeer = None,
    idle_seconds: IdleSeconds = 600.0,
    metrics_port: MetricsPort = None,
    log_format: LogLines = LogFormat.PLAIN,
    log_level: LogLevelOption = LogLevel.INFO,
    until_stdin_ends: UntilStdinEnds = False,
) -> None:
    """Serve a model that guesses."""
    from crossdraft.cli import serve as command
    from crossdraft.engine.served_model import ModelOptions

    pruning = command.pruning_of(vocab_keep, frequencies)
    emulation = command.emulation_of(pace, logit_noise)
    options = ModelOptions(
        model,
        dtype,
        device,
        cache_mib,
        max_model_len,
        trust_remote_code,
        threads,
        pruning,
        emulation,
        enable_prefix_caching,
        enforce_eager,
    )
    tls, limits = (
        tls_of(tls_ca, tls_cert, tls_key),
        command.limits_of(max_sessions, max_sessions_per_peer, idle_seconds),
    )
    log = command.Log(log_format, log_level)
    where = command.Where(host, port, max_message_mib, grace_seconds, until_stdin_ends, tls, limits, metrics_port, log)
    command.serve_a_drafter(options, affinity, where)


@app.command()
def ngram(
    max_ngram: Annotated[int, typer.Option(help="Most bytes that are matched.")] = 24,
    min_ngram: Annotated[int, typer.Option(help="Fewest bytes that must match.")] = 4,
    host: Host = "127.0.0.1",
    port: Port = 0,
    max_message_mib: MaxMessageMib = 32,
    grace_seconds: GraceSeconds = 10.0,
    pace: Paced = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    max_sessions: MaxSessions = 1024,
    max_sessions_per_peer: MaxSessionsPerPeer = None,
    idle_seconds: IdleSeconds = 600.0,
    metrics_port: MetricsPort = None,
    log_format: LogLines = LogFormat.PLAIN,
    log_level: LogLevelOption = LogLevel.INFO,
    until_stdin_ends: UntilStdinEnds = False,
) -> None:
    """Serve a drafter without a model: it copies what followed when the last bytes of the text were seen before.

    A draft token is one byte, so a round should have many of them: use -k 16 or more.
    """
    from crossdraft.cli import serve as command

    tls, limits = (
        tls_of(tls_ca, tls_cert, tls_key),
        command.limits_of(max_sessions, max_sessions_per_peer, idle_seconds),
    )
    log = command.Log(log_format, log_level)
    where = command.Where(host, port, max_message_mib, grace_seconds, until_stdin_ends, tls, limits, metrics_port, log)
    command.serve_an_ngram_drafter(max_ngram, min_ngram, command.pace_of(pace), where)


# `crossdraft serve http` and its options. What it needs is imported when it runs.

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
        from crossdraft.cli import serve as command
    except ModuleNotFoundError as error:
        raise CommandFailed(MISSING) from error

    tls = tls_of(tls_ca, tls_cert, tls_key)
    services = command.Services(model, tuple(target), tuple(drafter or ()), frozenset(untrusted or ()), tls)
    rates = None if rate is None else (rate, burst)
    limits = command.Limits(max_outputs, max_choices, max_body_mib, rates, stalled_seconds)
    log = command.Log(log_format, log_level)
    shown = front_of(ssl_certfile, ssl_keyfile)
    where = command.Where(host, port, 1, grace_seconds, until_stdin_ends, shown, log=log)
    command.serve_http(services, api_keys, limits, where, grpc_port)


app.command()(http)


# `crossdraft serve grpc` and its options. What it needs is imported when it runs.


def grpc(
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
    port: Annotated[int, typer.Option(help="0 is any free one; the ready line says which.")] = 8001,
    api_keys: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Lines of a name and a key; without it everybody may ask.")
    ] = None,
    max_outputs: Annotated[int, typer.Option(help="At once; more are refused with RESOURCE_EXHAUSTED.")] = 64,
    max_message_mib: Annotated[int, typer.Option(help="Largest request, in MiB.")] = 4,
    rate: Annotated[float | None, typer.Option(help="Requests a minute of each key, or else address.")] = None,
    burst: Annotated[int, typer.Option(help="Requests that may come at once within the rate.")] = 10,
    stalled_seconds: Annotated[float, typer.Option(help="After which a client that does not read is given up.")] = 60.0,
    grace_seconds: Annotated[float, typer.Option(help="For open outputs, after SIGTERM.")] = 30.0,
    metrics_port: MetricsPort = None,
    ssl_certfile: FrontCertificate = None,
    ssl_keyfile: FrontKey = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    log_format: LogLines = LogFormat.PLAIN,
    log_level: LogLevelOption = LogLevel.INFO,
    until_stdin_ends: Annotated[bool, typer.Option("--until-stdin-ends", hidden=True)] = False,
) -> None:
    """Serve crossdraft.v1.Generation before targets and drafters. --ssl-... is for clients, --tls-... for services."""
    from crossdraft.cli import serve as command

    tls = tls_of(tls_ca, tls_cert, tls_key)
    services = command.Services(model, tuple(target), tuple(drafter or ()), frozenset(untrusted or ()), tls)
    limits = command.FrontGrpcLimits(max_outputs, None if rate is None else (rate, burst), stalled_seconds)
    log = command.Log(log_format, log_level)
    shown = front_of(ssl_certfile, ssl_keyfile)
    where = command.Where(host, port, max_message_mib, grace_seconds, until_stdin_ends, shown, log=log)
    command.serve_grpc(services, api_keys, limits, where, metrics_port)


app.command()(grpc)

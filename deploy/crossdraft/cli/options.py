"""The options of commands, in groups: dataclasses whose fields typer sees as options (`grouped`)."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from enum import StrEnum
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from crossdraft.console.processes import ModelNames
from crossdraft.console.running import METHODS, Misused, checked_options
from crossdraft.serving.logs import LogFormat, LogLevel

if TYPE_CHECKING:
    from crossdraft.rpc.security import FrontFiles, TlsFiles

Host = Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 listens on all interfaces.")]
Port = Annotated[int, typer.Option(help="Port to listen on; 0 picks a free one, which the ready line names.")]
MetricsPort = Annotated[
    int | None, typer.Option(metavar="PORT", help="Serve Prometheus metrics over plain HTTP there; 0 picks a free one.")
]
UntilStdinEnds = Annotated[bool, typer.Option("--until-stdin-ends", hidden=True)]
MaxTokens = Annotated[int, typer.Option(help="Max tokens to generate.")]
Temperature = Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy.")]
ApiKey = Annotated[
    str, typer.Option(metavar="KEY", envvar="CROSSDRAFT_API_KEY", help="API key of the server.", show_envvar=True)
]


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """The command for typer, which sees each field of a parameter that is a dataclass as an option of its own.

    Groups may hold groups. The command itself gets them made.
    """
    own = inspect.signature(command, eval_str=True).parameters
    flat = [
        one
        for parameter in own.values()
        for one in (_options(parameter.annotation) if is_dataclass(parameter.annotation) else [parameter])
    ]

    @wraps(command)
    def run(**given: Any) -> None:
        command(**{name: _value(name, one.annotation, given) for name, one in own.items()})

    parameters = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in flat]
    vars(run)["__signature__"] = inspect.Signature(parameters)
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run


def _options(group: Any) -> Iterator[inspect.Parameter]:
    types = get_type_hints(group, include_extras=True)
    for one in fields(group):
        if is_dataclass(types[one.name]):
            yield from _options(types[one.name])
        else:
            default = one.default if one.default_factory is MISSING else one.default_factory()
            default = inspect.Parameter.empty if default is MISSING else default
            kind = inspect.Parameter.KEYWORD_ONLY
            yield inspect.Parameter(one.name, kind, default=default, annotation=types[one.name])


def _value(name: str, type_: Any, given: Mapping[str, Any]) -> Any:
    if not is_dataclass(type_):
        return given[name]
    types = get_type_hints(type_, include_extras=True)
    values = {one.name: _value(one.name, types[one.name], given) for one in fields(type_)}
    return type_(**values)  # type: ignore[operator]  # is_dataclass is true of instances, too


@dataclass(frozen=True, kw_only=True)
class TlsOptions:
    """Mutual TLS with services."""

    tls_ca: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Certificate of the CA that signed the other side's.")
    ] = None
    tls_cert: Annotated[
        Path | None, typer.Option(metavar="FILE", help="This side's certificate; see `crossdraft certs`.")
    ] = None
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE", help="The key of --tls-cert.")] = None

    def files(self) -> "TlsFiles | None":
        """The three files, or None if none was given; raises Misused if one is missing or cannot be used."""
        if self.tls_ca is None and self.tls_cert is None and self.tls_key is None:
            return None
        if self.tls_ca is None or self.tls_cert is None or self.tls_key is None:
            raise Misused("--tls-ca, --tls-cert and --tls-key go together: give all three, or none")
        from crossdraft.rpc.security import TlsFiles

        files = TlsFiles(self.tls_ca, self.tls_cert, self.tls_key)
        with checked_options():
            files.load()
        return files


@dataclass(frozen=True, kw_only=True)
class ServerCertificate:
    """TLS with clients; the options are named as vLLM's and uvicorn's."""

    ssl_certfile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Certificate for clients; by default nothing is encrypted.")
    ] = None
    ssl_keyfile: Annotated[Path | None, typer.Option(metavar="FILE", help="The key of --ssl-certfile.")] = None

    def files(self) -> "FrontFiles | None":
        """Both files, or None if none was given; raises Misused if one is missing or cannot be used."""
        if self.ssl_certfile is None and self.ssl_keyfile is None:
            return None
        if self.ssl_certfile is None or self.ssl_keyfile is None:
            raise Misused("--ssl-certfile and --ssl-keyfile go together: give both, or neither")
        from crossdraft.rpc.security import FrontFiles

        files = FrontFiles(self.ssl_certfile, self.ssl_keyfile)
        with checked_options():
            files.load()
        return files


@dataclass(frozen=True, kw_only=True)
class LogOptions:
    """What a server logs."""

    log_format: Annotated[
        LogFormat, typer.Option(help="Format of the log on standard error; json is one object a line.")
    ] = LogFormat.PLAIN
    log_level: Annotated[LogLevel, typer.Option(help="Lowest level that is logged.")] = LogLevel.INFO


@dataclass(frozen=True, kw_only=True)
class ModelChoice:
    """Which model a service runs, and with what."""

    model: Annotated[str, typer.Option(help="A folder, a hub id, or bundled:NAME.")]
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto"
    device: Annotated[str, typer.Option(help="A torch device, such as cuda:0.")] = "cpu"
    cache_mib: Annotated[
        int,
        typer.Option(
            envvar="CROSSDRAFT_CACHE_MIB", help="Size of the KV cache in MiB, allocated at start.", show_envvar=True
        ),
    ] = 512
    enable_prefix_caching: Annotated[
        bool,
        typer.Option(
            "--enable-prefix-caching/--no-enable-prefix-caching",
            help="Reuse the KV cache of a session for another one that begins with the same text.",
        ),
    ] = True
    enforce_eager: Annotated[bool, typer.Option("--enforce-eager", help="Do not use CUDA graphs.")] = False
    max_model_len: Annotated[
        int | None, typer.Option(help="Max tokens of a session; by default the model's context length.")
    ] = None
    threads: Annotated[int | None, typer.Option(help="Threads of torch; by default torch decides.")] = None
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class DrafterOptions:
    """What only drafters with a model have."""

    vocab_keep: Annotated[
        int | None, typer.Option(metavar="N", help="Keep only the N most frequent tokens in the model's head.")
    ] = None
    frequencies: Annotated[
        Path | None, typer.Option(metavar="FILE", help="For --vocab-keep: written by `crossdraft frequencies`.")
    ] = None
    affinity: Annotated[
        Path | None, typer.Option(metavar="FILE", help="For the method rdk: written by `crossdraft affinity`.")
    ] = None
    logit_noise: Annotated[
        float, typer.Option(metavar="SIGMA", help="For benchmarks: standard deviation of noise on the logits.")
    ] = 0.0


@dataclass(frozen=True, kw_only=True)
class ServiceOptions:
    """What all gRPC services of a target or drafter have."""

    host: Host = "127.0.0.1"
    port: Port = 0
    max_message_mib: Annotated[int, typer.Option(help="Max size of a message, in MiB.")] = 32
    grace_seconds: Annotated[float, typer.Option(help="How long open sessions may go on after SIGTERM.")] = 10.0
    pace: Annotated[
        str | None, typer.Option(metavar="A,B", help="For benchmarks: a step of n tokens takes at least A + B n ms.")
    ] = None
    tls: TlsOptions
    max_sessions: Annotated[int, typer.Option(help="Max open sessions; further sessions are refused.")] = 1024
    max_sessions_per_peer: Annotated[
        int | None,
        typer.Option(help="Likewise for one client certificate, or for one address without TLS; by default no limit."),
    ] = None
    idle_seconds: Annotated[float, typer.Option(help="A session without messages for so long is ended.")] = 600.0
    metrics_port: MetricsPort = None
    log: LogOptions
    until_stdin_ends: UntilStdinEnds = False


@dataclass(frozen=True, kw_only=True)
class ApiOptions:
    """What the HTTP and the gRPC API have in common: what they generate with, for whom, and how much."""

    target: Annotated[
        list[str],
        typer.Option(metavar="HOST:PORT,...", help="Targets, all of the same model; comma-separated or repeated."),
    ]
    model: Annotated[str, typer.Option(metavar="NAME", help="Name of the model in the API.")]
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=HOST:PORT,...", help="Drafters of one kind, and their name; repeatable. The first is default."
        ),
    ] = None
    untrusted_drafter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Use this drafter only with methods whose output no drafter can change; repeatable.",
        ),
    ] = None
    host: Host = "127.0.0.1"
    api_keys: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A name and an API key on each line; by default no key is needed."),
    ] = None
    max_outputs: Annotated[
        int,
        typer.Option(help="Max outputs at once; further requests are refused (HTTP 429, gRPC RESOURCE_EXHAUSTED)."),
    ] = 64
    rate: Annotated[
        float | None, typer.Option(help="Max requests per minute of each API key, or of each address without keys.")
    ] = None
    burst: Annotated[int, typer.Option(help="Requests within --rate that may come at once.")] = 10
    stalled_seconds: Annotated[
        float, typer.Option(help="Abort the output of a client that has read nothing for so long.")
    ] = 60.0
    grace_seconds: Annotated[float, typer.Option(help="How long open requests may go on after SIGTERM.")] = 30.0
    ssl: ServerCertificate
    tls: TlsOptions
    log: LogOptions
    until_stdin_ends: UntilStdinEnds = False


class Overlaps(StrEnum):
    """Whether the drafter drafts on while the target verifies; the values are those of `types.request.Overlap`."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


@dataclass(frozen=True, kw_only=True)
class WhereToGenerate:
    """Which services or which server generate."""

    target: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT,...", help="Targets, all of the same model; by default a bundled one is started."
        ),
    ] = None
    drafter: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT,...",
            help="Drafters, or none to decode without one; by default a bundled one is started.",
        ),
    ] = None
    untrusted_drafter: Annotated[
        bool, typer.Option("--untrusted-drafter", help="Use only methods whose output no drafter can change.")
    ] = False
    server: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="Generate on a `crossdraft serve grpc` server; --drafter is then a name it knows."
        ),
    ] = None
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Model of the --server; by default its only one.")
    ] = None
    api_key: ApiKey = ""
    tls: TlsOptions = TlsOptions()


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """What is generated, and how; the fields are those of `types.request.GenerationRequest`."""

    method: Annotated[
        str | None, typer.Option(help=f"{', '.join(METHODS)}; by default the best for the models and the temperature.")
    ] = None
    k: Annotated[int, typer.Option("-k", help="Draft tokens in a lock-step round.")] = 5
    max_tokens: MaxTokens = 128
    temperature: Temperature = 1.0
    seed: Annotated[int | None, typer.Option(help="Random seed; makes the output repeatable.")] = None
    top_k: Annotated[int, typer.Option(help="Sample among so many of the most probable tokens; 0 is all.")] = 0
    top_p: Annotated[
        float, typer.Option(help="Sample among the most probable tokens up to this total probability; 1 is all.")
    ] = 1.0
    min_p: Annotated[
        float, typer.Option(help="Sample among tokens at least so probable, relative to the most probable; 0 is all.")
    ] = 0.0
    repetition_penalty: Annotated[float, typer.Option(help="As in transformers; 1 is none.")] = 1.0
    presence_penalty: Annotated[float, typer.Option(help="As in vLLM; 0 is none.")] = 0.0
    logit_bias: Annotated[
        list[str] | None, typer.Option(metavar="ID:BIAS", help="Added to the logit of a token; repeatable.")
    ] = None
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="End the output before this text; repeatable.")
    ] = None
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end-of-sequence token.")] = False
    drafter_temperature: Annotated[
        float | None, typer.Option(help="Temperature of the drafter; by default the target's.")
    ] = None
    allow_inexact: Annotated[
        bool, typer.Option("--allow-inexact", help="Allow methods whose output has not the target's distribution.")
    ] = False
    audit: Annotated[
        bool, typer.Option("--audit", help="Check that the drafter draws its tokens from the rows that it sends.")
    ] = False
    overlap: Annotated[
        Overlaps,
        typer.Option(help="Draft on while the target verifies; off is lock-step, rounds of -k draft tokens."),
    ] = Overlaps.AUTO
    window: Annotated[int | None, typer.Option(help="Max draft tokens ahead of what is verified.")] = None
    wait: Annotated[int | None, typer.Option(help="Draft tokens that a pass of the target waits for.")] = None
    branches: Annotated[
        int | None, typer.Option(help="Draft tokens in each prepared continuation; 0 prepares none.")
    ] = None
    branch_width: Annotated[int | None, typer.Option(help="Prepared continuations for each draft token.")] = None
    paths: Annotated[int, typer.Option(help="Max paths of a token tree in one pass; 1 is a chain.")] = 2
    speculation: Annotated[
        bool, typer.Option("--speculation", help="With two targets, start a pass before the one before has returned.")
    ] = False
    explain: Annotated[bool, typer.Option("--explain", help="Show what the controller decided, and why.")] = False
    record: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a flight record, for `crossdraft replay` and `crossdraft timeline`."),
    ] = None


class Uses(StrEnum):
    """What certificates are good for; the values are those of `rpc.authority.Use`."""

    SERVICE = "service"
    ORCHESTRATOR = "orchestrator"
    BOTH = "both"


@dataclass(frozen=True, kw_only=True)
class CertsOptions:
    """Which certificates are made, and where."""

    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Keep it private: the CA's key is in it.")]
    host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME,...", help="A host: its names and addresses, comma-separated. Repeat it for more hosts."
        ),
    ] = None
    use: Annotated[
        Uses | None,
        typer.Option(help="Whether the host serves, connects to services, or both; untrusted drafters only serve."),
    ] = None
    days: Annotated[int, typer.Option(help="How many days the certificates are valid.")] = 365
    renew: Annotated[
        bool, typer.Option("--renew", help="Replace certificates and keys: of all hosts, or of each --host.")
    ] = False


class Kinds(StrEnum):
    """How `affinity` makes its matrix."""

    ALIGNED = "aligned"
    PREFIX = "prefix"
    CO_OCCURRENCE = "co-occurrence"
    FIRST_ORDER = "first-order"


@dataclass(frozen=True, kw_only=True)
class AffinityOptions:
    """How an affinity matrix is made; None is what was not given, as not every kind takes every option."""

    kind: Annotated[Kinds, typer.Option(help="How the matrix is made; docs/rdk.md compares the kinds.")] = Kinds.ALIGNED
    neighbours: Annotated[
        int | None, typer.Option(min=1, help="Max target tokens of each draft token; by default 64.")
    ] = None
    keep: Annotated[
        float | None, typer.Option(help="Share of its probability that each shared token keeps; by default 0.")
    ] = None
    window: Annotated[
        int | None, typer.Option(min=2, help="For co-occurrence: target tokens in a window; by default 8.")
    ] = None
    temperature: Annotated[
        float | None, typer.Option(help="For co-occurrence: temperature of the softmax; by default 0.0001.")
    ] = None


class Far(StrEnum):
    """Which service of a load test is on an emulated host of its own."""

    TARGET = "target"
    DRAFTER = "drafter"


class Over(StrEnum):
    """Which API of a started server a load test uses."""

    HTTP = "http"
    GRPC = "grpc"


@dataclass(frozen=True, kw_only=True)
class ExistingServers:
    """Servers and services that run already, for a load test."""

    url: Annotated[str, typer.Option(help="An HTTP server to test, such as http://127.0.0.1:8000.")] = ""
    server: Annotated[str, typer.Option(metavar="HOST:PORT", help="A gRPC server to test.")] = ""
    target: Annotated[
        str, typer.Option(metavar="HOST:PORT,...", help="Targets, to test a pipeline in this process.")
    ] = ""
    drafter: Annotated[str, typer.Option(metavar="HOST:PORT,...", help="Drafters of that pipeline.")] = ""
    api_key: ApiKey = ""
    tls: TlsOptions = TlsOptions()


@dataclass(frozen=True, kw_only=True)
class StartedServices:
    """What a load test starts if it is given no address."""

    delay_ms: Annotated[
        str | None,
        typer.Option(metavar="MS,...", help="Emulate a network with this one-way delay; several are tested in turn."),
    ] = None
    far: Annotated[list[Far], typer.Option(help="Which service is that far away; repeatable.")] = field(
        default_factory=lambda: [Far.DRAFTER]
    )
    over: Annotated[list[Over], typer.Option(help="Which API of the started server is tested; repeatable.")] = field(
        default_factory=lambda: [Over.HTTP]
    )
    compare: Annotated[
        bool, typer.Option("--compare", help="Compare with a pipeline in this process, without a server.")
    ] = False
    target_model: Annotated[str, typer.Option(help="Target to start: a folder, a hub id, or bundled:NAME.")] = (
        ModelNames.target
    )
    drafter_model: Annotated[str, typer.Option(help="Drafter to start, likewise.")] = ModelNames.drafter
    pace_target: Annotated[
        str | None, typer.Option(metavar="A,B", help="A pass of the target over n tokens takes at least A + B n ms.")
    ] = None
    pace_drafter: Annotated[str | None, typer.Option(metavar="A,B", help="Likewise a step of the drafter.")] = None


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """When a load test sends how many requests."""

    rate: Annotated[
        float | None, typer.Option(help="Requests per second, at random (Poisson) times: an open-loop load.")
    ] = None
    clients: Annotated[
        int | None,
        typer.Option(
            help="Clients that each wait for a reply before the next request: a closed loop, by default of 2."
        ),
    ] = None
    max_concurrency: Annotated[
        int | None,
        typer.Option(help="With --rate: max requests at once; further ones wait, which counts in their latency."),
    ] = None
    most_at_once: Annotated[int | None, typer.Option(hidden=True)] = None  # the old name of --max-concurrency
    requests: Annotated[int, typer.Option(help="Requests for each API and delay.")] = 24
    warm_up: Annotated[int, typer.Option(help="Requests before these, which do not count.")] = 2
    repeat: Annotated[int, typer.Option(help="Send all requests so often, the APIs taking turns.")] = 1
    timeout: Annotated[float, typer.Option(help="Seconds after which a request counts as failed.")] = 120.0
    seed: Annotated[int, typer.Option(help="Random seed of arrival times, and of outputs if --method takes one.")] = 0


@dataclass(frozen=True, kw_only=True)
class LoadRequests:
    """What a load test asks for."""

    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="JSON lines with `text`, `turns` or `messages`; by default 36 bundled prompts."
        ),
    ] = None
    max_tokens: MaxTokens = 64
    temperature: Temperature = 0.0
    method: Annotated[str | None, typer.Option(help="By default the server chooses.")] = None
    model: Annotated[str, typer.Option(metavar="NAME", help="Model of the server; by default its only one.")] = ""
    use_drafter: Annotated[
        str | None, typer.Option(metavar="NAME", help="Drafter of the server, or none; by default its first one.")
    ] = None
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Generate up to --max-tokens in any case.")] = False
    trace: Annotated[
        bool,
        typer.Option("--trace/--no-trace", help="Ask for each output's costs; only crossdraft's servers answer that."),
    ] = True
    ttft_ms: Annotated[
        float | None, typer.Option(help="For goodput: max time to the first token, in milliseconds.")
    ] = None
    tpot_ms: Annotated[
        float | None, typer.Option(help="For goodput: max time per token after the first, in milliseconds.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class LoadFiles:
    """What a load test writes besides its tables."""

    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the whole report.")] = None
    csv_file: Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="Write a line per request.")] = None
    picture: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Write a picture.")] = None

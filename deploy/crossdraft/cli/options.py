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
from crossdraft.console.running import METHODS, UsageError, checked_options
from crossdraft.serving.logs import LogFormat, LogLevel

if TYPE_CHECKING:
    from crossdraft.rpc.security import FrontFiles, TlsFiles

NO_DRAFTER = "none"  # in place of a drafter's address or name


def option(help: str, metavar: str | None = None, flag: str | None = None, **more: Any) -> Any:
    """An option of typer's; `flag` where its name does not follow from the parameter's."""
    return typer.Option(*(() if flag is None else (flag,)), help=help, metavar=metavar, **more)


Host = Annotated[str, option("Address to listen on; 0.0.0.0 listens on all interfaces.")]
Port = Annotated[int, option("Port to listen on; 0 picks a free one: the JSON line printed at start has it.")]
MetricsPort = Annotated[
    int | None, option("Serve Prometheus metrics over plain HTTP on this port; 0 picks a free one.", "PORT")
]
UntilStdinEnds = Annotated[bool, typer.Option("--until-stdin-ends", hidden=True)]
MaxTokens = Annotated[int, option("Max tokens to generate.")]
Temperature = Annotated[float, option("Sampling temperature; 0 is greedy.")]
ApiKey = Annotated[str, option("API key of the server.", "KEY", envvar="CROSSDRAFT_API_KEY", show_envvar=True)]


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


def check_addresses(option: str, given: str) -> None:
    """Raises UsageError unless it is host:port, or several with commas between."""
    for one in given.split(","):
        check_address(option, one.strip())


def check_address(option: str, address: str) -> None:
    """Raises UsageError unless it is host:port."""
    if not address:
        raise UsageError(f"{option} has an empty address: remove the extra comma")
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise UsageError(f"{option} must be HOST:PORT, such as 127.0.0.1:7001, got {address!r}")


@dataclass(frozen=True, kw_only=True)
class TlsOptions:
    """Mutual TLS with services."""

    tls_ca: Annotated[Path | None, option("CA certificate that verifies the other side.", "FILE")] = None
    tls_cert: Annotated[Path | None, option("This side's certificate; see `crossdraft certs`.", "FILE")] = None
    tls_key: Annotated[Path | None, option("The key of --tls-cert.", "FILE")] = None

    def files(self) -> "TlsFiles | None":
        """The three files, or None if none was given; raises UsageError if one is missing or cannot be used."""
        if self.tls_ca is None and self.tls_cert is None and self.tls_key is None:
            return None
        if self.tls_ca is None or self.tls_cert is None or self.tls_key is None:
            raise UsageError("--tls-ca, --tls-cert and --tls-key go together: give all three, or none")
        from crossdraft.rpc.security import TlsFiles

        files = TlsFiles(self.tls_ca, self.tls_cert, self.tls_key)
        with checked_options():
            files.load()
        return files


@dataclass(frozen=True, kw_only=True)
class ServerCertificate:
    """TLS with clients; the options are named as vLLM's and uvicorn's."""

    ssl_certfile: Annotated[
        Path | None, option("Certificate for clients; by default nothing is encrypted.", "FILE")
    ] = None
    ssl_keyfile: Annotated[Path | None, option("The key of --ssl-certfile.", "FILE")] = None

    def files(self) -> "FrontFiles | None":
        """Both files, or None if none was given; raises UsageError if one is missing or cannot be used."""
        if self.ssl_certfile is None and self.ssl_keyfile is None:
            return None
        if self.ssl_certfile is None or self.ssl_keyfile is None:
            raise UsageError("--ssl-certfile and --ssl-keyfile go together: give both, or neither")
        from crossdraft.rpc.security import FrontFiles

        files = FrontFiles(self.ssl_certfile, self.ssl_keyfile)
        with checked_options():
            files.load()
        return files


@dataclass(frozen=True, kw_only=True)
class LogOptions:
    """What a server logs."""

    log_format: Annotated[LogFormat, option("Format of the log on standard error; json is one object a line.")] = (
        LogFormat.PLAIN
    )
    log_level: Annotated[LogLevel, option("Lowest level that is logged.")] = LogLevel.INFO


@dataclass(frozen=True, kw_only=True)
class ModelChoice:
    """Which model a service runs, and with what."""

    model: Annotated[str, option("A folder, a hub id, or bundled:NAME.")]
    dtype: Annotated[str, option("auto, float32, bfloat16 or float16.")] = "auto"
    device: Annotated[str, option("A torch device, such as cuda:0.")] = "cpu"
    cache_mib: Annotated[
        int, option("Size of the KV cache in MiB, allocated at start.", envvar="CROSSDRAFT_CACHE_MIB", show_envvar=True)
    ] = 512
    enable_prefix_caching: Annotated[
        bool,
        option(
            "Reuse the KV cache of a session for another one that begins with the same text.",
            flag="--enable-prefix-caching/--no-enable-prefix-caching",
        ),
    ] = True
    enforce_eager: Annotated[bool, option("Do not use CUDA graphs.", flag="--enforce-eager")] = False
    max_model_len: Annotated[int | None, option("Max tokens of a session; by default the model's context length.")] = (
        None
    )
    threads: Annotated[int | None, option("Threads of torch; by default torch decides.")] = None
    trust_remote_code: Annotated[
        bool, option("Run Python code that comes with the model.", flag="--trust-remote-code")
    ] = False


@dataclass(frozen=True, kw_only=True)
class DrafterOptions:
    """What only drafters with a model have."""

    vocab_keep: Annotated[int | None, option("Keep only the N most frequent tokens in the LM head.", "N")] = None
    frequencies: Annotated[Path | None, option("For --vocab-keep: written by `crossdraft frequencies`.", "FILE")] = None
    affinity: Annotated[Path | None, option("For the method rdk: written by `crossdraft affinity`.", "FILE")] = None
    logit_noise: Annotated[float, option("For benchmarks: standard deviation of noise on the logits.", "SIGMA")] = 0.0


@dataclass(frozen=True, kw_only=True)
class ServiceOptions:
    """What all gRPC services of a target or drafter have."""

    host: Host = "127.0.0.1"
    port: Port = 0
    max_message_mib: Annotated[int, option("Max size of a message, in MiB.")] = 32
    grace_seconds: Annotated[float, option("Seconds that open sessions may go on after SIGTERM.")] = 10.0
    pace: Annotated[str | None, option("For benchmarks: a step of n tokens takes at least A + B n ms.", "A,B")] = None
    tls: TlsOptions
    max_sessions: Annotated[int, option("Max open sessions; further sessions are refused.")] = 1024
    max_sessions_per_peer: Annotated[
        int | None,
        option("Max open sessions per client certificate, or per address without TLS; by default --max-sessions."),
    ] = None
    idle_seconds: Annotated[float, option("End a session after this many seconds without a message.")] = 600.0
    metrics_port: MetricsPort = None
    log: LogOptions
    until_stdin_ends: UntilStdinEnds = False


@dataclass(frozen=True, kw_only=True)
class ApiOptions:
    """What the HTTP and the gRPC API have in common: what they generate with, for whom, and how much."""

    target: Annotated[
        list[str], option("Targets, all of the same model; comma-separated or repeated.", "HOST:PORT,...")
    ]
    model: Annotated[str, option("Name of the model in the API, like vLLM's --served-model-name.", "NAME")]
    drafter: Annotated[
        list[str] | None,
        option(
            "A name for drafters of one model, and their addresses; repeatable. The first is the default.",
            "NAME=HOST:PORT,...",
        ),
    ] = None
    untrusted_drafter: Annotated[
        list[str] | None,
        option("Use this drafter only with methods whose output no drafter can change; repeatable.", "NAME"),
    ] = None
    host: Host = "127.0.0.1"
    api_keys: Annotated[
        Path | None, option("A name and an API key on each line; by default no key is needed.", "FILE")
    ] = None
    max_outputs: Annotated[
        int, option("Max outputs at once; further requests are refused (HTTP 429, gRPC RESOURCE_EXHAUSTED).")
    ] = 64
    rate: Annotated[
        float | None, option("Max requests per minute of each API key, or of each address without keys.")
    ] = None
    burst: Annotated[int, option("Requests within --rate that may come at once.")] = 10
    stalled_seconds: Annotated[float, option("Abort an output whose client has not read for this many seconds.")] = 60.0
    grace_seconds: Annotated[float, option("Seconds that open requests may go on after SIGTERM.")] = 30.0
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
        str | None, option("Targets, all of the same model; by default a bundled one is started.", "HOST:PORT,...")
    ] = None
    drafter: Annotated[
        str | None,
        option("Drafters, or none to decode without one; by default a bundled one is started.", "HOST:PORT,..."),
    ] = None
    untrusted_drafter: Annotated[
        bool, option("Use only methods whose output no drafter can change.", flag="--untrusted-drafter")
    ] = False
    server: Annotated[
        str | None,
        option("Generate on a `crossdraft serve grpc` server; --drafter is then a name it knows.", "HOST:PORT"),
    ] = None
    model: Annotated[str | None, option("Model of the --server; by default its only one.", "NAME")] = None
    api_key: ApiKey = ""
    tls: TlsOptions = TlsOptions()


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """What is generated, and how; the fields are those of `types.request.GenerationRequest`."""

    method: Annotated[
        str | None, option(f"{', '.join(METHODS)}; by default the best for the models and the temperature.")
    ] = None
    num_speculative_tokens: Annotated[
        int,
        typer.Option(
            "--num-speculative-tokens", "-k", help="Draft tokens in a round, if the drafter works in lock-step."
        ),
    ] = 5
    max_tokens: MaxTokens = 128
    temperature: Temperature = 1.0
    seed: Annotated[int | None, option("Random seed; makes the output repeatable.")] = None
    top_k: Annotated[int, option("Sample from this many most probable tokens; 0 is all.")] = 0
    top_p: Annotated[float, option("Sample from the most probable tokens with this total probability; 1 is all.")] = 1.0
    min_p: Annotated[float, option("Min probability of a token, relative to the most probable one; 0 is none.")] = 0.0
    repetition_penalty: Annotated[float, option("As in transformers; 1 is none.")] = 1.0
    presence_penalty: Annotated[float, option("As in vLLM; 0 is none.")] = 0.0
    logit_bias: Annotated[list[str] | None, option("Added to the logit of a token; repeatable.", "ID:BIAS")] = None
    stop: Annotated[list[str] | None, option("End the output before this text; repeatable.", "TEXT")] = None
    ignore_eos: Annotated[bool, option("Go on after the end-of-sequence token.", flag="--ignore-eos")] = False
    drafter_temperature: Annotated[float | None, option("Temperature of the drafter; by default the target's.")] = None
    allow_inexact: Annotated[
        bool, option("Allow methods whose output does not follow the target's distribution.", flag="--allow-inexact")
    ] = False
    audit: Annotated[
        bool, option("Check that the drafter's tokens are drawn from the distributions that it sends.", flag="--audit")
    ] = False
    overlap: Annotated[
        Overlaps, option("Draft on while the target verifies; off is lock-step, rounds of -k draft tokens.")
    ] = Overlaps.AUTO
    max_draft_tokens: Annotated[
        int | None, typer.Option("--max-draft-tokens", "--window", help="Max draft tokens ahead of what is verified.")
    ] = None
    min_draft_tokens: Annotated[
        int | None, typer.Option("--min-draft-tokens", "--wait", help="Draft tokens that a target pass waits for.")
    ] = None
    branches: Annotated[
        int | None, option("Draft tokens in each continuation prepared for a rejection; 0 prepares none.")
    ] = None
    branch_width: Annotated[int | None, option("Prepared continuations for each draft token.")] = None
    paths: Annotated[int, option("Max paths of a token tree in one pass; 1 is a chain.")] = 2
    speculation: Annotated[
        bool,
        option(
            "Speculation parallelism: with two targets, start a pass before the previous one has returned.",
            flag="--speculation",
        ),
    ] = False
    explain: Annotated[bool, option("Show how far the controller decided to draft, and why.", flag="--explain")] = False
    record: Annotated[
        Path | None,
        option("Record the output (a flight record), for `crossdraft replay` and `crossdraft timeline`.", "FILE"),
    ] = None


class Uses(StrEnum):
    """What certificates are good for; the values are those of `rpc.authority.Purpose`."""

    SERVICE = "service"
    ORCHESTRATOR = "orchestrator"
    BOTH = "both"


@dataclass(frozen=True, kw_only=True)
class CertsOptions:
    """Which certificates are made, and where."""

    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Keep it private: the CA's key is in it.")]
    host: Annotated[
        list[str] | None,
        option("A host: its names and addresses, comma-separated. Repeat it for more hosts.", "NAME,..."),
    ] = None
    use: Annotated[
        Uses | None, option("Whether the host serves, connects to services, or both; untrusted drafters only serve.")
    ] = None
    days: Annotated[int, option("How many days the certificates are valid.")] = 365
    renew: Annotated[
        bool, option("Replace certificates and keys: of all hosts, or of each --host.", flag="--renew")
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

    kind: Annotated[Kinds, option("How the matrix is made; docs/rdk.md compares the kinds.")] = Kinds.ALIGNED
    neighbours: Annotated[int | None, option("Max target tokens of each draft token; by default 64.", min=1)] = None
    keep: Annotated[float | None, option("Share of its probability that each shared token keeps; by default 0.")] = None
    window: Annotated[int | None, option("For co-occurrence: target tokens in a window; by default 8.", min=2)] = None
    temperature: Annotated[
        float | None, option("For co-occurrence: temperature of the softmax; by default 0.0001.")
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

    url: Annotated[str, option("An HTTP server to test, such as http://127.0.0.1:8000.")] = ""
    server: Annotated[str, option("A gRPC server to test.", "HOST:PORT")] = ""
    target: Annotated[str, option("Targets, to test without a server: this process generates.", "HOST:PORT,...")] = ""
    drafter: Annotated[str, option("Drafters, for --target.", "HOST:PORT,...")] = ""
    api_key: ApiKey = ""
    tls: TlsOptions = TlsOptions()


@dataclass(frozen=True, kw_only=True)
class StartedServices:
    """What a load test starts if it is given no address."""

    delay_ms: Annotated[
        str | None, option("Emulate a network with this one-way delay; several are tested in turn.", "MS,...")
    ] = None
    far: Annotated[list[Far], option("Which service has the delay of --delay-ms; repeatable.")] = field(
        default_factory=lambda: [Far.DRAFTER]
    )
    over: Annotated[list[Over], option("Which API of the started server is tested; repeatable.")] = field(
        default_factory=lambda: [Over.HTTP]
    )
    compare: Annotated[bool, option("Compare with generation in this process, without a server.", flag="--compare")] = (
        False
    )
    target_model: Annotated[str, option("Target to start: a folder, a hub id, or bundled:NAME.")] = ModelNames.target
    drafter_model: Annotated[str, option("Drafter to start: a folder, a hub id, or bundled:NAME.")] = ModelNames.drafter
    pace_target: Annotated[
        str | None, option("A pass of the target over n tokens takes at least A + B n ms.", "A,B")
    ] = None
    pace_drafter: Annotated[
        str | None, option("A step of the drafter over n tokens takes at least A + B n ms.", "A,B")
    ] = None


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """When a load test sends how many requests."""

    rate: Annotated[float | None, option("Requests per second, at random (Poisson) times: an open-loop load.")] = None
    clients: Annotated[
        int | None,
        option("Clients that each wait for a reply before the next request: a closed loop, by default of 2."),
    ] = None
    max_concurrency: Annotated[
        int | None, option("With --rate: max requests at once; further ones wait, which counts in their latency.")
    ] = None
    most_at_once: Annotated[int | None, typer.Option(hidden=True)] = None  # the old name of --max-concurrency
    requests: Annotated[int, option("Requests for each API and delay.")] = 24
    warm_up: Annotated[int, option("Requests before the measured ones, as warm-up.")] = 2
    repeat: Annotated[int, option("Repetitions of all requests, alternating between the APIs.")] = 1
    timeout: Annotated[float, option("Seconds after which a request counts as failed.")] = 120.0
    seed: Annotated[int, option("Random seed of arrival times, and of outputs if --method takes one.")] = 0


@dataclass(frozen=True, kw_only=True)
class LoadRequests:
    """What a load test asks for."""

    prompts: Annotated[
        Path | None, option("JSON lines with `text`, `turns` or `messages`; by default 36 bundled prompts.", "FILE")
    ] = None
    max_tokens: MaxTokens = 64
    temperature: Temperature = 0.0
    method: Annotated[str | None, option("By default the server chooses.")] = None
    model: Annotated[str, option("Model of the server; by default its only one.", "NAME")] = ""
    use_drafter: Annotated[str | None, option("Drafter of the server, or none; by default its first one.", "NAME")] = (
        None
    )
    ignore_eos: Annotated[
        bool, option("Go on after the end-of-sequence token, up to --max-tokens.", flag="--ignore-eos")
    ] = False
    trace: Annotated[
        bool,
        option(
            "Request the statistics of each output; only crossdraft's servers send them.", flag="--trace/--no-trace"
        ),
    ] = True
    ttft_ms: Annotated[float | None, option("For goodput: max time to the first token, in milliseconds.")] = None
    tpot_ms: Annotated[float | None, option("For goodput: max time per token after the first, in milliseconds.")] = None


@dataclass(frozen=True, kw_only=True)
class LoadFiles:
    """What a load test writes besides its tables."""

    json_file: Annotated[Path | None, option("Write the report as JSON.", "FILE", flag="--json")] = None
    csv_file: Annotated[Path | None, option("Write a line per request.", "FILE", flag="--csv")] = None
    picture: Annotated[Path | None, option("Write a plot.", "FILE", flag="--plot")] = None

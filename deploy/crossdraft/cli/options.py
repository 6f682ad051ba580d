"""The options of commands, in groups: dataclasses whose fields `console.options.command` shows as options."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from crossdraft.console.options import COMMAS, option
from crossdraft.console.processes import STARTED, EngineOptions
from crossdraft.console.running import METHODS, UsageError, check_output, checked_options, write_text
from crossdraft.serving.logs import LogFormat, LogLevel

if TYPE_CHECKING:
    from crossdraft.rpc.security import FrontFiles, TlsFiles

BY_DEFAULT = "by default the model's, or"
NO_DRAFTER = "none"  # in place of a drafter's address or name


Host = Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 listens on all interfaces.")]
Port = Annotated[
    int, typer.Option(help="Port to listen on; 0 picks a free one: the JSON line printed at start has it.")
]
MetricsPort = Annotated[
    int | None,
    typer.Option(metavar="PORT", help="Serve Prometheus metrics over plain HTTP on this port; 0 picks a free one."),
]
TargetWaitSeconds = Annotated[
    float, typer.Option(help="Fail an output that has been without any target for this many seconds.")
]
ReplyWaitSeconds = Annotated[
    float,
    typer.Option(
        help="Take a target or drafter for lost that owes a reply and has given no sign of life for this many seconds. "
        "Each step that it makes is one: a long prompt may take longer."
    ),
]
UntilStdinEnds = Annotated[bool, typer.Option("--until-stdin-ends", hidden=True)]
MaxTokens = Annotated[int, typer.Option(help="Max tokens to generate.")]
Temperature = Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy.")]
ApiKey = Annotated[
    str, typer.Option(metavar="KEY", help="API key of the server.", envvar="CROSSDRAFT_API_KEY", show_envvar=True)
]


def named(record: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Those values whose names are fields of a dataclass."""
    return {one.name: given[one.name] for one in fields(record) if one.name in given}


def check_addresses(option: str, given: str) -> None:
    """Raises UsageError unless it is host:port, or several with commas between."""
    for one in given.split(","):
        check_address(option, one.strip())


def check_address(option: str, address: str) -> None:
    """Raises UsageError unless it is host:port."""
    if not address:
        raise UsageError(f"{option} has an empty address: remove the extra comma")
    scheme, separator, _ = address.partition("://")
    if separator:
        raise UsageError(f"{option} must be HOST:PORT, without {scheme}://, got {address!r}")
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise UsageError(f"{option} must be HOST:PORT, such as 127.0.0.1:7001, got {address!r}")


def only_model(given: list[str]) -> str:
    """The value of --model; raises UsageError if it was given more than once."""
    if len(given) > 1:
        raise UsageError(
            f"--model was given {len(given)} times ({', '.join(given)}), and a server has one model: "
            "start one for each, on ports of their own"
        )
    return given[0]


@dataclass(frozen=True, kw_only=True)
class TlsOptions:
    """Mutual TLS with services."""

    tls_ca: Path | None = option(None, "CA certificate that verifies the other side.", metavar="FILE")
    tls_cert: Path | None = option(None, "This side's certificate; see `crossdraft certs`.", metavar="FILE")
    tls_key: Path | None = option(None, "The key of --tls-cert.", metavar="FILE")

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

    ssl_certfile: Path | None = option(
        None, "Certificate for clients; by default nothing is encrypted.", metavar="FILE"
    )
    ssl_keyfile: Path | None = option(None, "The key of --ssl-certfile.", metavar="FILE")

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

    log_format: LogFormat = option(LogFormat.PLAIN, "Format of the log on standard error; json is one object a line.")
    log_level: LogLevel = option(LogLevel.INFO, "Lowest level that is logged.")


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """With what a service runs its model."""

    engine: EngineOptions
    chat_template: Path | None = option(
        None, "Jinja template of chats; by default the model's own. Without one chats are refused.", metavar="FILE"
    )
    lora_modules: list[str] | None = option(
        None, "A LoRA adapter, a folder: it is merged, and the model is called NAME (needs peft).", metavar="NAME=PATH"
    )


@dataclass(frozen=True, kw_only=True)
class ModelChoice:
    """Which model a service runs, and with what."""

    model: Annotated[list[str], typer.Option(help="A folder, a hub id, or bundled:NAME.", metavar="MODEL")]
    settings: ModelSettings
    pace: str | None = option(None, "For benchmarks: a step of n tokens takes at least A + B n ms.", metavar="A,B")

    @property
    def name(self) -> str:
        """The model; raises UsageError if there are several."""
        return only_model(self.model)


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """What only targets have; the first two are named as vLLM's."""

    generation_config: str = option(
        "auto",
        "Sampling settings of requests that leave them out: auto are those of the model's generation_config.json, vllm "
        "none, FOLDER those of another one.",
        metavar="auto|vllm|FOLDER",
    )
    override_generation_config: str = option(
        "{}", 'Settings in place of these, such as {"temperature": 0.5}.', metavar="JSON"
    )
    tensor_parallel_size: int = option(1, "Devices that share the model, with a process for each.", metavar="N", min=1)


@dataclass(frozen=True, kw_only=True)
class DrafterOptions:
    """What only drafters with a model have."""

    vocab_keep: int | None = option(None, "Keep only the N most frequent tokens in the LM head.", metavar="N", min=1)
    frequencies: Path | None = option(None, "For --vocab-keep: written by `crossdraft frequencies`.", metavar="FILE")
    affinity: Path | None = option(None, "For the method rdk: written by `crossdraft affinity`.", metavar="FILE")
    logit_noise: float = option(0.0, "For benchmarks: standard deviation of noise on the logits.", metavar="SIGMA")


@dataclass(frozen=True, kw_only=True)
class ServiceOptions:
    """What all gRPC services of a target or drafter have."""

    host: Host = "127.0.0.1"
    port: Port = 0
    max_message_mib: int = option(
        32, "Max size of a message, in MiB; messages of sessions may have a quarter of it, at least 8 MiB."
    )
    grace_seconds: float = option(10.0, "Seconds that open sessions may go on after SIGTERM.")
    tls: TlsOptions
    max_sessions: int = option(256, "Max open sessions; further sessions are refused.")
    max_sessions_per_peer: int | None = option(
        None, "Max open sessions per client certificate, or per address without TLS; by default --max-sessions."
    )
    idle_seconds: float = option(600.0, "End a session after this many seconds without a message.")
    metrics_port: MetricsPort = None
    log: LogOptions
    until_stdin_ends: UntilStdinEnds = False


@dataclass(frozen=True, kw_only=True)
class OwnModels:
    """Models that run in a command's own process. Engine options are of both, where the drafter has none of its own;
    a chat template, an adapter and what only targets have are the target's."""

    target_model: str | None = option(
        None, "Run this target in this process: a folder, a hub id, or bundled:NAME.", metavar="MODEL"
    )
    drafter_model: str | None = option(
        None, "Run this drafter in this process; it is the default one.", metavar="MODEL"
    )
    target_port: int | None = option(None, "Also serve --target-model to others, as `serve target` does; 0 picks one.")
    drafter_port: int | None = option(None, "Also serve --drafter-model to others, as `serve drafter` does.")
    drafter_device: str | None = option(None, "--device of the drafter.")
    drafter_dtype: str | None = option(None, "--dtype of the drafter.")
    drafter_quantization: str | None = option(None, "--quantization of the drafter, which has none by default.")
    drafter_cache_mib: int | None = option(
        None, "--cache-mib of the drafter; without either both caches of a device hold about as many tokens."
    )
    settings: ModelSettings
    sampling: TargetOptions = TargetOptions()

    def of_drafter(self, engine: EngineOptions) -> ModelSettings:
        """With what the drafter runs, where these are the shared options; the length of a session is the target's."""
        given = {name: getattr(self, f"drafter_{name}") for name in ("device", "dtype", "cache_mib")}
        given = {name: value for name, value in given.items() if value is not None}
        return ModelSettings(
            engine=replace(engine, **given, max_model_len=None, quantization=self.drafter_quantization)
        )


@dataclass(frozen=True, kw_only=True)
class ApiOptions:
    """What the HTTP and the gRPC API have in common: what they generate with, for whom, and how much."""

    own: OwnModels
    target: list[str] = option(
        [], f"Targets that run elsewhere, all of the same model; {COMMAS}.", metavar="HOST:PORT,..."
    )
    model: list[str] = option(
        [], "Name of the model in the API; by default --target-model or the NAME of its adapter.", metavar="NAME"
    )
    drafter: list[str] | None = option(
        None,
        "A name for drafters of one model, and their addresses; repeatable. Of several the fastest is used.",
        metavar="NAME=HOST:PORT,...",
    )
    untrusted_drafter: list[str] | None = option(
        None, f"Use this drafter only with methods whose output no drafter can change; {COMMAS}.", metavar="NAME"
    )
    host: Host = "127.0.0.1"
    served_model_name: list[str] | None = option(
        None, f"A further name of the model in the API; {COMMAS}.", metavar="NAME"
    )
    api_keys: Path | None = option(
        None,
        "File with a name and an API key on each line, of at least 16 characters; by default no key is needed.",
        metavar="FILE",
    )
    api_key: list[str] | None = option(
        None,
        "An API key that clients must send, of at least 16 characters; repeatable. Others on this machine can read the "
        "command line.",
        metavar="KEY",
        envvar="CROSSDRAFT_API_KEY",
        show_envvar=True,
    )
    max_outputs: int = option(
        64, "Max outputs at once; further requests are refused (HTTP 429, gRPC RESOURCE_EXHAUSTED)."
    )
    rate: float | None = option(None, "Max requests per minute of each API key, or of each address without keys.")
    burst: int = option(10, "Requests within --rate that may come at once.")
    stalled_seconds: float = option(60.0, "Abort an output whose client has not read for this many seconds.")
    target_wait_seconds: TargetWaitSeconds = 30.0
    reply_wait_seconds: ReplyWaitSeconds = 30.0
    grace_seconds: float = option(30.0, "Seconds that open requests may go on after SIGTERM.")
    workers: int = option(
        1,
        "Processes that serve the port; one that dies is replaced. --max-outputs, --rate and --burst are divided among "
        "them, and a connection stays with one: a client with one connection gets the share of one worker.",
        min=1,
    )
    worker_of: int = option(0, "This is one of so many workers; 0: it is none.", hidden=True)
    ssl: ServerCertificate
    tls: TlsOptions
    log: LogOptions
    until_stdin_ends: UntilStdinEnds = False

    @property
    def name(self) -> str:
        """Of the model; raises UsageError if there are several, or none."""
        adapters = self.own.settings.lora_modules or ()
        named = self.model or [one.partition("=")[0] for one in adapters] or [self.own.target_model or ""]
        if not named[0]:
            raise UsageError("give --model, the name of the model in the API")
        return only_model(named)


@dataclass(frozen=True, kw_only=True)
class HttpApiOptions:
    """What only the HTTP API has."""

    port: Port = 8000
    grpc_port: int | None = option(
        None, "Also serve the gRPC API (crossdraft.v1.Generation) on this port; 0 picks a free one."
    )
    max_choices: int = option(32, "Max outputs of one request.")
    max_body_mib: float = option(4.0, "Max size of a request, in MiB.")
    max_bodies_mib: float = option(256.0, "Max size of all requests under way, in MiB; small ones are taken anyway.")


@dataclass(frozen=True, kw_only=True)
class ConnectionOptions:
    """Limits of `ConnectionLimits`."""

    max_header_kib: int = option(64, "Max size of a request's headers, in KiB.")
    header_seconds: float = option(20.0, "Close a connection whose request's headers have not come by then.")
    body_seconds: float = option(120.0, "Close a connection whose request's body has not come by then.")
    max_connections_per_address: int = option(
        512, "Max connections of each address; beyond it the one that has been silent for longest is closed."
    )


@dataclass(frozen=True, kw_only=True)
class CorsOptions:
    """Which pages of other servers may use the HTTP API; named as vLLM's options, whose JSON lists are taken, too."""

    allowed_origins: str = option("", "Origins of pages that may use the API, with commas, or *; by default none.")
    allowed_methods: str = option("*", "HTTP methods for --allowed-origins.")
    allowed_headers: str = option("*", "Headers for --allowed-origins.")
    allow_credentials: bool = option(False, "Let --allowed-origins send cookies.", "--allow-credentials")

    @property
    def settings(self) -> dict[str, object]:
        """Arguments of Starlette's middleware; none without an origin. Raises ValueError."""
        names = ("origins", "methods", "headers")
        lists: dict[str, object] = {f"allow_{name}": _listed(getattr(self, f"allowed_{name}")) for name in names}
        return lists | {"allow_credentials": self.allow_credentials} if self.allowed_origins else {}


def _listed(text: str) -> list[str]:
    """Values with commas, or a JSON list, as vLLM has it."""
    return list(map(str, json.loads(text))) if text.startswith("[") else [one.strip() for one in text.split(",")]


@dataclass(frozen=True, kw_only=True)
class WhereToGenerate:
    """Which models, services or server generate."""

    own: OwnModels = OwnModels(settings=ModelSettings(engine=STARTED))
    target: str | None = option(None, "Targets that run elsewhere, all of the same model.", metavar="HOST:PORT,...")
    drafter: str | None = option(None, "Drafters that run elsewhere; none decodes without.", metavar="HOST:PORT,...")
    untrusted_drafter: bool = option(
        False, "Use only methods whose output no drafter can change.", "--untrusted-drafter"
    )
    server: str | None = option(
        None,
        "Generate on a `crossdraft serve grpc` server; --drafter then names one of its drafters.",
        metavar="HOST:PORT",
    )
    model: str | None = option(None, "Model of the --server; by default its only one.", metavar="NAME")
    api_key: ApiKey = ""
    target_wait_seconds: TargetWaitSeconds = 30.0
    reply_wait_seconds: ReplyWaitSeconds = 30.0
    tls: TlsOptions = TlsOptions()


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """What is generated, and how; the fields are those of `types.request.GenerationRequest`."""

    method: str | None = option(None, f"{', '.join(METHODS)}; by default the best for the models and the temperature.")
    num_speculative_tokens: int | None = option(
        None,
        "Draft tokens in a lock-step round (--overlap off), or that a pass waits for (--overlap on); by default 5.",
        "--num-speculative-tokens",
        "-k",
    )
    max_tokens: int | None = option(None, f"Max tokens to generate; {BY_DEFAULT} 128.")
    temperature: float | None = option(None, f"Sampling temperature, 0 is greedy; {BY_DEFAULT} 1.")
    seed: int | None = option(None, "Random seed; makes the output repeatable.")
    top_k: int | None = option(None, f"Sample from this many most probable tokens, 0 is all; {BY_DEFAULT} 0.")
    top_p: float | None = option(None, f"Sample from the most probable tokens of this total mass; {BY_DEFAULT} 1.")
    min_p: float | None = option(None, f"Min probability of a token, as a share of the largest; {BY_DEFAULT} 0.")
    repetition_penalty: float | None = option(None, f"As in transformers, 1 is none; {BY_DEFAULT} 1.")
    presence_penalty: float = option(0.0, "As in vLLM; 0 is none.")
    frequency_penalty: float = option(0.0, "As in vLLM; 0 is none.")
    min_tokens: int = option(0, "Tokens before which the output may not end.")
    bad_words: list[str] | None = option(
        None, "A text that the output must not contain; repeatable.", "--bad-word", metavar="TEXT"
    )
    logit_bias: list[str] | None = option(None, f"Added to the logit of a token; {COMMAS}.", metavar="ID:BIAS")
    stop: list[str] | None = option(None, "End the output before this text; repeatable.", metavar="TEXT")
    stop_token_ids: list[int] | None = option(
        None, f"End the output after this token; {COMMAS}.", "--stop-token-id", metavar="ID"
    )
    ignore_eos: bool = option(False, "Go on after the end-of-sequence token.", "--ignore-eos")
    drafter_temperature: float | None = option(None, "Temperature of the drafter; by default the target's.")
    allow_inexact: bool = option(
        False, "Allow methods whose output does not follow the target's distribution.", "--allow-inexact"
    )
    audit: bool = option(
        False, "Check that the drafter's tokens are drawn from the distributions that it sends.", "--audit"
    )
    overlap: Literal["auto", "on", "off"] = option(
        "auto", "Draft on while the target verifies; off is lock-step, rounds of -k draft tokens."
    )
    max_draft_tokens: int | None = option(
        None, "Max draft tokens ahead of what is verified.", "--max-draft-tokens", "--window"
    )
    min_draft_tokens: int | None = option(
        None, "Draft tokens that a target pass waits for.", "--min-draft-tokens", "--wait"
    )
    branches: int | None = option(None, "Draft tokens in each continuation prepared for a rejection; 0 prepares none.")
    branch_width: int | None = option(None, "Prepared continuations for each draft token.")
    tree_nodes: int | None = option(
        None, "Nodes of a draft tree of depth -k (slem, seeded); with --overlap auto, where it pays.", min=0, max=63
    )
    paths: int = option(2, "Max paths of a token tree in one pass; 1 is a chain.")
    speculation: bool = option(
        False,
        "Speculation parallelism: with two targets, start a pass before the previous one has returned.",
        "--speculation",
    )
    explain: bool = option(False, "Show how far the controller decided to draft, and why.", "--explain")
    record: Path | None = option(
        None, "Record the output (a flight record), for `crossdraft replay` and `crossdraft timeline`.", metavar="FILE"
    )


@dataclass(frozen=True, kw_only=True)
class CertsOptions:
    """Which certificates are made, and where."""

    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Keep it private: the CA's key is in it.")]
    host: list[str] | None = option(
        None, "A host: its names and addresses, comma-separated. Repeat it for more hosts.", metavar="NAME,..."
    )
    use: Literal["service", "orchestrator", "both"] | None = option(
        None,
        "What a host may do: serve, connect to services, or (by default) both. Untrusted drafters need only service.",
    )
    days: int = option(365, "How many days the certificates are valid.", min=1)
    renew: bool = option(False, "Replace certificates and keys: of all hosts, or of each --host.", "--renew")


@dataclass(frozen=True, kw_only=True)
class AffinityOptions:
    """How an affinity matrix is made; None is what was not given, as not every kind takes every option."""

    kind: Literal["aligned", "co-occurrence"] = option(
        "aligned", "How the matrix is made; docs/rdk.md compares the kinds."
    )
    neighbours: int | None = option(None, "Max target tokens of each draft token; by default 64.", min=1)
    window: int | None = option(None, "For co-occurrence: target tokens in a window; by default 8.", min=2)
    temperature: float | None = option(None, "For co-occurrence: temperature of the softmax; by default 0.0001.")


@dataclass(frozen=True, kw_only=True)
class AuditedEndpoint:
    """Whom an audit asks."""

    url: Annotated[str, typer.Option(help="The server to audit, such as http://127.0.0.1:8000.")]
    api_key: ApiKey = ""
    served_model_name: str = option("", "Model of the server; by default the first that it lists.", metavar="NAME")
    api: Literal["auto", "completions", "chat"] = option(
        "auto", "Which API to use; auto: completions, or chat where only that reports log-probabilities."
    )
    extra_body: str = option("{}", "Further fields of every request, as a JSON object.", metavar="JSON")


@dataclass(frozen=True, kw_only=True)
class AuditReference:
    """With what an audit compares greedy texts."""

    reference_url: str = option("", "A server of the same model without speculation.", metavar="URL")
    reference_api_key: str = option("", "API key of --reference-url.", metavar="KEY")
    reference_body: str = option("{}", "As --extra-body, for the reference.", metavar="JSON")
    model: str = option("", "Serve this model here as the reference: a folder, a hub id, or bundled:NAME.")
    engine: EngineOptions = STARTED


@dataclass(frozen=True, kw_only=True)
class AuditOptions:
    """What an audit asks; the first fields are those of `audit.checks.AuditPlan`."""

    prompts: Path | None = option(
        None, "JSON lines with `text`, `turns` or `messages`; by default 42 bundled prompts.", metavar="FILE"
    )
    greedy: int = option(12, "Prompts that are completed greedily.", min=0)
    greedy_tokens: int = option(48, "Max tokens of greedy texts, and of texts with a seed.", min=1)
    seeds: int = option(4, "Prompts that are completed twice with the same seed.", min=0)
    sampled: int = option(3, "Prompts whose distributions are tested.", min=0)
    samples: int = option(1000, "Samples of each of these prompts.", min=0)
    tokens: int = option(4, "Max tokens of a sample.", min=1)
    temperature: float = option(1.0, "Sampling temperature, above 0.")
    tolerance: float = option(0.2, "Difference of log-probabilities, in nats, that counts as a numerical tie.")
    level: float = option(0.001, "Probability of a false alarm in all tests of distributions together.")
    choices: int = option(16, "Samples of one request (`n`), if the server allows several.", min=1)
    requests_per_second: float = option(0.0, "Max requests per second; 0 is no limit.", min=0)
    concurrency: int = option(4, "Max requests at once.", min=1)
    timeout: float = option(120.0, "Seconds to wait for a reply.", min=0.001)


@dataclass(frozen=True, kw_only=True)
class ReportFile:
    """What a load test or an audit writes besides its tables."""

    json_file: Path | None = option(None, "Write the report as JSON.", "--json", metavar="FILE")

    def check(self) -> None:
        """Raises UsageError if it cannot be written."""
        if self.json_file is not None:
            check_output(self.json_file)

    def write(self, report: Mapping[str, Any]) -> None:
        """Raises CommandFailed."""
        if self.json_file is not None:
            write_text(self.json_file, json.dumps(report, indent=1) + "\n")

"""What the HTTP and the gRPC API have: for whom they generate, and how much."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from crossdraft.config.engine import OwnModels
from crossdraft.config.fields import COMMAS, Checked, option
from crossdraft.config.service import MAX_MIB, METRICS_PORT, PORT, ServerCertificate, ServerOptions, TlsOptions, Waits


@dataclass(frozen=True, kw_only=True)
class RateOptions:
    """How much a client may ask for."""

    rate: float | None = option(None, "Max requests per minute of each API key; without keys, address.", above=0)
    burst: int = option(10, "Requests within --rate that may come at once.", min=1)
    stalled_seconds: float = option(60.0, "Seconds without a read that abort an output.", above=0, max=3600)


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """How much is generated at once."""

    max_outputs: int = option(64, "Max outputs at once; further requests are refused (429, RESOURCE_EXHAUSTED).", min=1)


@dataclass(frozen=True, kw_only=True)
class KeyOptions:
    """For whom."""

    api_keys: Path | None = option(
        None, "File with a name and an API key, of at least 16 characters, on each line.", metavar="FILE"
    )


@dataclass(frozen=True, kw_only=True)
class ApiOptions(
    OwnModels, ServerOptions, KeyOptions, OutputOptions, RateOptions, Waits, ServerCertificate, TlsOptions
):
    """What both have."""

    target: list[str] = option([], f"Targets that run elsewhere, of one model; {COMMAS}.", metavar="HOST:PORT,...")
    model: list[str] = option([], "The model's name; by default --target-model, or its adapter's.", metavar="NAME")
    drafter: list[str] | None = option(
        None,
        "Drafters of one model, by a name, or none; repeatable: the fastest is used.",
        metavar="NAME=HOST:PORT,...",
    )
    untrusted_drafter: list[str] | None = option(
        None, f"Use this drafter only with methods whose output no drafter can change; {COMMAS}.", metavar="NAME"
    )
    served_model_name: list[str] | None = option(None, f"A further name of the model; {COMMAS}.", metavar="NAME")
    api_key: list[str] | None = option(
        None, "A key, of at least 16 characters, that clients must send; repeatable.", metavar="KEY", env=True
    )
    workers: int = option(
        1,
        "Processes that serve the port, beside the one of --target-model; one that dies is replaced. --max-outputs, "
        "--rate and --burst are divided among them, and a connection stays with one: a client with one connection gets "
        "the share of one worker.",
        min=1,
    )
    worker_of: int = option(0, "This is one of so many workers; 0: it is none.", hidden=True)
    models_at: list[str] | None = option(
        None, f"Where the models of the process that has started a worker are, as ROLE=ADDRESS; {COMMAS}.", hidden=True
    )


@dataclass(frozen=True, kw_only=True)
class ConnectionOptions(Checked):
    """What clients of the HTTP API may send, and how slowly."""

    max_header_kib: int = option(64, "Max size of a request's headers, in KiB.", min=1, max=1024)
    header_seconds: float = option(20.0, "Seconds for the headers of a request to come.", above=0, max=3600)
    body_seconds: float = option(120.0, "Seconds for the body of a request to come.", above=0, max=3600)
    max_connections_per_address: int = option(
        512, "Max connections of each address; beyond it the one that has been silent for longest is closed.", min=1
    )


# As vLLM's parsers are called, and in which form a model calls tools, or how it marks its reasoning: `text.answers`.
ToolCallParser = StrEnum(
    "ToolCallParser", ("auto", "hermes", "mistral", "granite", "jamba", "phi4_mini_json", "llama3_json", "json")
)
ReasoningParser = StrEnum("ReasoningParser", ("none", "deepseek_r1", "qwen3", "glm45", "step3", "mistral"))
SpeculativeMetrics = StrEnum("SpeculativeMetrics", ("none", "summary"))


@dataclass(frozen=True, kw_only=True)
class HttpSettings(ConnectionOptions):
    """How answers are read, where the HTTP API listens, how large a request may be, and which pages of other servers
    may use it: named as vLLM's options, whose JSON lists are taken, too."""

    tool_call_parser: ToolCallParser = option(
        ToolCallParser.auto, "In which form models call tools; auto: what the chat template writes."
    )
    reasoning_parser: ReasoningParser = option(ReasoningParser.none, "How models mark their reasoning.")
    per_request_spec_decode_metrics: SpeculativeMetrics = option(
        SpeculativeMetrics.none, "Add `metrics.speculative_decoding` to replies of one output, as vLLM does."
    )
    port: int = option(8000, PORT, min=0, max=65535)
    max_choices: int = option(32, "Max outputs of one request.", min=1)
    max_body_mib: float = option(4.0, "Max size of a request, in MiB.", above=0, max=MAX_MIB)
    max_bodies_mib: float = option(256.0, "Max size of all requests under way, in MiB, but for small ones.", above=0)
    allowed_origins: tuple[str, ...] = option((), f"Origins of pages that may use the API, or *, {COMMAS}.")
    allowed_methods: tuple[str, ...] = option(("*",), f"HTTP methods for --allowed-origins, {COMMAS}.")
    allowed_headers: tuple[str, ...] = option(("*",), f"Headers for --allowed-origins, {COMMAS}.")
    allow_credentials: bool = option(False, "Let --allowed-origins send cookies.")

    @property
    def cors(self) -> dict[str, Any]:
        """Arguments of Starlette's middleware; none without an origin."""
        names = ("origins", "methods", "headers")
        lists: dict[str, Any] = {f"allow_{name}": list(getattr(self, f"allowed_{name}")) for name in names}
        return lists | {"allow_credentials": self.allow_credentials} if self.allowed_origins else {}


@dataclass(frozen=True, kw_only=True)
class GrpcSettings:
    """Where the gRPC API listens, and how large a request of it may be."""

    port: int = option(9000, PORT, min=0, max=65535)
    max_message_mib: int = option(4, "Max size of a request, in MiB.", min=1, max=MAX_MIB)


@dataclass(frozen=True, kw_only=True)
class ServedGrpc(GrpcSettings, ApiOptions):
    """The gRPC API by itself."""

    metrics_port: int | None = option(None, METRICS_PORT, metavar="PORT", min=0, max=65535)


@dataclass(frozen=True, kw_only=True)
class ServedHttp(HttpSettings, ApiOptions):
    """The HTTP API."""

    grpc_port: int | None = option(
        None, "Also serve the gRPC API (crossdraft.v1.Generation) on this port; 0 picks a free one.", min=0, max=65535
    )

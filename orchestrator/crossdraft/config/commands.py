"""What single commands have besides: where to generate, certificates, matrices, audits."""

from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Literal

from crossdraft.config.engine import STARTED, EngineOptions, OwnModels
from crossdraft.config.fields import COMMAS, option
from crossdraft.config.request import Output, Sampling, Speculation, Watching
from crossdraft.config.service import TlsOptions, Waits

# The models that a command starts if it is given no address, as `--model` has them.
DEFAULT_TARGET, DEFAULT_DRAFTER = "bundled:target", "bundled:drafter-b"


@dataclass(frozen=True, kw_only=True)
class ServerKey:
    """How a client shows who it is."""

    api_key: str = option("", "API key of the server.", metavar="KEY", env=True)


@dataclass(frozen=True, kw_only=True)
class WhereToGenerate(TlsOptions, Waits, ServerKey, OwnModels):
    """Which models, services or server generate."""

    target: list[str] | None = option(
        None, f"Targets that run elsewhere, all of the same model; {COMMAS}.", metavar="HOST:PORT,..."
    )
    drafter: list[str] | None = option(
        None, f"Drafters that run elsewhere; {COMMAS}; none decodes without.", metavar="HOST:PORT,..."
    )
    untrusted_drafter: bool = option(False, "Use only methods whose output no drafter can change.")
    server: str | None = option(
        None, "Generate on a `crossdraft serve grpc` server; --drafter is a name there.", metavar="HOST:PORT"
    )
    model: str | None = option(None, "Model of the --server; by default its only one.", metavar="NAME")


@dataclass(frozen=True, kw_only=True)
class RequestOptions(Watching, Speculation, Output, Sampling):
    """What is generated, and how; lists as the command line has them."""

    bad_words: list[str] | None = option(None, "A text not to be written; repeatable.", "--bad-word", metavar="TEXT")
    logit_bias: list[str] | None = option(None, f"Added to the logit of a token; {COMMAS}.", metavar="ID:BIAS")
    stop: list[str] | None = option(None, "End the output before this text; repeatable.", metavar="TEXT")
    stop_token_ids: list[int] | None = option(None, f"End after this token; {COMMAS}.", "--stop-token-id", metavar="ID")


@dataclass(frozen=True, kw_only=True)
class CertsOptions:
    """Which certificates are made."""

    host: list[str] | None = option(
        None, "A host: its names and addresses, comma-separated. Repeat it for more hosts.", metavar="NAME,..."
    )
    use: Literal["service", "orchestrator", "both"] | None = option(
        None, "What a host may do: serve, connect to services, or by default both. Untrusted drafters only serve."
    )
    days: int = option(365, "How many days the certificates are valid.", min=1, max=36_500)
    renew: bool = option(False, "Replace certificates and keys: of all hosts, or of each --host.")


@dataclass(frozen=True, kw_only=True)
class AffinityOptions:
    """How an affinity matrix is made; None is what was not given, as not every kind takes every option."""

    kind: Literal["aligned", "co-occurrence"] = option("aligned", "How it is made: see docs/rdk.md.")
    neighbours: int | None = option(None, "Max target tokens of each draft token; by default 64.", min=1)
    window: int | None = option(None, "For co-occurrence: target tokens in a window; by default 8.", min=2)
    temperature: float | None = option(None, "For co-occurrence: of the softmax; by default 0.0001.", above=0)


@dataclass(frozen=True, kw_only=True)
class AuditedEndpoint(ServerKey):
    """Whom an audit asks."""

    url: str = option(MISSING, "The server to audit, such as http://127.0.0.1:8000.")
    served_model_name: str = option("", "Model of the server; by default the first that it lists.", metavar="NAME")
    api: Literal["auto", "completions", "chat"] = option("auto", "auto: chat where only it has log-probabilities.")
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
class AuditSizes:
    """How much an audit asks, and what counts as a fault."""

    greedy: int = option(12, "Prompts that are completed greedily.", min=0)
    greedy_tokens: int = option(48, "Max tokens of greedy texts.", min=1)
    sampled: int = option(3, "Prompts whose distributions are tested.", min=0)
    samples: int = option(1000, "Samples of each of these prompts.", min=0)
    tokens: int = option(4, "Max tokens of a sample.", min=1)
    tolerance: float = option(0.2, "Difference of log-probabilities, in nats, that counts as a numerical tie.", min=0)
    level: float = option(0.001, "Probability of a false alarm in all tests of distributions together.")


@dataclass(frozen=True, kw_only=True)
class AuditOptions(AuditSizes):
    """What an audit asks."""

    prompts: Path | None = option(None, "JSON lines (`text`, `turns`, `messages`); by default bundled.", metavar="FILE")
    choices: int = option(16, "Samples of one request (`n`), if the server allows several.", min=1)
    concurrency: int = option(4, "Max requests at once.", min=1)
    timeout: float = option(120.0, "Seconds to wait for a reply.", min=0.001)
    json_file: Path | None = option(None, "Write the report as JSON.", "--json", metavar="FILE")

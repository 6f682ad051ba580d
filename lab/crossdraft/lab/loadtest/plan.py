"""Options of the load test."""

from dataclasses import dataclass, field
from pathlib import Path

from crossdraft.config.commands import ModelNames, ServerKey
from crossdraft.config.engine import STARTED, EngineOptions
from crossdraft.config.fields import COMMAS, option

PACE = "A {} over n tokens takes at least A + B n ms."
TO_START = "{} to start: a folder, a hub id, or bundled:NAME."


@dataclass(frozen=True, kw_only=True)
class StartedServices:
    """What is started where no URL is given."""

    delay_ms: tuple[float, ...] = option(
        (), f"One-way delay to the drafter, emulated; {COMMAS}: in turn.", min=0, max=60_000, metavar="MS"
    )
    target_model: str = option(ModelNames.target, TO_START.format("Target"))
    drafter_model: str = option(ModelNames.drafter, TO_START.format("Drafter"))
    pace_target: str | None = option(None, PACE.format("pass of the target"), metavar="A,B")
    pace_drafter: str | None = option(None, PACE.format("step of the drafter"), metavar="A,B")
    engine: EngineOptions = STARTED


@dataclass(frozen=True, kw_only=True)
class LoadPlan(ServerKey):
    """Measure latency and throughput under load. Also measures acceptance, and where time goes between services.

    Without --url it starts services and an HTTP server, and ends them afterwards.
    """

    url: str = option("", "A server of crossdraft's to test, such as http://127.0.0.1:8000.")
    services: StartedServices = field(default_factory=StartedServices)
    clients: int = option(2, "Clients that each wait for a reply before the next request.", min=1)
    requests: int = option(24, "Requests for each delay.", min=1)
    warm_up: int = option(2, "Requests before the measured ones, as warm-up.", min=0)
    timeout: float = option(120.0, "Seconds after which a request counts as failed.", min=0.001, max=86_400)
    seed: int = option(0, "Random seed of outputs, if --method takes one.", min=0, max=2**32 - 1)
    prompts: Path | None = option(
        None, "JSON lines with `text`, `turns` or `messages`; by default 36 bundled prompts.", metavar="FILE"
    )
    chat: bool = option(
        False, "Send them to /v1/chat/completions. A model with a chat template may end a text that is no chat at once."
    )
    max_tokens: int = option(64, "Max tokens to generate.", min=1)
    temperature: float = option(0.0, "Sampling temperature; 0 is greedy.", min=0)
    method: str | None = option(None, "By default the server chooses.")
    model: str = option("", "Model of the server; by default its only one.", metavar="NAME")
    use_drafter: str | None = option(None, "Drafter of the server, or none; by default the fastest.", metavar="NAME")
    ignore_eos: bool = option(False, "Go on after the end-of-sequence token, up to --max-tokens.")
    num_speculative_tokens: int | None = option(
        None,
        "Have the server draft in lock-step rounds of so many tokens; by default it decides.",
        "--num-speculative-tokens",
        "-k",
        min=1,
        max=64,
    )

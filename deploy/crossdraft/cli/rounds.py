"""`crossdraft bench round`: what a round costs outside the two models, on loopback, one generation at a time."""

from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from crossdraft.cli.benching import Setting, Workload, finished, print_table, running_pairs, write_json
from crossdraft.cli.recording import DRAFTER_CODECS, TARGET_CODECS, Recorder
from crossdraft.cli.running import run_to_end
from crossdraft.pipeline import Generation, GenerationRequest, Statistics, connect
from crossdraft.pipeline.ports import Services
from crossdraft.pipeline.resolution import Models, resolve
from crossdraft.rpc.clients import DrafterClient, TargetClient

MILLISECONDS = 1000.0
COLUMNS = (
    *("method", "drafter", "T", "k", "drafter", "target", "verification", "codec", "transport", "outside"),
    "bytes/token",
)


@dataclass(frozen=True)
class Round:
    """A round of one setting. Times are medians over generations, of each one's mean."""

    method: str
    drafter: str  # a model's name
    temperature: float
    k: int  # proposals in a round
    generations: int
    rounds: int
    drafter_ms: float  # in its model, draws included
    target_ms: float  # in its model
    verification_ms: float  # in the session's state machine: planning, walks, bookkeeping
    codec_ms: float  # encoding and decoding on both sides, measured apart on the same messages
    transport_ms: float  # the rest of the waiting: gRPC, queues, the target's rows and draws from its logits
    outside_ms: float  # verification, codec and transport
    bytes_per_token: float  # serialized, both services and directions


@dataclass(frozen=True)
class Recording:
    """One generation: its figures, and the seconds of its codecs."""

    figures: Statistics
    codec_seconds: float


def measure(workload: Workload, json_path: Path | None) -> None:
    """Measures every setting; a table on stdout, and JSON if a path is given.

    Raises:
        Misused: a value is out of its range, or the pair cannot do what is asked.
        CommandFailed: a service does not start or fails.
    """
    workload.check()
    run_to_end(_measure(workload, json_path))


async def _measure(workload: Workload, json_path: Path | None) -> None:
    rounds = []
    async with aclosing(running_pairs(workload)) as pairs:
        async for target, drafter, settings in pairs:
            async with (
                connect(target, drafter, needs_drafter=True) as pipeline,
                TargetClient(target) as verify,
                DrafterClient(drafter) as draft,
            ):
                for setting in settings:
                    requests = setting.requests(workload.prompts, workload.max_tokens)
                    await _record(requests[0], pipeline.models, verify, draft)  # the first one warms up
                    recordings = [await _record(request, pipeline.models, verify, draft) for request in requests]
                    rounds.append(round_of(setting, recordings))
    print_table("Milliseconds in a round", COLUMNS, [shown(one) for one in rounds])
    if json_path is not None:
        record = {"target": workload.target, "max_tokens": workload.max_tokens}
        write_json(json_path, record | {"rounds": [asdict(one) for one in rounds]})


async def _record(
    request: GenerationRequest, models: Models, target: TargetClient, drafter: DrafterClient
) -> Recording:
    """Runs one generation to its end, then its messages through the codecs."""
    verified, drafted = Recorder(target), Recorder(drafter)
    figures = await finished(Generation(resolve(request, models), Services.of(verified, drafted), request.k))
    sizes = [(await client.described()).vocabulary_size for client in (target, drafter)]
    seconds = TARGET_CODECS.seconds(verified, sizes[0]) + DRAFTER_CODECS.seconds(drafted, sizes[1])
    return Recording(figures, seconds)


def round_of(setting: Setting, recordings: Sequence[Recording]) -> Round:
    """The medians."""
    figures = [recording.figures for recording in recordings]

    def median_ms(seconds: Callable[[Recording], float]) -> float:
        return median(MILLISECONDS * seconds(recording) / recording.figures.epochs for recording in recordings)

    return Round(
        **asdict(setting),
        generations=len(figures),
        rounds=sum(figure.epochs for figure in figures),
        drafter_ms=median_ms(lambda one: one.figures.drafter_seconds),
        target_ms=median_ms(lambda one: one.figures.target_seconds),
        verification_ms=median_ms(lambda one: one.figures.verification_seconds),
        codec_ms=median_ms(lambda one: one.codec_seconds),
        transport_ms=median_ms(lambda one: one.figures.wire_seconds - one.codec_seconds),
        outside_ms=median_ms(lambda one: one.figures.wire_seconds + one.figures.verification_seconds),
        bytes_per_token=sum(figure.bytes_sent + figure.bytes_received for figure in figures)
        / sum(figure.tokens for figure in figures),
    )


def shown(one: Round) -> tuple[str, ...]:
    """A row of the table."""
    times = (one.drafter_ms, one.target_ms, one.verification_ms, one.codec_ms, one.transport_ms, one.outside_ms)
    figures = (f"{one.temperature:g}", str(one.k), *(f"{time:.2f}" for time in times), f"{one.bytes_per_token:,.0f}")
    return (one.method, one.drafter, *figures)

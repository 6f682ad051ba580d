"""`crossdraft bench round`: what a round costs outside the two models, on loopback, one generation at a time."""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter
from typing import Any, ClassVar

from crossdraft.bench.commands import RoundPlan
from crossdraft.bench.harness import MILLISECONDS, Columns, finished, total_of
from crossdraft.bench.workload import SETTING, OfSettings, Setting, pairs_of
from crossdraft.client import GenerationRequest, Pipeline, Statistics, connect
from crossdraft.console.running import ProgressCounter
from crossdraft.rpc import drafter_codec, target_codec
from crossdraft.session.events import Lane, Open, Replied, Send
from crossdraft.trace.recording import Step
from crossdraft.types.messages import OpenTarget

REPEATS = 5  # of the codecs; the fastest counts


@dataclass(frozen=True, kw_only=True)
class Round(Setting):
    """A round of one setting. Times are medians over generations, of each one's mean."""

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
class RecordedGeneration:
    """One generation: its figures, and the seconds of its codecs."""

    figures: Statistics
    codec_seconds: float


class RoundBenchmark(OfSettings[RoundPlan, Round]):
    """`crossdraft bench round`: every setting over all prompts; the first prompt comes once before, to warm up."""

    unit: ClassVar[str] = "settings"
    title: ClassVar[str] = "Milliseconds in a round"
    columns: ClassVar[Columns] = {
        **SETTING,
        "drafter's model": lambda one: f"{one.drafter_ms:.2f}",
        "target's model": lambda one: f"{one.target_ms:.2f}",
        "verification": lambda one: f"{one.verification_ms:.2f}",
        "codec": lambda one: f"{one.codec_ms:.2f}",
        "transport": lambda one: f"{one.transport_ms:.2f}",
        "outside": lambda one: f"{one.outside_ms:.2f}",
        "bytes/token": lambda one: f"{one.bytes_per_token:,.0f}",
    }

    @property
    def total(self) -> int:
        return len(self.settings)

    async def measure(self, advance: ProgressCounter) -> AsyncGenerator[Round, None]:
        async with aclosing(pairs_of(self.plan.target, self.settings, self.plan.engine)) as pairs:
            async for target, drafter, settings in pairs:
                async with connect(target, drafter, needs_drafter=True) as pipeline:
                    for setting in settings:
                        requests = setting.requests(self.prompts, self.plan.max_tokens)
                        await _recorded(pipeline, requests[0])
                        yield round_of(setting, [await _recorded(pipeline, request) for request in requests])
                        advance()


class KeptMessages:
    """A recorder that keeps the messages of a session by the codec that they travel with, but for the openings."""

    def __init__(self) -> None:
        self.requests: dict[Any, list[Any]] = {target_codec: [], drafter_codec: []}
        self.replies: dict[Any, list[Any]] = {target_codec: [], drafter_codec: []}
        self._codecs: dict[Lane, Any] = {}

    def record(self, step: Step) -> None:
        if isinstance(step.event, Replied):
            self.replies[self._codecs[step.event.lane]].append(step.event.reply)
        for command in step.commands:
            match command:
                case Open(lane, request):
                    self._codecs[lane] = target_codec if isinstance(request, OpenTarget) else drafter_codec
                case Send(lane, request):
                    self.requests[self._codecs[lane]].append(request)

    def close(self) -> None:
        """They stay."""


async def _recorded(pipeline: Pipeline, request: GenerationRequest) -> RecordedGeneration:
    """Runs one generation to its end, then its messages through the codecs."""
    kept, drafter = KeptMessages(), pipeline.models.drafter
    assert drafter is not None  # the pipeline was connected with one
    figures = await finished(pipeline.run(request, kept))
    seconds = codec_seconds(target_codec, kept, pipeline.models.target.vocabulary_size)
    return RecordedGeneration(figures, seconds + codec_seconds(drafter_codec, kept, drafter.vocabulary_size))


def codec_seconds(codec: Any, kept: KeptMessages, vocabulary_size: int) -> float:
    """To encode and decode all messages of a codec once, each in a frame of its own."""
    seconds = []
    for _ in range(REPEATS):
        began = perf_counter()
        for request in kept.requests[codec]:
            list(codec.decode_requests(codec.encode_requests([(1, request)]), vocabulary_size))
        for reply in kept.replies[codec]:
            list(codec.decode_replies(codec.encode_replies([(1, reply)]), vocabulary_size))
        seconds.append(perf_counter() - began)
    return min(seconds)


def round_of(setting: Setting, recordings: Sequence[RecordedGeneration]) -> Round:
    """The medians."""
    total = total_of([recording.figures for recording in recordings])

    def median_ms(seconds: Callable[[RecordedGeneration], float]) -> float:
        return median(MILLISECONDS * seconds(recording) / recording.figures.epochs for recording in recordings)

    return Round(
        **asdict(setting),
        generations=len(recordings),
        rounds=total.epochs,
        drafter_ms=median_ms(lambda one: one.figures.drafter_seconds),
        target_ms=median_ms(lambda one: one.figures.target_seconds),
        verification_ms=median_ms(lambda one: one.figures.verification_seconds),
        codec_ms=median_ms(lambda one: one.codec_seconds),
        transport_ms=median_ms(lambda one: one.figures.wire_seconds - one.codec_seconds),
        outside_ms=median_ms(lambda one: one.figures.wire_seconds + one.figures.verification_seconds),
        bytes_per_token=(total.bytes_sent + total.bytes_received) / total.tokens,
    )

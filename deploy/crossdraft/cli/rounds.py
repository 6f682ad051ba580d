"""`crossdraft bench round`: what a round costs outside the two models, on loopback, one generation at a time."""

import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Generic, TypeVar

from rich.console import Console
from rich.table import Table

from crossdraft.cli.benching import Setting, Workload, finished, running_pairs, write_json
from crossdraft.cli.running import run_to_end
from crossdraft.pipeline import Generation, Pipeline, Statistics, connect
from crossdraft.pipeline.ports import DrafterStream, StreamPort, TargetStream
from crossdraft.pipeline.request import resolve
from crossdraft.pipeline.statistics import TrafficCount
from crossdraft.rpc import drafter_codec, target_codec
from crossdraft.rpc.clients import DrafterClient, TargetClient
from crossdraft.rpc.handlers import DRAFTER, TARGET
from crossdraft.verification.exchange import OpenDrafter, OpenTarget

REPEATS = 5  # of the codecs, on the same messages; the fastest counts
MILLISECONDS = 1000.0

Request = TypeVar("Request")
Reply = TypeVar("Reply")


@dataclass(frozen=True)
class Round:
    """One round of one setting: medians over generations of each one's mean, milliseconds."""

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
    bytes_per_token: float  # serialized, both services, both directions


@dataclass
class Recorded(Generic[Request, Reply]):
    """The messages of one session with one service."""

    requests: list[Request] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class RecordedStream(Generic[Request, Reply]):
    """A stream that keeps what passes through it."""

    stream: StreamPort[Request, Reply]
    recorded: Recorded[Request, Reply]

    @property
    def traffic(self) -> TrafficCount:
        """What was sent and received so far."""
        return self.stream.traffic

    async def send(self, request: Request, /) -> None:
        """As the stream's own."""
        self.recorded.requests.append(request)
        await self.stream.send(request)

    async def receive(self) -> Reply:
        """As the stream's own."""
        reply = await self.stream.receive()
        self.recorded.replies.append(reply)
        return reply

    async def close(self) -> None:
        """As the stream's own."""
        await self.stream.close()


@dataclass(frozen=True, eq=False)
class RecordedPair:
    """Both services, for one generation."""

    target: TargetClient
    drafter: DrafterClient
    verified: Recorded[Any, Any] = field(default_factory=Recorded)
    drafted: Recorded[Any, Any] = field(default_factory=Recorded)

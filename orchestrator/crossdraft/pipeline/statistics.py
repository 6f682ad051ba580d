"""What a generation cost, and how often the drafter was right."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from crossdraft.pipeline.events import Counts
from crossdraft.verification.exchange import Drafted, PassDone, RowFetched, Scored
from crossdraft.verification.walk import Kind


@dataclass(frozen=True)
class Statistics:
    """The final figures of one generation."""

    method: str
    k: int  # proposals asked for in a round
    prompt_tokens: int
    tokens: int  # emitted
    accepted: int
    corrected: int
    bonus: int
    passes: int  # of the target, row misses included
    row_misses: int
    rows_fetched: int  # whole rows, because a head was not enough
    epochs: int
    proposals: int
    stood_aside: int  # rounds in which the drafter proposed fewer than asked for
    drafter_lost: str  # why the drafter was given up; empty if it was not
    seconds: float  # from the opening of the sessions to the last token
    first_token_seconds: float  # to the first token
    drafter_seconds: float  # in the drafter's model
    target_seconds: float  # in the target's model
    wire_seconds: float  # waiting for a service, less its time in the model
    verification_seconds: float  # in the state machine: planning, walks, bookkeeping
    bytes_sent: int  # serialized messages, both services
    bytes_received: int
    scores: int = 0  # prefixes whose probability the drafter was asked for
    audited: int = 0  # draws of the drafter that were recomputed from their rows and found right
    proposed_at: tuple[int, ...] = ()  # by place in a round, from 0: rounds with a proposal there
    judged_at: tuple[int, ...] = ()  # ... rounds in which it was accepted or refused
    accepted_at: tuple[int, ...] = ()  # ... rounds in which it was accepted: wholly in the output

    @property
    def acceptance_at(self) -> tuple[float, ...]:
        """For each place in a round, the share of the proposals judged there that were accepted.

        A proposal is judged only if all before it were accepted, so each share is a conditional one.
        """
        return tuple(
            accepted / judged if judged else 0.0
            for accepted, judged in zip(self.accepted_at, self.judged_at, strict=True)
        )

    @property
    def accepted_length(self) -> float:
        """Proposals accepted in a round, on average over the rounds that had any."""
        return sum(self.accepted_at) / self.proposed_at[0] if self.proposed_at else 0.0

    @property
    def tokens_per_pass(self) -> float:
        """Emitted tokens for one target forward; 1 without a drafter."""
        return self.tokens / self.passes if self.passes else 0.0

    @property
    def acceptance(self) -> float:
        """Share of the judged tokens (accepted or corrected) that agreed with the draft."""
        judged = self.accepted + self.corrected
        return self.accepted / judged if judged else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens a second."""
        return self.tokens / self.seconds if self.seconds else 0.0


class TrafficCount(Protocol):
    """What a stream counts."""

    bytes_sent: int
    bytes_received: int


@dataclass(frozen=True)
class Times:
    """What the driver measured, in seconds, and bytes on the wire."""

    seconds: float
    first_token_seconds: float
    wire_seconds: float
    verification_seconds: float
    bytes_sent: int
    bytes_received: int


DRAFTER = "drafter"
TARGET = "target"


class Clock:
    """Stop-watches of one session; seconds of the monotonic clock."""

    def __init__(self) -> None:
        self._began = 0.0
        self._ended = 0.0
        self._first_token = 0.0
        self._verification = 0.0
        self._wire = 0.0
        self._asked: dict[str, float] = {}

    def begin(self) -> None:
        self._began = time.monotonic()

    def end(self) -> None:
        self._ended = time.monotonic()

    def token(self) -> None:
        self._first_token = self._first_token or time.monotonic()

    def asked(self, service: str) -> None:
        """A request leaves."""
        self._asked[service] = time.monotonic()

    def answered(self, reply: PassDone | RowFetched | Drafted | Scored) -> None:
        """Its reply is there: what the model did not take was the wire, both codecs and the queue."""
        service = DRAFTER if isinstance(reply, Drafted | Scored) else TARGET
        in_model = 0.0 if isinstance(reply, RowFetched) else reply.seconds
        self._wire += max(0.0, time.monotonic() - self._asked.get(service, time.monotonic()) - in_model)

    @contextmanager
    def verification(self) -> Iterator[None]:
        """Counts the block as verification."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._verification += time.perf_counter() - began

    def times(self, traffic: Sequence[TrafficCount]) -> Times:
        """What was measured."""
        return Times(
            seconds=(self._ended or time.monotonic()) - self._began,
            first_token_seconds=max(0.0, self._first_token - self._began),
            wire_seconds=self._wire,
            verification_seconds=self._verification,
            bytes_sent=sum(count.bytes_sent for count in traffic),
            bytes_received=sum(count.bytes_received for count in traffic),
        )


def statistics_of(method: str, k: int, prompt_tokens: int, counts: Counts, times: Times) -> Statistics:
    """The figures of a finished session."""
    return Statistics(
        method=method,
        k=k,
        prompt_tokens=prompt_tokens,
        tokens=counts.tokens,
        accepted=counts.kinds[Kind.ACCEPTED],
        corrected=counts.kinds[Kind.CORRECTED],
        bonus=counts.kinds[Kind.BONUS],
        passes=counts.passes,
        row_misses=counts.row_misses,
        rows_fetched=counts.rows_fetched,
        epochs=counts.epochs,
        proposals=counts.proposals,
        stood_aside=counts.stood_aside,
        drafter_lost=counts.drafter_lost,
        seconds=times.seconds,
        first_token_seconds=times.first_token_seconds,
        drafter_seconds=counts.drafter_seconds,
        target_seconds=counts.target_seconds,
        wire_seconds=times.wire_seconds,
        verification_seconds=times.verification_seconds,
        bytes_sent=times.bytes_sent,
        bytes_received=times.bytes_received,
        scores=counts.scores,
        audited=counts.audited,
        proposed_at=tuple(counts.proposed_at),
        judged_at=tuple(counts.judged_at),
        accepted_at=tuple(counts.accepted_at),
    )

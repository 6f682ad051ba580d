"""What a generation cost, and how often the drafter was right."""

from dataclasses import dataclass

from crossdraft.pipeline.events import Counts
from crossdraft.pipeline.stopwatches import Times
from crossdraft.pipeline.trips import LaneFigures
from crossdraft.verification.walk import Kind


@dataclass(frozen=True)
class Statistics:
    """The final figures of one generation."""

    method: str
    k: int  # proposals asked for in each lock-step round; 0: epochs were run in other ways
    prompt_tokens: int
    tokens: int  # emitted
    accepted: int
    corrected: int
    bonus: int
    passes: int  # forwards of the target, row misses included, and each token of a run
    row_misses: int
    rows_fetched: int  # whole rows, because a head was not enough
    epochs: int
    proposals: int
    stood_aside: int  # rounds in which the drafter proposed fewer than asked for
    drafter_lost: str  # why the drafter was given up, or never was there; empty otherwise
    seconds: float  # from the opening of the sessions to the last token
    first_token_seconds: float  # to the first token
    drafter_seconds: float  # in the drafter's model
    target_seconds: float  # in the target's model
    wire_seconds: float  # waiting for a service, less its time in the model
    verification_seconds: float  # CPU time in the state machine: planning, walks, bookkeeping
    bytes_sent: int  # serialized messages, both services
    bytes_received: int
    scores: int = 0  # prefixes whose probability the drafter was asked for
    audited: int = 0  # draws of the drafter that were recomputed from their rows and found right
    proposed_at: tuple[int, ...] = ()  # by place in a round, from 0: rounds with a proposal there
    judged_at: tuple[int, ...] = ()  # ... rounds in which it was accepted or refused
    accepted_at: tuple[int, ...] = ()  # ... rounds in which it was accepted: wholly in the output
    rows_completed: int = 0  # rows that were asked for more ids, because a proposal came after its pass had left
    drafters_lost: int = 0  # times that a drafter that was open failed or was given up
    targets_lost: int = 0  # times that a target failed
    rewinds: int = 0  # epochs that the drafter was told of
    branches: int = 0  # prepared continuations that came
    branch_tokens: int = 0  # proposals in them
    branches_tried: int = 0  # refusals that met any
    branches_hit: int = 0  # ... and were continued by one
    stalls: int = 0  # times that the target stood idle for proposals until patience ended
    speculated: int = 0  # passes that began while another was in flight
    events: int = 0  # that the state machine handled
    target_bytes: int = 0  # serialized, both ways, with targets
    drafter_bytes: int = 0  # ... with drafters
    idle_seconds: float = 0.0  # of targets: sessions open, and no pass in flight
    target_lane_seconds: float = 0.0  # of targets: sessions open
    lanes: tuple[LaneFigures, ...] = ()  # sessions with services, in the order of their opening
    runs: int = 0  # passes that asked for several tokens of the target's own

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
    def idle_share(self) -> float:
        """Share of the targets' time without a pass in flight."""
        return self.idle_seconds / self.target_lane_seconds if self.target_lane_seconds else 0.0

    @property
    def round_milliseconds(self) -> float:
        """CPU time in the state machine for one pass."""
        return 1000 * self.verification_seconds / self.passes if self.passes else 0.0

    @property
    def bytes_per_token(self) -> float:
        """Serialized, both services and directions, for an emitted token."""
        return (self.bytes_sent + self.bytes_received) / self.tokens if self.tokens else 0.0

    @property
    def branch_hits(self) -> float:
        """Share of the refusals that met prepared continuations and were continued by one."""
        return self.branches_hit / self.branches_tried if self.branches_tried else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens a second."""
        return self.tokens / self.seconds if self.seconds else 0.0


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
        rows_completed=counts.rows_completed,
        drafters_lost=counts.drafters_lost,
        targets_lost=counts.targets_lost,
        rewinds=counts.rewinds,
        branches=counts.branches,
        branch_tokens=counts.branch_tokens,
        branches_tried=counts.branches_tried,
        branches_hit=counts.branches_hit,
        stalls=counts.stalls,
        speculated=counts.speculated,
        events=times.events,
        target_bytes=times.target_bytes,
        drafter_bytes=times.drafter_bytes,
        idle_seconds=times.idle_seconds,
        target_lane_seconds=times.target_lane_seconds,
        lanes=times.lanes,
        runs=counts.runs,
    )

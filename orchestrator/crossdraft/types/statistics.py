"""What a generation cost, and how often the drafter was right."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

# Upper bounds of the counts in `Trips`, in seconds; what is above the last one is counted after it.
BOUNDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)


@dataclass(frozen=True)
class Trips:
    """Round trips of one lane: from a question to its first answer, less what the model took for that answer."""

    counts: tuple[int, ...] = (0,) * (len(BOUNDS) + 1)  # by BOUNDS, those above the last one included
    seconds: float = 0.0  # of all together
    queued_seconds: float = 0.0  # of these, waiting for the model


@dataclass(frozen=True)
class LaneFigures:
    """What one session with a service cost."""

    role: str  # "target" or "drafter"
    address: str  # of the service; empty if none was found
    bytes_sent: int  # serialized
    bytes_received: int
    trips: Trips
    lost: str = ""  # how the service failed: `rpc.errors.name_of`, or BLAMED
    model_seconds: float = 0.0  # in the model, for all answers
    codec_seconds: float = 0.0  # in which messages were made and read, in this process
    open_seconds: float = 0.0
    idle_seconds: float = 0.0  # of these, without anything asked that is not answered: `Owing`


@dataclass(frozen=True)
class Statistics:
    """The final figures of one generation."""

    method: str
    k: int  # draft tokens asked for in each lock-step round; 0: epochs were run in other ways
    prompt_tokens: int
    tokens: int  # emitted
    accepted: int
    corrected: int
    bonus: int
    passes: int  # forwards of the target, row misses included, and each token of a run
    row_misses: int
    rows_fetched: int  # whole rows, because a head was not enough
    epochs: int
    draft_tokens: int
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
    proposed_at: tuple[int, ...] = ()  # by place in a round, from 0: rounds with a draft token there
    judged_at: tuple[int, ...] = ()  # ... rounds in which it was accepted or refused
    accepted_at: tuple[int, ...] = ()  # ... rounds in which it was accepted: wholly in the output
    rows_completed: int = 0  # rows that were asked for more ids, because a draft token came after its pass had left
    drafters_lost: int = 0  # times that a drafter that was open failed or was given up
    targets_lost: int = 0  # times that a target failed
    rewinds: int = 0  # epochs that the drafter was told of
    branches: int = 0  # prepared continuations that came
    branch_tokens: int = 0  # draft tokens in them
    branches_tried: int = 0  # refusals that met any
    branches_hit: int = 0  # ... and were continued by one
    stalls: int = 0  # times that the target stood idle for draft tokens until patience ended
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
        """For each place in a round, the share of the draft tokens judged there that were accepted.

        A draft token is judged only if all before it were accepted, so each share is a conditional one.
        """
        return tuple(
            accepted / judged if judged else 0.0
            for accepted, judged in zip(self.accepted_at, self.judged_at, strict=True)
        )

    @property
    def accepted_length(self) -> float:
        """Draft tokens accepted in a round, on average over the rounds that had any."""
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


class Kind(Enum):
    """How a token came to be emitted."""

    ACCEPTED = "accepted"  # agrees with the draft
    CORRECTED = "corrected"  # replaces a refused draft token
    BONUS = "bonus"  # drawn with no draft token left


@dataclass
class Counts:
    """What a session has done so far."""

    tokens: int = 0  # emitted
    passes: int = 0  # forwards of the target, row misses included, and each token of a run
    runs: int = 0  # passes that asked for several tokens
    row_misses: int = 0  # passes for a row that a pass over the same draft had not fetched
    rows_fetched: int = 0  # whole rows, because a head was not enough
    rows_completed: int = 0  # rows that were asked for more ids, because a draft token came after its pass had left
    epochs: int = 0
    draft_tokens: int = 0
    scores: int = 0  # prefixes whose probability the drafter was asked for
    kinds: dict[Kind, int] = field(default_factory=lambda: dict.fromkeys(Kind, 0))
    drafter_seconds: float = 0.0  # in the model
    target_seconds: float = 0.0  # in the model
    stood_aside: int = 0  # rounds in which the drafter proposed fewer than asked for
    drafter_lost: str = ""  # why a drafter was given up the last time, or none was there; else empty
    drafters_lost: int = 0  # times that a drafter that was open failed or was given up
    targets_lost: int = 0  # times that a target failed
    rewinds: int = 0  # epochs that the drafter was told of
    branches: int = 0  # prepared continuations that came
    branch_tokens: int = 0  # draft tokens in them
    branches_tried: int = 0  # refusals that met any
    branches_hit: int = 0  # ... and were continued by one
    stalls: int = 0  # times that the target stood idle for draft tokens until patience ended
    speculated: int = 0  # passes that began while another was in flight
    audited: int = 0  # draws of the drafter that were recomputed from their rows and found right
    proposed_at: list[int] = field(default_factory=list)  # by place in a round, from 0: rounds with a draft token there
    judged_at: list[int] = field(default_factory=list)  # ... rounds in which it was accepted or refused
    accepted_at: list[int] = field(default_factory=list)  # ... rounds in which it was accepted

    def round(self, proposed: int, accepted: int, refused: bool) -> None:
        """A round is over.

        Args:
            proposed: draft tokens that it had.
            accepted: how many of them, from the first on, are wholly in the output.
            refused: whether the next one was refused; if not, nothing is known of it.
        """
        judged = min(proposed, accepted + refused)
        for counted, reached in ((self.proposed_at, proposed), (self.judged_at, judged), (self.accepted_at, accepted)):
            counted += [0] * (proposed - len(counted))
            for place in range(reached):
                counted[place] += 1


@dataclass(frozen=True)
class Times:
    """What the driver measured, in seconds, and bytes on the wire."""

    seconds: float
    first_token_seconds: float
    wire_seconds: float
    verification_seconds: float
    bytes_sent: int
    bytes_received: int
    events: int = 0  # that the state machine handled
    target_bytes: int = 0  # of those sent and received, with targets
    drafter_bytes: int = 0  # ... with drafters
    idle_seconds: float = 0.0  # of targets: sessions open, and no pass in flight
    target_lane_seconds: float = 0.0  # of targets: sessions open
    lanes: tuple[LaneFigures, ...] = ()  # in the order of their opening


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
        draft_tokens=counts.draft_tokens,
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


@dataclass(frozen=True)
class ModelStatistics:
    """What a service's model has done since it was loaded."""

    steps: int  # batched forwards
    seconds: float  # in them, and in what was drawn from their logits
    batches: Mapping[int, int]  # by number of sessions: steps that had so many
    tokens: int  # fed
    kv_slots: int  # tokens whose keys and values the cache can hold
    kv_slots_used: int  # ... and that live sessions hold now
    requests: int  # answered, such as passes and steps of a draft
    queued_seconds: float  # that these waited for their first steps
    evictions: int  # sessions that gave their KV slots to others

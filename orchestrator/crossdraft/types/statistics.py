"""What a generation cost, and how often the drafter was right.

`Counted` is what the session counts while it runs (by `Counts`), `Times` what the driver measures around it;
`Statistics` has both and is what users see.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise

# Upper bounds of buckets, seconds: of metrics, and with PARTS for each of these of `Trips`; a last bucket counts all
# above them.
COARSE = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
PARTS = 10
BOUNDS = tuple(
    round(a + (b - a) * part / PARTS, 9) for a, b in pairwise((0.0, *COARSE)) for part in range(1, PARTS + 1)
)


@dataclass(frozen=True)
class Trips:
    """Histogram of the round trips of one lane: from a request to its first reply, less the model's time for it."""

    counts: tuple[int, ...] = (0,) * (len(BOUNDS) + 1)  # by bucket
    seconds: float = 0.0  # sum of all round trips
    queued_seconds: float = 0.0  # part of the sum that requests waited for the model

    @property
    def coarse(self) -> tuple[int, ...]:
        """By the buckets of COARSE, and one above."""
        return tuple(sum(self.counts[first : first + PARTS]) for first in range(0, len(self.counts), PARTS))


@dataclass(frozen=True)
class LaneFigures:
    """What one stream with one service cost."""

    role: str  # "target" or "drafter"
    address: str  # of the service; empty if none was found
    bytes_sent: int  # serialized messages
    bytes_received: int
    trips: Trips
    lost: str = ""  # how the service failed: `rpc.errors.name_of`, or `client.driver.BLAMED`
    model_seconds: float = 0.0  # in the model, for all replies
    codec_seconds: float = 0.0  # serializing and parsing messages, in this process
    open_seconds: float = 0.0
    idle_seconds: float = 0.0  # part of open_seconds without an unanswered request


@dataclass(frozen=True)
class Times:
    """What the driver measured of one generation."""

    seconds: float  # from the opening of the sessions to the last token
    first_token_seconds: float  # to the first token
    wire_seconds: float  # waiting for a service, less its time in the model
    verification_seconds: float  # CPU time in the state machine: planning, walks, bookkeeping
    bytes_sent: int  # serialized messages, both services
    bytes_received: int
    events: int = 0  # handled by the state machine
    target_bytes: int = 0  # serialized, both ways, with targets
    drafter_bytes: int = 0  # ... with drafters
    idle_seconds: float = 0.0  # of open targets without an unanswered request
    target_lane_seconds: float = 0.0  # of open targets
    lanes: tuple[LaneFigures, ...] = ()  # streams with services, in the order of their opening


class Kind(Enum):
    """How verification produced an emitted token."""

    ACCEPTED = "accepted"  # agrees with the draft
    CORRECTED = "corrected"  # replaces a refused draft token
    BONUS = "bonus"  # drawn with no draft token left


@dataclass(frozen=True, kw_only=True)
class Counted:
    """What a session counts of one generation."""

    tokens: int = 0  # emitted
    accepted: int = 0  # of them, by `Kind`
    corrected: int = 0
    bonus: int = 0
    passes: int = 0  # target forwards, row misses included; a run counts one for each of its tokens
    row_misses: int = 0  # passes for a row that the pass over the same draft had not fetched
    rows_fetched: int = 0  # whole rows fetched because the head was not enough
    epochs: int = 0
    draft_tokens: int = 0
    stood_aside: int = 0  # rounds in which the drafter sent fewer draft tokens than requested
    drafter_lost: str = ""  # why the drafter was given up or could not be opened; empty otherwise
    drafter_seconds: float = 0.0  # in the drafters' models
    target_seconds: float = 0.0  # in the targets' models
    scores: int = 0  # strings whose probability the drafter was asked for (`slrs`)
    audited: int = 0  # draws of the drafter that an audit recomputed and confirmed
    drafted_at: tuple[int, ...] = ()  # by position in a round, from 0: rounds with a draft token there
    judged_at: tuple[int, ...] = ()  # ... rounds in which it was accepted or refused
    accepted_at: tuple[int, ...] = ()  # ... rounds in which it was accepted: all its letters are in the output
    rows_completed: int = 0  # rows extended by further ids because a draft token came after its pass was sent
    drafters_lost: int = 0  # open drafters that failed or were given up
    targets_lost: int = 0  # open targets that failed
    rewinds: int = 0  # epochs begun with a message to the drafter
    branches: int = 0  # prepared continuations received
    branch_tokens: int = 0  # draft tokens in them
    branches_tried: int = 0  # refusals with a prepared continuation at hand
    branches_hit: int = 0  # ... that one of them matched
    stalls: int = 0  # waits for draft tokens, the target idle, that ended by timeout
    speculated: int = 0  # passes sent while another was in flight
    runs: int = 0  # passes that asked the target for several tokens of its own
    undrafted: str = ""  # why the drafter stood aside the last time, or why it drafted nothing; empty if it was lost


@dataclass(frozen=True, kw_only=True)
class Statistics(Counted, Times):
    """The final figures of one generation."""

    method: str
    num_speculative_tokens: int  # draft tokens of each lock-step round; 0: the epochs were not lock-step rounds
    prompt_tokens: int
    settings: Mapping[str, float] = field(default_factory=dict)  # of sampling, and max_tokens
    drafter: str = ""  # its name, where drafters have names; empty: none

    @property
    def acceptance_at(self) -> tuple[float, ...]:
        """For each position in a round: P(accepted | all before it were accepted)."""
        counted = zip(self.accepted_at, self.judged_at, strict=True)
        return tuple(accepted / judged if judged else 0.0 for accepted, judged in counted)

    @property
    def accepted_length(self) -> float:
        """Mean number of draft tokens accepted in a round that had any."""
        return sum(self.accepted_at) / self.drafted_at[0] if self.drafted_at else 0.0

    @property
    def tokens_per_pass(self) -> float:
        """Emitted tokens per target forward; 1 without a drafter."""
        return self.tokens / self.passes if self.passes else 0.0

    @property
    def acceptance(self) -> float:
        """Share of the judged tokens (accepted or corrected) that agreed with the draft."""
        judged = self.accepted + self.corrected
        return self.accepted / judged if judged else 0.0

    @property
    def idle_share(self) -> float:
        """Share of the targets' open time without an unanswered request."""
        return self.idle_seconds / self.target_lane_seconds if self.target_lane_seconds else 0.0

    @property
    def round_milliseconds(self) -> float:
        """CPU time in the state machine per pass."""
        return 1000 * self.verification_seconds / self.passes if self.passes else 0.0

    @property
    def bytes_per_token(self) -> float:
        """Serialized bytes, both services and directions, per emitted token."""
        return (self.bytes_sent + self.bytes_received) / self.tokens if self.tokens else 0.0

    @property
    def branch_hits(self) -> float:
        """Share of the refusals with prepared continuations at hand that one of them matched."""
        return self.branches_hit / self.branches_tried if self.branches_tried else 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


class Counts(Counted):
    """What a session has counted so far; only its methods change it."""

    def add(self, **counted: float) -> None:
        """Adds to fields that are numbers."""
        own = self.__dict__
        for name, number in counted.items():
            own[name] += number

    def emit(self, kind: Kind) -> None:
        """Counts a token of the output."""
        own = self.__dict__
        own["tokens"] += 1
        own["accepted" if kind is Kind.ACCEPTED else kind._value_] += 1  # `value` costs more

    def note(self, undrafted: str = "", drafter_lost: str = "") -> None:
        """Keeps what is given."""
        self.__dict__["undrafted"] = undrafted or self.undrafted
        self.__dict__["drafter_lost"] = drafter_lost or self.drafter_lost

    def rounds(self, proposed: int, accepted: int, refused: bool, number: int) -> None:
        """Counts finished rounds.

        `proposed`: draft tokens of each. `accepted`: leading ones whose letters are all in the output. `refused`:
        whether the next one was refused; if not, it was not judged. `number`: of such rounds.
        """
        judged = min(proposed, accepted + refused)
        for name, reached in (("drafted_at", proposed), ("judged_at", judged), ("accepted_at", accepted)):
            counted = self.__dict__[name]
            counted += (0,) * (proposed - len(counted))
            self.__dict__[name] = (*map(number.__add__, counted[:reached]), *counted[reached:])


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

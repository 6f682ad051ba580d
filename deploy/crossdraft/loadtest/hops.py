"""Where the time between the orchestrator and its services goes. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from crossdraft.loadtest.figures import LaneFigures
from crossdraft.loadtest.spreads import Spread, binned_quantile
from crossdraft.pipeline.trips import BOUNDS

MILLISECONDS = 1000.0
ROLES = ("target", "drafter")


@dataclass(frozen=True)
class Hop:
    """The way between the orchestrator and the services of one role, over all outputs.

    A round trip goes from a question (a pass, a draft, more of a row, scores) to its first answer, without the model's
    time for that answer. It is made of the time that the question waited for a model that was busy, and of the rest:
    network, gRPC, serialization on both sides, event loops.
    """

    role: str  # target or drafter
    questions: int
    questions_per_token: float
    round_trip_ms: Spread | None  # quantiles are interpolated within the bins of `pipeline.trips.BOUNDS`
    queueing_ms: float  # of a round trip, mean
    wire_ms: float  # the rest of a round trip, mean
    serialization_ms_per_token: float  # in the orchestrator's process: messages made and read; a part of the wire
    model_ms_per_token: float  # in the model
    model_share: float  # of the time that sessions were open
    idle_share: float  # of this time, in which nothing was asked of the service that it had not answered
    bytes_per_token: float  # serialized, both ways
    lost: int  # sessions that failed

    @staticmethod
    def of(role: str, lanes: Sequence[LaneFigures], tokens: int) -> "Hop":
        """Of all sessions with services of a role, and the tokens of their outputs."""
        counts = [sum(column) for column in zip_longest(*(one.trip_counts for one in lanes), fillvalue=0)]
        asked, opened = sum(counts), sum(one.open_seconds for one in lanes)
        trips, queued = sum(one.trip_seconds for one in lanes), sum(one.queued_seconds for one in lanes)
        model = sum(one.model_seconds for one in lanes)
        return Hop(
            role=role,
            questions=asked,
            questions_per_token=_ratio(asked, tokens),
            round_trip_ms=_round_trip(counts, trips) if asked else None,
            queueing_ms=MILLISECONDS * _ratio(queued, asked),
            wire_ms=MILLISECONDS * _ratio(max(0.0, trips - queued), asked),
            serialization_ms_per_token=MILLISECONDS * _ratio(sum(one.codec_seconds for one in lanes), tokens),
            model_ms_per_token=MILLISECONDS * _ratio(model, tokens),
            model_share=_ratio(model, opened),
            idle_share=_ratio(sum(one.idle_seconds for one in lanes), opened),
            bytes_per_token=_ratio(sum(one.bytes_sent + one.bytes_received for one in lanes), tokens),
            lost=sum(bool(one.lost) for one in lanes),
        )


def hops_of(lanes: Iterable[LaneFigures], tokens: int) -> tuple[Hop, ...]:
    """One for each role that there was."""
    found = tuple(lanes)
    by_role = {role: [one for one in found if one.role == role] for role in ROLES}
    return tuple(Hop.of(role, of_role, tokens) for role, of_role in by_role.items() if of_role)


def _round_trip(counts: Sequence[int], seconds: float) -> Spread:
    bounds = [MILLISECONDS * bound for bound in BOUNDS]
    quantiles = (binned_quantile(counts, bounds, share) for share in (0.5, 0.9, 0.99))
    return Spread(sum(counts), MILLISECONDS * seconds / sum(counts), *quantiles)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0

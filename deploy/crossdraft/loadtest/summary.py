"""From the timelines of requests to figures. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, zip_longest
from statistics import median

from crossdraft.loadtest.arrivals import ClosedLoop, Load
from crossdraft.loadtest.timeline import LaneFigures, Timeline, at_once
from crossdraft.types.statistics import BOUNDS

MILLISECONDS = 1000.0
LATE = 0.010  # seconds after which a request counts as sent too late
GROWTH = 1.5  # requests under way at the end of the schedule, of those at its middle, at which a server falls behind
FEW = 4  # requests under way at which this says nothing yet


@dataclass(frozen=True)
class Goal:
    """What is good enough for a request.

    Raises:
        ValueError: a limit is not above 0.
    """

    first_token_ms: float | None = None
    per_token_ms: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("--ttft-ms", self.first_token_ms), ("--tpot-ms", self.per_token_ms)):
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be above 0, got {value:g}")

    @property
    def set(self) -> bool:
        """Whether there is any."""
        return (self.first_token_ms, self.per_token_ms) != (None, None)

    def met(self, timeline: Timeline) -> bool:
        """Whether a request was answered, and within all limits."""
        if not timeline.fine:
            return False
        took = ((self.first_token_ms, timeline.first_token), (self.per_token_ms, timeline.per_token))
        return all(limit is None or value is None or MILLISECONDS * value <= limit for limit, value in took)


@dataclass(frozen=True)
class Goodput:
    """Requests that met the goal."""

    share: float  # of all requests, those with errors included
    requests_per_second: float


@dataclass(frozen=True)
class Place:
    """Draft tokens at one place of a round."""

    judged: int
    acceptance: float


@dataclass(frozen=True)
class Acceptance:
    """How the drafter fared."""

    share: float  # of the judged tokens
    tokens_per_pass: float
    places: tuple[Place, ...]  # by place in a round, as far as any was judged; each given that all before it held


@dataclass(frozen=True)
class Schedule:
    """Whether client and server kept up with the schedule. Where clients wait for answers only `most` says anything."""

    late: int  # requests that were sent more than 10 ms after they were due
    latest_ms: float
    most: int  # requests under way at once
    at_middle: int  # ... when the middle one was due
    at_end: int  # ... when the last one was due
    saturated: bool  # requests piled up: latencies say how long the test was, not how fast the server is


# Mean and quantiles, of values or of counts by bins. Pure.


@dataclass(frozen=True)
class Spread:
    """How values lie."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float

    @staticmethod
    def of(values: Iterable[float], scale: float = 1.0) -> "Spread | None":
        """Of values times `scale`; None: there are none."""
        ordered = sorted(scale * value for value in values)
        if not ordered:
            return None
        mean = sum(ordered) / len(ordered)
        return Spread(len(ordered), mean, *(quantile(ordered, share) for share in (0.5, 0.9, 0.99)))


# Where the time between the orchestrator and its services goes. Pure.


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


@dataclass(frozen=True)
class Summary:
    """All figures of one run. Latencies are of requests without an error, and count from when these were due."""

    requests: int
    errors: Mapping[str, int]  # by kind
    seconds: float  # from when the first request was due to the last end; of repetitions, together
    tokens: int
    tokens_per_second: float
    requests_per_second: float  # answered
    first_token_ms: Spread | None
    between_chunks_ms: Spread | None  # tokens of one pass come together, so that the median may be near 0
    per_token_ms: Spread | None  # of each request: from its first token to its last, for each token after the first
    end_to_end_ms: Spread | None
    front_ms: Spread | None  # of each token: its own way from the server, and its request's way there
    acceptance: Acceptance | None
    goodput: Goodput | None  # None: there is no goal
    schedule: Schedule
    hops: tuple[Hop, ...]


def summary_of(repetitions: Sequence[Sequence[Timeline]], load: Load, goal: Goal) -> Summary:
    """The figures of one run, whose requests may have been made several times; each time there was any."""
    timelines = list(chain.from_iterable(repetitions))
    fine = [one for one in timelines if one.fine]
    seconds = sum(max(one.ended for one in each) - min(one.due for one in each) for each in repetitions)
    tokens = sum(one.tokens for one in fine)
    figures = [one.figures for one in fine if one.figures is not None]
    good = sum(map(goal.met, timelines))
    return Summary(
        requests=len(timelines),
        errors=dict(sorted(Counter(one.error or "no token" for one in timelines if not one.fine).items())),
        seconds=seconds,
        tokens=tokens,
        tokens_per_second=tokens / seconds if seconds else 0.0,
        requests_per_second=len(fine) / seconds if seconds else 0.0,
        first_token_ms=Spread.of((one.first_token for one in fine), MILLISECONDS),
        between_chunks_ms=Spread.of(chain.from_iterable(one.between_chunks for one in fine), MILLISECONDS),
        per_token_ms=Spread.of((one.per_token for one in fine if one.per_token is not None), MILLISECONDS),
        end_to_end_ms=Spread.of((one.end_to_end for one in fine), MILLISECONDS),
        front_ms=Spread.of(chain.from_iterable(one.front for one in fine), MILLISECONDS),
        acceptance=acceptance_of(fine),
        goodput=Goodput(good / len(timelines), good / seconds if seconds else 0.0) if goal.set else None,
        schedule=schedule_of(repetitions, load),
        hops=hops_of(chain.from_iterable(one.lanes for one in figures), sum(one.tokens for one in figures)),
    )


def acceptance_of(timelines: Sequence[Timeline]) -> Acceptance | None:
    """Over all outputs together; None: no server says how it made them."""
    figures = [one.figures for one in timelines if one.figures is not None and one.figures.passes]
    if not figures:
        return None
    longest = max(len(one.judged_at) for one in figures)
    judged, accepted = ([0] * longest for _ in range(2))
    for one in figures:
        for place, (was_judged, was_accepted) in enumerate(zip(one.judged_at, one.accepted_at, strict=False)):
            judged[place] += was_judged
            accepted[place] += was_accepted
    all_accepted = sum(one.accepted for one in figures)
    all_judged = all_accepted + sum(one.corrected for one in figures)
    return Acceptance(
        all_accepted / all_judged if all_judged else 0.0,
        sum(one.tokens for one in figures) / sum(one.passes for one in figures),
        tuple(Place(of, good / of) for of, good in zip(judged, accepted, strict=True) if of),
    )


def schedule_of(repetitions: Sequence[Sequence[Timeline]], load: Load) -> Schedule:
    """How requests lay beside each other; of several times the one that ended with most under way."""
    timelines = list(chain.from_iterable(repetitions))
    under_way = [(at_once(each, _last(each)), at_once(each, _middle(each))) for each in repetitions]
    end, middle = max(under_way)
    return Schedule(
        late=sum(one.late > LATE for one in timelines),
        latest_ms=MILLISECONDS * max(one.late for one in timelines),
        most=max(at_once(each, one.due) for each in repetitions for one in each),
        at_middle=middle,
        at_end=end,
        saturated=not isinstance(load, ClosedLoop) and end > FEW and end >= GROWTH * middle,
    )


def _middle(timelines: Sequence[Timeline]) -> float:
    return sorted(one.due for one in timelines)[(len(timelines) - 1) // 2]


def _last(timelines: Sequence[Timeline]) -> float:
    return max(one.due for one in timelines)


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value below which a share of ascending values lies, linear between the two nearest."""
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def binned_quantile(counts: Sequence[int], bounds: Sequence[float], share: float) -> float:
    """The same of counts by bins, linear within a bin.

    Args:
        counts: of each bin, and at the end of what is above the last bound; any positive number of values in all.
        bounds: the bins' upper bounds. What is above the last one is taken for it.
        share: 0 to 1.
    """
    wanted = share * sum(counts)
    place = next(place for place, reached in enumerate(accumulate(counts)) if reached >= wanted and counts[place])
    if place == len(bounds):
        return bounds[-1]
    low = bounds[place - 1] if place else 0.0
    before = sum(counts[:place])
    return low + (bounds[place] - low) * max(0.0, wanted - before) / counts[place]


ROLES = ("target", "drafter")


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


# The same requests made in two ways: what one way adds. Pure.

Repetitions = Sequence[Sequence[Timeline]]  # of the same requests


@dataclass(frozen=True)
class Added:
    """Milliseconds that a way takes longer than another, over the requests that were answered in both."""

    way: str
    than: str
    first_token_ms: Spread | None
    per_token_ms: Spread | None  # of each request: its milliseconds a token after the first, less those of the other
    end_to_end_ms: Spread | None
    per_token_ratio: float | None  # median over requests


def added_by(way: str, made: Repetitions, than: str, others: Repetitions) -> Added:
    """Pairs the requests of each repetition by their numbers."""
    ordered = (zip(_ordered(one), _ordered(other), strict=True) for one, other in zip(made, others, strict=True))
    pairs = [pair for pair in chain.from_iterable(ordered) if all(one.fine for one in pair)]
    paces = [
        (one.per_token, other.per_token)
        for one, other in pairs
        if one.per_token is not None and other.per_token is not None
    ]
    ratios = [one / other for one, other in paces if other > 0]
    return Added(
        way,
        than,
        Spread.of((one.first_token - other.first_token for one, other in pairs), MILLISECONDS),
        Spread.of((one - other for one, other in paces), MILLISECONDS),
        Spread.of((one.end_to_end - other.end_to_end for one, other in pairs), MILLISECONDS),
        median(ratios) if ratios else None,
    )


def _ordered(timelines: Sequence[Timeline]) -> list[Timeline]:
    return sorted(timelines, key=lambda one: one.number)

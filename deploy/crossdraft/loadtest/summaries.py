"""From the timelines of requests to figures. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from crossdraft.loadtest.arrivals import ClosedLoop, Load
from crossdraft.loadtest.hops import Hop, hops_of
from crossdraft.loadtest.spreads import Spread
from crossdraft.loadtest.timelines import Timeline, at_once

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
    """Proposals at one place of a round."""

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

"""The best way to run the pipeline for a workload, by forecasts."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from crossdraft.pipeline.forecast import forecast
from crossdraft.pipeline.governing import PLAIN, Choice
from crossdraft.pipeline.simulator import simulate
from crossdraft.pipeline.workload import Workload
from crossdraft.verification.exchange import MOST_PROPOSALS

SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)  # windows and rounds that are tried
COARSE = (4, 12, 32)  # windows that are tried first
WAITS = (0, 1, 2, 3, 4, 6, 8)
BRANCHES = ((2, 1), (4, 1), (8, 1), (4, 2))  # depths and widths
CHUNK = 4  # proposals of a reply at most
SHARE = 1 / 6  # of a pass, that making a reply's proposals may take
CHEAP = 0.99  # of the speed, that replies of several proposals must keep
SCALES = (1.0, 0.94, 1.06)  # of a forward, with which they must: a reply may just precede the end of a pass, or not
MARGIN = 1.3  # of patience over the time that proposals are expected to take
TRIED = 300  # tokens of a simulation, where there is no forecast
FEW = 8  # proposals of a drafter of which little is known
WORTH = 1.03  # what a second target must give to be used


@dataclass(frozen=True)
class Limits:
    """What may be chosen.

    Raises:
        ValueError: a number is out of its range.
    """

    rounds_only: bool = False  # lock-step, for methods that must know how many proposals there are
    samples: bool = False  # the method's target draws by itself
    window: int = 32  # most proposals beyond those revealed
    wait: int | None = None  # always this; None: the governor's
    branch_depth: int | None = None  # always this, 0: no branches; None: the governor's
    branch_width: int | None = None  # always this; None: the governor's
    targets: int = 1  # more: passes may be speculated on

    def __post_init__(self) -> None:
        if not (1 <= self.window <= MOST_PROPOSALS and 0 <= (self.wait or 0) <= self.window and self.targets >= 1):
            raise ValueError(f"1 <= window <= {MOST_PROPOSALS}, 0 <= wait <= window, targets >= 1: got {self}")


@dataclass(frozen=True)
class Rated:
    """A choice and its expected speed."""

    choice: Choice
    speed: float  # tokens a second


@dataclass(frozen=True)
class Ranking:
    """The best of each kind."""

    plain: Rated
    rounds: Rated  # lock-step
    hurried: Rated  # overlapped, and the target never waits
    best: Rated  # of all


def rank(workload: Workload, limits: Limits) -> Ranking:
    """Forecasts what may be chosen, coarsely first; some 30 forecasts."""
    plain = rate(workload, PLAIN)
    if workload.token >= workload.tokens_per_proposal * workload.plain_seconds or bound(workload) <= plain.speed:
        return _hopeless(workload, plain)
    rounds = _best(workload, (_round(workload, size) for size in SIZES if size <= limits.window))
    if limits.rounds_only:
        return Ranking(plain, rounds, plain, max(plain, rounds, key=_speed))
    coarse = sorted({min(size, limits.window) for size in COARSE})
    hurried = _best(workload, (Choice(size, patience=0.0) for size in coarse))
    hurried = _finer(workload, hurried, limits)
    patient = _best(workload, _waiting(workload, hurried.choice.window, limits))
    patient = _finer(workload, patient, limits)
    overlapped = patient if limits.wait is not None else max(hurried, patient, key=_speed)
    if limits.branch_depth != 0:
        overlapped = max(overlapped, _branched(workload, overlapped.choice, limits), key=_speed)
        hurried = max(hurried, _branched(workload, hurried.choice, limits), key=_speed)
    if overlapped.speed > max(plain, rounds, key=_speed).speed:
        overlapped = _chunked(workload, overlapped)
    if limits.targets > 1:
        overlapped = _speculated(workload, overlapped)
    return Ranking(plain, rounds, hurried, max(plain, rounds, overlapped, key=_speed))


def _hopeless(workload: Workload, plain: Rated) -> Ranking:
    """A drafter that writes no faster than the target by itself, so that what is accepted took it as long as it saves;
    or one that is not worth the room of its proposals in a pass, however soon they come."""
    rounds = rate(workload, _round(workload, 1))
    return Ranking(plain, rounds, rate(workload, Choice(1, patience=0.0)), plain)


def bound(workload: Workload) -> float:
    """Tokens a second that no way with a drafter exceeds: passes that always have as many proposals as are best, and
    these are there at once, each accepted as often as the most accepted place is."""
    often = max(*workload.acceptance, workload.match)
    best, alive, accepted = 0.0, 1.0, 0.0
    for proposals in range(1, MOST_PROPOSALS + 1):
        alive *= often
        accepted += alive
        best = max(best, (1 + accepted * workload.tokens_per_proposal) / workload.pass_seconds(proposals))
    return best


def rate(workload: Workload, choice: Choice) -> Rated:
    """A choice with its forecast."""
    return Rated(choice, forecast(workload, choice).speed)


def patience_for(workload: Workload, wait: int, round_: bool = False) -> float:
    """Seconds in which so many proposals come after a refusal, with a margin."""
    return MARGIN * (workload.drafter_trip + (wait + (0 if round_ else 1)) * workload.token) + 0.1 * workload.pass_base


def tried(workload: Workload, choice: Choice) -> Choice:
    """The same with few proposals, each a reply, and no branches, for a drafter of which little is known."""
    wait = min(choice.wait, FEW)
    meanwhile = int((workload.drafter_trip + 2 * workload.plain_seconds) / workload.token) if workload.token else FEW
    window = min(choice.window, (1 + choice.overlap) * FEW, max(2, wait + meanwhile))
    patience = choice.patience and min(choice.patience, patience_for(workload, wait, not choice.overlap))
    return replace(choice, window=window, wait=wait, patience=patience, branch_depth=0, chunk=1, speculate=False)


def loss(workload: Workload, choice: Choice) -> float:
    """Passes of plain decoding that an epoch costs beyond its one token if its first proposal is refused."""
    waits = choice.patience and workload.drafter_trip + max(1, choice.wait) * workload.token
    proposals = choice.window if not choice.overlap else min(choice.window, choice.wait + 1)
    passing = workload.pass_seconds(proposals) * (workload.contention if choice.overlap else 1.0)
    return (min(waits, choice.patience) + passing) / workload.plain_seconds - 1


def _speed(rated: Rated) -> float:
    return rated.speed


def _best(workload: Workload, choices: Iterable[Choice]) -> Rated:
    return max((rate(workload, choice) for choice in choices), key=_speed)


def _round(workload: Workload, size: int) -> Choice:
    return Choice(size, wait=size, overlap=False, patience=patience_for(workload, size, round_=True))


def _waiting(workload: Workload, window: int, limits: Limits) -> Iterable[Choice]:
    """With this window, the target waits for proposals: for the next one in hand of a row, or before a pass."""
    if limits.wait is not None:
        yield Choice(max(window, limits.wait), limits.wait, patience=patience_for(workload, limits.wait))
        return
    yield Choice(window, patience=MARGIN * 1.5 * workload.token)
    for wait in WAITS:
        if wait <= window:
            yield Choice(window, wait, patience=patience_for(workload, wait))


def _finer(workload: Workload, rated: Rated, limits: Limits) -> Rated:
    """The sizes next to this window, as long as they are better, or less and as good."""
    while True:
        window, choice = rated.choice.window, rated.choice
        below = max((size for size in SIZES if size < window), default=window)
        above = min((size for size in SIZES if size > window), default=window)
        near = [size for size in (below, above) if choice.wait <= size <= limits.window and size != window]
        if not near:
            return rated
        better = _best(workload, (replace(choice, window=size) for size in near))
        if better.speed <= rated.speed * (1.002 if better.choice.window > window else 0.999):
            return rated
        rated = better


def _branched(workload: Workload, choice: Choice, limits: Limits) -> Rated:
    """The same with prepared continuations."""
    depths = BRANCHES if limits.branch_depth is None else [(limits.branch_depth, width) for width in (1, 2)]
    wanted = {(depth, limits.branch_width or width) for depth, width in depths}
    patience = choice.patience and MARGIN * workload.slope * max(depth * width for depth, width in wanted)
    more = patience * workload.token * (choice.wait + 1)
    return _best(
        workload,
        (
            replace(choice, branch_depth=depth, branch_width=width, patience=choice.patience + more)
            for depth, width in wanted
        ),
    )


def _chunked(workload: Workload, rated: Rated) -> Rated:
    """The same with as many proposals in a reply as cost next to nothing: each message costs processor time."""
    choice, forward = rated.choice, workload.forward(rated.choice)
    most = min(CHUNK, int(SHARE * workload.pass_seconds(0) / forward)) if forward else CHUNK
    scaled = [replace(workload, token=scale * workload.token) for scale in SCALES]
    for chunk in range(most, 1, -1):
        patience = choice.patience and choice.patience + MARGIN * (chunk - 1) * forward
        chunked = rate(workload, replace(choice, chunk=chunk, patience=patience))
        if all(rate(one, chunked.choice).speed >= CHEAP * rate(one, choice).speed for one in scaled):
            return chunked
    return rated


def _speculated(workload: Workload, rated: Rated) -> Rated:
    """The same with passes before others have returned, if it pays in a simulation that is always the same."""
    alone = replace(workload, targets=1)
    speeds = [
        simulate(one, choice, TRIED, np.random.default_rng(0)).speed
        for one, choice in ((alone, rated.choice), (workload, replace(rated.choice, speculate=True)))
    ]
    gain = speeds[1] / speeds[0]
    return Rated(replace(rated.choice, speculate=True), rated.speed * gain) if gain > WORTH else rated

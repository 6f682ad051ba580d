"""How fast a way of running the pipeline is expected to be, computed without chance.

With given times, an epoch in which nothing has been refused so far goes one way only. So one run along it, with the
probability of still being on it, gives every way that the epoch can end. Epochs differ only in what they begin with
(adopted proposals, how long the pass in flight still takes): they form a Markov renewal process, and the speed is the
mean of tokens over the mean of time under its stationary distribution (the renewal-reward theorem).
"""

from dataclasses import dataclass

import numpy as np

from crossdraft.pipeline.expected_epoch import FREE, Beginning, ExpectedEpoch, Sums
from crossdraft.pipeline.governing import Choice
from crossdraft.pipeline.workload import Workload

LONG = 0.1  # a drafter's forward of more than this share of a pass is looked at closely


@dataclass(frozen=True)
class Forecast:
    """What is expected of a way of running the pipeline."""

    speed: float  # tokens a second
    idle: float  # share of the time in which the target has no pass
    passes_per_token: float


def forecast(workload: Workload, choice: Choice) -> Forecast:
    """The expected speed of one target with this choice, in the long run; `speculate` is not looked at."""
    if not choice.drafts or workload.token == float("inf"):
        return Forecast(1 / workload.plain_seconds, 0.0, 1.0)
    return _rounds(workload, choice) if not choice.overlap else _epochs(workload, choice)


def _rounds(workload: Workload, choice: Choice) -> Forecast:
    """Lock-step: every round takes as long, and the tokens are those accepted and one more."""
    passing = workload.pass_seconds(choice.window)
    seconds = workload.drafter_trip + choice.window * workload.token + passing
    alive, accepted = 1.0, 0.0
    for place in range(choice.window):
        alive *= workload.accepted(place)
        accepted += alive
    tokens = 1 + accepted * workload.tokens_per_proposal
    return Forecast(tokens / seconds, 1 - passing / seconds, 1 / tokens)


def _epochs(workload: Workload, choice: Choice) -> Forecast:
    """The mean epoch. A drafter whose forwards are long may be in the midst of one when it is told of a refusal."""
    forward = workload.forward(choice)
    mean = _mean_epoch(workload, choice, forward / 2)
    if forward > LONG * workload.pass_seconds(0):
        mean = _mean_epoch(workload, choice, mean.busy)
    return Forecast(mean.tokens / mean.seconds, max(0.0, 1 - mean.passing / mean.seconds), mean.passes / mean.tokens)


def _mean_epoch(workload: Workload, choice: Choice, busy: float) -> Sums:
    """Every kind of epoch that can follow the first one, weighted by how often it comes."""
    kinds: dict[Beginning, Sums] = {}
    new: list[Beginning] = [(0, FREE)]
    while new:
        kind = new.pop()
        if kind not in kinds:
            kinds[kind] = ExpectedEpoch(workload, choice, kind, busy).sums
            new += kinds[kind].nexts
    mean = Sums()
    for kind, share in _stationary(list(kinds), kinds).items():
        sums = kinds[kind]
        mean.seconds += share * sums.seconds
        mean.tokens += share * sums.tokens
        mean.passing += share * sums.passing
        mean.passes += share * sums.passes
        mean.busy += share * sums.busy
    return mean


def _stationary(order: list[Beginning], kinds: dict[Beginning, Sums]) -> dict[Beginning, float]:
    """How often each kind of epoch comes, in the long run."""
    if len(order) == 1:
        return {order[0]: 1.0}
    place = {kind: i for i, kind in enumerate(order)}
    system = np.zeros((len(order), len(order)))
    for kind, sums in kinds.items():
        for following, probability in sums.nexts.items():
            system[place[following], place[kind]] += probability
    system -= np.eye(len(order))
    system[0] = 1.0  # the shares' sum, in the place of one of the balances, which depend on each other
    return dict(zip(order, np.linalg.solve(system, np.eye(len(order))[0]).tolist(), strict=True))

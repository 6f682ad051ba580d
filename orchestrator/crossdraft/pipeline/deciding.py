"""What a governor decides for the estimates at hand: the way that is expected to be fastest, unless too little speaks
for leaving the one that runs."""

from dataclasses import dataclass, replace
from functools import lru_cache

from crossdraft.pipeline.estimates import Estimates
from crossdraft.pipeline.governing import Choice
from crossdraft.pipeline.search import Limits, Ranking, Rated, rank, rate

SWITCH = 1.02  # another way is taken if it is expected to be so much faster
STAYS = 1.005  # ... than plain decoding, for a drafter to be used on
RANKINGS = 32  # that are remembered: outputs that are told the same all need the same, some 10 ms of work
NOTICEABLE = 0.06  # relative change of an estimate after which choices are made again


@dataclass(frozen=True)
class Decision:
    """What a choice rests on."""

    choice: Choice
    estimates: Estimates
    ranking: Ranking
    best: Rated  # what was chosen, with its expected speed

    @property
    def gain(self) -> float:
        """The expected speed of what was chosen, relative to plain decoding."""
        return self.best.speed / self.ranking.plain.speed

    @property
    def rival(self) -> float:
        """The expected speed of the best way with a drafter, relative to plain decoding."""
        return max(self.ranking.rounds.speed, self.ranking.hurried.speed) / self.ranking.plain.speed


_ranked = lru_cache(maxsize=RANKINGS)(rank)


def choose(estimates: Estimates, limits: Limits, running: Choice | None = None) -> Decision:
    """The way that is expected to be fastest; `running` stays unless another one is noticeably better.

    Raises ValueError if the estimates know nothing of one of the services.
    """
    workload = estimates.workload(limits.samples, limits.targets)
    ranking = _ranked(workload, limits)
    best = ranking.best
    if running is not None and running.drafts and running != best.choice:
        stays = rate(workload, running)
        best = best if best.speed > SWITCH * stays.speed else stays
    least = STAYS if running is not None and running.drafts else SWITCH
    best = best if best.speed > least * ranking.plain.speed else ranking.plain
    decision = Decision(best.choice, estimates, ranking, best)
    return replace(decision, choice=replace(best.choice, reason=_reason(best, decision)))


def _reason(best: Rated, decision: Decision) -> str:
    if not best.choice.drafts:
        return f"plain decoding: with the drafter {decision.rival:.2f} of its speed expected"
    way = "overlapped" if best.choice.overlap else "lock-step"
    return f"{way}: {best.speed / decision.ranking.plain.speed:.2f} times plain decoding expected"


def changed(before: Estimates, after: Estimates) -> bool:
    """Whether estimates differ enough to choose anew."""
    shares = [(before.match, after.match), (before.branch_hit, after.branch_hit)]
    shares += list(zip(before.acceptance, after.acceptance, strict=True))
    costs = [
        (before.token, after.token),
        (before.pass_base, after.pass_base),
        (before.tokens_per_proposal, after.tokens_per_proposal),
        (1 + before.slope, 1 + after.slope),
        (1 + before.slowed, 1 + after.slowed),
        (before.plain, after.plain),
        (before.sessions, after.sessions),
    ]
    pass_seconds = after.pass_base + after.target_trip
    trips = abs(before.drafter_trip - after.drafter_trip) + abs(before.target_trip - after.target_trip)
    nodes = abs(before.pass_node - after.pass_node) * 8
    return (
        any(abs(old - new) > NOTICEABLE / 2 for old, new in shares)
        or any(abs(old - new) > NOTICEABLE * max(old, new) for old, new in costs)
        or trips + nodes > NOTICEABLE * pass_seconds
    )

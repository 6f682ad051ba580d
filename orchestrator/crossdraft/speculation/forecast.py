"""The expected speed of a choice when all outputs on a target make it.

An epoch in which nothing has been refused so far is deterministic, so it is followed once, weighing what happens with
the probability that it still goes on. Epochs follow each other independently: the speed is the tokens of the mean
epoch over its seconds (renewal-reward theorem). Others that share target and drafter are in the costs of steps.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import mul

from crossdraft.speculation.choice import Choice
from crossdraft.speculation.estimates import StepCost

LONGEST = 12  # passes of an epoch that are followed: those after them go on like the last
NEGLIGIBLE = 0.02  # probability that an epoch goes on below which it is not followed
HANDLED = (
    2e-4  # seconds of processor time of an output's part of a pass, with what goes to and fro for it; a run has none
)
CROWDED = (
    0.85  # of the speed is left where several outputs wait for draft tokens: they come back apart, and miss passes
)
BRANCHED = 0.2  # exponent: with n times the nodes of a chain, a tree misses n^-0.2 times as often, measured
MATCHES = 0.7  # share of acceptable draft tokens that equal one drawn by the target, measured with several pairs


@dataclass(frozen=True)
class Conditions:
    """What a forecast depends on."""

    chances: Sequence[float]  # of each place that its draft token is accepted, if all before it were
    outputs: float  # that share the target
    target: StepCost
    drafter: StepCost  # of outputs counted like `drafting`
    drafting: float  # outputs that share the drafter
    target_trip: float  # seconds of a round trip
    drafter_trip: float
    worth: float = 1.0  # target tokens of an accepted draft token
    samples: bool = False  # the target draws by itself, and what it drew is compared
    rounds: StepCost | None = None  # as `drafter`, where the target waits for whole rounds; None: not known, the same

    def pass_seconds(self, draft_tokens: float) -> float:
        """From sending a pass to its answer, if all outputs have so many draft tokens in theirs."""
        tokens = self.outputs * draft_tokens * self.worth
        return self.target_trip + self.target.seconds(self.outputs, tokens) + HANDLED * self.outputs

    @cached_property
    def draft_seconds(self) -> float:
        """Of a draft token."""
        return self.drafter.seconds(self.drafting)

    def round_seconds(self, width: int = 1) -> float:
        """Of a draft token of a round, for which so many nodes of a tree are expanded."""
        cost = self.drafter if self.rounds is None else self.rounds
        return cost.seconds(self.drafting, self.drafting * (width - 1))

    def draft_arrives(self, draft_tokens: int) -> float:
        """Seconds from asking for so many draft tokens to their arrival."""
        return self.drafter_trip + draft_tokens * self.draft_seconds

    @cached_property
    def alive(self) -> list[float]:
        """For each place, the probability that all draft tokens before it were accepted."""
        return list(accumulate(self.chances, lambda alive, chance: alive * chance, initial=1.0))

    @cached_property
    def gains(self) -> list[float]:
        """Tokens expected of judging the places before each."""
        alive = self.alive
        tokens = (self.worth * alive[i + 1] + alive[i] - alive[i + 1] for i in range(len(alive) - 1))
        return list(accumulate(tokens, initial=0.0))


@dataclass(frozen=True)
class Forecast:
    """What is expected of an epoch."""

    tokens: float  # of the mean epoch
    seconds: float  # ... from its beginning to that of the next one

    @property
    def speed(self) -> float:
        """Tokens a second of each output."""
        return self.tokens / self.seconds


def forecast(given: Conditions, choice: Choice) -> Forecast:
    """What is expected if all outputs make this choice."""
    if not choice.drafts:
        return Forecast(1.0, given.target.seconds(given.outputs))
    found = _overlapped(given, choice) if choice.overlap else _lock_step(given, choice)
    crowded = given.outputs > 1 and choice.patience > 0
    return Forecast(found.tokens, found.seconds / CROWDED) if crowded else found


def _lock_step(given: Conditions, choice: Choice) -> Forecast:
    drafted, nodes = choice.max_draft_tokens, choice.tree_nodes
    drafting = given.drafter_trip + drafted * given.round_seconds(choice.width)
    if not nodes:
        return Forecast(given.gains[drafted] + given.alive[drafted], drafting + given.pass_seconds(drafted))
    left = (drafted / nodes) ** BRANCHED
    alive = accumulate((1 - left * (1 - chance) for chance in given.chances[:drafted]), mul)
    return Forecast(1 + given.worth * sum(alive), drafting + given.pass_seconds(nodes / given.worth))


def _overlapped(given: Conditions, choice: Choice) -> Forecast:
    """Follows an epoch. Times are seconds since it began, when the drafter was told of it in the middle of a step."""
    most = len(given.alive) - 1
    match = given.chances[0] * (1.0 if given.samples else MATCHES)
    draft = _Draft(given, choice.max_draft_tokens)
    now = seconds = tokens = passes = 0.0
    judged = behind = 0  # places; of them, those where the target's own tokens are to be compared
    sure, kept, last = 1.0, 0.0, (0.0, 0.0, 0.0)
    for _ in range(LONGEST):
        alive, began, had = sure * given.alive[judged], now, tokens
        if alive < NEGLIGIBLE or judged + 1 >= most:
            break
        if choice.patience > 0:
            now = max(now, draft.arrival(judged + choice.min_draft_tokens, now))
        known = max(0, min(draft.known(now), most - 1) - judged)
        if known and behind:
            sure, behind = sure * match**behind, 0  # where they differ, the next epoch has begun
            alive = sure * given.alive[judged]
        now += given.pass_seconds(known)
        following = draft.arrival(judged + known + 1, now)  # the draft token on which the last row decides
        if following <= now or choice.patience > 0:
            now = max(now, following)
            tokens += sure * (given.gains[judged + known + 1] - given.gains[judged])
        else:
            tokens += sure * (given.gains[judged + known] - given.gains[judged] + given.alive[judged + known])
            sure /= max(given.chances[judged + known], NEGLIGIBLE)  # emitted without a draft token: nothing is refused
            behind += 1
        judged += known + 1
        draft.revealed(judged - behind, now)
        seconds += alive * (now - began)
        passes += alive
        kept, last = sure * given.alive[judged] / alive, (tokens - had, alive * (now - began), alive)
    further = kept / (1 - kept) if kept < 0.999 and sure * given.alive[judged] >= NEGLIGIBLE else 0.0
    tokens, seconds, passes = (all_ + further * one for all_, one in zip((tokens, seconds, passes), last, strict=True))
    late = 1.0
    if choice.patience > 0 and given.outputs > 1:
        # Those in the same pass wait for one that was refused, or it misses the pass and comes in the middle of it.
        refused = 1 - (1 - min(1.0, 1 / passes)) ** (given.outputs - 1)
        late += min(max(0.0, passes - 1) * refused * draft.first, given.pass_seconds(0) / 2) / seconds
    return Forecast(tokens, late * seconds)


class _Draft:
    """When draft tokens arrive, if none is refused; `first` is when the first one does."""

    def __init__(self, given: Conditions, window: int) -> None:
        self._each, self._trip, self._window = given.draft_seconds, given.drafter_trip, window
        self.first = self._trip + 1.5 * self._each
        self._arrivals = [self.first + place * self._each for place in range(window)]

    def known(self, now: float) -> int:
        """Draft tokens that have arrived."""
        return bisect_right(self._arrivals, now)

    def arrival(self, count: int, now: float) -> float:
        """When so many have; those that were not asked for are asked for now."""
        late = count - len(self._arrivals)
        if late <= 0:
            return self._arrivals[count - 1] if count else 0.0
        return max(self._arrivals[-1], now + self._trip) + late * self._each

    def revealed(self, judged: int, now: float) -> None:
        """The walk has gone on, and more are asked for."""
        more = judged + self._window - len(self._arrivals)
        if more > 0:
            latest = self._arrivals[-1]
            begin = latest if latest > now + self._trip else now + self._trip
            self._arrivals += [begin + place * self._each for place in range(1, more + 1)]

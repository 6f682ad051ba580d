"""How many draft tokens each request proposes, how long a step waits for them, and whether drafting pays at all.

A step of vLLM is one forward for all requests, so that all wait where one does. What is at hand is proposed in the
order of its chance to be accepted, as long as the next token raises the expected tokens per second of the whole step.
Chances are counted on all that drafts would have proposed, whether it was or not: so judging a drafter costs the target
nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from crossdraft.integrations.vllm.streams import Guess, Outcome, Pull
from crossdraft.speculation.choice import DraftSeen
from crossdraft.speculation.estimates import Acceptance, FittedCost, Recent, Share, StepCost
from crossdraft.types.messages import MOST_DRAFT_TOKENS

WORTH = 1.03  # times the speed without drafts that drafting has to promise, for the work that it makes here
EXPLORED = 128.0  # tokens of the target between trials of a drafter that does not pay
TRIAL = 12.0  # guessed tokens that are judged in one, without being proposed unless that pays
MISSES = 2  # waits in vain after which a step waits for nothing, until the drafter answers again
LETTERS = 2000.0  # of output or draft after which the length of a token weighs 1/e
LEAST_CHUNK = 2  # target tokens in a reply of the drafter, as each costs a turn of the event loop
SHARED = 8.0  # guesses that a drafter's acceptance weighs against what was seen of one request
LEAST_EACH = 0.25  # draft tokens for a target token at least, however long they are
SLACK = 1.5  # times the expected time that a wait lasts at most
SPARE = 2  # target tokens asked for beyond two proposals: the second is drafted while the first is verified


class DrafterPace:
    """What is known of one drafter: how its draft tokens fare, how long they are, and when they come."""

    def __init__(self) -> None:
        self.acceptance = Acceptance()
        self.edge = Share()  # of the last tokens of a text, behind which nothing was drafted yet
        self.step = FittedCost(StepCost())  # seconds for a draft token
        self.trip = Recent()  # seconds from a rewind to the first reply, without the drafter's own
        self._length = Share(memory=LETTERS)  # draft tokens of letters

    def judged(self, outcome: Outcome) -> None:
        if outcome.matched or outcome.missed:
            self.acceptance.add(0, outcome.matched, outcome.missed)
        if outcome.edge is not None:
            self.edge.add(float(outcome.edge), 1.0)

    def answered(self, seen: DraftSeen, letters: int) -> None:
        """A reply came, whose draft tokens have so many letters together."""
        if seen.draft_tokens:
            self.step.add(seen.seconds / seen.draft_tokens, 1.0)
            self._length.add(seen.draft_tokens, letters)
        if seen.waited is not None:
            self.trip.add(max(0.0, seen.waited - seen.seconds))

    def chances(self, count: int, sure: int) -> list[float]:
        """The chance of each of so many guessed tokens to be accepted if all before it were, `sure` as of a guess."""
        usual = self.acceptance.chances()
        edge = self.edge.mean(usual[0])
        return [usual[place] if place < sure else edge for place in range(count)]

    def tokens_for(self, letters: float) -> float:
        """Draft tokens that so many letters take."""
        return letters * self._length.mean(0.25, 8.0)

    def seconds(self, draft_tokens: float) -> float:
        """Expected from a rewind until so many draft tokens are here."""
        return self.trip.value + draft_tokens * self.step.cost.seconds(1.0)


@dataclass(frozen=True)
class Offer:
    """What one request could propose."""

    pace: DrafterPace  # of its drafter
    guess: Guess
    share: Share  # of its guessed tokens that matched
    awaited: bool = False  # the first draft tokens after a rewind are under way

    @property
    def chances(self) -> list[float]:
        """As `DrafterPace.chances`, of this request."""
        each = self.pace.chances(len(self.guess.ids), self.guess.sure)
        return [self.share.mean(chance, SHARED) for chance in each]


class Pacing:
    """The decisions of one vLLM engine.

    Args:
        most: draft tokens of a request in a step.
        longest: seconds that a step waits at most; 0: it never waits.
    """

    def __init__(self, most: int, longest: float) -> None:
        self.target = FittedCost(StepCost())  # seconds of a step, by requests and draft tokens
        self._most = most
        self._longest = longest
        self._letters = Share(memory=LETTERS)  # target tokens of letters
        self._misses = 0  # waits in vain, one after another
        self._untried = 0.0  # target tokens since a drafter that does not pay was tried
        self._trial = 0.0  # guessed tokens that the trial under way has still to judge

    def emitted(self, tokens: int, letters: int) -> None:
        """A request has emitted tokens."""
        self._letters.add(tokens, letters)
        self._untried += tokens

    def judged(self, outcome: Outcome) -> None:
        """Of a request that drafts for a trial, among others."""
        self._trial -= outcome.matched + outcome.missed + (outcome.edge is not None)

    def stepped(self, seconds: float, requests: int, draft_tokens: int) -> None:
        """A step of so many requests, all of them past their prompts, that verified draft tokens took so long."""
        self.target.add(seconds, float(requests), float(draft_tokens))

    def waited(self, answered: bool) -> None:
        """A step has waited, and a drafter answered in that time or not."""
        self._misses = 0 if answered else self._misses + 1

    def answered(self) -> None:
        """A drafter has answered, at any time."""
        self._misses = 0

    def pays(self, pace: DrafterPace, requests: int) -> bool:
        """Whether drafting is expected to be faster than not, with the whole guess at hand in every second step."""
        if not pace.acceptance.tested or not self.target.known:
            return True
        chances = [pace.chances(self._most, self._most)] * requests
        counts = self._counts(chances)
        gained = sum(_expected(one[:count]) for one, count in zip(chances, counts, strict=True))
        cost = self.target.cost
        faster = (1 + gained / requests) * cost.seconds(requests) / cost.seconds(requests, sum(counts))
        return (1 + faster) / 2 >= WORTH

    def trial_due(self) -> bool:
        """Whether one request shall try a drafter that does not pay; true until enough is judged."""
        if self._trial <= 0 and self._untried >= EXPLORED:
            self._trial, self._untried = TRIAL, 0.0
        return self._trial > 0

    def pull(self, pace: DrafterPace) -> Pull:
        """How much is asked of a drafter."""
        each = self._draft_tokens_each(pace)
        window = min(MOST_DRAFT_TOKENS, round(each * (2 * self._most + SPARE)) + 1)
        chunk = min(window, max(1, round(each * LEAST_CHUNK)))
        return Pull(window, chunk, chunk)

    def wait(self, offers: Sequence[Offer]) -> float:
        """Seconds that this step waits for draft tokens on their way; 0: it goes on with what is at hand.

        A step without drafts is not lost: the draft arrives meanwhile, and serves the next one if its first token was
        right. With chance p of that, drafts are at hand in p / (1 + p) of the steps that wait for none.
        """
        lacking = [offer.pace for offer in offers if offer.awaited and not offer.guess.ids]
        if not (lacking and self.target.known and self._misses < MISSES and all(pace.trip.value for pace in lacking)):
            return 0.0
        slowest, cost = max(lacking, key=lambda pace: pace.trip.value), self.target.cost
        chances, each = slowest.chances(self._most, self._most), self._draft_tokens_each(slowest)
        at_hand = len(offers) + sum(_expected(offer.chances) for offer in offers)
        proposed = sum(len(offer.guess.ids) for offer in offers)
        later = len(lacking) * chances[0] / (1 + chances[0]) * _expected(chances)
        best, seconds = (at_hand + later) / cost.seconds(len(offers), proposed), 0.0
        for count in range(1, self._most + 1):
            needed = slowest.seconds(each * count)
            tokens = at_hand + len(lacking) * _expected(chances[:count])
            speed = tokens / (needed + cost.seconds(len(offers), proposed + len(lacking) * count))
            if needed <= self._longest and speed > best:
                best, seconds = speed, needed
        return min(self._longest, SLACK * seconds)

    def lengths(self, offers: Sequence[Offer]) -> list[int]:
        """How many of each request's guessed tokens are proposed."""
        return self._counts([offer.chances for offer in offers])

    def _draft_tokens_each(self, pace: DrafterPace) -> float:
        """Draft tokens for a target token."""
        return max(LEAST_EACH, pace.tokens_for(1.0 / self._letters.mean(0.25, 8.0)))

    def _counts(self, chances: Sequence[Sequence[float]]) -> list[int]:
        """Tokens of each request that together give the most tokens per second."""
        counts = [0] * len(chances)
        waiting: list[tuple[float, int]] = []  # (minus the chance that the next token is accepted, request)
        for request, each in enumerate(chances):
            if each:
                heappush(waiting, (-each[0], request))
        cost = self.target.cost
        tokens, seconds = float(len(chances)), cost.seconds(len(chances)) if self.target.known else 0.0
        while waiting:
            chance, request = heappop(waiting)
            # The next token raises the speed while its chance per second is above the speed that there is already.
            if seconds and -chance * seconds <= tokens * cost.token:
                break
            tokens, seconds = tokens - chance, seconds + cost.token
            counts[request] += 1
            if counts[request] < len(chances[request]):
                heappush(waiting, (chance * chances[request][counts[request]], request))
        return counts


def _expected(chances: Sequence[float]) -> float:
    """Tokens accepted on average, of some in a row with these chances."""
    total, all_before = 0.0, 1.0
    for chance in chances:
        all_before *= chance
        total += all_before
    return total

"""Whether vLLM's requests draft at all, how long a step waits for draft tokens, and how many each request proposes.

A step of vLLM is one forward for all requests, so that all wait where one does. Three decisions, from the coarsest on:

- whether drafting pays is not modelled but measured: `DraftingAccount` compares steps with and without it;
- a wait is worth it if the tokens that it may bring take longer otherwise, by the delays of the latest replies;
- what is at hand is proposed in the order of its chance to be accepted, as long as the next token raises the expected
  tokens per second of the whole step.

Chances are counted on all that drafts would have proposed, whether it was or not.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import accumulate
from math import prod
from operator import mul
from statistics import median

from crossdraft.integrations.vllm.logs import Seldom
from crossdraft.integrations.vllm.streams import Guess, Outcome, Pull
from crossdraft.speculation.choice import DraftSeen
from crossdraft.speculation.estimates import Acceptance, FittedCost, Recent, Share, StepCost
from crossdraft.types.messages import MOST_DRAFT_TOKENS

log = logging.getLogger(__name__)

ALLOWED = 0.01  # of all steps that drafting may lose altogether
ALLOWED_STEPS = 4.0  # and so many more, for the first trial: new sizes of forwards take long the first time
MOST_GAINED = 16.0  # steps of gain that are set against losses: a drafter that becomes bad is left after as many
COMPARED = 16  # latest steps without drafting that those with it are compared with
LEAST_COMPARED = 6  # of them before drafting is tried: single steps differ by a tenth
PAUSE = 3.0  # times the usual step that a step counts as at most: a pause of the machine is nobody's loss
TRIAL = 16  # steps in which a drafter is heard, asked, and its drafts proposed a few times
LEAST_GAIN = 0.04  # of a step, less of which is taken for a loss: it is not told from noise
RENEWED = 250  # steps with drafting, after which some without it tell what these cost by now
RENEWAL = 6  # such steps; the first one is not counted, as the drafter is still at work
LETTERS = 2000.0  # of output or draft after which the length of a token weighs 1/e
SHARED = 8.0  # guesses that a drafter's acceptance weighs against what was seen of one request
LEAST_EACH = 0.25  # draft tokens for a target token at least, however long they are
SPARE = 2  # target tokens asked for beyond two proposals: the second is drafted while the first is verified
REPLIES = 4  # of a drafter in a step, at most if its tokens take long
BRANCH = 2  # target tokens of a prepared continuation
FEW = 2  # requests of a step that waits, as of many one always lacks its draft, or for which continuations are prepared
LONGEST_WAIT = 0.08  # of a step of one request
SLACK = 1.2  # times a delay seen before that is waited for
DELAYS = 16  # latest delays of first replies
SPEED_SECONDS = 2.0  # after which the speed of a step weighs 1/e


class DrafterPace:
    """What is known of one drafter: how its draft tokens fare, how long they are, and when they come."""

    def __init__(self) -> None:
        self.acceptance = Acceptance()
        self.edge = Share()  # of the last tokens of a text, behind which nothing was drafted yet
        self.step = Recent()  # seconds of a draft token
        self.delays: deque[float] = deque(maxlen=DELAYS)  # seconds from an epoch's begin to its first reply
        self._length = Share(memory=LETTERS)  # draft tokens of letters
        self._usual: list[float] = []  # `Acceptance.chances`, as long as it holds

    def judged(self, outcome: Outcome) -> None:
        if outcome.matched or outcome.missed:
            self.acceptance.add(0, outcome.matched, outcome.missed)
            self._usual = []
        if outcome.edge is not None:
            self.edge.add(float(outcome.edge), 1.0)

    def answered(self, seen: DraftSeen, letters: int) -> None:
        """A reply came, whose draft tokens have so many letters together."""
        if seen.draft_tokens:
            self.step.add(seen.seconds / seen.draft_tokens)
            self._length.add(seen.draft_tokens, letters)
        if seen.waited is not None:
            self.delays.append(seen.waited)

    def chances(self, count: int, sure: int) -> list[float]:
        """The chance of each of so many guessed tokens to be accepted if all before it were, `sure` as of a guess."""
        self._usual = self._usual or self.acceptance.chances()
        edge = self.edge.mean(self._usual[0])
        return [self._usual[place] if place < sure else edge for place in range(count)]

    def tokens_for(self, letters: float) -> float:
        """Draft tokens that so many letters take."""
        return letters * self._length.mean(0.25, 8.0)


@dataclass(frozen=True)
class Offer:
    """What one request could propose."""

    pace: DrafterPace  # of its drafter
    guess: Guess
    share: Share  # of its guessed tokens that matched
    asked: float | None = None  # seconds: since when the first draft tokens of an epoch are under way

    @property
    def chances(self) -> list[float]:
        """As `DrafterPace.chances`, of this request."""
        each = self.pace.chances(len(self.guess.ids), self.guess.sure)
        return [self.share.mean(chance, SHARED) for chance in each]


class DraftingAccount:
    """What drafting has lost so far in batches of one size, and whether it goes on.

    A step without drafting emits one token of each request. So a step with it, from one call of the proposer to the
    next, has lost its duration, in steps without drafting, less the tokens that it emitted of each request: everything
    is in it, whether calls, waits, tokens verified in vain, or a drafter on the target's cores. Drafting
    ends where it would lose more than the allowance, and is tried again as soon as that has grown enough for a trial.
    So of any number of steps it loses at most `ALLOWED` and `ALLOWED_STEPS`, and a step more.

    Args:
        paused: told, when drafting ends, what it has lost of each step.
    """

    def __init__(self, paused: Callable[[float], None] = lambda _: None) -> None:
        self.drafting = False
        self._paused = paused
        self._off: deque[float] = deque(maxlen=COMPARED)  # seconds of the latest steps without drafting
        self._allowed = ALLOWED_STEPS  # steps that may be lost still
        self._loss = LEAST_GAIN  # of a step, that each step has lost since drafting began the last time
        self._steps = 0  # counted since drafting began or ended
        self._renewing = False  # it has ended for `RENEWAL` steps only
        self._lost = 0.0  # steps, since it began

    @property
    def usual(self) -> float:
        """Seconds of a step without drafting."""
        usual = median(self._off)
        return sum(min(one, PAUSE * usual) for one in self._off) / len(self._off)

    def stepped(self, seconds: float, tokens: float) -> None:
        """A step took so long from one call of the proposer to the next, and emitted so many tokens of each request."""
        self._steps += 1
        if not self.drafting:
            self._allow(ALLOWED)
            if self._steps > 1 or not self._off:
                self._off.append(seconds)
            return
        lasted = min(seconds / self.usual, PAUSE)
        lost = lasted - tokens + LEAST_GAIN
        self._lost += lost
        self._allow(ALLOWED * lasted - lost)

    def decide(self) -> bool:
        """Whether the next step drafts."""
        if self.drafting:
            if self._allowed < 0 or self._steps >= RENEWED:
                self._switch(False, renewing=self._allowed >= 0)
        elif self._renewing:
            if self._steps >= RENEWAL:
                self._switch(True)
        elif len(self._off) >= LEAST_COMPARED and self._allowed >= min(TRIAL * self._loss, ALLOWED_STEPS):
            self._switch(True)
        return self.drafting

    def _allow(self, steps: float) -> None:
        self._allowed = min(self._allowed + steps, MOST_GAINED)

    def _switch(self, drafting: bool, renewing: bool = False) -> None:
        if not drafting and not renewing:
            loss = self._lost / self._steps
            self._loss = max(LEAST_GAIN, loss)
            self._paused(loss - LEAST_GAIN)
        self.drafting, self._renewing, self._steps, self._lost = drafting, renewing, 0, 0.0


class Pacing:
    """The decisions of one vLLM engine.

    Args:
        most: draft tokens of a request in a step.
        longest: seconds that a step waits at most, besides `LONGEST_WAIT`; 0: it never waits.
        always: requests draft whether that pays or not.
    """

    def __init__(self, most: int, longest: float, always: bool = False) -> None:
        self._always = always
        self._pauses = Seldom(log)
        self.target = FittedCost(StepCost())  # seconds of a step, by requests and draft tokens
        self._most = most
        self._longest = longest
        self._letters = Share(memory=LETTERS)  # target tokens of letters
        self._speed = Share(memory=SPEED_SECONDS)  # tokens of seconds
        self._requests = 0  # of the latest step
        self._accounts: dict[int, DraftingAccount] = {}  # by size of the batch: up to 1, 2, 4, 8 … requests

    def emitted(self, tokens: int, letters: int) -> None:
        """A request has emitted tokens."""
        self._letters.add(tokens, letters)

    def verified(self, seconds: float, requests: int, draft_tokens: int) -> None:
        """A forward of so many requests, all of them past their prompts, that verified draft tokens took so long."""
        self.target.add(seconds, float(requests), float(draft_tokens))

    def stepped(self, seconds: float, requests: int, tokens: int) -> None:
        """A step of the same requests took so long with its proposals, and emitted so many tokens."""
        self._speed.add(tokens, seconds)
        self._account(requests).stepped(seconds, tokens / requests)

    def drafts(self, requests: int) -> bool:
        """Whether a step of so many requests drafts."""
        self._requests = requests
        return self._account(requests).decide() or self._always

    def pull(self, pace: DrafterPace) -> Pull:
        """How much is asked of a drafter for each request.

        One target token in the first reply, then as many as it drafts in a part of a step, since each reply costs a
        turn of the event loop, and what is in none is late. A drafter that has time left in a step prepares
        continuations for the case that its tokens are refused.
        """
        each = max(LEAST_EACH, pace.tokens_for(1.0 / self._letters.mean(0.25, 8.0)))
        window = min(MOST_DRAFT_TOKENS, round(each * (2 * self._most + SPARE)) + 1)
        in_a_step = self.target.cost.seconds(1.0) / max(pace.step.value, 1e-6) if self.target.known else each
        chunk = min(max(each, in_a_step / REPLIES), each * (self._most + 1))
        spare = self._requests <= FEW and in_a_step >= window
        return Pull(
            window, max(1, round(each)), min(window, max(1, round(chunk))), round(each * BRANCH) if spare else 0
        )

    def wait(self, offers: Sequence[Offer], now: float) -> float:
        """Until when this step waits for draft tokens on their way, in seconds; `now`: it goes on with what is here."""
        if len(offers) > FEW:
            return now
        lacking = [offer for offer in offers if offer.asked is not None and not offer.guess.ids]
        return max((now, *(self._until(offer.pace, offer.asked or 0.0, now) for offer in lacking)))

    def _until(self, pace: DrafterPace, asked: float, now: float) -> float:
        """The time at which a wait for one request's first token brings the most, if the latest delays come again."""
        longest = min(self._longest, LONGEST_WAIT * self.target.cost.seconds(1.0))
        delays = sorted(one - (now - asked) for one in pace.delays if one > now - asked)
        gain, speed = worth_of_first(pace.chances(self._most, self._most)), self._speed.mean(0.0, 1e-9)
        best, until, waited = 0.0, now, 0.0
        for number, delay in enumerate(delays, 1):
            if SLACK * delay > longest:
                break
            waited += delay
            value = (gain * number - speed * (waited + (len(delays) - number) * SLACK * delay)) / len(delays)
            if value > best:
                best, until = value, now + SLACK * delay
        return until

    def lengths(self, offers: Sequence[Offer]) -> list[int]:
        """How many of each request's guessed tokens are proposed: together they give the most tokens per second."""
        chances = [offer.chances for offer in offers]
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

    def _account(self, requests: int) -> DraftingAccount:
        size = (requests - 1).bit_length()
        if size not in self._accounts:
            self._accounts[size] = DraftingAccount(partial(self._paused, size))
        return self._accounts[size]

    def _paused(self, size: int, loss: float) -> None:
        if not self._always:
            self._pauses.warning(
                "drafting loses %.0f %% of a step here with %s at once: paused, and tried again later (a gain below "
                "%.0f %% is taken for none; CROSSDRAFT_ALWAYS_DRAFT=1 drafts all the same)",
                max(0.0, 100 * loss),
                f"up to {1 << size} requests" if size else "one request",
                100 * LEAST_GAIN,
            )


def worth_of_first(chances: Sequence[float]) -> float:
    """Tokens that the first draft token brings when it is proposed one step earlier.

    After a refusal a step has no draft. It arrives meanwhile, and serves the next step if its first token was right.
    Let p be a token's chance, E the expected tokens of a whole draft of K, and h what a step with a draft at hand is
    worth more than one without. The former emits 1 + E and is followed by another one with p^(K+1), the latter emits 1
    and is followed by one with p; so h = E + p^(K+1) h - p h. With its first token such a step emits 1 + p, and is
    followed by one with p^2.
    """
    first, second = (*chances, chances[-1])[:2]
    ahead: float = sum(accumulate(chances, mul)) / (1 + first - prod(chances) * first)
    return first - first * (1 - second) * ahead

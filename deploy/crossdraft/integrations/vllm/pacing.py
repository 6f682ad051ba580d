"""Whether vLLM's requests draft at all, how long a step waits for draft tokens, and how many each request proposes.

A step of vLLM is one forward for all requests, so that all wait where one does. Three decisions, from the coarsest on:

- whether drafts are proposed, and how many tokens of a usual request, is measured, as in crossdraft's own controller;
- a wait is worth it if the tokens that it may bring take longer otherwise, by the delays of the latest replies;
- a request whose draft tokens fare better or worse than usual proposes more or fewer, up to the same chance.

Chances are counted on all that drafts would have proposed, whether it was or not.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from operator import mul

from crossdraft.integrations.vllm.streams import Guess, Outcome, Pull
from crossdraft.speculation.choice import PLAIN, ROUNDS, Choice, DraftSeen
from crossdraft.speculation.estimates import Round, Share, Times
from crossdraft.speculation.selection import ArmSelection, Guesses, LossBudget
from crossdraft.types.messages import MOST_DRAFT_TOKENS

log = logging.getLogger(__name__)

LETTERS = 2000.0  # of output or draft after which the length of a token weighs 1/e
SHARED = 8.0  # guesses that a drafter's acceptance weighs against what was seen of one request
LEAST_EACH = 0.25  # draft tokens for a target token at least, however long they are
SPARE = 2  # target tokens asked for beyond two proposals: the second is drafted while the first is verified
REPLIES = 4  # of a drafter in a step, at most if its tokens take long
BRANCH = 2  # target tokens of a prepared continuation
FEW = 2  # requests of a step that waits, as of many one always lacks its draft, or for which continuations are prepared
MAX_WAIT = 0.08  # of a step of one request
SLACK = 1.2  # times a delay seen before that is waited for
DELAYS = 16  # latest delays of first replies
ALIKE = 0.5  # of a usual request's chance of its last token: a request with less proposes fewer
SPEED_SECONDS = 2.0  # after which the speed of a step weighs 1/e
FIRST_PAUSE = 60.0  # seconds between two lines of one kind; it doubles
MAX_PAUSE = 3600.0


class DrafterPace:
    """What is known of one drafter: how its draft tokens fare, how long they are, and when they come."""

    def __init__(self) -> None:
        self.acceptance = Share()
        self.edge = Share()  # of the last tokens of a text, behind which nothing was drafted yet
        self.step = Times()  # seconds of a draft token
        self.delays: deque[float] = deque(maxlen=DELAYS)  # seconds from an epoch's begin to its first reply
        self._length = Share(memory=LETTERS)  # draft tokens of letters

    def judged(self, outcome: Outcome) -> None:
        self.acceptance.add(outcome.matched, outcome.matched + outcome.missed)
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
        usual = self.acceptance.mean()
        edge = self.edge.mean(usual)
        return [usual if place < sure else edge for place in range(count)]

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


class Pacing:
    """The decisions of one vLLM engine, for at most so many draft tokens of a request in a step. A step waits for at
    most `longest` seconds, besides `MAX_WAIT`; 0: for none. `always`: requests draft whether that pays or not."""

    def __init__(self, most: int, longest: float, always: bool = False) -> None:
        arms = [Choice(depth, depth, False) for depth in (*(one for one in ROUNDS if one < most), most)]
        self._arms = arms if always else [PLAIN, *arms]
        self._pauses = Seldom(log)
        self.target = Times()  # of a step, by its tokens
        self._beside = Times()  # from the end of a step to the next one, by requests
        self._acceptance = Share()  # of draft tokens of all requests
        self._most = most
        self._longest = longest
        self._letters = Share(memory=LETTERS)  # target tokens of letters
        self._speed = Share(memory=SPEED_SECONDS)  # tokens of seconds
        self._requests = 1  # of the latest step
        self._budget = LossBudget()
        self._selections: dict[int, ArmSelection] = {}  # by size of the batch: up to 1, 2, 4, 8 … requests

    def emitted(self, tokens: int, letters: int) -> None:
        """A request has emitted tokens."""
        self._letters.add(tokens, letters)

    def judged(self, outcome: Outcome) -> None:
        """How a guess of any request fared."""
        self._acceptance.add(outcome.matched, outcome.matched + outcome.missed)

    def verified(self, seconds: float, requests: int, draft_tokens: int) -> None:
        """A forward of so many requests, all of them past their prompts, that verified draft tokens took so long."""
        self.target.add(seconds, requests + draft_tokens)

    def stepped(self, seconds: float, requests: int, tokens: int) -> None:
        """A step of the same requests took so long with its proposals, and emitted so many tokens."""
        self._speed.add(tokens, seconds)
        selection = self._selection(requests)
        before, guesses = selection.current, self._guesses(requests)
        self._beside.add(max(0.0, seconds - guesses[before].seconds + self._beside.seconds(requests)), requests)
        if selection.add(seconds, tokens / requests, True, guesses, requests):
            selection.decide(guesses)
        if not before.drafts:
            self._acceptance.fade(2 * tokens / requests)
        if before.drafts and not selection.current.drafts:
            speeds = selection.speeds(guesses)
            self._paused(requests, 1 - max(speeds[arm] for arm in self._arms if arm.drafts) / speeds[PLAIN])

    def drafts(self, requests: int) -> bool:
        """Whether a step of so many requests drafts."""
        self._requests = requests
        return self._selection(requests).current.drafts

    def pull(self, pace: DrafterPace) -> Pull:
        """How much is asked of a drafter for each request.

        One target token in the first reply, then as many as it drafts in a part of a step, since each reply costs a
        turn of the event loop. A drafter that has time left in a step prepares continuations.
        """
        each = max(LEAST_EACH, pace.tokens_for(1.0 / self._letters.mean(0.25, 8.0)))
        window = min(MOST_DRAFT_TOKENS, round(each * (2 * self._most + SPARE)) + 1)
        in_a_step = self.target.seconds() / max(pace.step.seconds(), 1e-6) if self.target.known else each
        chunk = min(max(each, in_a_step / REPLIES), each * (self._most + 1))
        spare = self._requests <= FEW and in_a_step >= window
        return Pull(window, max(1, round(each)), min(window, max(1, round(chunk))), round(each * BRANCH) * spare)

    def wait(self, offers: Sequence[Offer], now: float) -> float:
        """Until when this step waits for draft tokens on their way, in seconds; `now`: it goes on with what is here."""
        if len(offers) > FEW:
            return now
        lacking = [offer for offer in offers if offer.asked is not None and not offer.guess.ids]
        return max((now, *(self._until(offer.pace, offer.asked or 0.0, now) for offer in lacking)))

    def _until(self, pace: DrafterPace, asked: float, now: float) -> float:
        """The time at which a wait for one request's first token brings the most, if the latest delays come again."""
        longest = min(self._longest, MAX_WAIT * self.target.seconds())
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
        """How many of each request's guessed tokens are proposed: all that are as likely as a usual request's last."""
        depth = self._selection(self._requests).current.max_draft_tokens
        least = self._acceptance.mean() ** depth
        alive = [accumulate(offer.chances, mul) for offer in offers]
        return [
            sum(chance >= least * (ALIKE if place < depth else 1) for place, chance in enumerate(each))
            for each in alive
        ]

    def _guesses(self, requests: int) -> Guesses:
        alive = [self._acceptance.mean() ** place for place in range(self._most + 1)]
        beside = self._beside.seconds(requests)
        return {
            arm: Round(sum(alive[: depth + 1]), beside + self.target.seconds(requests * (1 + depth)))
            for arm, depth in ((arm, arm.max_draft_tokens) for arm in self._arms)
        }

    def _selection(self, requests: int) -> ArmSelection:
        size = (requests - 1).bit_length()
        if size not in self._selections:
            self._selections[size] = ArmSelection(self._budget, self._arms[0])
        return self._selections[size]

    def _paused(self, requests: int, loss: float) -> None:
        self._pauses.warning(
            "drafting loses %.0f %% of a step here with %s at once: paused, and tried again later "
            "(CROSSDRAFT_ALWAYS_DRAFT=1 drafts all the same)",
            max(0.0, 100 * loss),
            f"up to {1 << (requests - 1).bit_length()} requests" if requests > 1 else "one request",
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


@dataclass(eq=False)
class Seldom:
    """Warns of what comes again and again, at most once a minute and then less and less often."""

    log: logging.Logger
    clock: Callable[[], float] = time.monotonic  # seconds
    _pause: float = FIRST_PAUSE
    _not_before: float = 0.0

    def warning(self, text: str, *values: object) -> None:
        now = self.clock()
        if now < self._not_before:
            return
        self.log.warning(text, *values)
        self._not_before, self._pause = now + self._pause, min(2 * self._pause, MAX_PAUSE)

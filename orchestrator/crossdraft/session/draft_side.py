"""A session's dealings with its drafter: its lane, epochs, the window, what it was told and still owes."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from crossdraft.session.assignment import Assignment
from crossdraft.session.events import Close, Command, Lane, Open, Send, SetTimer, Timer
from crossdraft.speculation.choice import Choice, DraftSeen
from crossdraft.text.letters import NOTHING, Letters, common_length
from crossdraft.text.pairs import Pair
from crossdraft.types.messages import Advance, Branch, Draft, Drafted, Score, Scored
from crossdraft.types.request import GenerationRequest, RequestError
from crossdraft.types.rows import DraftToken
from crossdraft.verification.methods import METHODS, default_method, method_named
from crossdraft.verification.walk import Answer, NeedPrefix, Refused, Step, Walk, draft_token_letters

EXCESS = 1e-6  # that a probability which is a sum of float32 products may have over one
LONGEST_BACKOFF = 8.0  # seconds


# One epoch: its draft as far as it has arrived, and the walk over it.


@dataclass(frozen=True)
class Verdict:
    """How far a draft held, counted in draft tokens from its first one on."""

    accepted: int = 0  # wholly in the output
    refused: bool = False  # the next one is not, and never will be


class Epoch:
    """A draft from the letter `start` of the output on, and the walk that verifies it.

    The walk sees draft tokens only when it asks for them. What is decided without it, which rows to fetch, may
    look at all of them.
    """

    def __init__(self, number: int, choice: Choice, pair: Pair, start: int, frontier: int) -> None:
        self.number = number
        self.choice = choice
        self.start = start  # letters of output before the draft
        self.began = frontier  # letters of output when the epoch began; less than `start` never
        self.draft_tokens: list[DraftToken] = []
        self.drafted = NOTHING  # their letters
        self.promised: tuple[DraftToken, ...] = ()  # an adopted branch whose rows have not come: from its first one on
        self.revealed = 0  # draft tokens that the walk has asked for
        self.settled = False  # the target has gone on by itself, and the draft has not caught up yet
        self.draws = False  # the walk needs the target's own draws, not rows
        self.reach = 0  # letters of output up to which passes of this epoch have guessed
        self._pair = pair
        self._ends: list[int] = []  # of each draft token, in letters since `start`
        self._agreed = 0  # letters of `drafted` that are in the output
        self._released = 0  # draft tokens whose rows are given back
        self._walk: Walk | None = None
        self._step: Step | None = None

    def begin(self, walk: Walk, draws: bool = False) -> None:
        """The walk sets out, on rows or on the target's own draws."""
        self._walk, self._step, self.draws = walk, next(walk), draws

    @property
    def begun(self) -> bool:
        """Whether the walk has set out."""
        return self._walk is not None

    @property
    def step(self) -> Step:
        """What the walk waits for."""
        assert self._step is not None
        return self._step

    def answer(self, answer: Answer) -> None:
        """Give the walk what it asked for; `step` becomes the next thing that it asks."""
        assert self._walk is not None
        self._step = self._walk.send(answer)

    def extend(self, draft_tokens: Sequence[DraftToken]) -> None:
        """More of the draft has arrived."""
        for draft_token in draft_tokens:
            self.draft_tokens.append(draft_token)
            self.drafted = Letters(self.drafted + draft_token_letters(self._pair, draft_token))
            self._ends.append(len(self.drafted))

    def take(self) -> DraftToken:
        """Reveal the next draft token."""
        self.revealed += 1
        return self.draft_tokens[self.revealed - 1]

    @property
    def alone(self) -> bool:
        """Whether the target draws by itself and there is nothing to compare with."""
        return self.draws and not self.choice.drafts and not self.draft_tokens

    @property
    def exhausted(self) -> bool:
        """Whether every draft token that has arrived is revealed."""
        return self.revealed == len(self.draft_tokens)

    def guessed(self, first: int) -> list[DraftToken]:
        """The draft as far as it is known from place `first` on, for planning: draft tokens, and what a branch promises
        after them."""
        return [*self.draft_tokens[first:], *self.promised[max(first, len(self.draft_tokens)) :]]

    def passed(self, frontier: int) -> int:
        """Draft tokens that end at or before the frontier (letters of output)."""
        return bisect_right(self._ends, frontier - self.start)

    def beyond(self, frontier: int) -> int:
        """Draft tokens known that end beyond the frontier (letters of output)."""
        return max(len(self.draft_tokens), len(self.promised)) - self.passed(frontier)

    def release(self, frontier: int) -> None:
        """The output has passed these draft tokens: no row is fetched and nothing is judged by theirs any more.

        An epoch in which all is accepted has as many draft tokens as the output has tokens.
        """
        over = min(self.revealed, self.passed(frontier))
        for place in range(self._released, over):
            self.draft_tokens[place] = replace(self.draft_tokens[place], row=None)
        self._released = max(self._released, over)

    def begin_of(self, place: int) -> int:
        """Letters of the draft before a draft token, or before the next one."""
        return self._ends[place - 1] if place else 0

    def contradicts(self, text: Letters) -> bool:
        """Whether the draft as it has arrived and the output differ: only where that may end an epoch (samples)."""
        self._follow(text)
        return self._agreed < min(len(self.drafted), len(text) - self.start)

    def verdict(self, text: Letters) -> Verdict:
        """How far the draft held.

        In letters, so that it means the same for every method. A token that replaces a refused draft token may begin
        with that draft token's letters: where the walk says what is wrong, that counts.
        """
        self._follow(text)
        agreed, refused = self._agreed, self._agreed < min(len(self.drafted), len(text) - self.start)
        if isinstance(self._step, Refused):
            agreed, refused = min(agreed, self._step.offset - self.start), True
        return Verdict(bisect_right(self._ends, agreed), refused)

    def _follow(self, text: Letters) -> None:
        place = self._agreed
        self._agreed += common_length(self.drafted[place:], text[self.start + place :])


class Drafting:
    """One drafter at a time; a lost one is opened again, somewhere, later and later."""

    def __init__(self, assignment: Assignment, lanes: Iterator[Lane]) -> None:
        self.lane: Lane | None = None  # open, or being opened
        self.ready = False
        self.branches = Branches(assignment.pair)
        self.epoch = 0  # number of the latest one that it was told of
        self.asked = 0  # draft tokens of it that were asked for
        self.received = 0  # ... that came
        self.scoring: Score | None = None  # what it has not scored yet
        self._given = assignment
        self._lanes = lanes
        self._failures = 0  # since it last answered
        self._aside = False  # it stands aside for the rest of the epoch
        self._told = (0, NOTHING)  # its text: the output up to an offset, then its own letters
        self._asked_at = 0.0
        self._heard_at = 0.0
        self._timer = 0  # number of the latest
        self._armed = False

    @property
    def due(self) -> bool:
        """Whether more draft tokens of the running epoch will come."""
        return self.ready and not self._aside and self.received < self.asked

    @property
    def told_epoch(self) -> bool:
        """Whether it was told of the running epoch's draft: one that has opened since was not."""
        return self.ready and self.asked > 0

    @property
    def hoped_for(self) -> bool:
        """Whether a first lane is being opened, and none has failed yet."""
        return self.lane is not None and not self.ready and not self._failures

    def open(self) -> list[Command]:
        """A lane, if the session has a use for a drafter."""
        if self._given.open_drafter is None:
            return []
        self.lane = next(self._lanes)
        wait = 0.0 if not self._failures else min(LONGEST_BACKOFF, 0.125 * 2.0 ** min(self._failures, 10))
        return [Open(self.lane, self._given.open_drafter, wait)]

    def opened(self) -> None:
        """It knows the prompt, and nothing of the output."""
        self.ready = True
        self._told = (0, NOTHING)
        self.branches.start_over()

    def lost(self, again: bool) -> list[Command]:
        """Whatever it owes will not come; another one is opened if `again`."""
        self.lane, self.ready, self.scoring = None, False, None
        self.end_epoch()
        self._failures += 1
        return self.open() if again else []

    def give_up(self, why: str) -> list[Command]:
        """It is not to be used any more in this session."""
        assert self.lane is not None
        return [Close(self.lane, why), *self.lost(again=True)]

    def end_epoch(self) -> None:
        """What it still sends of the epoch is not wanted."""
        self.asked = self.received = 0
        self.branches.clear()

    def begin(self, epoch: Epoch, text: Letters, branch: Branch | None, now: float) -> list[Command]:
        """A new epoch: rewinds the drafter to the output, or to where a branch goes on from it."""
        assert self.lane is not None
        choice = epoch.choice
        start, drafted = self._told
        same = common_length(drafted, text[start : epoch.start])
        count = choice.window if branch is None else max(choice.window, len(branch.tokens))
        draft = Draft(
            epoch.number,
            start + same,
            Letters(text[start + same : epoch.start]),
            count,
            choice.chunk,
            choice.branch_depth,
            choice.branch_width,
            0 if branch is None else branch.number,
            choice.first if branch is None else max(choice.first, len(branch.tokens)),
        )
        self.end_epoch()
        self.epoch, self.asked, self._aside = epoch.number, count, False
        self._told = (epoch.start, epoch.drafted)
        self.received = len(epoch.draft_tokens)  # those of a branch, where no rows are needed
        self._asked_at = now
        return [Send(self.lane, draft), *self._arm(now)]

    def advance(self, count: int, chunk: int, now: float) -> list[Command]:
        """More draft tokens of the running epoch are wanted: `count` from its first one on.

        Said at once to a drafter that owes nothing. To another only when it may go on by a whole reply, which it
        hears early enough: a window is larger than that.
        """
        least = chunk if self.due else 1
        if not self.ready or self._aside or count < self.asked + least:
            return []
        assert self.lane is not None
        owed, self.asked = self.due, count
        return [Send(self.lane, Advance(self.epoch, count)), *([] if owed else self._arm(now))]

    def score(self, need: NeedPrefix, start: int, now: float) -> list[Command]:
        """Asks for probabilities of prefixes of the draft that began at the offset `start`, once."""
        assert self.lane is not None
        if self.scoring is not None:
            return []
        self.scoring = Score(self.epoch, start, need.strings, need.tokens)
        return [Send(self.lane, self.scoring), *self._arm(now)]

    def expects(self, reply: Drafted | Scored) -> bool:
        """Whether a reply is due: draft tokens in order, scores of what was asked."""
        if isinstance(reply, Scored):
            return self.scoring is not None and reply.epoch == self.scoring.epoch
        came = reply.first + len(reply.draft_tokens)
        return reply.epoch == self.epoch and (reply.first == self.received or came <= self.received)

    def fault_of(self, drafted: Drafted, choice: Choice) -> str:
        """What is wrong with a reply that was due; empty if it can be used.

        An empty one is a fault: it would put off the time when the drafter is given up.
        """
        if not (drafted.draft_tokens or drafted.branches or drafted.reason):
            return "it sent a reply without anything in it"
        start, letters = self._told
        fault = self._given.fault_of(drafted, start + len(letters), self.asked - self.received)
        return fault or self.branches.fault_of(drafted.branches, choice.branch_depth, choice.branch_width * self.asked)

    def take(self, drafted: Drafted, epoch: Epoch, now: float) -> DraftSeen:
        """Draft tokens that were due and have no fault join the epoch's draft."""
        first = self.received == 0
        seen = DraftSeen(
            len(drafted.draft_tokens),
            drafted.first,
            now - self._asked_at if first else None,
            None if first else now - self._heard_at,
            drafted.seconds,
            sum(len(branch.tokens) for branch in drafted.branches),
        )
        epoch.extend(drafted.draft_tokens)
        self.received += len(drafted.draft_tokens)
        self.branches.add(drafted.branches)
        self._told = (epoch.start, epoch.drafted)
        self._aside = self._aside or bool(drafted.reason)
        self._heard(now)
        return seen

    def scored(self, scored: Scored, now: float) -> str:
        """What is wrong with scores that were due, as a text; empty if they can be used."""
        asked, self.scoring = self.scoring, None
        assert asked is not None
        self._heard(now)
        return _fault_of_scores(scored, len(asked.strings))

    def expired(self, number: int, now: float) -> tuple[bool, list[Command]]:
        """Whether it owes an answer for too long; if not, the timer runs on for the rest."""
        self._armed = self._armed and number != self._timer
        if number != self._timer or not (self.due or self.scoring is not None):
            return False, []
        left = max(self._asked_at, self._heard_at) + self._given.draft_seconds - now
        return (False, self._arm(now, left)) if left > 0 else (True, [])

    def _heard(self, now: float) -> None:
        self._heard_at = now
        self._failures = 0

    def _arm(self, now: float, seconds: float | None = None) -> list[Command]:
        """One timer, which is looked at when it expires: most answers come long before."""
        self._asked_at = now if seconds is None else self._asked_at
        if self._armed:
            return []
        self._armed = True
        self._timer += 1
        return [SetTimer(Timer.DRAFTER, self._timer, self._given.draft_seconds if seconds is None else seconds)]


def of_branch(branch: Branch) -> tuple[DraftToken, ...]:
    """A branch's draft tokens, without the rows that they were drawn from."""
    return tuple(DraftToken(token) for token in branch.tokens)


def _fault_of_scores(answer: Scored, strings: int) -> str:
    values = answer.probabilities
    if values.shape != (strings,):
        return f"it scored {values.size} prefixes, asked for {strings}"
    if not bool(np.all((values >= 0) & (values <= 1 + EXCESS))):  # false for NaN as well
        return "it sent a score that is not between 0 and 1"
    return ""


# Prepared continuations that a drafter has sent for the running epoch.


class Branches:
    """The branches of one epoch, by what they replace."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._by_number: dict[int, Branch] = {}
        self._came = 0  # in the epoch
        self._latest = 0  # number of the session's latest branch

    def __len__(self) -> int:
        return len(self._by_number)

    def fault_of(self, branches: tuple[Branch, ...], depth: int, most: int) -> str:
        """What is wrong with branches that were sent, of `depth` ids and `most` in the epoch; empty if nothing is."""
        if self._came + len(branches) > most:
            return f"it sent {self._came + len(branches)} branches in an epoch, asked for at most {most}"
        size = self._pair.drafter.size
        latest = self._latest
        for branch in branches:
            if branch.number <= latest:
                return f"it sent branch {branch.number} after branch {latest}"
            latest = branch.number
            if not branch.letters or len(branch.tokens) > depth or not all(0 <= one < size for one in branch.tokens):
                return (
                    f"branch {branch.number} is not one of at most {depth} ids from 0 to {size - 1} after some letters"
                )
        return ""

    def add(self, branches: tuple[Branch, ...]) -> None:
        """They came, and have no fault."""
        for branch in branches:
            self._by_number[branch.number] = branch
            self._came += 1
            self._latest = branch.number

    def clear(self) -> None:
        """Another epoch begins."""
        self._by_number.clear()
        self._came = 0

    def release(self, frontier: int) -> None:
        """The output has `frontier` letters: a branch that says fewer than that can never go on from it."""
        over = [
            branch.number for branch in self._by_number.values() if branch.offset + len(self._said(branch)) < frontier
        ]
        for number in over:
            del self._by_number[number]

    def start_over(self) -> None:
        """Another drafter: it numbers its own from 1."""
        self.clear()
        self._latest = 0

    def match(self, epoch: Epoch, text: Letters, letters_decide: bool) -> Branch | None:
        """The branch that goes on from the output as it is, after the epoch's draft was refused.

        It must replace what was refused by just the letters that the output has. Where the output does not
        depend on draft tokens (`letters_decide`), it may also have replaced less, if its draft tokens agree with the
        rest.
        """
        best: Branch | None = None
        for branch in self._by_number.values():
            begin = branch.offset - epoch.start
            if begin < 0 or branch.offset >= len(text):
                continue
            if common_length(epoch.drafted, text[epoch.start :]) < begin:
                continue
            rest = text[branch.offset :]
            if rest == branch.letters:
                return branch
            if letters_decide and rest.startswith(branch.letters) and self._agrees(branch, rest):
                best = branch
        return best

    def texts(self, epoch: Epoch, frontier: int) -> list[Letters]:
        """What each says from the frontier on, where it goes on from the draft as it is; earlier refusals first."""
        ahead = (branch for branch in self._by_number.values() if branch.offset >= max(frontier, epoch.start))
        return [
            Letters(epoch.drafted[frontier - epoch.start : branch.offset - epoch.start] + self._said(branch))
            for branch in sorted(ahead, key=lambda branch: branch.offset)
        ]

    def _said(self, branch: Branch) -> str:
        return branch.letters + self._pair.drafter.letters_of(branch.tokens)

    def _agrees(self, branch: Branch, rest: str) -> bool:
        """Whether the branch says the rest, and more."""
        said = self._said(branch)
        return said.startswith(rest) and len(said) > len(rest)


# Drafters that are not trusted: nothing that they say may change the distribution of the output.

SAFE = tuple(method.name for method in METHODS.values() if not method.trusting)


def without_trust(request: GenerationRequest) -> GenerationRequest:
    """The request with a method that needs no trust: the one asked for, or the default among them.

    Raises:
        RequestError: the method asked for needs it.
    """
    if request.method is None:
        default = default_method(request.options.temperature, seeded=True, same_vocabulary=False)
        return replace(request, method=default.name)
    if method_named(request.method).trusting:
        raise RequestError(
            f"with method {request.method!r} a drafter that lies about the distributions that it drew from "
            f"changes the output, "
            f"and this drafter is not trusted; use {' or '.join(map(repr, SAFE))}, or leave the method out",
            "method",
        )
    return request

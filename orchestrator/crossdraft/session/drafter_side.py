"""The drafter side of a session: the client of the drafter's protocol, its lane, how long it is waited for, its faults.

`Drafts` is what one drafter was told and asked, and what it has said. vLLM's integration speaks to drafters by it, too.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from crossdraft.session.assignment import Assignment
from crossdraft.session.epoch import Epoch
from crossdraft.session.events import Close, Command, Lane, Open, Reply, Send, SetTimer, Timer
from crossdraft.session.ledger import Ledger
from crossdraft.session.rules import DrafterState
from crossdraft.speculation.choice import Choice, DraftSeen
from crossdraft.text.letters import NOTHING, Letters, common_length
from crossdraft.text.pairs import Pair
from crossdraft.types.messages import Advance, Branch, Draft, Drafted, HiddenStates, Score, Scored
from crossdraft.types.rows import DraftToken
from crossdraft.verification.walk import NeedPrefix


class Drafts:
    """One session with a drafter: requests are returned, to be sent in order."""

    def __init__(self, pair: Pair) -> None:
        self.ledger = Ledger()
        self.branches = Branches(pair)
        self._known = (0, NOTHING)  # the text it knows: the output up to an offset, then its own letters
        self._adopted = 0  # draft tokens of the epoch that were drafted before it

    @property
    def end(self) -> int:
        """Letters of output, and of draft after it, that the drafter knows."""
        start, drafted = self._known
        return start + len(drafted)

    def start_over(self) -> None:
        """Another drafter, which knows the prompt, and nothing of the output."""
        self.ledger, self._known = Ledger(), (0, NOTHING)
        self.branches.start_over()

    def begin(
        self, epoch: Epoch, text: Letters, branch: Branch | None, count: int, first: int, now: float, **shape: Any
    ) -> Draft:
        """Rewind the drafter to the output, or to the end of an adopted branch, for a new epoch.

        Args:
            epoch: has the draft tokens of the branch already, where no rows are needed.
            text: the output.
            branch: that is adopted.
            count: draft tokens that are wanted.
            first: of them in the first reply.
            now: seconds.
            shape: further fields of the request.
        """
        start, drafted = self._known
        offset = start + common_length(drafted, text[start : epoch.start])
        self._adopted = 0 if branch is None else len(branch.tokens)
        draft = Draft(
            epoch.number,
            offset,
            Letters(text[offset : epoch.start]),
            max(count, self._adopted),
            adopt=0 if branch is None else branch.number,
            first=max(first, self._adopted),
            **shape,
        )
        self.branches.clear()
        self._known = (epoch.start, epoch.drafted)
        self.ledger.sent(draft, now, received=len(epoch.draft_tokens))
        return draft

    def advance(self, count: int, chunk: int, now: float) -> list[Advance]:
        """Ask for more of the running epoch: `count` draft tokens from its first one on.

        Sent at once to a drafter that owes nothing. A drafter that is still drafting gets it only once a whole reply
        more is wanted, which still reaches it in time because max_draft_tokens is larger than that.
        """
        ledger = self.ledger
        if ledger.aside or count < ledger.wanted + (chunk if ledger.drafting else 1):
            return []
        advance = Advance(ledger.epoch, count)
        ledger.sent(advance, now)
        return [advance]

    def stop(self, now: float) -> list[Advance]:
        """Nothing more is wanted for now; a drafter that has nothing to do need not be told."""
        told = [Advance(self.ledger.epoch, 0)] if self.ledger.drafting else []
        self.ledger.end(now)
        self.branches.clear()
        return told

    def fault_of(self, drafted: Drafted, depth: int, most: int) -> str:
        """What is wrong with a reply that was due, but for its draft tokens; empty if nothing is.

        A reply without content is a fault: it would postpone the drafter's deadline.

        `drafted`: the reply. `depth`: ids that each branch may have at most. `most`: branches of the epoch at most.
        """
        if not (drafted.draft_tokens or drafted.branches or drafted.reason):
            return "it sent a reply without anything in it"
        return self.branches.fault_of(drafted.branches, depth, most) if drafted.branches else ""

    def take(self, drafted: Drafted, epoch: Epoch, now: float) -> DraftSeen:
        """Add draft tokens that were due and have no fault to the epoch's draft."""
        count = len(drafted.draft_tokens)
        asked = self.ledger.take(drafted, now)
        assert asked is not None
        epoch.extend(drafted.draft_tokens)
        self.branches.add(drafted.branches)
        self._known = (epoch.start, epoch.drafted)
        return DraftSeen(
            count - min(count, max(0, self._adopted - drafted.first)),
            now - asked.at if asked.replies == 1 else None,
            drafted.seconds,
            drafted.queued,
            drafted.reason,
        )


def of_branch(branch: Branch) -> tuple[DraftToken, ...]:
    """A branch's draft tokens, without rows."""
    return tuple(DraftToken(token) for token in branch.tokens)


class Branches:
    """Prepared continuations that the drafter has sent for the running epoch."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._by_number: dict[int, Branch] = {}
        self._received = 0  # in the epoch
        self._latest = 0  # number of the session's latest branch

    def __len__(self) -> int:
        return len(self._by_number)

    def fault_of(self, branches: tuple[Branch, ...], depth: int, most: int) -> str:
        """What is wrong with new branches; empty if nothing is.

        `depth`: ids that each may have at most. `most`: branches of the epoch at most.
        """
        if self._received + len(branches) > most:
            return f"it sent {self._received + len(branches)} branches in an epoch, asked for at most {most}"
        size, longest = self._pair.drafter.size, self._pair.drafter.longest
        latest = self._latest
        for branch in branches:
            if branch.number <= latest:
                return f"it sent branch {branch.number} after branch {latest}"
            latest = branch.number
            letters, tokens = branch.letters, branch.tokens
            if not 0 < len(letters) <= longest or len(tokens) > depth or not all(0 <= one < size for one in tokens):
                ids = f"at most {depth} ids from 0 to {size - 1}"
                return f"branch {branch.number} is not one of {ids} after a token's letters"
        return ""

    def add(self, branches: tuple[Branch, ...]) -> None:
        """Keep branches that have no fault."""
        for branch in branches:
            self._by_number[branch.number] = branch
            self._received += 1
            self._latest = branch.number

    def clear(self) -> None:
        """Another epoch begins: forget them all."""
        self._by_number.clear()
        self._received = 0

    def release(self, frontier: int) -> None:
        """Drop branches whose text ends before the frontier (letters of output): none of them can go on from it."""
        for number, branch in [*self._by_number.items()] if self._by_number else ():
            if branch.offset + len(self._said(branch)) < frontier:
                del self._by_number[number]

    def start_over(self) -> None:
        """Another drafter, which numbers its branches from 1."""
        self.clear()
        self._latest = 0

    def match(self, epoch: Epoch, text: Letters, letters_decide: bool) -> Branch | None:
        """The branch that continues the output after the epoch's draft was refused.

        It must replace what was refused by exactly the letters that the output has. Where the output does not depend
        on draft tokens (`letters_decide`), it may also replace fewer, if its draft tokens agree with the rest.
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
            if letters_decide and rest.startswith(branch.letters):
                said = self._said(branch)
                best = branch if said.startswith(rest) and len(said) > len(rest) else best
        return best

    def texts(self, epoch: Epoch, frontier: int) -> list[Letters]:
        """The text of each branch from the frontier on, if its prefix is the draft, in the drafter's order."""
        return [
            Letters(epoch.drafted[frontier - epoch.start : branch.offset - epoch.start] + self._said(branch))
            for branch in self._by_number.values()
            if branch.offset >= max(frontier, epoch.start)
        ]

    def _said(self, branch: Branch) -> str:
        return branch.letters + self._pair.drafter.letters_of(branch.tokens)


ROUNDING = 1e-6  # that a probability which is a sum of float32 products may exceed one by
MAX_BACKOFF = 8.0  # seconds


class DrafterSide:
    """One drafter at a time. A lost one is opened again, at any address, with growing pauses."""

    def __init__(self, assignment: Assignment, lanes: Iterator[Lane]) -> None:
        self.lane: Lane | None = None  # open, or being opened
        self.ready = False
        self.fault = assignment.no_drafter  # why there is none, if there is none
        self.drafts = Drafts(assignment.pair)
        self.branches = self.drafts.branches
        self._given = assignment
        self._lanes = lanes
        self._failures = 0  # since it last answered
        self._timer = 0  # number of the latest
        self._armed = False  # that timer runs

    @property
    def ledger(self) -> Ledger:
        """What it was asked, and has answered."""
        return self.drafts.ledger

    @property
    def due(self) -> bool:
        """Whether more draft tokens of the running epoch will come."""
        return self.ready and self.ledger.drafting

    @property
    def hoped_for(self) -> bool:
        """Whether the first lane is being opened and no attempt has failed yet."""
        return self.lane is not None and not self.ready and not self._failures

    @property
    def unopened(self) -> bool:
        """Whether the session can use a drafter, and has tried to open none yet."""
        return self.lane is None and not self._failures and self._given.open_drafter is not None

    def open(self) -> list[Command]:
        """Open a lane, if the session can use a drafter."""
        if self._given.open_drafter is None:
            return []
        self.lane = next(self._lanes)
        pause = 0.0 if not self._failures else min(MAX_BACKOFF, 0.125 * 2.0 ** min(self._failures, 10))
        return [Open(self.lane, self._given.open_drafter, pause)]

    def opened(self) -> None:
        """The lane is open: the drafter knows the prompt, and nothing of the output."""
        self.ready = True
        self.drafts.start_over()

    def lost(self, why: str, again: bool) -> list[Command]:
        """What it owes will not come; another lane is opened if `again`."""
        self.fault = f"the drafter was lost: {why}" if self.ready else f"no drafter: {why}"
        self.lane, self.ready = None, False
        self.drafts.start_over()
        self._failures += 1
        return self.open() if again else []

    def give_up(self, why: str) -> list[Command]:
        """Close the lane for a fault; this session does not use its service again."""
        assert self.lane is not None
        return [Close(self.lane, why), *self.lost(why, again=True)]

    def stop(self, now: float) -> list[Command]:
        """No epoch is to be drafted for now."""
        told = self.drafts.stop(now)
        return [Send(self.lane, one) for one in told if self.lane is not None]

    def begin(
        self, epoch: Epoch, text: Letters, branch: Branch | None, now: float, hidden: HiddenStates
    ) -> list[Command]:
        """Rewind the drafter to the output, or to the end of an adopted branch, for a new epoch.

        `hidden` are the target's states that it has not been told.
        """
        assert self.lane is not None
        choice = epoch.choice
        draft = self.drafts.begin(
            epoch,
            text,
            branch,
            choice.max_draft_tokens,
            choice.first,
            now,
            chunk=choice.chunk,
            branch_depth=choice.branch_depth,
            branch_width=choice.branch_width,
            tree_nodes=choice.tree_nodes if self._given.method.samples else 0,
            least_likely=choice.least_likely,
            hidden=hidden,
        )
        return [Send(self.lane, draft), *self._arm(now)]

    def advance(self, count: int, chunk: int, now: float) -> list[Command]:
        """Ask for more of the running epoch, as `Drafts.advance`."""
        if not self.ready:
            return []
        assert self.lane is not None
        owed, more = self.due, self.drafts.advance(count, chunk, now)
        return [*(Send(self.lane, one) for one in more), *(self._arm(now) if more and not owed else ())]

    def score(self, need: NeedPrefix, start: int, now: float) -> list[Command]:
        """Ask once for the probabilities of prefixes of the draft that began at offset `start`."""
        assert self.lane is not None
        if self.ledger.score is not None:
            return []
        request = Score(self.ledger.epoch, start, need.strings, need.tokens)
        self.ledger.sent(request, now)
        return [Send(self.lane, request), *self._arm(now)]

    @property
    def state(self) -> DrafterState:
        """Of its lane, as in `rules`."""
        if not self.ready:
            return DrafterState.OPENING
        if self.ledger.score is not None:
            return DrafterState.SCORING
        return DrafterState.DRAFTING if self.ledger.wanted else DrafterState.IDLE

    def outdated(self, reply: Reply) -> bool:
        """Whether it is of an epoch that is over."""
        return isinstance(reply, (Drafted, Scored)) and reply.epoch < self.ledger.epoch + (not self.ledger.wanted)

    def expects(self, reply: Drafted | Scored) -> bool:
        """Whether a reply is due: draft tokens in order, or the scores that were asked for."""
        if isinstance(reply, Scored):
            asked = self.ledger.score
            return asked is not None and reply.epoch == asked.epoch
        came = reply.first + len(reply.draft_tokens)
        return reply.epoch == self.ledger.epoch and (
            reply.first == self.ledger.received or came <= self.ledger.received
        )

    def fault_of(self, drafted: Drafted, choice: Choice) -> str:
        """What is wrong with a reply that was due; empty if it can be used."""
        depth, most = choice.branch_depth, choice.branch_width * self.ledger.wanted
        if choice.tree_nodes and self._given.method.samples:
            depth, most = self.ledger.wanted, choice.tree_nodes
        fault = self._given.fault_of(drafted, self.drafts.end, self.ledger.wanted - self.ledger.received)
        return fault or self.drafts.fault_of(drafted, depth, most)

    def take(self, drafted: Drafted, epoch: Epoch, now: float) -> DraftSeen:
        """Add draft tokens that were due and have no fault to the epoch's draft."""
        self._failures = 0
        return self.drafts.take(drafted, epoch, now)

    def scored(self, scored: Scored, now: float) -> str:
        """What is wrong with scores that were due; empty if they can be used."""
        asked, values = self.ledger.take(scored, now), scored.probabilities
        assert asked is not None
        self._failures = 0
        if values.shape != (len(asked.request.strings),):
            return f"it scored {values.size} prefixes, asked for {len(asked.request.strings)}"
        if not bool(np.all((values >= 0) & (values <= 1 + ROUNDING))):  # false for NaN as well
            return "it sent a score that is not between 0 and 1"
        return ""

    def expired(self, number: int, now: float) -> tuple[bool, list[Command]]:
        """Whether an answer is overdue; if not, the timer is set for the time that is left."""
        self._armed = self._armed and number != self._timer
        if number != self._timer or not (self.due or self.ledger.score is not None):
            return False, []
        return (False, self._arm(now)) if self._left(now) > 0 else (True, [])

    def _left(self, now: float) -> float:
        """Seconds until its answer is overdue."""
        since = self.ledger.since
        return self._given.draft_seconds - (0.0 if since is None else now - since)

    def _arm(self, now: float) -> list[Command]:
        """One timer for all deadlines, checked when it expires: most answers come long before."""
        if self._armed:
            return []
        self._armed = True
        self._timer += 1
        return [SetTimer(Timer.DRAFTER, self._timer, max(0.0, self._left(now)))]

"""The client's side of a drafter's protocol: what one drafter was told and asked, and what it has said.

A session speaks to its drafter by it, and so does vLLM's integration.
"""

from typing import Any

from crossdraft.session.epoch import Epoch
from crossdraft.session.ledger import Ledger
from crossdraft.speculation.choice import DraftSeen
from crossdraft.text.letters import NOTHING, Letters, common_length
from crossdraft.text.pairs import Pair
from crossdraft.types.messages import Advance, Branch, Draft, Drafted
from crossdraft.types.rows import DraftToken


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

        Args:
            drafted: the reply.
            depth: ids that each branch may have at most.
            most: branches of the epoch at most.
        """
        if not (drafted.draft_tokens or drafted.branches or drafted.reason):
            return "it sent a reply without anything in it"
        return self.branches.fault_of(drafted.branches, depth, most)

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

        Args:
            depth: ids that each may have at most.
            most: branches of the epoch at most.
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
        over = [
            branch.number for branch in self._by_number.values() if branch.offset + len(self._said(branch)) < frontier
        ]
        for number in over:
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
            if letters_decide and rest.startswith(branch.letters) and self._agrees(branch, rest):
                best = branch
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

    def _agrees(self, branch: Branch, rest: str) -> bool:
        """Whether the branch's text is longer than the rest and begins with it."""
        said = self._said(branch)
        return said.startswith(rest) and len(said) > len(rest)

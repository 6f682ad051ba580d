"""Prepared continuations that a drafter has sent for the running epoch."""

from crossdraft.pipeline.epoch import Epoch
from crossdraft.text.letters import Letters, common_length
from crossdraft.text.pairing import Pair
from crossdraft.verification.exchange import Branch


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
        depend on proposals (`letters_decide`), it may also have replaced less, if its proposals agree with the rest.
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

"""Where the drafts of the current epoch began: what a score is asked about."""

from typing import Generic, TypeVar

from crossdraft.rpc.errors import ProtocolBroken
from crossdraft.verification.exchange import Draft, Score

Begun = TypeVar("Begun")  # what a session keeps of a draft


class Beginnings(Generic[Begun]):
    """The drafts of the latest epoch, by the letter offset where they began."""

    def __init__(self) -> None:
        self._epoch = 0
        self._drafts: dict[int, tuple[int, Begun]] = {}  # offset -> proposals that were wanted, what is kept

    def enter(self, request: Draft) -> None:
        """The epoch of a draft that is asked for; raises ProtocolBroken if it is over."""
        if request.epoch < self._epoch:
            raise ProtocolBroken(f"epoch {request.epoch} is over; the latest is {self._epoch}")
        if request.epoch > self._epoch:
            self._drafts.clear()
        self._epoch = request.epoch

    def keep(self, offset: int, count: int, draft: Begun) -> None:
        """A draft of `count` proposals begins at this offset."""
        self._drafts[offset] = count, draft

    def scored(self, request: Score) -> Begun:
        """The draft that is to be scored.

        Raises:
            ProtocolBroken: no draft of the latest epoch began there, or it had fewer proposals.
        """
        if request.epoch != self._epoch:
            raise ProtocolBroken(f"epoch {request.epoch} cannot be scored; the latest is {self._epoch}")
        if request.offset not in self._drafts:
            raise ProtocolBroken(f"no draft of epoch {self._epoch} began at letter {request.offset}")
        count, draft = self._drafts[request.offset]
        if request.tokens > count:
            raise ProtocolBroken(f"a score of {request.tokens} proposals was asked for, and the draft was of {count}")
        return draft

"""The epochs of a session: which one is drafted, and how far. Rules only, no I/O."""

from crossdraft.rpc.errors import ProtocolBroken
from crossdraft.verification.exchange import MOST_PROPOSALS, Advance, Draft, Drafted, Score

# That are drafted ahead of what the client has read, so that one that never reads does not fill the memory. The window
# of one that reads, MOST_PROPOSALS from what was revealed, never reaches so far.
MOST_UNREAD = 2 * MOST_PROPOSALS


class Epoch:
    """One draft: what was asked for, and how far it has come.

    The event loop and the thread that drafts share it without a lock: each attribute is written by one of them.
    """

    def __init__(self, request: Draft) -> None:
        self.request = request
        self.count = request.count  # proposals wanted so far; written by the event loop
        self.asked = request.count  # the same without MOST_UNREAD; likewise
        self.over = False  # a newer epoch has begun: nothing more is to be done; written by the event loop
        self.sent = 0  # proposals that the other side has, adopted ones included; written by who drafts
        self.aside = False  # the drafter stands aside: no more will come; written by who drafts

    @property
    def number(self) -> int:
        """As the other side counts."""
        return self.request.epoch

    @property
    def start(self) -> int:
        """Letters since the start of the output, where the draft begins."""
        return self.request.offset + len(self.request.letters)

    @property
    def wanted(self) -> bool:
        """Whether proposals are to be sent that are not yet."""
        return self.sent < self.count and not (self.over or self.aside)

    def allow(self, read: int) -> bool:
        """The client has read so many proposals; whether more are wanted now than before."""
        before = self.count
        self.count = max(before, min(self.asked, read + MOST_UNREAD))
        return self.count > before


class Epochs:
    """The latest epoch of a session. All its methods raise ProtocolBroken and change nothing for what cannot be."""

    def __init__(self) -> None:
        self._latest: Epoch | None = None
        self._read = 0  # proposals of the latest epoch that the client has read

    @property
    def number(self) -> int:
        """Of the latest epoch; -1 before the first."""
        return self._latest.number if self._latest is not None else -1

    def begin(self, request: Draft) -> Epoch:
        """A new epoch; the one before is over."""
        if request.epoch < self.number:
            raise ProtocolBroken(f"epoch {request.epoch} is over; the latest is {self.number}")
        if request.epoch == self.number:
            raise ProtocolBroken(f"epoch {request.epoch} has begun already; an Advance asks for more of it")
        if self._latest is not None:
            self._latest.over = True
        self._latest, self._read = Epoch(request), 0
        return self._latest

    def advance(self, request: Advance) -> Epoch | None:
        """The epoch of which more is wanted now; None if it is over, as the two messages have crossed, or if what was
        drafted before must be read first."""
        if request.epoch < self.number:
            return None
        if self._latest is None or request.epoch > self.number:
            raise ProtocolBroken(f"epoch {request.epoch} has not begun; a Draft begins it")
        asked = self._latest.asked
        if not asked <= request.count <= asked + MOST_PROPOSALS:
            raise ProtocolBroken(
                f"epoch {request.epoch} may advance from {asked} proposals to at most {asked + MOST_PROPOSALS}, "
                f"not to {request.count}"
            )
        self._latest.asked = request.count
        return self._latest if self._latest.allow(self._read) else None

    @property
    def held(self) -> bool:
        """Whether more is to be drafted once the client has read what there is."""
        epoch = self._latest
        return epoch is not None and epoch.asked > epoch.count and not (epoch.over or epoch.aside)

    def read(self, reply: Drafted) -> Epoch | None:
        """The client has read a reply. The epoch of which more is wanted now, if there is one."""
        if self._latest is None or reply.epoch != self.number:
            return None
        self._read = reply.first + len(reply.proposals)
        return self._latest if self._latest.allow(self._read) else None

    def scored(self, request: Score) -> Epoch:
        """The epoch whose draft is to be scored."""
        if self._latest is not None and request.epoch != self.number:
            raise ProtocolBroken(f"epoch {request.epoch} cannot be scored; the latest is {self.number}")
        if self._latest is None or request.offset != self._latest.start:
            raise ProtocolBroken(f"no draft of epoch {request.epoch} began at letter {request.offset}")
        if request.tokens > self._latest.count:
            raise ProtocolBroken(
                f"a score of {request.tokens} proposals was asked for, and the draft was of {self._latest.count}"
            )
        return self._latest

    def close(self) -> None:
        """Nothing more is wanted."""
        if self._latest is not None:
            self._latest.over = True

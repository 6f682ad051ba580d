"""What an epoch makes, as replies of several proposals each. No I/O."""

import time
from collections.abc import Iterator

from crossdraft.drafter.epochs import Epoch
from crossdraft.verification.exchange import Branch, Drafted
from crossdraft.verification.rows import Proposal


class Packing:
    """Proposals and branches that are not sent yet.

    When a reply is due depends on numbers of proposals only, never on what was drawn (the release rule): it is when a
    reply is full, or all that are wanted are there. Branches that are finished go with the next reply, or alone
    once all proposals are sent. So a branch never arrives before the proposal that it replaces.
    """

    def __init__(self, epoch: Epoch) -> None:
        self._epoch = epoch
        self._proposals: list[Proposal] = []
        self._branches: list[Branch] = []
        self._since = self._queued = 0.0
        self.resume()

    @property
    def made(self) -> int:
        """Proposals of the epoch so far, sent or not."""
        return self._epoch.sent + len(self._proposals)

    def resume(self) -> None:
        """Time counts from now on: nothing was drafted before."""
        self._since = time.perf_counter()
        self._queued = 0.0

    def waited(self, seconds: float) -> None:
        """Of the time since, so many seconds were spent waiting for the model: the next reply tells them apart."""
        self._queued += seconds

    def propose(self, proposal: Proposal) -> None:
        """One more proposal."""
        self._proposals.append(proposal)

    def prepare(self, branch: Branch) -> None:
        """A branch that is finished."""
        self._branches.append(branch)

    def due(self) -> Iterator[Drafted]:
        """The replies that are to be sent now."""
        epoch, request = self._epoch, self._epoch.request
        while True:
            size = request.first - epoch.sent if epoch.sent < request.first else request.chunk
            left = max(0, epoch.count - epoch.sent)
            ready = min(len(self._proposals), left)
            if ready >= size or (ready == left and (ready or self._branches)):
                yield self._reply(min(ready, size), "")
            else:
                return

    def last(self, reason: str) -> Drafted:
        """The epoch's last reply: all that is left, and why no more will come."""
        self._epoch.aside = True
        return self._reply(len(self._proposals), reason)

    def _reply(self, size: int, reason: str) -> Drafted:
        epoch, now = self._epoch, time.perf_counter()
        taken, branches, first = tuple(self._proposals[:size]), tuple(self._branches), epoch.sent
        del self._proposals[:size]
        self._branches.clear()
        epoch.sent += size
        queued, self._queued = self._queued, 0.0
        seconds, self._since = max(0.0, now - self._since - queued), now
        return Drafted(epoch.number, taken, seconds, reason, first, branches, queued)

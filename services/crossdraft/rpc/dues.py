"""Which requests of a session still wait for a reply: what a client's patience is measured against."""

from typing import Protocol, TypeVar

from crossdraft.rpc import drafter_codec, target_codec
from crossdraft.rpc.codec import Opened
from crossdraft.verification.exchange import Advance, Draft, Drafted, OpenDrafter, PassDone, RunTo, Score, Scored

Request_contra = TypeVar("Request_contra", contravariant=True)
Reply_contra = TypeVar("Reply_contra", contravariant=True)


class Dues(Protocol[Request_contra, Reply_contra]):
    """What a service owes one session."""

    @property
    def owed(self) -> bool:
        """Whether a reply is due."""
        ...

    def sent(self, request: Request_contra) -> bool:
        """Counts a request; returns whether the wait for a reply begins with it."""
        ...

    def came(self, reply: Reply_contra) -> None:
        """Counts a reply."""
        ...


class TargetDues:
    """A target owes one reply for each request, in order: the wait begins with the oldest that has none.

    For a run it owes several, each within the time of one; to `RunTo` it owes none.
    """

    def __init__(self) -> None:
        self._unanswered = 0

    @property
    def owed(self) -> bool:
        """As in `Dues`."""
        return self._unanswered > 0

    def sent(self, request: target_codec.Request) -> bool:
        """As in `Dues`."""
        if isinstance(request, RunTo):
            return False
        self._unanswered += 1
        return self._unanswered == 1

    def came(self, reply: target_codec.Reply) -> None:
        """As in `Dues`."""
        if not (isinstance(reply, PassDone) and reply.more):
            self._unanswered = max(0, self._unanswered - 1)


class DrafterDues:
    """A drafter owes the newest Draft a first reply, and each Score since then one. Older requests are owed nothing.

    It owes nothing for an Advance, nor the later replies of an epoch: how long proposals are worth waiting for is for
    the session to say.
    """

    def __init__(self) -> None:
        self._opening = False
        self._epoch = 0
        self._draft = False
        self._scores = 0

    @property
    def owed(self) -> bool:
        """As in `Dues`."""
        return self._opening or self._draft or self._scores > 0

    def sent(self, request: drafter_codec.Request) -> bool:
        """As in `Dues`."""
        before = self.owed
        match request:
            case OpenDrafter():
                self._opening = True
            case Draft():
                self._epoch, self._draft, self._scores = request.epoch, True, 0
                return True
            case Score():
                self._scores += 1
            case Advance():
                pass
        return self.owed and not before

    def came(self, reply: drafter_codec.Reply) -> None:
        """As in `Dues`; what belongs to another epoch than the newest counts for nothing."""
        match reply:
            case Opened():
                self._opening = False
            case Drafted(epoch=self._epoch):
                self._draft = False
            case Scored(epoch=self._epoch):
                self._scores = max(0, self._scores - 1)

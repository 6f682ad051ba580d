"""What a service was asked in one session, and has not answered.

Links keep a ledger of each session to know which one is lost, the driver measures by it, a session waits for its
drafter by one of its own, vLLM's integration likewise, and a timeline is drawn from one. Times are seconds of any clock
that never goes back.
"""

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from crossdraft.types import messages


@dataclass(eq=False)
class Asked:
    """A request that is answered, by one reply or by several."""

    request: Any
    at: float  # when it was sent
    replies: int = 0  # that have come

    def answered(self) -> None:
        self.replies += 1


ANSWERED: dict[type, tuple[type, Callable[[Any], Any]]] = {  # by the reply: its request, and what they have in common
    messages.PassDone: (messages.Pass, attrgetter("number")),
    messages.RowFetched: (messages.FetchRow, attrgetter("number", "node")),
    messages.Scored: (messages.Score, attrgetter("epoch")),
    messages.PromptScored: (messages.ScorePrompt, lambda _: ()),
}


class Ledger:
    """Of one session with a service.

    A target owes a reply for each request; for a run and for a prompt several; for `RunTo` none. A drafter owes the
    draft tokens of the newest epoch up to the number wanted last, at least one reply, and each `Score` since then one;
    nothing for older epochs, and no more of one in which it stands aside.
    """

    def __init__(self) -> None:
        self.draft: Asked | None = None  # the newest
        self.epoch = 0  # of the newest draft; 0: there was none
        self.wanted = 0  # draft tokens of its epoch; 0: no more
        self.received = 0  # ... that have come
        self.aside = False  # the drafter drafts no more of them
        self.answered: Asked | None = None  # by the latest reply; None: nothing that was due
        self.since: float | None = None  # since when it has owed something and not been heard; None: it owes nothing
        self._due: list[Asked] = []  # without its only, or its last, reply; of a draft without its first
        self._silent = 0.0  # seconds that it had owed something when that was not wanted any more, and not been heard
        self._busy, self._busy_since = 0.0, 0.0  # seconds in which it owed something; since when it does

    @property
    def drafting(self) -> bool:
        """Whether draft tokens of the newest epoch are due."""
        return self.received < self.wanted and not self.aside

    @property
    def owes(self) -> bool:
        return bool(self._due) or self.drafting

    @property
    def score(self) -> messages.Score | None:
        """The scores that are due."""
        for one in self._due:
            if isinstance(one.request, messages.Score):
                return one.request
        return None

    def sent(self, request: object, now: float, received: int = 0) -> None:
        """A request leaves; of a draft's epoch so many draft tokens are there already."""
        if isinstance(request, messages.Draft):
            self.draft, self.epoch = Asked(request, now), request.epoch
            self._due, self.wanted, self.received, self.aside = [self.draft], request.count, received, False
        elif isinstance(request, messages.Advance):
            if request.count:
                self.wanted = max(self.wanted, request.count) if self.wanted else 0
            else:
                self.end(now)
        elif not isinstance(request, messages.RunTo):
            self._due.append(Asked(request, now))
        self._note(now)

    def end(self, now: float) -> None:
        """Nothing more of the newest epoch is wanted."""
        self.wanted = self.received = 0
        self._due = [one for one in self._due if one is not self.draft]
        self._note(now)

    def opened(self, now: float) -> None:
        """The session is open: until now it had no work."""
        self._due = [
            one for one in self._due if not isinstance(one.request, messages.OpenTarget | messages.OpenDrafter)
        ]
        self._busy, self._busy_since = 0.0, now
        self.heard(now)

    def heard(self, now: float) -> None:
        """The service has said something: it lives."""
        owes = self.owes
        if not owes and self.since is not None:
            self._busy += now - self._busy_since
        self._silent, self.since = 0.0, now if owes else None

    def take(self, reply: Any, now: float) -> Asked | None:
        """A reply came; returns what it answers, or None if that was not due or is not wanted any more."""
        of_draft = isinstance(reply, messages.Drafted)
        asked = self.answered = self._drafted(reply) if of_draft else self._answered_by(reply)
        if asked is not None:
            asked.answered()
            self.heard(now)
        return asked

    def busy(self, now: float) -> float:
        """Seconds in which it has owed something so far, and was open."""
        return self._busy + (max(0.0, now - self._busy_since) if self.owes else 0.0)

    def _drafted(self, reply: messages.Drafted) -> Asked | None:
        if self.draft is None or reply.epoch != self.epoch:
            return None
        if self.draft in self._due:
            self._due.remove(self.draft)
        self.received = max(self.received, reply.first + len(reply.draft_tokens))
        self.aside = self.aside or reply.reason != ""
        return self.draft

    def _answered_by(self, reply: Any) -> Asked | None:
        kind, common = ANSWERED[type(reply)]
        for asked in self._due:
            if isinstance(asked.request, kind) and common(asked.request) == common(reply):
                if not getattr(reply, "more", False):
                    self._due.remove(asked)
                return asked
        return None

    def _note(self, now: float) -> None:
        owes = self.owes
        if owes and self.since is None:
            self.since, self._busy_since = now - self._silent, now
        elif not owes and self.since is not None:
            self._silent, self.since = now - self.since, None
            self._busy += now - self._busy_since

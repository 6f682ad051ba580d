"""A drafter session's stream, without any model: which epoch is drafted, how far, and when its replies are sent.

Requests change what is drafted, and replies leave as they are made. An *epoch* is one draft: a `Draft` request begins
it, `Advance` asks for more of it or ends it, as the next `Draft` does. What drafts is a `Drafter`: a model, or a text
look-up.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

from crossdraft.rpc.errors import BadRequest, ProtocolBroken, ServiceError
from crossdraft.rpc.handlers import Replies
from crossdraft.text.grammar import Grammar, GrammarCompiler, GrammarError, GrammarMatcher
from crossdraft.types.messages import MOST_DRAFT_TOKENS, Advance, Branch, Draft, Drafted, Score, Scored
from crossdraft.types.rows import DraftToken

Request = Draft | Advance | Score
Reply = Drafted | Scored
Send = Callable[[Drafted], None]  # called in the event loop; returns at once
MAX_BEHIND_SCORE = 64  # requests behind a score


def matcher_of(compiler: GrammarCompiler, grammar: Grammar) -> GrammarMatcher:
    """Of a session's grammar; raises BadRequest if it cannot be compiled."""
    try:
        return compiler.matcher(grammar)
    except GrammarError as error:
        raise BadRequest(str(error)) from error


class DraftProgress:
    """One draft: what was asked for, how far it has come, and draft tokens and branches that were not sent yet.

    The event loop, which writes `count` and `over`, and the thread that drafts, which writes all else, share it without
    a lock.

    When a reply is due depends on numbers of draft tokens only, never on what was drawn (the release rule): it is when
    a reply is full, or all that are wanted are there. Finished branches go with the next reply, or alone once all draft
    tokens are sent. So a branch never arrives before the draft token that it replaces.
    """

    def __init__(self, request: Draft) -> None:
        self.request = request
        self.count = request.count  # draft tokens wanted so far
        self.over = False  # a newer epoch has begun: nothing more is to be done
        self.sent = 0  # draft tokens that the client has, adopted ones included
        self.aside = False  # the drafter drafts no more of it
        self._draft_tokens: list[DraftToken] = []
        self._branches: list[Branch] = []
        self.resume()

    @property
    def number(self) -> int:
        """As the client counts."""
        return self.request.epoch

    @property
    def start(self) -> int:
        """Letters since the start of the output, where the draft begins."""
        return self.request.offset + len(self.request.letters)

    @property
    def wanted(self) -> bool:
        """Whether draft tokens are wanted that were not sent yet."""
        return self.sent < self.count and not (self.over or self.aside)

    @property
    def made(self) -> int:
        return self.sent + len(self._draft_tokens)

    def resume(self, asked: float | None = None) -> None:
        """Time counts from when more was asked for, which is now if not given: nothing was drafted before."""
        self._since = time.perf_counter() if asked is None else asked
        self._queued: float | None = None

    def waited(self, seconds: float) -> None:
        """A step has waited so many seconds for the model.

        Only the first wait since `resume` counts: the next reply reports it apart from the time that drafting took. Any
        later wait belongs to that time, as what a step costs here.
        """
        if self._queued is None:
            self._queued = seconds

    def add(self, *draft_tokens: DraftToken) -> None:
        self._draft_tokens += draft_tokens

    def add_branch(self, branch: Branch) -> None:
        self._branches.append(branch)

    def due(self) -> Iterator[Drafted]:
        """The replies that are due."""
        while self._draft_tokens or self._branches:
            size, left = self._size, max(0, self.count - self.sent)
            ready = min(len(self._draft_tokens), left)
            if ready >= size or (ready == left and (ready or self._branches)):
                yield self._reply(min(ready, size), "")
            else:
                return

    @property
    def lacking(self) -> int:
        return min(self._size, self.count - self.sent) - len(self._draft_tokens)

    @property
    def _size(self) -> int:
        request = self.request
        return request.first - self.sent if self.sent < request.first else request.chunk

    def last(self, reason: str) -> Drafted:
        """The epoch's last reply: all that is left, and why no more will come."""
        self.aside = True
        return self._reply(len(self._draft_tokens), reason)

    def _reply(self, size: int, reason: str) -> Drafted:
        now, first = time.perf_counter(), self.sent
        taken, branches = tuple(self._draft_tokens[:size]), tuple(self._branches)
        del self._draft_tokens[:size]
        self._branches.clear()
        self.sent += size
        queued, self._queued = self._queued or 0.0, 0.0
        seconds, self._since = max(0.0, now - self._since - queued), now
        return Drafted(self.number, taken, seconds, reason, first, branches, queued)


class Epochs:
    """The latest epoch of a session. Its methods raise ProtocolBroken for a request that is not due, and change nothing
    then."""

    def __init__(self) -> None:
        self._latest: DraftProgress | None = None

    @property
    def number(self) -> int:
        """Of the latest epoch; -1 before the first."""
        return self._latest.number if self._latest is not None else -1

    def begin(self, request: Draft) -> DraftProgress:
        """A new epoch; the one before is over."""
        if request.epoch < self.number:
            raise ProtocolBroken(f"epoch {request.epoch} is over; the latest is {self.number}")
        if request.epoch == self.number:
            raise ProtocolBroken(f"epoch {request.epoch} has begun already; an Advance asks for more of it")
        self.close()
        self._latest = DraftProgress(request)
        return self._latest

    def advance(self, request: Advance) -> DraftProgress | None:
        """The epoch if more of it is wanted than before, or if this ends it; None also where it is over: its end and
        the request cross."""
        if self._latest is None or request.epoch > self.number:
            raise ProtocolBroken(f"epoch {request.epoch} has not begun; a Draft begins it")
        if request.epoch < self.number or self._latest.over:
            return None
        if not request.count:
            self.close()
            return self._latest
        count, most = self._latest.count, self._latest.count + MOST_DRAFT_TOKENS
        if not count <= request.count <= most:
            what = f"epoch {request.epoch} may advance from {count} draft tokens to at most {most}"
            raise ProtocolBroken(f"{what}, not to {request.count}")
        self._latest.count = request.count
        return self._latest if request.count > count else None

    def scored(self, request: Score) -> DraftProgress:
        if self._latest is not None and request.epoch != self.number:
            raise ProtocolBroken(f"epoch {request.epoch} cannot be scored; the latest is {self.number}")
        if self._latest is None or request.offset != self._latest.start:
            raise ProtocolBroken(f"no draft of epoch {request.epoch} began at letter {request.offset}")
        if request.tokens > self._latest.count:
            raise ProtocolBroken(
                f"a score of {request.tokens} draft tokens was asked for, and the draft was of {self._latest.count}"
            )
        return self._latest

    def close(self) -> None:
        if self._latest is not None:
            self._latest.over = True


class Drafter(Protocol):
    """What drafts in one session. Its methods raise ServiceError where an epoch is not possible, and never wait."""

    def begin(self, epoch: DraftProgress) -> None:
        """A new epoch says what the text is; called once for each, in order, also for one that is soon over."""

    def draft(self, epoch: DraftProgress, send: Send) -> asyncio.Future[None]:
        """Sends draft tokens until no more are wanted; called again when more are.

        Cancelled when a newer epoch begins, perhaps before it has done anything. That one may be drafted at once: what
        is under way ends before the text is touched for it.
        """

    async def score(self, epoch: DraftProgress, request: Score) -> Scored:
        """Scores of the epoch's draft."""

    def close(self) -> None:
        """Frees what it holds."""


class Conversation:
    """One session's requests and replies: a `SessionHandler` of `rpc.handlers`.

    No reply of an epoch leaves after the request that begins the next one was taken. Raises ProtocolBroken: (by
    `receive`) an epoch is over or has not begun, the output has fewer letters than it is to be rewound to, or there is
    no such branch, or no such draft to be scored.
    """

    def __init__(self, drafter: Drafter, replies: Replies[Reply]) -> None:
        self._drafter = drafter
        self._replies = replies
        self._epochs = Epochs()
        self._drafting: asyncio.Future[None] | None = None
        self._scoring: asyncio.Task[None] | None = None
        self._waiting: deque[Request] = deque()  # behind a score under way
        self._closed = False

    def receive(self, request: Request) -> None:
        """Takes a request; raises ServiceError."""
        if self._scoring is None:
            self._take(request)
        elif len(self._waiting) < MAX_BEHIND_SCORE:
            self._waiting.append(request)
        else:
            raise ProtocolBroken(f"{MAX_BEHIND_SCORE} requests of this session wait already")

    def left(self, reply: Reply) -> None:
        """Changes nothing."""

    def close(self) -> None:
        self._closed = True
        self._epochs.close()
        for task in (self._drafting, self._scoring):
            if task is not None:
                task.cancel()
        self._drafter.close()

    def _take(self, request: Request) -> None:
        match request:
            case Draft():
                self._begin(request)
            case Advance():
                epoch = self._epochs.advance(request)
                if epoch is not None and epoch.over:
                    self._drop()
                elif epoch is not None and (self._drafting is None or self._drafting.done()):
                    self._draft(epoch)
            case Score():
                self._scoring = asyncio.create_task(self._score(self._epochs.scored(request), request))
                self._scoring.add_done_callback(self._scored)

    def _begin(self, request: Draft) -> None:
        epoch = self._epochs.begin(request)
        self._drop()
        self._drafter.begin(epoch)
        self._draft(epoch)

    def _drop(self) -> None:
        """What was drafted of an epoch that is over."""
        self._replies.drop()
        if self._drafting is not None:
            self._drafting.cancel()

    async def _score(self, epoch: DraftProgress, request: Score) -> None:
        while self._drafting is not None and not self._drafting.done():  # what was asked for since is drafted as well
            await asyncio.wait((self._drafting,))
        self._replies.send(await self._drafter.score(epoch, request))

    def _scored(self, scoring: asyncio.Task[None]) -> None:
        """The requests behind it are taken."""
        self._scoring = None
        if self._closed or scoring.cancelled():
            return
        error = scoring.exception()
        try:
            while error is None and self._waiting and self._scoring is None:
                self._take(self._waiting.popleft())
        except ServiceError as fault:
            error = fault
        if error is not None:
            self._replies.fail(error)

    def _draft(self, epoch: DraftProgress) -> None:
        def send(reply: Drafted) -> None:
            if not (epoch.over or self._closed):
                self._replies.send(reply)

        def drafted(drafting: asyncio.Future[None]) -> None:
            if self._closed or drafting.cancelled():
                return
            if (error := drafting.exception()) is not None:
                self._replies.fail(error)
            elif epoch.wanted and self._drafting is drafting:  # asked for while the last draft tokens were made
                self._draft(epoch)

        self._drafting = self._drafter.draft(epoch, send)
        self._drafting.add_done_callback(drafted)

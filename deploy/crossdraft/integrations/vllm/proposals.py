"""A step of vLLM's: what its requests have emitted goes to the drafters, and what these have said becomes proposals."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from crossdraft.integrations.vllm.pacing import DrafterPace, Offer, Pacing
from crossdraft.integrations.vllm.services import DrafterServices, DrafterSession, RequestState, TokenIds
from crossdraft.integrations.vllm.streams import Guess
from crossdraft.rpc.security import RenewedCredentials
from crossdraft.speculation.estimates import Share
from crossdraft.text.tokenization import Tokenization
from crossdraft.types.messages import Advance, Draft

FORGOTTEN_SECONDS = 5.0  # after which a request that is in no batch is over: a preempted one may come back

HEAD = 16  # first ids of a request that are compared
TAIL = 64  # last ids that are compared: longer than texts of different requests agree by chance

Key = tuple[int, bytes, bytes]
Told = list[tuple[DrafterSession, Sequence[Draft | Advance]]]


def key_of(ids: TokenIds) -> Key:
    """What a request is found by: how many ids it has, the first and the last of them."""
    return len(ids), ids[:HEAD].tobytes(), ids[-TAIL:].tobytes()


class Prefixes:
    """The requests that were seen, by their ids so far.

    vLLM names no request to proposers, so that it is told by the row's ids, which only ever grow by what was sampled,
    also when rows move, and after a preemption. Their number and the first and the last few are compared: requests that
    agree in these are interchangeable for drafting, where a mistake costs acceptance and never correctness.
    """

    def __init__(self, seconds: float = FORGOTTEN_SECONDS) -> None:
        self._seconds = seconds
        # Requests with the same ids so far, and when each was seen, in seconds; the oldest keys first.
        self._known: dict[Key, deque[tuple[RequestState, float]]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._known.values()))

    def step(self, rows: Sequence[TokenIds], sampled: Sequence[int], now: float) -> list[RequestState]:
        """The request of each row. Rows have all ids, of which so many, at least 1, were `sampled` `now` (seconds)."""
        # All are taken before any is put back: one row's ids now may be what another's were.
        found = [self._take(ids[: len(ids) - count]) for ids, count in zip(rows, sampled, strict=True)]
        requests = [RequestState() if one is None else one for one in found]
        for ids, request in zip(rows, requests, strict=True):
            self._known.setdefault(key_of(ids), deque()).append((request, now))
        return requests

    def forget(self, now: float) -> list[RequestState]:
        """The requests that were not seen for too long, which are seen as new ones if they come back."""
        gone: list[RequestState] = []
        for key, waiting in list(self._known.items()):
            while waiting and waiting[0][1] < now - self._seconds:
                gone.append(waiting.popleft()[0])
            if not waiting:
                del self._known[key]
        return gone

    def _take(self, ids: TokenIds) -> RequestState | None:
        key = key_of(ids)
        waiting = self._known.get(key)
        if waiting is None:
            return None
        request, _ = waiting.popleft()
        if not waiting:
            del self._known[key]
        return request


@dataclass(frozen=True)
class Latest:
    """The latest call of the proposer."""

    called: float  # seconds
    returned: float  # seconds: when the step was left to the target
    requests: list[RequestState]
    draft_tokens: int  # proposed


@dataclass(eq=False)
class Proposals:
    """The draft tokens of one vLLM engine's requests."""

    addresses: Sequence[str]  # host:port of the drafters
    target: Tokenization  # of vLLM's model
    most: int  # draft tokens of a request in a step
    longest_wait: float  # seconds that a step is held up for draft tokens at most
    tls: RenewedCredentials | None = None  # None: plaintext
    always: bool = False  # requests draft whether that pays or not
    clock: Callable[[], float] = time.monotonic  # seconds

    def __post_init__(self) -> None:
        self._pacing = Pacing(self.most, self.longest_wait, self.always)
        self._prefixes, vocabulary = Prefixes(), self.target.vocabulary
        self._stops, self._letters = frozenset(vocabulary.stops), vocabulary.letters
        forget = self._prefixes.forget
        self._services = DrafterServices(self.addresses, self.target, self._pacing, forget, self.tls, self.clock)
        self._nothing = Offer(DrafterPace(), Guess(), Share())
        self._latest: Latest | None = None

    def start(self, seconds: float) -> None:
        """Wait so long for the drafters, and go on without those that do not answer."""
        self._services.start(seconds)

    def stop(self) -> None:
        self._services.stop()

    def step(self, rows: Sequence[TokenIds], sampled: Sequence[Sequence[int]], alone: bool) -> list[list[int]]:
        """The draft tokens of each row. Rows have all ids of requests, and end with those that were `sampled` now, at
        least one; `alone`: no other request, such as one whose prompt is read, shared the forward."""
        services, now = self._services, self.clock()
        with services.lock:
            requests = self._prefixes.step(rows, [len(ids) for ids in sampled], now)
            if alone:
                self._measure(requests, sum(map(len, sampled)), now)
            drafting = self._pacing.drafts(len(requests))
            for request, ids in zip(requests, sampled, strict=True):
                self._emitted(request, ids)
            services.send(self._follow(requests, rows, drafting, now))
            drafts = self._proposed(requests, now) if drafting else [[] for _ in rows]
            self._latest = Latest(now, self.clock(), requests, sum(map(len, drafts)))
        return drafts

    def idle(self) -> None:
        """A step in which no request emitted anything: it says nothing of the cost of others."""
        self._latest = None

    def _measure(self, requests: list[RequestState], tokens: int, now: float) -> None:
        """The step that ends now; only one that was for the same requests as before, without prompts."""
        latest = self._latest
        if latest is not None and set(map(id, latest.requests)) == set(map(id, requests)):
            self._pacing.verified(now - latest.returned, len(requests), latest.draft_tokens)
            self._pacing.stepped(now - latest.called, len(requests), tokens)

    def _emitted(self, request: RequestState, ids: Sequence[int]) -> None:
        self._pacing.emitted(len(ids), sum(len(self._letters[one]) for one in ids))
        if request.session is not None:
            outcome = request.session.stream.emitted(ids)
            request.session.known.pace.judged(outcome)
            self._pacing.judged(outcome)
            if ids[-1] in self._stops:
                self._services.close(request)

    def _follow(self, requests: Sequence[RequestState], rows: Sequence[TokenIds], drafting: bool, now: float) -> Told:
        """Requests that draft follow the text, the others stop; one without a session opens it."""
        told: Told = []
        for request, ids in zip(requests, rows, strict=True):
            stopped, request.drafts = request.drafts and not drafting, drafting
            session = request.session
            if session is None and drafting and int(ids[-1]) not in self._stops:
                self._services.open(request, ids, now)
            elif session is not None and session.ready and drafting:
                told.append((session, session.stream.follow(self._pacing.pull(session.known.pace), now)))
            elif session is not None and session.ready and stopped:
                told.append((session, session.stream.stop(now)))
        return [one for one in told if one[1]]

    def _proposed(self, requests: Sequence[RequestState], now: float) -> list[list[int]]:
        """What is at hand, perhaps after a short wait until every draft has begun to arrive; the lock is free
        meanwhile."""
        offers = list(map(self._offer, requests))
        until = self._pacing.wait(offers, now)
        while until > now and any(offer.asked is not None for offer in offers):
            if not self._services.news.wait(max(0.0, until - self.clock())):
                break
            offers = list(map(self._offer, requests))
        counts = self._pacing.lengths(offers)
        return [list(one.guess.ids[:count]) for one, count in zip(offers, counts, strict=True)]

    def _offer(self, request: RequestState) -> Offer:
        """Of every request: those without a draft take part in the forward all the same."""
        session = request.session
        if session is None or not session.ready:
            return self._nothing
        stream = session.stream
        return Offer(session.known.pace, stream.guess(self.most), stream.share, stream.asked)

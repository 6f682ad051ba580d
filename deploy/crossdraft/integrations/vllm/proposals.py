"""A step of vLLM's: what its requests have emitted goes to the drafters, and what these have said becomes proposals."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from crossdraft.integrations.vllm.pacing import DrafterPace, Offer, Pacing
from crossdraft.integrations.vllm.prefixes import Prefixes, TokenIds
from crossdraft.integrations.vllm.services import DrafterServices, DrafterSession, RequestState
from crossdraft.integrations.vllm.streams import Guess
from crossdraft.rpc.security import RenewedCredentials
from crossdraft.speculation.estimates import Share
from crossdraft.text.tokenization import Tokenization
from crossdraft.types.messages import Advance, Draft

FORGOTTEN_SECONDS = 5.0  # after which a request that is in no batch is over: a preempted one may come back

Told = list[tuple[DrafterSession, Sequence[Draft | Advance]]]


@dataclass(frozen=True)
class Latest:
    """The latest call of the proposer."""

    called: float  # seconds
    returned: float  # seconds: when the step was left to the target
    requests: list[RequestState]
    draft_tokens: int  # proposed


class Proposals:
    """The draft tokens of one vLLM engine's requests.

    Args:
        addresses: host:port of the drafters.
        target: the tokenizer of vLLM's model.
        most: draft tokens of a request in a step.
        longest_wait: seconds that a step is held up for draft tokens at most.
        tls: certificates; None: plaintext.
        always: requests draft whether that pays or not.
        clock: seconds.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        target: Tokenization,
        most: int,
        longest_wait: float,
        tls: RenewedCredentials | None = None,
        always: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._most = most
        self._pacing = Pacing(most, longest_wait, always)
        self._stops = frozenset(target.vocabulary.stops)
        self._prefixes = Prefixes(RequestState, FORGOTTEN_SECONDS)
        self._services = DrafterServices(addresses, target, self._pacing, self._prefixes.forget, tls, clock)
        self._letters = target.vocabulary.letters
        self._nothing = Offer(DrafterPace(), Guess(), Share())
        self._latest: Latest | None = None

    def start(self, seconds: float) -> None:
        """Wait so long for the drafters, and go on without those that do not answer."""
        self._services.start(seconds)

    def stop(self) -> None:
        self._services.stop()

    def step(self, rows: Sequence[TokenIds], sampled: Sequence[Sequence[int]], alone: bool) -> list[list[int]]:
        """The draft tokens of each row, in their order.

        Args:
            rows: all ids of each request that emits tokens, those that were sampled now included.
            sampled: these, at least one of each row.
            alone: no other request shared the forward, such as one whose prompt is being read.
        """
        services, now = self._services, self._clock()
        with services.lock:
            requests = self._prefixes.step(rows, [len(ids) for ids in sampled], now)
            if alone:
                self._measure(requests, sum(map(len, sampled)), now)
            drafting = self._pacing.drafts(len(requests))
            for request, ids in zip(requests, sampled, strict=True):
                self._emitted(request, ids)
            services.send(self._follow(requests, rows, drafting, now))
            drafts = self._proposed(requests, now) if drafting else [[] for _ in rows]
            self._latest = Latest(now, self._clock(), requests, sum(map(len, drafts)))
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
        """What is at hand, perhaps after a short wait."""
        offers = [self._offer(request) for request in requests]
        if (until := self._pacing.wait(offers, now)) > now:
            offers = self._wait(requests, until)
        counts = self._pacing.lengths(offers)
        return [list(one.guess.ids[:count]) for one, count in zip(offers, counts, strict=True)]

    def _offer(self, request: RequestState) -> Offer:
        """Of every request: those without a draft take part in the forward all the same."""
        session = request.session
        if session is None or not session.ready:
            return self._nothing
        stream = session.stream
        return Offer(session.known.pace, stream.guess(self._most), stream.share, stream.asked)

    def _wait(self, requests: Sequence[RequestState], until: float) -> list[Offer]:
        """The offers when every draft has begun to arrive, or at a time; the lock is free meanwhile."""
        offers = [self._offer(request) for request in requests]
        while any(one.asked is not None for one in offers):
            if not self._services.news.wait(max(0.0, until - self._clock())):
                break
            offers = [self._offer(request) for request in requests]
        return offers

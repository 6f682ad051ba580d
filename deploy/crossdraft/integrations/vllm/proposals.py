"""A step of vLLM's: what its requests have emitted goes to the drafters, and what these have said becomes proposals."""

import time
from collections.abc import Sequence

from crossdraft.integrations.vllm.pacing import DrafterPace, Offer, Pacing
from crossdraft.integrations.vllm.prefixes import Prefixes, TokenIds
from crossdraft.integrations.vllm.services import DrafterServices, DrafterSession, RequestState
from crossdraft.integrations.vllm.streams import Guess
from crossdraft.rpc.security import RenewedCredentials
from crossdraft.speculation.estimates import Share
from crossdraft.text.tokenization import Tokenization
from crossdraft.types.messages import Advance, Draft

FORGOTTEN_SECONDS = 20.0  # after which a request that is in no batch is over: a preempted one may come back

Told = list[tuple[DrafterSession, Sequence[Draft | Advance]]]


class Proposals:
    """The draft tokens of one vLLM engine's requests.

    Args:
        addresses: host:port of the drafters.
        target: the tokenizer of vLLM's model.
        most: draft tokens of a request in a step.
        longest_wait: seconds that a step is held up for draft tokens at most.
        tls: certificates; None: plaintext.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        target: Tokenization,
        most: int,
        longest_wait: float,
        tls: RenewedCredentials | None = None,
    ) -> None:
        self._most = most
        self._pacing = Pacing(most, longest_wait)
        self._prefixes = Prefixes(RequestState, FORGOTTEN_SECONDS)
        self._services = DrafterServices(addresses, target, self._pacing, self._prefixes.forget, tls)
        self._letters = target.vocabulary.letters
        self._nothing = Offer(DrafterPace(), Guess(), Share())
        # Of the latest step: when it was left to the target, its requests, and their draft tokens.
        self._returned: tuple[float, list[RequestState], int] | None = None

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
        services, now = self._services, time.monotonic()
        with services.lock:
            requests = self._prefixes.step(rows, [len(ids) for ids in sampled], now)
            self._measure(requests, now, alone)
            for request, ids in zip(requests, sampled, strict=True):
                self._emitted(request, ids)
            services.send(self._follow(requests, rows, now))
            offers = [self._offer(request) for request in requests]
            if seconds := self._pacing.wait(offers):
                offers = self._wait(requests, now + seconds)
            counts = self._pacing.lengths(offers)
            drafts = [list(one.guess.ids[:count]) for one, count in zip(offers, counts, strict=True)]
            self._returned = time.monotonic(), requests, sum(map(len, drafts))
        return drafts

    def idle(self) -> None:
        """A step in which no request emitted anything: it says nothing of the cost of others."""
        self._returned = None

    def _measure(self, requests: list[RequestState], now: float, alone: bool) -> None:
        """The step that ends now; only one that was for the same requests as before, without prompts."""
        before = self._returned
        if before is not None and alone and set(map(id, before[1])) == set(map(id, requests)):
            self._pacing.stepped(now - before[0], len(requests), before[2])

    def _emitted(self, request: RequestState, ids: Sequence[int]) -> None:
        self._pacing.emitted(len(ids), sum(len(self._letters[one]) for one in ids))
        if request.session is not None:
            outcome = request.session.stream.emitted(ids)
            request.session.known.pace.judged(outcome)
            self._pacing.judged(outcome)

    def _follow(self, requests: Sequence[RequestState], rows: Sequence[TokenIds], now: float) -> Told:
        """Requests that are to draft follow the text, the others stop; without a session they open one."""
        told: Told = []
        for request, ids, drafts in zip(requests, rows, self._who_drafts(requests), strict=True):
            stopped, request.drafts = request.drafts and not drafts, drafts
            session = request.session
            if session is None and drafts:
                self._services.open(request, ids, now)
            elif session is not None and session.ready and drafts:
                told.append((session, session.stream.follow(self._pacing.pull(session.known.pace), now)))
            elif session is not None and session.ready and stopped:
                told.append((session, session.stream.stop()))
        return [one for one in told if one[1]]

    def _who_drafts(self, requests: Sequence[RequestState]) -> list[bool]:
        """Whether each request is to have a draft: all where that pays, else one at a time, now and then."""
        paces = {id(one.session.known.pace): one.session.known.pace for one in requests if one.session is not None}
        pays = {key: self._pacing.pays(pace, len(requests)) for key, pace in paces.items()}
        drafts = [one.session is None or pays[id(one.session.known.pace)] for one in requests]
        if not all(drafts) and self._pacing.trial_due():
            others = [place for place, each in enumerate(drafts) if not each]
            drafts[next((place for place in others if requests[place].drafts), others[0])] = True
        return drafts

    def _offer(self, request: RequestState) -> Offer:
        """Of every request: those without a draft take part in the forward all the same."""
        session = request.session
        if session is None or not session.ready or not request.drafts:
            return self._nothing
        stream = session.stream
        return Offer(session.known.pace, stream.guess(self._most), stream.share, stream.awaited)

    def _wait(self, requests: Sequence[RequestState], until: float) -> list[Offer]:
        """The offers when every draft has begun to arrive, or at a time; the lock is free meanwhile."""
        offers = [self._offer(request) for request in requests]
        lacking = sum(one.awaited for one in offers)
        while any(one.awaited for one in offers) and self._services.news.wait(max(0.0, until - time.monotonic())):
            offers = [self._offer(request) for request in requests]
        self._pacing.waited(sum(one.awaited for one in offers) < lacking)
        return offers

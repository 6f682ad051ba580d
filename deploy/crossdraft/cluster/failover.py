"""A backend over orchestrators on other nodes, with a journal of each output.

When an orchestrator is lost, another one continues from the journal: greedy and seeded outputs with the same text.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from math import inf
from typing import Any, get_args

import prometheus_client
from prometheus_client import CollectorRegistry, Histogram

from crossdraft.client import Kind, RequestError
from crossdraft.rpc.errors import Cancelled, Full, Overloaded, ServiceError, TimedOut, Unreachable
from crossdraft.rpc.generation import Committed, OutputEnded, PromptTokens
from crossdraft.rpc.logs import about
from crossdraft.rpc.metrics import PREFIX
from crossdraft.serving.backend import OutputItem, OutputRequest, TraceSpans, UnknownModelError
from crossdraft.types.output import ServedModel, Written
from crossdraft.types.request import Asked
from crossdraft.verification.methods import SEEDED, method_named

log = logging.getLogger(__name__)
MODELS_SECONDS = 3.0  # that a call of `models` may take
SEARCH_SECONDS = 30.0  # after a loss, without a new token, an output fails
BUSY = (Overloaded, Full)  # errors of orchestrators and targets without room now
RETRIABLE = (Unreachable, TimedOut, Cancelled, *BUSY)  # errors that another orchestrator need not meet, or not for long
PAUSE = 0.25  # seconds before another orchestrator is asked
SEED_BYTES = 8
RESUME_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 16, 32)  # bounds of a histogram
NOT_RESUMED = (
    "the orchestrator was lost, and an output of method {!r} cannot go on elsewhere with the same distribution; "
    "ask again, or use method seeded or slem"
)


@dataclass(frozen=True)
class Began:
    """The first reply: the orchestrator has received the request."""

    orchestrator: str  # its actor's id


Expected = RequestError | UnknownModelError | ServiceError
EXPECTED = get_args(Expected)


@dataclass(frozen=True)
class Refusal:
    """The output ends with an error, as a value: Ray would wrap an exception that is raised."""

    error: Expected


Reply = Began | OutputItem | Refusal
Replies = tuple[Reply, ...]  # one of them, as fronts and orchestrators of before an upgrade expect


class Lost(Exception):  # noqa: N818 - it says what happened
    """An orchestrator died, or cannot be reached; or, as the error `busy` says, it has no room."""

    def __init__(self, text: str, busy: Exception | None = None) -> None:
        super().__init__(text)
        self.busy = busy


class LossMetrics:
    """Orchestrators that a front has lost in the middle of an output, and how long the client waited."""

    def __init__(self, registry: CollectorRegistry, models: Iterable[str] = ()) -> None:
        labels = ("model_name",)
        self.lost = prometheus_client.Counter(
            f"{PREFIX}orchestrators_lost", "Orchestrators lost during an output.", labels, registry=registry
        )
        self.waited = Histogram(
            f"{PREFIX}output_resume_seconds",
            "Seconds from the last message of a lost orchestrator to the next token, of another one.",
            labels,
            buckets=RESUME_SECONDS,
            registry=registry,
        )
        for model in models:  # for Prometheus a first value is no increase, unless it is 0
            self.lost.labels(model)
            self.waited.labels(model)


@dataclass
class Journal:
    """What the client has received of one output: enough for another orchestrator to continue."""

    request: OutputRequest
    delivered: list[int] = field(default_factory=list)  # ids
    prompt: int = 0  # tokens of the prompt, with their log-probabilities
    target: str = ""  # fingerprint of the model that made them; empty: there are none
    kinds: Counter[Kind] = field(default_factory=Counter)  # of the tokens
    orchestrator: str = ""  # that works on it; empty: it is not known yet
    resumed: bool = False  # more than one orchestrator has worked on it
    lost_at: float | None = None  # when the lost orchestrator was heard last; None: none is lost, or it is replaced
    given_up: float = 0.0  # when it was given up, where `lost_at` is not None

    @property
    def rest(self) -> OutputRequest:
        """The request for what is missing."""
        generation = self.request.generation
        if self.delivered:  # all of the prompt comes before
            generation = replace(generation, prompt_logprobs=None)
        committed = (*generation.committed, *self.delivered)
        return replace(self.request, generation=replace(generation, committed=committed), target=self.target)

    def whole(self, ended: OutputEnded) -> OutputEnded:
        """The end with the tokens of all orchestrators counted; other costs of those that were lost are not known."""
        if not self.resumed:
            return ended
        accepted, corrected, bonus = (self.kinds[kind] for kind in (Kind.ACCEPTED, Kind.CORRECTED, Kind.BONUS))
        tokens = len(self.delivered)
        figures = replace(ended.statistics, tokens=tokens, accepted=accepted, corrected=corrected, bonus=bonus)
        return replace(ended, statistics=figures)


@dataclass(eq=False)
class ClusterBackend:
    """A `Backend` of several models."""

    orchestrators: Mapping[str, Any]  # by model, as `fronts.ServeOrchestrators`
    metrics: LossMetrics | None = None  # where losses are counted
    clock: Callable[[], float] = time.monotonic  # seconds
    search_seconds: float = SEARCH_SECONDS  # that an output goes without a new token, after a loss, before it fails

    def __post_init__(self) -> None:
        self._served: dict[str, Sequence[ServedModel]] = {}  # by model, the latest answers of its orchestrators
        self._heard: dict[str, float] = {}  # by model, when one of them said something of an output

    @property
    def names(self) -> Mapping[str, str]:
        return {name: name for name in self.orchestrators}

    @property
    def absent(self) -> Mapping[str, str]:
        return dict.fromkeys(self.orchestrators, "no orchestrator answers, or none has a target yet; tried again")

    async def models(self) -> tuple[ServedModel, ...]:
        """Models whose orchestrators answer and have a target; of orchestrators too busy to answer, the last answer."""
        found = await asyncio.gather(*map(self._models_of, self.orchestrators))
        return tuple(model for models in found for model in models)

    async def _models_of(self, name: str) -> Sequence[ServedModel]:
        try:
            async with asyncio.timeout(MODELS_SECONDS):
                self._served[name] = await self.orchestrators[name].models()
        except Lost:
            return ()
        except Overloaded:
            pass
        except TimeoutError:
            if self.clock() - self._heard.get(name, -inf) > MODELS_SECONDS:
                return ()
        return self._served.get(name, ())

    async def written(self, model: str, asked: Asked, special: bool = True) -> Written:
        try:
            found: Written | Refusal = await self._orchestrators(model).written(asked, special)
        except Lost as error:
            raise Unreachable(f"no orchestrator of {model!r} answers: {error}") from error
        if isinstance(found, Refusal):
            raise found.error
        return found

    def _orchestrators(self, model: str) -> Any:
        if model not in self.orchestrators:
            raise UnknownModelError(f"there is no model {model!r}; there is {', '.join(self.orchestrators)}")
        return self.orchestrators[model]

    async def stream(self, request: OutputRequest) -> AsyncGenerator[OutputItem, None]:
        orchestrators = self._orchestrators(request.model)
        journal, heard = Journal(resumable(request)), self.clock()
        while True:
            try:
                async with aclosing(orchestrators.stream(journal.rest)) as coming:
                    async for replies in coming:
                        heard = self._heard[request.model] = self.clock()
                        for reply in replies:
                            item = self._recorded(reply, journal, heard)
                            if item is not None:
                                yield item
                return
            except (Lost, Overloaded) as error:
                self._lost(_meant(error, journal), journal, heard)
                await asyncio.sleep(PAUSE)

    def _recorded(self, reply: Reply, journal: Journal, now: float) -> OutputItem | None:
        """Writes a reply into the journal; returns what the client gets of it."""
        match reply:
            case Refusal():
                raise _meant(reply.error, journal)
            case Began():
                journal.orchestrator = reply.orchestrator
                return None
            case PromptTokens():
                new = replace(reply, first=journal.prompt, tokens=reply.tokens[max(0, journal.prompt - reply.first) :])
                journal.prompt += len(new.tokens)
                return new if new.tokens else None
            case Committed():
                self._delivered(reply, journal, now)
            case OutputEnded():
                return journal.whole(reply)
            case TraceSpans():
                pass
        return reply

    def _delivered(self, reply: Committed, journal: Journal, now: float) -> None:
        journal.target = reply.target
        journal.delivered += [token.id for token in reply.tokens]
        journal.kinds.update(token.kind for token in reply.tokens)
        if journal.lost_at is not None and self.metrics is not None:
            self.metrics.waited.labels(journal.request.model).observe(now - journal.lost_at)
        journal.lost_at = None

    def _lost(self, error: Exception, journal: Journal, heard: float) -> None:
        """Records a loss, or that there is no room for an output under way. Raises Unreachable, or Overloaded or
        Full where there is no room: it is a new output, cannot be resumed, or has waited for `search_seconds`."""
        if not isinstance(error, Lost):
            raise error
        request, now = journal.request, self.clock()
        if error.busy is None and journal.orchestrator:
            self.orchestrators[request.model].avoid(journal.orchestrator)
        journal.orchestrator = ""
        exact = request.generation.greedy or request.generation.seed is not None
        fault = "" if exact else NOT_RESUMED.format(request.generation.method)
        if not fault:
            journal.resumed = True
            if journal.lost_at is None:
                journal.lost_at, journal.given_up = heard, now
                if self.metrics is not None and error.busy is None:
                    self.metrics.lost.labels(request.model).inc()
            if now - journal.given_up > self.search_seconds:
                fault = f"no orchestrator of {request.model!r} can go on: {error}"
        if fault:
            raise error.busy or Unreachable(fault) from error
        with about(request=request.id):
            if error.busy is None:
                log.warning("an orchestrator was lost after %d tokens: %s", len(journal.delivered), error)
            else:
                log.debug("there is no room for what comes after %d tokens: %s", len(journal.delivered), error)


def _meant(error: Expected | Lost, journal: Journal) -> Exception:
    """In the middle of an output, an orchestrator without target or room is lost: another one, or it soon, has one."""
    if not isinstance(error, RETRIABLE) or not (journal.delivered or journal.resumed):
        return error
    return Lost(str(error), error if isinstance(error, BUSY) else None)


def resumable(request: OutputRequest) -> OutputRequest:
    """The request with method and seed fixed, so that any orchestrator that resumes it makes the same text.

    Where no method is named and the output is not greedy, it is `seeded`, as the moment of a loss depends on what was
    being decided. Where no seed is named, it comes from the request's id, so that the same id gets the same text again.
    """
    generation = request.generation
    if generation.greedy or not (generation.method is None or method_named(generation.method).samples):
        return request
    seed = seed_of(request.id) if generation.seed is None else generation.seed
    return replace(request, generation=replace(generation, method=generation.method or SEEDED.name, seed=seed))


def seed_of(id: str) -> int:
    """A seed of 64 bits from a request's id, by a keyed hash."""
    return int.from_bytes(blake2b(id.encode(), digest_size=SEED_BYTES, key=b"crossdraft seed").digest(), "big")

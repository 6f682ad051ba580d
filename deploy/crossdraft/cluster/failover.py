"""Outputs that orchestrators on other nodes make, each with a journal: one that is lost is replaced by another."""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from math import inf
from statistics import median
from typing import Protocol

from crossdraft.client import Kind, RequestError, Token
from crossdraft.rpc.errors import NAMES, Cancelled, Internal, ServiceError, TimedOut, Unreachable
from crossdraft.rpc.log_context import about
from crossdraft.serving.backend import (
    Ended,
    OutputRequest,
    OverloadedError,
    ServedModel,
    TraceSpans,
    UnknownDrafterError,
    UnknownModelError,
)
from crossdraft.types.request import PromptTooLongError
from crossdraft.verification.methods import SEEDED, method_named

log = logging.getLogger(__name__)
ASKED_SECONDS = 3.0  # that a question for models may take
LONGEST_SEARCH = 30.0  # seconds since an orchestrator was given up after which an output without a new token fails
ELSEWHERE = (Unreachable, TimedOut, Cancelled)  # errors that another orchestrator need not meet
PAUSE = 0.25  # seconds before another orchestrator is asked
NOT_RESUMED = (
    "the orchestrator was lost, and an output of method {!r} cannot go on elsewhere with the same distribution; "
    "ask again, or use method seeded or slem"
)


# What a replica sends back for an order. Errors travel as values: an exception of ours need not be unpickled.


@dataclass(frozen=True)
class Began:
    """The first one: the order has been taken up."""

    target: str  # what the targets run, in one word
    orchestrator: str  # which one; no other process ever has the same name


@dataclass(frozen=True)
class Alive:
    """Nothing new, but it is being worked on."""


Expected = RequestError | UnknownModelError | OverloadedError | ServiceError


@dataclass(frozen=True)
class Refusal:
    """The order ends with an error."""

    name: str  # of the error's class
    text: str
    after: float = 0.0  # seconds until it may be asked again, where that helps
    field: str = ""  # of the request, where it is that one's fault

    @staticmethod
    def of(error: Expected) -> "Refusal":
        """As it was raised."""
        after = error.after if isinstance(error, OverloadedError) else 0.0
        field = error.field if isinstance(error, RequestError) else ""
        return Refusal(type(error).__name__, str(error), after, field)

    def error(self) -> Expected:
        """To be raised again."""
        match self.name:
            case "PromptTooLongError":
                return PromptTooLongError(self.text, self.field)
            case "RequestError":
                return RequestError(self.text, self.field)
            case "UnknownDrafterError":
                return UnknownDrafterError(self.text)
            case "UnknownModelError":
                return UnknownModelError(self.text)
            case "OverloadedError":
                return OverloadedError(self.text, self.after)
        return SERVICE_ERRORS.get(self.name, Internal)(self.text)


Piece = Began | Token | TraceSpans | Ended | Alive | Refusal


# When a front takes an orchestrator for lost.
#
# One that is lost says nothing to anybody; one that has much to do says it late. So what all outputs hear counts: an
# orchestrator that one of them hears is there, and while outputs begin late, one that has not begun yet is none that is
# lost. Time in which this process did not come to listen is nobody's silence, and what lay here meanwhile is no sign of
# life: one that is lost may have left many pieces to a slow reader. To give up an orchestrator costs no text,
# but work that is done again, which a cluster that has too much of it must not be given.

Together = tuple[Piece, ...]  # pieces of one output that came at once


class Orchestrators(Protocol):
    """The replicas that make one model's outputs."""

    async def models(self) -> tuple[ServedModel, ...]:
        """What one of them can make; raises Lost."""
        ...

    def stream(self, order: OutputRequest) -> AsyncGenerator[Together, None]:
        """The pieces that one of them sends, those together that come at once; raises Lost."""
        ...


class Losses(Protocol):
    """Who is told of orchestrators that were lost with an output."""

    def lost(self, model: str) -> None:
        """One was."""
        ...

    def resumed(self, model: str, seconds: float) -> None:
        """Another one has made the next token, so long after the last sign of the lost one."""
        ...


class Lost(Exception):  # noqa: N818 - it says what happened
    """An orchestrator died, or cannot be reached."""


@dataclass(frozen=True)
class Attention:
    """Seconds after which an orchestrator is taken for lost, where nothing says that it just has much to do."""

    silent: float = 3.0  # without a piece
    # ... without a first one, where another was just lost; it doubles, up to `silent` where outputs begin. Serve knows
    # only later which replicas are gone, and may send an order to one of them again.
    first: float = 0.75
    most: float = 30.0  # whatever else is heard
    looks: float = 0.25  # between two looks


# What is kept of an output so that another orchestrator can go on with it. Pure.


@dataclass
class Journal:
    """What a client has been given of one output: enough for another orchestrator to go on from there."""

    order: OutputRequest
    delivered: list[int] = field(default_factory=list)  # ids
    target: str = ""  # what the targets ran that made them
    kinds: Counter[Kind] = field(default_factory=Counter)  # of the tokens
    resumed: bool = False  # more than one orchestrator has worked on it
    lost_at: float | None = None  # when the latest orchestrator was heard of last, until another one makes a token
    given_up: float = 0.0  # when it was given up, where `lost_at` is not None

    @property
    def rest(self) -> OutputRequest:
        """The order for what is missing."""
        request = self.order.request
        committed = (*request.committed, *self.delivered)
        return replace(self.order, request=replace(request, committed=committed))

    def whole(self, ended: Ended) -> Ended:
        """The end, with all tokens counted; what an orchestrator that was lost has cost is not known."""
        if not self.resumed:
            return ended
        accepted, corrected, bonus = (self.kinds[kind] for kind in (Kind.ACCEPTED, Kind.CORRECTED, Kind.BONUS))
        tokens = len(self.delivered)
        figures = replace(ended.statistics, tokens=tokens, accepted=accepted, corrected=corrected, bonus=bonus)
        return replace(ended, statistics=figures)

    def took_up(self, target: str) -> None:
        """An orchestrator goes on, with targets that run this; raises Unreachable if it is not the same model."""
        if self.delivered and target != self.target:
            raise Unreachable(ANOTHER_MODEL.format(self.order.model))
        self.target = target


class ClusterBackend:
    """`Backend` of several models.

    Args:
        models: their orchestrators by name.
        losses: who is told of those that are lost.
        clock: seconds.
        attention: when one is taken for lost.
    """

    def __init__(
        self,
        models: Mapping[str, Orchestrators],
        losses: Losses | None = None,
        clock: Callable[[], float] = time.monotonic,
        attention: Attention | None = None,
    ) -> None:
        self._models = dict(models)
        self._hearing = {model: Hearing(attention or Attention()) for model in models}
        self._served: dict[str, Sequence[ServedModel]] = {}  # by model, what its orchestrators said last
        self._losses = losses
        self._clock = clock

    async def models(self) -> tuple[ServedModel, ...]:
        """Those whose orchestrators answer and have found a target; where they have no time to, what they said last."""
        asked = await asyncio.gather(*map(self._asked, self._models))
        return tuple(model for found in asked for model in found)

    async def _asked(self, name: str) -> Sequence[ServedModel]:
        try:
            async with asyncio.timeout(ASKED_SECONDS):
                self._served[name] = await self._models[name].models()
        except Lost:
            return ()
        except TimeoutError:
            return self._served.get(name, ()) if self._hearing[name].lively else ()
        return self._served[name]

    async def stream(self, order: OutputRequest) -> AsyncGenerator[Token | TraceSpans | Ended, None]:
        """As `Backend.stream`."""
        orchestrators = self._models.get(order.model)
        if orchestrators is None:
            raise UnknownModelError(f"there is no model {order.model!r}; there is {', '.join(self._models)}")
        journal, heard = Journal(resumable(order)), self._clock()
        hearing, lost = self._hearing[order.model], 0  # orchestrators, one after the other, since a piece came
        while True:
            try:
                async with aclosing(hearing.listen(orchestrators.stream(journal.rest), lost)) as coming:
                    async for together in coming:
                        heard, lost = self._clock(), 0
                        for piece in together:
                            shown = self._noted(piece, journal, heard)
                            if shown is not None:
                                yield shown
                return
            except Lost as error:
                self._gone(error, journal, heard)
                lost += 1
                await asyncio.sleep(PAUSE)

    def _noted(self, piece: Piece, journal: Journal, now: float) -> Token | TraceSpans | Ended | None:
        """Keeps the journal; what the client is given of the piece."""
        match piece:
            case Refusal():
                raise _meant(piece.error(), journal)
            case Began():
                journal.took_up(piece.target)
                return None
            case Alive():
                return None
            case Token():
                self._delivered(piece, journal, now)
            case Ended():
                return journal.whole(piece)
        return piece

    def _delivered(self, token: Token, journal: Journal, now: float) -> None:
        journal.delivered.append(token.id)
        journal.kinds[token.kind] += 1
        if journal.lost_at is not None and self._losses is not None:
            self._losses.resumed(journal.order.model, now - journal.lost_at)
        journal.lost_at = None

    def _gone(self, error: Lost, journal: Journal, heard: float) -> None:
        """An orchestrator was lost; raises Unreachable if the output must not go on, or has waited for too long."""
        order = journal.order
        if not exact_after_loss(order):
            raise Unreachable(NOT_RESUMED.format(order.request.method)) from error
        journal.resumed, now = True, self._clock()
        if journal.lost_at is None:
            journal.lost_at, journal.given_up = heard, now
            if self._losses is not None:
                self._losses.lost(order.model)
        if now - journal.given_up > LONGEST_SEARCH:
            raise Unreachable(f"no orchestrator of {order.model!r} can go on: {error}") from error
        with about(request=order.id):
            log.warning("an orchestrator was lost after %d tokens: %s", len(journal.delivered), error)


def _meant(error: Expected, journal: Journal) -> Exception:
    """In the middle of an output, an orchestrator that finds no target is as good as lost: another one may."""
    return Lost(str(error)) if journal.delivered and isinstance(error, ELSEWHERE) else error


LATEST = 16  # beginnings that are remembered
FRESH = 10.0  # seconds for which they are
LATE = 4.0  # times as late as others did lately (their median) may an output begin
FORGOTTEN = 60.0  # seconds after which an orchestrator that nobody hears is forgotten


class Hearing:
    """What a front hears of one model's orchestrators.

    Args:
        attention: how long it waits.
        clock: seconds.
    """

    def __init__(self, attention: Attention, clock: Callable[[], float] = time.monotonic) -> None:
        self._attention = attention
        self._clock = clock
        self._heard: dict[str, float] = {}  # by orchestrator, when any output heard it last
        self._begun: deque[tuple[float, float]] = deque(maxlen=LATEST)  # when an output did, and how long after asking

    @property
    def lively(self) -> bool:
        """Whether an output has just heard an orchestrator."""
        now = self._clock()
        return any(now - heard < self._attention.silent for heard in self._heard.values())

    async def listen(self, stream: AsyncGenerator[Together, None], lost: int = 0) -> AsyncGenerator[Together, None]:
        """What an orchestrator sends for one output.

        Args:
            stream: what comes of it; it is closed.
            lost: orchestrators that this output has lost since it heard one.

        Raises:
            Lost: nothing has come for too long, or what `stream` raised.
        """
        asked, who = self._clock(), ""
        left = back = asked  # when the reader had the latest pieces, and when it asked for more
        async with aclosing(stream):
            while together := await self._next(stream, who, lost):
                now = self._clock()
                match together[0]:
                    case Began(orchestrator=who):
                        self._begins(who, now, now - asked)
                if now - back >= back - left:  # else they may have lain here
                    self._heard[who] = now
                yield together
                left, back = now, self._clock()

    async def _next(self, stream: AsyncGenerator[Together, None], who: str, lost: int) -> Together | None:
        """What comes next, None at the end; raises Lost."""
        due = asyncio.ensure_future(anext(stream, None))
        silence, looks = 0.0, self._attention.looks
        try:
            while not due.done():
                before = self._clock()
                await asyncio.wait([due], timeout=looks)
                silence += min(self._clock() - before, 2 * looks)
                if not due.done() and self._lost(who, silence, lost):
                    raise Lost(f"{who or 'it'} has been silent for {silence:.2g} s")
            return due.result()
        finally:
            due.cancel()
            await asyncio.gather(due, return_exceptions=True)

    def _begins(self, who: str, now: float, seconds: float) -> None:
        self._begun.append((now, seconds))
        self._heard = {one: heard for one, heard in self._heard.items() if now - heard < FORGOTTEN}

    def _lost(self, who: str, silence: float, lost: int) -> bool:
        """Whether an orchestrator is taken for lost that has not told an output anything for so long.

        Args:
            who: it; empty: nobody has begun, so it is not known who was asked.
            silence: seconds.
            lost: as of `listen`.
        """
        attention = self._attention
        if silence >= attention.most:
            return True
        now = self._clock()
        if who:
            return min(silence, now - self._heard.get(who, -inf)) >= attention.silent
        doubled = attention.silent if not lost else attention.first * 2 ** (lost - 1)
        latest = [seconds for at, seconds in self._begun if now - at < FRESH]
        if not latest:  # it may be that all begin late, and that those who asked did not wait for long enough to know
            return silence >= min(LATE * attention.silent, doubled)
        return silence >= max(min(attention.silent, doubled), LATE * median(latest))


SEED_BYTES = 8
ANOTHER_MODEL = "{!r} was replaced by another model while this output was being made; ask again"


def resumable(order: OutputRequest) -> OutputRequest:
    """The same order with its chance resolved, so that whoever goes on with it makes the same text.

    Where no method is named and the output is not greedy, the method is `seeded`: what began with `coupled` and is
    resumed has not the target's distribution, as the moment of a loss depends on what was being decided then. Where no
    seed is named it comes from the order's id, so that a client that asks again with the same id gets the same text,
    whatever has been lost since.
    """
    request = order.request
    if request.greedy or not (request.method is None or method_named(request.method).seedable):
        return order
    seed = seed_of(order.id) if request.seed is None else request.seed
    return replace(order, request=replace(request, method=request.method or SEEDED.name, seed=seed))


def seed_of(id: str) -> int:
    """A seed from a request's id, by a hash with a key of its own, 64 bits."""
    return int.from_bytes(blake2b(id.encode(), digest_size=SEED_BYTES, key=b"crossdraft seed").digest(), "big")


def exact_after_loss(order: OutputRequest) -> bool:
    """Whether the rest of an output may be made by another orchestrator without changing its distribution."""
    return order.request.greedy or order.request.seed is not None


EXPECTED = (RequestError, UnknownModelError, OverloadedError, ServiceError)
SERVICE_ERRORS = {kind.__name__: kind for kind in NAMES if issubclass(kind, ServiceError)}

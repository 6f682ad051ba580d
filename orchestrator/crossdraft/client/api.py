"""The Python API: connect to targets and drafters, and generate.

async with connect(target="127.0.0.1:7001", drafter="127.0.0.1:7002") as pipeline:
    async for token in pipeline.generate("def main(", method="seeded", seed=7):
        print(token.text, end="")
"""

import asyncio
import contextvars
import json
import logging
import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import fields, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Self, TypeVar
from weakref import WeakSet

from crossdraft.client.discovery import Discovery
from crossdraft.client.driver import Driver
from crossdraft.client.roster import Services
from crossdraft.config.fields import fault_of_address
from crossdraft.config.request import Sampling
from crossdraft.rpc.errors import TimedOut
from crossdraft.rpc.event_loop import Beside
from crossdraft.rpc.links import Patience
from crossdraft.rpc.security import RenewedCredentials, TlsFiles
from crossdraft.session.assignment import Assignment, Secrets
from crossdraft.session.events import Emitted, Finished, Reason
from crossdraft.session.models import Models, choose_method, with_defaults, without_trust
from crossdraft.session.output import ShownText
from crossdraft.session.resolution import Prompts, controller_of, prompts_of, resolve, sampling_of, written
from crossdraft.session.session import Session
from crossdraft.speculation.choice import Decision
from crossdraft.speculation.controller import OutputController, TargetController
from crossdraft.text.letters import Letters, to_bytes
from crossdraft.text.tokenization import LetterDecoder
from crossdraft.trace.timeline import Watch, trace_events
from crossdraft.types.messages import MODEL_SETTINGS, PromptScored, Sample, SamplingOptions
from crossdraft.types.output import Names, PromptToken, Token, Written
from crossdraft.types.request import Asked, GenerationRequest, Overlap, Prompt, RequestError, sampling_size, size_of
from crossdraft.types.statistics import Statistics

log = logging.getLogger(__name__)
T = TypeVar("T")

INSIDE = "use the pipeline inside `async with connect(...)`"
ONCE = "a pipeline is entered once: make another one with `connect(...)`"
TOKENIZING = 2  # prompts at once: tokenizers leave the interpreter to others
Addresses = str | Sequence[str]  # HOST:PORT, several separated by commas, or a sequence of them


class TokenStream(ABC):
    """An asynchronous iterator over tokens that come in groups; as a context manager it is closed with the block.

    `text`, `ids`, `reason` and `statistics` describe the end. `prompt_tokens` are those of the prompt with their
    log-probabilities, if the request has `prompt_logprobs`; all are there before the first of the output.
    """

    def __init__(self) -> None:
        self.text = ""
        self.ids: list[int] = []
        self.prompt_tokens: list[PromptToken] = []
        self.reason: Reason | None = None
        self.statistics: Statistics | None = None
        self._ready: deque[Token] = deque()  # came with the latest one that was returned

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Token:
        if not self._ready:
            self._ready.extend(await self.together())
        if not self._ready:
            raise StopAsyncIteration
        return self._ready.popleft()

    @abstractmethod
    async def aclose(self) -> None:
        """Cancel what is still running."""

    @abstractmethod
    async def together(self) -> Sequence[Token]:
        """The next tokens, as many as were decided together, for instance by one pass; none at the end."""

    def _came(self, tokens: Sequence[Token]) -> Sequence[Token]:
        self.ids += [token.id for token in tokens]
        self.text += "".join([token.text for token in tokens])
        return tokens


class Generation(TokenStream):
    """One output.

    If the request continues an output after `committed` ids, all of these cover only what came after them.

    Use it as a context manager, or exhaust it: leaving it early cancels the sessions. When no target is left, the
    iteration raises the last one's ServiceError; a drafter that fails does not end it.

    Args:
        assignment: of its session.
        services: where lanes may be opened.
        watch: is told the session's steps while it runs.
        opening: letters that its tokenizer put before the prompt, which are not shown.
    """

    def __init__(
        self, assignment: Assignment, services: Services, watch: Watch | None = None, opening: int = 0
    ) -> None:
        super().__init__()
        self._assignment = assignment
        self._recorded = None if assignment.request.record is None else Watch()
        watches = [one for one in (self._recorded, watch) if one is not None]
        for one in watches:
            assignment = one.judging(assignment)
        self._session = Session(assignment)
        self._driver = Driver(self._session, services, watches)
        self._shown = ShownText(assignment)
        self._prompt = LetterDecoder()
        self._opening = opening
        self._queue: asyncio.Queue[Sequence[Emitted] | PromptScored | None] = asyncio.Queue()  # of one event
        self._task: asyncio.Task[Finished] | None = None
        self._over = False  # nothing more will come
        self.unrecorded = False  # whether the request names a file for its record that could not be written
        self._context = contextvars.copy_context()  # of the creator: log lines name its request (`rpc.logs`)

    async def aclose(self) -> None:
        self._over = True
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])
            await self._written()

    @property
    def addresses(self) -> frozenset[str]:
        """Of the services that it has open sessions with now."""
        return self._driver.addresses

    @property
    def decisions(self) -> list[Decision]:
        return self._session.decisions

    @property
    def estimates(self) -> Sequence[str]:
        """What the controller decided from last, as lines of text, if the request has `explain`."""
        given, controller = self._assignment, self._assignment.controller
        return controller.explain() if given.request.explain and isinstance(controller, OutputController) else ()

    async def read(self) -> None:
        """Wait until all of `prompt_tokens` are there, if the request has `prompt_logprobs`; else for nothing.

        Raises:
            ServiceError: as the iteration does.
        """
        given = self._assignment
        size = 0 if given.request.prompt_logprobs is None else len(given.open_target.prompt)
        while len(self.prompt_tokens) < size and (tokens := await self.together()):
            self._ready.extend(tokens)

    async def together(self) -> Sequence[Token]:
        """As of any stream.

        Raises:
            ServiceError: as the iteration does.
        """
        if self._ready:
            ready = list(self._ready)
            self._ready.clear()
            return ready
        if self._task is None and not self._over:
            self._task = self._begin()
        while isinstance(emitted := None if self._over else await self._queue.get(), PromptScored):
            for scored in emitted.tokens:
                self.prompt_tokens.append(self._prompt_token(scored))
        if emitted is None:
            self._queue.put_nowait(None)  # for whoever else waits
            over, self._over = self._over, True
            if not over and self._task is not None:
                try:  # also if this is cancelled meanwhile: nobody is told again how it has ended
                    self._end(self._task.result())
                finally:
                    await self._written()
            return []
        return self._came(list(map(self._token, emitted)))

    def _begin(self) -> asyncio.Task[Finished]:
        task = asyncio.create_task(self._driver.run(self._queue.put_nowait), context=self._context)
        task.add_done_callback(lambda _: self._queue.put_nowait(None))
        if self._assignment.request.prompt_logprobs is not None:
            self.prompt_tokens.append(self._prompt_token(Sample(self._assignment.open_target.prompt[0], math.nan)))
        return task

    async def _written(self) -> None:
        """Wait until what is to be recorded is on disk; log a warning if it cannot be written."""
        path = self._assignment.request.record
        if path is not None and self._recorded is not None:
            try:
                await asyncio.to_thread(_write_trace, path, self._recorded)
            except OSError as error:
                self.unrecorded = True
                log.warning("the output is not recorded: %s", error)

    def _token(self, emitted: Emitted) -> Token:
        shown = self._shown.add(emitted.letters, emitted.kept)
        top = self._likely(emitted.likely) if emitted.likely else ()
        raw, names = to_bytes(emitted.letters), self._names(emitted)
        return Token(emitted.token, shown, raw, emitted.kind, emitted.log_probability, top, names)

    def _prompt_token(self, scored: Sample) -> PromptToken:
        given, value = self._assignment, scored.log_probability if scored.rank else None
        letters = given.pair.target.letters[scored.token]
        shown, top = self._prompt.feed(Letters(letters[self._opening :])), self._likely(scored.likely)
        self._opening = max(0, self._opening - len(letters))
        if not given.request.max_tokens and len(self.prompt_tokens) + 1 == len(given.open_target.prompt):
            shown += self._prompt.flush()  # nothing goes on with its last character
        return PromptToken(scored.token, shown, to_bytes(letters), value, scored.rank, top, self._names(scored))

    def _names(self, one: Emitted | Sample) -> Names:
        """Of the control symbols among a token and the likely ones."""
        names = self._assignment.pair.target.names
        if one.token not in names and not one.likely:
            return ()
        return tuple((id, names[id]) for id in (one.token, *(id for id, _ in one.likely)) if id in names)

    def _likely(self, likely: Sequence[tuple[int, float]]) -> tuple[tuple[int, bytes, float], ...]:
        letters = self._assignment.pair.target.letters
        return tuple((token, to_bytes(letters[token]), value) for token, value in likely)

    def _end(self, finished: Finished) -> None:
        """Set reason and statistics; raises the session's error, if there is one."""
        self.reason = finished.reason
        given, opened = self._assignment, self._assignment.open_target
        options = opened.options
        given_too = [one.name for one in fields(Sampling) if getattr(options, one.name) != one.default]
        names = dict.fromkeys((*MODEL_SETTINGS, *given_too))
        settings = {name: getattr(options, name) for name in names} | {"max_tokens": given.request.max_tokens}
        in_round = given.request.num_speculative_tokens if given.request.overlap is Overlap.OFF else 0
        self.statistics = Statistics(
            method=given.method.name,
            num_speculative_tokens=in_round,
            prompt_tokens=len(opened.prompt),
            settings=settings,
            **vars(finished.counts),
            **vars(self._driver.times()),
        )
        if isinstance(finished.error, TimeoutError):
            raise TimedOut(str(finished.error)) from finished.error
        if finished.error is not None:
            # Not itself: the session keeps it, and the traceback of what is raised here keeps the session.
            raise copy(finished.error).with_traceback(finished.error.__traceback__) from finished.error.__cause__


class Pipeline:
    """Connections to the targets of one model and, unless decoding is plain, to drafters of one vocabulary.

    Use it with `async with`.

    Args:
        target: one address or several, all of the same model; one must be there, others may come later.
        drafter: likewise of one vocabulary. None: plain decoding, as it is until a drafter has answered.
        patience: how long services may take to answer.
        needs_drafter: fail to connect, as for a target, if no drafter answers.
        tls: the client's certificate, and the authority of the services' certificates; None: plaintext.
        trusted: whether the drafters are. With untrusted ones only methods whose output does not depend on the
            distributions that a drafter reports are used (`slem`, `seeded`), and others are refused.
        updated: targets of another model may be there, as in an update, and are used once the others have left.

    Raises:
        ValueError: there is no address of a target, one is not host:port, or TLS files cannot be used (`TlsError`).
    """

    def __init__(
        self,
        target: Addresses,
        drafter: Addresses | None = None,
        patience: Patience | None = None,
        *,
        needs_drafter: bool = False,
        tls: TlsFiles | None = None,
        trusted: bool = True,
        updated: bool = False,
    ) -> None:
        self._targets = addresses_of(target)
        self._drafters = addresses_of(drafter or ())
        if not self._targets:
            raise ValueError("give at least one address of a target, such as 127.0.0.1:7001")
        for role, addresses in (("target", self._targets), ("drafter", self._drafters)):
            if fault := next(filter(None, map(fault_of_address, addresses)), ""):
                raise ValueError(f"an address of a {role} {fault}")
        for name, given, kind in (("patience", patience, Patience), ("tls", tls, TlsFiles)):
            if given is not None and not isinstance(given, kind):
                raise ValueError(f"{name} must be {kind.__name__}, got {given!r}")
        self._patience = patience or Patience()
        self._needs_drafter = needs_drafter
        self._shown = None if tls is None else RenewedCredentials(tls)
        self._trusted = trusted
        self._updated = updated
        self._discovery: Discovery | None = None
        self._generations: WeakSet[Generation] = WeakSet()  # to close those that still run
        self._controller = TargetController()  # for the models that `_controlled` names
        self._controlled: tuple[str, ...] = ()
        self._noted: set[str] = set()  # reasons that were logged
        self._tokenizing = Beside("tokenizing", TOKENIZING)
        self._making: dict[object, asyncio.Task[Any]] = {}  # by what is made, of which objects

    async def __aenter__(self) -> Self:
        """Connect and learn the two vocabularies.

        Raises:
            ServiceError: no target answers in time, or its tokenizer cannot be used; the text says which one and
                what to do. The same of drafters where one is needed.
            RequestError: the targets serve models that differ.
        """
        if self._discovery is not None and self._discovery.closed:
            raise RuntimeError(ONCE)
        try:
            await self.ready()
        except BaseException:
            await self.__aexit__()
            self._discovery = None
            raise
        return self

    async def ready(self) -> None:
        """Begin to connect, if that was not begun, and return once outputs can be made.

        Raises:
            ServiceError, RequestError: as of `async with`; who does not answer is asked on, and at once by each call.
        """
        if self._discovery is None:
            self._discovery = Discovery(self._patience, self._shown, self._trusted, self._updated)
            await self._discovery.follow(self._targets, self._drafters)
        if not self.usable:
            await self._discovery.gather(self._needs_drafter)

    @property
    def usable(self) -> bool:
        """Whether `ready` would return at once."""
        found = self._discovery
        return found is not None and found.usable and (found.drafter_known.is_set() or not self._needs_drafter)

    async def __aexit__(self, *_: object) -> None:
        """Close all connections; if this is cancelled that goes on by itself."""
        self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        for generation in list(self._generations):
            await generation.aclose()
        await self._connected.close()

    def generate(self, prompt: Prompt, **settings: Any) -> Generation:
        """One output for a text, target ids or a Chat; `settings` are the other fields of GenerationRequest.

        `k`, `window` and `wait` stand for `num_speculative_tokens`, `max_draft_tokens` and `min_draft_tokens`.

        Raises:
            RequestError: the request cannot be served by this pair.
            TypeError: there is no such setting.
        """
        return self.run(GenerationRequest.of(prompt, **settings))

    async def prepared(self, request: GenerationRequest) -> tuple[Prompts, SamplingOptions]:
        """What of a request grows with it, for `run`; once for all its choices, which have the same prompt and lists.

        If there is much of it, it is made in a thread: the event loop goes on meanwhile.

        Raises:
            RequestError: it cannot be served by this pair.
        """
        models = None
        while models is not self.models:  # else another service was described meanwhile, perhaps with other ids
            models = self.models
            size = sampling_size(request)
            sampling = await self._once(sampling_of, size, request, models, but=("choice", "prompt"))
            prompts = await self._once(prompts_of, size_of(request.prompt), request, models, but=("choice",))
        return prompts, sampling

    async def _once(
        self,
        work: Callable[[GenerationRequest, Models], T],
        size: int,
        request: GenerationRequest,
        models: Models,
        but: Sequence[str],
    ) -> T:
        """The result of `work`, shared by all who ask meanwhile with the same values `but` for these fields."""
        values = [value for name, value in vars(request).items() if name not in but]
        key = (work, id(models), *map(id, values))
        task: asyncio.Task[T] | None = self._making.get(key)
        if task is None:
            task = self._making[key] = asyncio.create_task(self._tokenizing.run(size, work, request, models))
            task.add_done_callback(partial(self._made, key, (request, models)))  # of which the ids in the key are
        return await asyncio.shield(task)

    def _made(self, key: object, _: object, task: asyncio.Task[Any]) -> None:
        del self._making[key]
        if not task.cancelled():
            task.exception()  # those who asked may have left

    async def written(self, asked: Asked, special: bool = True) -> Written:
        """As `session.resolution.written`, in a thread for a long prompt."""
        return await self._tokenizing.run(size_of(asked), written, asked, self.models, special)

    def run(
        self,
        request: GenerationRequest,
        watch: Watch | None = None,
        prepared: tuple[Prompts, SamplingOptions] | None = None,
        drafting: bool = True,
    ) -> Generation:
        """One output for a request.

        Args:
            request: what to generate.
            watch: is told the session's steps.
            prepared: what `prepared` has made of the request; None: it is made here.
            drafting: whether drafters may be used; without them the output is as on a pipeline that has none.

        Raises:
            RequestError: the request cannot be served by this pair.
        """
        services, models, drawn = self._connected.services, self.models, Secrets.drawn()
        if self._connected.closed:
            raise RuntimeError(INSIDE)
        request, controller = with_defaults(request, models.target.defaults), self._learning
        if not drafting:
            models = Models(models.target, models.tokenization)
        elif not self._trusted and (self._drafters or models.drafter is not None):  # one may have come later
            request = without_trust(request)
        targets, patience = len(services.targets), self._patience.target_seconds
        assignment = resolve(request, models, drawn, targets, controller, patience, *(prepared or ()))
        if drafting and models.drafter is None and self._drafters:
            assignment = replace(assignment, no_drafter=f"the drafter is {self._connected.drafter_fault}")
        if request.record is not None:
            try:
                request.record.open("ab").close()
            except OSError as error:
                raise RequestError(f"cannot record: {error}; name a file that can be written") from error
        scored = request.prompt_logprobs is not None
        opening = models.tokenization.opening(assignment.open_target.prompt) if scored else 0
        generation = Generation(assignment, services, watch, opening)
        self._generations.add(generation)
        return generation

    @property
    def _learning(self) -> TargetController:
        """The controller for the models that are served now: what was learned of others is of no use."""
        described = [one for one in (self.models.target, self.models.drafter) if one is not None]
        served = tuple(text for one in described for text in (one.model, one.fingerprint))
        if served != self._controlled:
            self._controlled = served
            self._controller = TargetController()
        return self._controller

    @property
    def load(self) -> float:
        """Outputs that share a target now, those of others included; 1 if none of this pipeline is under way."""
        return self._controller.load if self._controller.outputs else 1.0

    def gain(self, request: GenerationRequest, load: float) -> float | None:
        """As of a controller, of requests like this one; None: the drafters cannot draft for it."""
        models = self.models
        if models.drafter is None or not len(self._connected.services.drafters):
            return None
        try:
            _ = models.reads_hidden  # raises for a drafter that reads another target's states
            request = with_defaults(request, models.target.defaults)
            request = replace(request if self._trusted else without_trust(request), overlap=Overlap.AUTO)
            controller = controller_of(request, choose_method(request, models), 1, self._learning, models.copies)
        except RequestError:
            return None
        assert isinstance(controller, OutputController)  # as overlap is automatic
        return controller.gain(load)

    async def follow(self, target: Addresses, drafter: Addresses | None = None) -> None:
        """Use these services from now on. Sessions that run elsewhere go on, but no new one is opened there."""
        await self._connected.follow(addresses_of(target), addresses_of(drafter or ()))

    async def drafter_known(self) -> None:
        """Return once a drafter has described itself; generations that begin from then on can use it."""
        await self._connected.drafter_known.wait()

    @property
    def target_there(self) -> bool:
        return self._connected.target_there

    @property
    def target_fault(self) -> str:
        """Why some targets are not used now, for clients; empty if all are."""
        return self._connected.target_fault

    @property
    def drafter_fault(self) -> str:
        """Why the drafters, or some of them, draft nothing now, for clients; empty if they do."""
        return self._connected.drafter_fault or self._learning.idle(time.monotonic())

    def note_idle(self) -> None:
        """Log why a drafter that is there is not used, once for each reason."""
        idle = self._learning.idle(time.monotonic())
        if idle and idle not in self._noted:
            self._noted.add(idle)
            log.warning("the drafter of %s: %s", self.models.target.model, idle)

    @property
    def models(self) -> Models:
        """The models of the pair; the drafter's only once a drafter has answered."""
        models = self._connected.models
        assert models is not None  # it is, before `gather` returns
        return models

    @property
    def _connected(self) -> Discovery:
        if self._discovery is None:
            raise RuntimeError(INSIDE)
        return self._discovery


connect = Pipeline
"""`Pipeline`, as in `async with connect(target, drafter) as pipeline`."""


def addresses_of(given: Addresses) -> tuple[str, ...]:
    """Each once, in their order; raises ValueError."""
    separate = given.split(",") if isinstance(given, str) else list(given) if isinstance(given, Iterable) else [given]
    if not all(isinstance(address, str) for address in separate):
        raise ValueError(f"give addresses as a text or texts, such as 127.0.0.1:7001, got {given!r}")
    return tuple(dict.fromkeys(address.strip() for address in separate if address.strip()))


def software() -> str:
    try:
        return version("crossdraft")
    except PackageNotFoundError:
        return "not installed"


def _write_trace(path: Path, recorded: Watch) -> None:
    """Raises OSError."""
    path.write_text(json.dumps(trace_events(recorded.take())), encoding="utf-8")

"""Drafter services, and the sessions of vLLM's requests with them, in a thread with an event loop of its own.

The engine's thread never waits for this one but on purpose, for a time that it names. What both touch (`Drafting` and
the streams) is guarded by one lock, which neither holds while it waits, tokenizes a prompt or speaks to a service.
"""

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, TimeoutError
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np
from numpy.typing import NDArray

from crossdraft.client.discovery import Probe, read_tokenization
from crossdraft.client.roster import Roster
from crossdraft.integrations.vllm.pacing import DrafterPace, Pacing, Seldom
from crossdraft.integrations.vllm.streams import DrafterFaultError, DraftStream
from crossdraft.rpc.errors import Cancelled, Closed, NotServed, ServiceError, Unreachable
from crossdraft.rpc.links import DrafterClient, LinkSession, Patience
from crossdraft.rpc.security import RenewedCredentials
from crossdraft.text.letters import Side
from crossdraft.text.pairs import Pair
from crossdraft.text.tokenization import Tokenization
from crossdraft.types.messages import Advance, Description, Draft, Drafted, OpenDrafter, SamplingOptions, Scored

log = logging.getLogger(__name__)
TokenIds = NDArray[np.int32]  # a row of vLLM's `token_ids_cpu`, as far as it is set

# Then a drafter counts as lost; its requests are served without one meanwhile.
DRAFTER_PATIENCE = Patience(reply_seconds=3.0)
FIRST_PAUSE = 0.25  # seconds before a request whose session was lost tries another one; it doubles
MAX_PAUSE = 8.0
STOP_SECONDS = 5.0  # for saying goodbye to services
TIDIED_EVERY = 2.0  # seconds between two looks for requests that are over
GREEDY = SamplingOptions(temperature=0.0)  # without probabilities the likeliest token is the best draft


@dataclass(eq=False)
class RequestState:
    """One request of vLLM's, as far as drafting goes. Guarded by the lock."""

    session: "DrafterSession | None" = None  # open, or being opened
    drafts: bool = False  # it is to have a draft at all
    failures: int = 0  # sessions lost, one after another
    not_before: float = 0.0  # seconds: when the next session may be opened


@dataclass(frozen=True, eq=False)
class KnownDrafter:
    """A drafter that has described itself."""

    client: DrafterClient
    about: Description
    pair: Pair
    pace: DrafterPace = field(default_factory=DrafterPace)


class DrafterSession:
    """One request's session with a drafter, and its listener. Made in the engine's thread, used in the loop's."""

    def __init__(self, services: "DrafterServices", request: RequestState, address: str, known: KnownDrafter) -> None:
        self.address = address
        self.known = known
        self.stream = DraftStream(known.pair, services.target.encode_continuation)
        self.live = True  # it may still bring something
        self.ready = False  # it is open: the stream may be followed
        self._services = services
        self._request = request
        self._session: LinkSession | None = None

    def begin(self, ids: TokenIds) -> None:
        """Open it with these ids of the target's as its context."""
        if not self.live:
            return
        try:
            prompt = self._services.target.prompt_letters(ids.tolist())
        except (IndexError, ValueError) as error:
            log.warning("no drafts for a request whose text cannot be told to a drafter: %s", error)
            with self._services.lock:
                self._over(blamed=False)
            return
        self._session = self.known.client.begin(OpenDrafter(prompt, GREEDY, None, 0), self)

    def send(self, messages: Sequence[Draft | Advance]) -> None:
        if self._session is not None:
            for message in messages:
                self._session.send(message)

    def close(self) -> None:
        self.live = False
        if self._session is not None:
            self._session.close()
            self._session = None

    def opened(self) -> None:
        services = self._services
        with services.lock:
            if not self.live:
                return
            self.ready = True
            pull = services.pacing.pull(self.known.pace)
            messages = self.stream.follow(pull, services.clock()) if self._request.drafts else []
            services.news.notify_all()
        self.send(messages)

    def received(self, reply: Drafted | Scored) -> None:
        services = self._services
        with services.lock:
            if not self.live:
                return
            try:
                if isinstance(reply, Drafted) and (seen := self.stream.take(reply, services.clock())) is not None:
                    letters = self.known.pair.drafter.letters
                    self.known.pace.answered(seen, sum(len(letters[token.token]) for token in reply.draft_tokens))
                    self._request.failures = 0
                    services.news.notify_all()
                return
            except DrafterFaultError as error:
                log.warning("%s is not used for a while: %s", self.known.client.service, error)
                self._over()
        self.close()

    def lost(self, error: ServiceError) -> None:
        self._session = None
        with self._services.lock:
            if self.live:
                self._over()
        # Of the others it is told that the service is lost, or it is described anew.
        if not isinstance(error, (Unreachable, Cancelled, Closed, NotServed)):
            self._services.losses.warning("a request goes on without drafts for a while: %s", error)

    def _over(self, blamed: bool = True) -> None:
        """The request goes on without it, and tries another one after a while; never if no drafter is to blame."""
        request, now = self._request, self._services.clock()
        self.live = False
        if request.session is self:
            request.session = None
            request.failures += 1
            pause = min(MAX_PAUSE, FIRST_PAUSE * 2.0 ** min(request.failures, 10))
            request.not_before = now + pause if blamed else inf
        if blamed:
            self._services.roster.failed(self.address, now)
        self._services.roster.give_back(self.address)
        self._services.news.notify_all()


@dataclass(eq=False)
class DrafterServices:
    """The drafters at some addresses."""

    addresses: Sequence[str]  # host:port of each, at least one
    target: Tokenization  # of vLLM's model
    pacing: Pacing  # is told what arrives
    tidy: Callable[[float], Sequence[RequestState]]  # called with the lock held; returns requests that are over
    tls: RenewedCredentials | None = None  # None: plaintext
    clock: Callable[[], float] = time.monotonic  # seconds

    def __post_init__(self) -> None:
        self.lock = threading.Lock()
        self.news = threading.Condition(self.lock)  # a session was opened or lost, or draft tokens arrived
        self.roster: Roster[KnownDrafter] = Roster("drafter")
        self.losses = Seldom(log, self.clock)  # of sessions
        self._members: dict[str, Probe] = {}
        self._started: Future[asyncio.AbstractEventLoop] = Future()
        self._stopping: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name="crossdraft-drafters", daemon=True)

    def start(self, seconds: float) -> None:
        """Begin, and wait so long for the drafters to describe themselves; those that do not are asked on."""
        self._thread.start()
        try:
            loop = self._started.result(seconds)
            asyncio.run_coroutine_threadsafe(self._tried(), loop).result(seconds)
        except TimeoutError:
            log.warning("not all drafters have answered yet; vLLM serves without them until they do")

    def stop(self) -> None:
        """End the thread, if it does so soon: it keeps no process from ending."""
        began = self._started.done() and self._started.exception() is None
        if began and self._stopping is not None and not (loop := self._started.result()).is_closed():
            loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(STOP_SECONDS)

    def open(self, request: RequestState, ids: TokenIds, now: float) -> None:
        """Open a session for a request whose ids these are, if a drafter can be reached. The lock is held."""
        known = {address for address, member in self._members.items() if member.reachable}
        if now < request.not_before or not known:
            return
        address = self.roster.take((), set(self.addresses) - known, now)
        if address is None:
            return
        request.session = DrafterSession(self, request, address, self.roster[address])
        self._call(request.session.begin, ids.copy())

    def send(self, messages: Sequence[tuple[DrafterSession, Sequence[Draft | Advance]]]) -> None:
        """Send what streams have returned, in this order."""
        if messages:
            self._call(_send_all, messages)

    def close(self, request: RequestState) -> None:
        """End a request's session. The lock is held."""
        session, request.session = request.session, None
        if session is not None and session.live:
            session.live = False
            self.roster.give_back(session.address)
            self._call(session.close)

    def _call(self, work: Callable[..., object], *given: object) -> None:
        self._started.result().call_soon_threadsafe(work, *given)

    def _run(self) -> None:
        _leave_engines_cores()
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            if not self._started.done():
                self._started.set_exception(error)
            raise

    async def _serve(self) -> None:
        self._stopping = asyncio.Event()
        for address in self.addresses:
            self._members[address] = Probe(DrafterClient(address, DRAFTER_PATIENCE, tls=self.tls), self._welcome)
        self._started.set_result(asyncio.get_running_loop())
        tidying = asyncio.create_task(self._tidy_up())
        try:
            await self._stopping.wait()
        finally:
            tidying.cancel()
            for member in self._members.values():
                await member.close()

    async def _welcome(self, client: DrafterClient, about: Description) -> None:
        if client.address in self.roster and self.roster[client.address].about == about:  # it is back
            return
        known = await asyncio.to_thread(self._learned, client, about)
        with self.lock:
            self.roster.remove(client.address)
            self.roster.add(client.address, known)
        log.warning("drafts come from %r at %s", about.model, client.address)

    def _learned(self, client: DrafterClient, about: Description) -> KnownDrafter:
        without = replace(about, chat_template=None)  # drafters are not trusted here: nothing of theirs is run
        vocabulary = read_tokenization(without, Side.DRAFTER).vocabulary
        return KnownDrafter(client, about, Pair(self.target.vocabulary, vocabulary))

    async def _tried(self) -> None:
        for member in list(self._members.values()):
            await member.tried
            member.warn()

    async def _tidy_up(self) -> None:
        while True:
            await asyncio.sleep(TIDIED_EVERY)
            with self.lock:
                for request in self.tidy(self.clock()):
                    self.close(request)


def _leave_engines_cores() -> None:
    """Run beside the engine's thread: vLLM's CPU build binds what that starts to the target's cores."""
    if hasattr(os, "sched_setaffinity"):
        every = set(range(os.cpu_count() or 1))
        with suppress(OSError):  # of a container that allows fewer cores, which stay as they are
            os.sched_setaffinity(0, every - os.sched_getaffinity(0) or every)


def _send_all(messages: Sequence[tuple[DrafterSession, Sequence[Draft | Advance]]]) -> None:
    for session, told in messages:
        session.send(told)

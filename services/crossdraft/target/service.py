"""The target service: sessions on one model, which answer passes over trees after the committed ids, and its server."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from typing import Any

from crossdraft.engine.device import fetched, state_bytes
from crossdraft.engine.model_thread import ForwardResult, Job
from crossdraft.engine.requests import ForwardRequest
from crossdraft.engine.sampling.distributions import History, LogitsProcessor, Nodes, NothingLeftError
from crossdraft.engine.sampling.sampler import RowRequest, SampleRequest, SamplerRequest, ScoreRequest
from crossdraft.engine.served_model import MakeBeside, ModelOptions, RunningModel
from crossdraft.engine.tensor_parallel import run_ranks
from crossdraft.rpc.errors import BadRequest, ContextTooLong, Full, ProtocolBroken
from crossdraft.rpc.event_loop import Beside
from crossdraft.rpc.frames import TARGET
from crossdraft.rpc.handlers import Replies
from crossdraft.rpc.server import Listening, Server
from crossdraft.text.grammar import Bits, Grammar, GrammarError, GrammarMatcher, of_letters
from crossdraft.text.letters import NOTHING, Letters, Side, is_plain
from crossdraft.types.messages import (
    IMPOSSIBLE,
    MAX_RUN,
    MAX_SCORED,
    Description,
    FetchRow,
    HiddenStates,
    OpenTarget,
    Pass,
    PassDone,
    PromptScored,
    RowFetched,
    RunTo,
    Sample,
    ScorePrompt,
)
from crossdraft.types.rows import Row
from crossdraft.types.trees import TokenTree

log = logging.getLogger(__name__)
Request = Pass | FetchRow | RunTo | ScorePrompt
Reply = PassDone | RowFetched | PromptScored
TargetServer = Server[OpenTarget, Request, Reply]
# After a reply of a run, tokens wait so long for each other: a message costs more than a token.
BATCHED_SECONDS = 0.008
MAX_WAITING_REQUESTS = 64  # requests of a session
COMPILE_SECONDS = 30.0  # for a grammar, and those that were sent before
LEAVES_NONE = "the request's limits (grammar, allowed_token_ids, bad_words, min_tokens) leave no id to draw"
SMALL_OPTIONS = 256  # ids in the options of a session that are handled in the event loop: a thread costs more
NO_RUN = RunTo(0, 0)  # there is none, or it ends with the token that is being drawn


@dataclass(frozen=True, eq=False)
class TargetService:
    """Sessions on one running model."""

    running: RunningModel
    _beside: Beside = field(default_factory=partial(Beside, "options", small=SMALL_OPTIONS))
    _compiling: Beside = field(default_factory=partial(Beside, "grammars", 2, small=0))

    @property
    def description(self) -> Description:
        return self.running.description

    async def open(self, request: OpenTarget, replies: Replies[Reply]) -> "TargetSession":
        """A new session. What many ids are made into is made in a thread, as grammars are: others do not wait.

        Raises ContextTooLong: the prompt alone does not fit; BadRequest: the grammar cannot be compiled.
        """
        running, options = self.running, request.options
        ids = len(options.allowed_token_ids) + len(options.logit_bias) + SMALL_OPTIONS * len(options.bad_word_ids)
        device, size = running.thread.engine.device, running.description.vocabulary_size
        prompt = request.prompt if options.repetition_penalty != 1 else ()
        processor = await self._beside.run(ids + len(prompt), LogitsProcessor, options, size, device, prompt)
        matchers = () if options.grammar is None else await self._matchers(options.grammar, request.stop_ids)
        return TargetSession(running, request, processor, replies, *matchers)

    async def _matchers(self, grammar: Grammar, stop_ids: Sequence[int]) -> tuple[GrammarMatcher, GrammarMatcher]:
        """For the target's tokens, and for letters alone."""
        letters = self.running.tokenization.vocabulary.letters
        ends, compiler = [token for token in stop_ids if not is_plain(letters[token])], self.running.grammars

        def both() -> tuple[GrammarMatcher, GrammarMatcher]:
            return compiler.matcher(grammar, ends), of_letters().matcher(grammar)

        try:
            async with asyncio.timeout(COMPILE_SECONDS):
                return await self._compiling.run(len(grammar.text), both)
        except GrammarError as error:
            raise BadRequest(str(error)) from error
        except TimeoutError:
            raise Full(f"other grammars are compiled first, for over {COMPILE_SECONDS:g} s") from None

    async def close(self) -> None:
        await asyncio.to_thread(self.running.close)


MakeReply = Callable[[], Reply]  # of what was found; called in the event loop: the model thread has other things to do


def joined(before: Reply, after: Reply) -> PassDone | None:
    """One reply in place of two that follow each other, if they are of one run."""
    if not (isinstance(before, PassDone) and isinstance(after, PassDone) and before.number == after.number):
        return None
    nodes, times = before.nodes + after.nodes, (before.seconds + after.seconds, before.queued + after.queued)
    forwards, batch = before.forwards + after.forwards, (after.shared, after.fed)
    return PassDone(after.number, nodes, *times, after.more, forwards, *batch, before.first, after.hidden)


@dataclass(eq=False)
class TargetSession:
    """One output of the target: what is committed, and the answers to passes over trees that begin after it.

    Raises ContextTooLong: the prompt alone does not fit.
    """

    running: RunningModel
    opening: OpenTarget
    processor: LogitsProcessor
    replies: Replies[Reply]
    matcher: GrammarMatcher | None = None  # of its grammar, over its tokens
    forcing: GrammarMatcher | None = None  # of it, over letters alone

    def __post_init__(self) -> None:
        self._text = NOTHING  # the output's letters, if there is a grammar
        self.opening = replace(self.opening, options=self.processor.warping)  # the others may be long
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[Request] = deque()
        self._busy: asyncio.Future[Any] | None = None  # the request under way
        self._run = NO_RUN  # how far it goes, if that is a run
        self._closed = False
        self._left_at = float("-inf")  # seconds of the loop's clock: when the latest reply left
        self._context = self.opening.prompt  # and what was committed after it
        self._before: tuple[int, ...] | None = None  # the context of the pass before
        self._offset = 0  # letters of the output
        self._number = 0  # of the latest pass
        self._answered: tuple[int, ...] = ()  # by it: 0 is the root, i + 1 node i
        self._latest: Nodes | None = None  # of it; None: it has drawn, and has no rows
        self._most = self.running.description.context  # tokens
        self._check_room(len(self.opening.prompt), "the prompt")

    def receive(self, request: Request) -> None:
        """Takes a request: one reply for each, in order; several for a run, which ends when another is asked for, and
        for a prompt to be scored.

        A session that was lost elsewhere goes on here: its first pass has all ids that were committed before. Raises
        ProtocolBroken: it is not due, or too many wait; ContextTooLong: committed ids and tree do not fit.
        """
        if isinstance(request, RunTo) and not self._waiting:  # else it is about what waits
            self._change_run(request)
            return
        if len(self._waiting) == MAX_WAITING_REQUESTS:
            raise ProtocolBroken(f"{MAX_WAITING_REQUESTS} requests of this session wait already")
        self._waiting.append(request)
        self._run = NO_RUN
        self._go_on()

    def left(self, reply: Reply) -> None:
        self._left_at = self._loop.time()

    def close(self) -> None:
        self._closed = True
        self._waiting.clear()  # a reply that is not read ends the session while the next request is about to begin
        if self._busy is not None:
            self._busy.cancel()
        self.running.thread.close_session(self)

    def _go_on(self) -> None:
        while self._busy is None and self._waiting:
            request = self._waiting.popleft()
            if isinstance(request, RunTo):  # what it is about is over
                continue
            if isinstance(request, Pass):
                self._begin(request)
                if self.matcher is not None and self.matcher.slow:
                    self._busy = asyncio.ensure_future(self._after_masks(request))
                else:
                    self._busy = self.running.thread.submit(self._job(request), self.replies.working)
            elif isinstance(request, FetchRow):
                self._busy = self._fetch(request)
            else:
                self._busy = self.running.thread.submit(self._score(request), self.replies.working)
            self._busy.add_done_callback(self._ended)

    async def _after_masks(self, request: Pass) -> MakeReply | None:
        """A pass whose masks may take long: the model thread must not wait for them."""
        masks = self._masks(self._text, request)
        assert masks is not None
        await asyncio.gather(asyncio.wrap_future(masks), return_exceptions=True)  # the job raises its error
        return await self.running.thread.submit(self._job(request, masks), self.replies.working)

    def _job(self, request: Pass, masks: "Future[Bits] | None" = None) -> Job[MakeReply | None]:
        return self._run_job(request, masks) if request.run > 1 else self._pass(request, masks)

    def _ended(self, done: asyncio.Future[Any]) -> None:
        """What was under way has ended; a run, or a prompt that was scored, has sent its replies by itself."""
        self._busy, self._run = None, NO_RUN
        if self._closed:
            if not done.cancelled():
                done.exception()  # nobody else asks for it
            return
        try:
            if (reply := done.result()) is not None:
                self.replies.send(reply())
            self._go_on()
        except Exception as error:  # a job, and reading its result, may raise anything: it ends this session
            nothing = isinstance(error, NothingLeftError)  # no other target could draw either
            self.replies.fail(BadRequest(LEAVES_NONE) if nothing else error)

    def _change_run(self, request: RunTo) -> None:
        """Changes the length of the run under way, if it is that one."""
        run = self._run
        if not run.tokens or request.number != run.number:
            return
        if request.tokens > run.tokens + MAX_RUN:
            what = f"a run of {run.tokens} tokens is to have {request.tokens}"
            raise ProtocolBroken(f"{what}; at most {MAX_RUN} more are possible at once")
        self._check_room(len(self._context) + request.tokens - 1, f"the text with a run of {request.tokens}")
        self._run = request

    def _drew(self, reply: MakeReply, waits: bool) -> None:
        """Tokens of a run."""
        if not self._closed:
            within = self._left_at + BATCHED_SECONDS - self._loop.time() if waits else 0.0
            self.replies.send(reply(), within, joined)

    def _begin(self, request: Pass) -> None:
        """Checks that a pass is the next one, and takes over what it commits."""
        if request.number != self._number + 1:
            raise ProtocolBroken(f"pass {request.number} is out of order; pass {self._number + 1} is next")
        if request.draws and self.opening.noise is None:
            raise ProtocolBroken("this session was opened without a noise key, so its target has no draws of its own")
        size = len(self._context) + len(request.committed) + max(len(request.tree), request.run - 1)
        if size > self._most:
            what = f"a tree of {len(request.tree)}" if request.run == 1 else f"a run of {request.run}"
            self._check_room(size, f"the text with {what}")
        self._number = request.number
        self._before = self._context
        self._context += request.committed
        written = self.running.tokenization.letters_of(request.committed)
        self._offset += len(written)
        if self.matcher is not None:
            self._text = Letters(self._text + written)
        self._answered, self._latest = (), None

    def _check_room(self, size: int, what: str) -> None:
        if size > self._most:
            raise ContextTooLong(f"{what} has {size} tokens, and the context holds {self._most}")

    def _masks(self, text: Letters, request: Pass) -> "Future[Bits] | None":
        """Of the nodes that a pass answers after this output: made beside its forward, in another thread."""
        if self.matcher is None:
            return None
        paths = list(map(self.running.tokenization.letters_of, request.tree.paths()))
        return self.matcher.begin(text, [paths[row] for row in request.answered])

    def _pass(self, request: Pass, masks: "Future[Bits] | None") -> Job[MakeReply]:
        """Runs in the model thread."""
        masks = masks or self._masks(self._text, request)
        answer, asked = yield from self._forward(request, self._context, self._before, masks)
        self._answered = request.answered
        sampling: SamplerRequest[Any]
        if request.draws:
            sampling = self._sampling(asked, request, self._offset)
        else:
            self._latest = replace(asked, logits=asked.logits.clone())  # for rows that are fetched later
            required = self._required(request.answered)
            sampling = RowRequest(asked, self.opening.head, request.listed, self.opening.likely, required)
        nodes = yield sampling
        times = time.perf_counter() - answer.began, answer.queued
        return partial(_done, request, nodes, answer, times, state_bytes(answer.hidden))

    def _forward(
        self, request: Pass, context: tuple[int, ...], before: tuple[int, ...] | None, masks: "Future[Bits] | None"
    ) -> Job[tuple[ForwardResult, Nodes]]:
        """The forward of a pass after a context, which was made of the one `before`."""
        asks = self.opening.hidden
        answer = yield ForwardRequest(self, context, request.tree, request.wanted, hidden=asks, grown_from=before)
        try:
            mask = None if masks is None else masks.result()
        except GrammarError as error:
            raise BadRequest(str(error)) from error
        if not self.processor.looks_back:
            return answer, Nodes(answer.logits, self.processor, mask=mask)
        paths, output = request.tree.paths(), context[len(self.opening.prompt) :]
        history = History(output, [paths[row] for row in request.answered])
        return answer, Nodes(answer.logits, self.processor, history, mask)

    def _sampling(self, nodes: Nodes, request: Pass, offset: int) -> SampleRequest:
        """A draw at each node of a pass at an offset, in letters since the start of the output."""
        assert self.opening.noise is not None
        ends = [offset + end for end in request.tree.ends(self.running.tokenization.vocabulary.letters)]
        offsets = [ends[row] for row in request.answered]
        required = 1 if request.run > 1 else self._required(request.answered)
        return SampleRequest(nodes, self.running.clocks, self.opening.noise, offsets, self.opening.likely, required)

    def _required(self, answered: Sequence[int]) -> int:
        """At how many of these nodes, from the first on, there must be something to draw."""
        return 0 in answered if self.opening.impossible else len(answered)

    def _run_job(self, request: Pass, masks: "Future[Bits] | None") -> Job[None]:
        """Draws each token after those before it; it is committed when the next pass says so."""
        self._run = RunTo(request.number, request.run)
        while self._waiting and isinstance(change := self._waiting[0], RunTo):
            self._waiting.popleft()
            self._change_run(change)
        self._run = NO_RUN if self._waiting else self._run
        return self._draw_run(request, masks)

    def _draw_run(self, request: Pass, masks: "Future[Bits] | None") -> Job[None]:
        """Runs in the model thread."""
        opening, text = self.opening, self._text
        context, before, offset, more, first, ended = self._context, self._before, self._offset, True, 0, 0.0
        stops = {*opening.stop_ids, *(() if opening.ignore_stops else self.running.description.stops)}
        while more:
            # What the grammar leaves no choice about is a draft; which tokens write it is the model's to say.
            guess = self._forced(text, self._run.tokens - first - 1) if masks is None else ()
            asked = replace(request, tree=TokenTree.chain(guess)) if guess else request
            masks = masks or self._masks(text, asked)
            answer, nodes = yield from self._forward(asked, context, before, masks)
            drawn = yield self._sampling(nodes, asked, offset)
            # After the first token nothing is waited for: what passes between steps is what a step costs here.
            began, queued = (ended, 0.0) if first else (answer.began, answer.queued)
            ended = time.perf_counter()
            samples: tuple[Sample, ...] = drawn()
            samples = tuple(takewhile(lambda sample: sample.log_probability != IMPOSSIBLE, samples))
            held = takewhile(lambda pair: pair[0].token == pair[1] not in stops, zip(samples, guess, strict=False))
            samples = samples[: 1 + sum(1 for _ in held)]
            tokens = tuple(sample.token for sample in samples)
            before, context = context, context + tokens
            written = self.running.tokenization.letters_of(tokens)
            offset += len(written)
            more = first + len(tokens) < self._run.tokens and stops.isdisjoint(tokens)
            if self.matcher is not None:
                text, masks = Letters(text + written), None
                more = more and not self.matcher.slow
            hidden = None if more or answer.hidden is None else answer.hidden[len(tokens) - 1 : len(tokens)]
            made = partial(tuple, samples), answer, (ended - began, queued), state_bytes(hidden), more, first
            # The first ones and the last wait for nothing.
            self.running.thread.call_soon(self._loop, self._drew, partial(_done, request, *made), bool(first and more))
            first += len(tokens)

    def _forced(self, text: Letters, most: int) -> tuple[int, ...]:
        """Tokens, so many at most, of what must follow an output by its grammar, if anything must."""
        if self.forcing is None or self.forcing.slow or most < 1:
            return ()
        try:
            letters = self.forcing.fitting(text, NOTHING)
        except GrammarError:
            return ()
        return tuple(self.running.tokenization.encode_continuation(letters, leave_out=True)[:most])

    def _score(self, request: ScorePrompt) -> Job[None]:
        """Scores the prompt piece by piece: no more rows of logits are held than a piece has tokens."""
        prompt, first = self.opening.prompt, request.first
        if not 0 < first < len(prompt):
            what = f"the prompt has {len(prompt)} tokens"
            raise ProtocolBroken(f"{what}; those from 1 on can be scored, not from {first}")
        while first < len(prompt):
            tokens = prompt[first : first + MAX_SCORED]
            answer: ForwardResult = yield ForwardRequest(self, prompt[:first], TokenTree.chain(tokens[:-1]))
            found = yield ScoreRequest(Nodes(answer.logits, self.processor), tokens, request.likely)
            more = first + len(tokens) < len(prompt)
            self.running.thread.call_soon(self._loop, self._scored, first, found, answer.seconds, more)
            first += len(tokens)

    def _scored(self, first: int, found: Callable[[], tuple[Sample, ...]], seconds: float, more: bool) -> None:
        if not self._closed:
            self.replies.send(PromptScored(first, found(), seconds, more))

    def _fetch(self, request: FetchRow) -> asyncio.Future[MakeReply]:
        """From the logits of the latest pass, in a thread; no forward."""
        if request.number != self._number or not self._number:
            raise ProtocolBroken(f"rows of pass {request.number} are gone; the latest pass is {self._number}")
        if request.node not in self._answered:
            raise ProtocolBroken(f"pass {request.number} has answered {list(self._answered)}, not node {request.node}")
        if self._latest is None:
            what = f"pass {request.number} has drawn and keeps no rows"
            raise ProtocolBroken(f"{what}; send a pass without draws for them")
        nodes, opening = _one_of(self._latest, self._answered.index(request.node)), self.opening
        whole = self.running.description.vocabulary_size
        head, listed = (whole, []) if request.listed is None else (opening.head, [request.listed])
        asked = RowRequest(nodes, head, listed, opening.likely, self._required((request.node,)))
        return self._loop.run_in_executor(None, _fetched, request, asked)


def _one_of(nodes: Nodes, place: int) -> Nodes:
    at, history, mask = slice(place, place + 1), nodes.history, nodes.mask
    history = None if history is None else replace(history, paths=history.paths[at])
    return replace(nodes, logits=nodes.logits[at], history=history, mask=None if mask is None else mask[at])


def _fetched(request: FetchRow, asked: RowRequest) -> MakeReply:
    (found,) = fetched(asked.launch([asked]))
    return partial(RowFetched, request.number, request.node, *found())


def _done(
    request: Pass,
    nodes: Callable[[], tuple[Row | Sample, ...]],
    answer: ForwardResult,
    times: tuple[float, float],
    states: Sequence[bytes],
    more: bool = False,
    first: int = 0,
) -> PassDone:
    """What was found at the nodes that are answered, its `seconds` and `queued`, and what the head read for each of
    them, if that was asked for, as it is sent."""
    found, hidden = nodes(), HiddenStates()
    if states:
        places = (first + len(found) - 1,) if request.run > 1 else followed(request, found)
        at = [0] if request.run > 1 else [request.answered.index(place) for place in places]
        hidden = HiddenStates(places, b"".join(states[number] for number in at))
    return PassDone(request.number, found, *times, more, 1, answer.sessions, answer.tokens, first, hidden)


def followed(request: Pass, nodes: Sequence[Row | Sample]) -> tuple[int, ...]:
    """The nodes of a pass whose states are of use: all but those where the samples before go another way."""
    drawn = {place: node.token for place, node in zip(request.answered, nodes, strict=True) if isinstance(node, Sample)}
    kept = {0}
    for place, (token, parent) in enumerate(zip(request.tree.tokens, request.tree.parents, strict=True), 1):
        if parent + 1 not in drawn or (parent + 1 in kept and drawn[parent + 1] == token):
            kept.add(place)
    return tuple(place for place in request.answered if place in kept)


async def target_server(
    model: ModelOptions,
    where: Listening,
    beside: MakeBeside = lambda _, __: None,
    *,
    run: Callable[[ModelOptions, Side, MakeBeside], RunningModel] = run_ranks,
) -> TargetServer:
    """Loads the model; the server does not listen yet.

    Raises ValueError: the model cannot be run with these options.
    """
    running = await asyncio.to_thread(run, model, Side.TARGET, beside)
    if own := running.description.defaults.given:
        text = "the model's own settings are the defaults of requests, %s; if not intended: --generation-config vllm"
        log.warning(text, own)
    return Server(TARGET, TargetService(running), where, model.marks, running.statistics)

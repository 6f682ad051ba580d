"""The target service: sessions on one model, which answer passes over trees after the committed ids, and its server."""

import asyncio
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TextIO

from crossdraft.engine.distributions import History, Logits, Nodes, distribution, row_table
from crossdraft.engine.model_thread import ForwardResult, Job, ModelThreadClosedError
from crossdraft.engine.requests import ForwardRequest
from crossdraft.engine.sampler import RowRequest, SampleRequest, SamplerRequest, TableSlice
from crossdraft.engine.served_model import ModelOptions, RunningModel, run_model
from crossdraft.rpc.errors import ContextTooLong, ProtocolBroken
from crossdraft.rpc.handlers import TARGET
from crossdraft.rpc.server import Listening, Server, serve
from crossdraft.text.letters import Side
from crossdraft.types.messages import (
    MOST_RUN,
    Description,
    FetchRow,
    OpenTarget,
    Pass,
    PassDone,
    RowFetched,
    RunTo,
    Sample,
)
from crossdraft.types.rows import Ids, Row

Request = Pass | FetchRow | RunTo
Reply = PassDone | RowFetched
TargetServer = Server[OpenTarget, Request, Reply]
# After a reply of a run, tokens wait so long for each other: a message costs more than a token.
BATCHED_SECONDS = 0.008


@dataclass(frozen=True)
class ServeTarget:
    """A target service: which model, and where."""

    model: ModelOptions
    listening: Listening = field(default_factory=Listening)


@dataclass(frozen=True, eq=False)
class TargetService:
    """Sessions on one running model."""

    running: RunningModel

    @property
    def description(self) -> Description:
        """What it says of its model."""
        return self.running.description

    async def open(self, request: OpenTarget) -> "TargetSession":
        """A new session; raises ContextTooLong."""
        return TargetSession(self.running, request)

    async def close(self) -> None:
        """Ends the model's thread."""
        await asyncio.to_thread(self.running.close)


class Run:
    """A run: tokens that a target draws one after another in the model thread, and what was not sent of them yet.

    A reply takes along all that was drawn while the one before was being sent, and leaves no sooner than
    BATCHED_SECONDS after it; the first and the last wait for nothing. So a model of some 10 ms a token or more sends
    each as it is drawn. Make it in the event loop that sends the replies.

    Args:
        tokens: how many are wanted at most; this may change.
    """

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.over = False  # no token is wanted after the one that is being drawn
        self.loop = asyncio.get_running_loop()
        self._drawn: list[PassDone] = []
        self._news = asyncio.Event()  # a token was drawn, or drawing has ended
        self._due = asyncio.Event()  # the next reply waits for no further token
        self._sent_at = float("-inf")  # seconds of the loop's clock: when the latest reply left

    def end(self, cause: object = None) -> None:
        """The model thread is to stop after the token that it is drawing, whatever the cause."""
        self.over = True

    def drew(self, done: PassDone) -> None:
        """The loop calls it with each token: one sample; the last one says that no more will come."""
        self._drawn.append(done)
        self._news.set()
        if not done.more:
            self._due.set()

    async def replies(self, drawing: Coroutine[Any, Any, None]) -> AsyncGenerator[PassDone, None]:
        """The replies, while `drawing` runs; raises what it raises. Leaving early cancels it."""
        task = asyncio.create_task(drawing)
        task.add_done_callback(self._ended)
        try:
            more = True
            while more:
                while not (self._drawn or task.done()):
                    self._news.clear()
                    await self._news.wait()
                if not self._drawn:
                    await task  # it failed
                    return
                await self._wait_for_more()
                drawn, self._drawn = self._drawn, []
                more = drawn[-1].more
                self._sent_at = self.loop.time()
                yield merged(drawn)
            await task
        finally:
            task.cancel()

    async def _wait_for_more(self) -> None:
        early = self._sent_at + BATCHED_SECONDS - self.loop.time()
        if early > 0 and not self._due.is_set():
            timer = self.loop.call_later(early, self._due.set)
            await self._due.wait()
            timer.cancel()
            if self._drawn[-1].more:
                self._due.clear()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._news.set()
        self._due.set()


def merged(replies: Sequence[PassDone]) -> PassDone:
    """One reply in place of several of a run that follow each other."""
    if len(replies) == 1:
        return replies[0]
    return replace(
        replies[-1],
        nodes=tuple(node for done in replies for node in done.nodes),
        seconds=sum(done.seconds for done in replies),
        queued=sum(done.queued for done in replies),
        forwards=sum(done.forwards for done in replies),
        first=replies[0].first,
    )


class TargetSession:
    """One output of the target: what is committed, and the answers to passes over trees that begin after it.

    Raises:
        ContextTooLong: the prompt alone does not fit.
    """

    def __init__(self, running: RunningModel, opening: OpenTarget) -> None:
        self._running = running
        self._opening = opening
        self._output: tuple[int, ...] = ()  # committed after the prompt
        self._offset = 0  # letters of the output
        self._number = 0  # of the latest pass
        self._answered: tuple[int, ...] = ()  # by it: 0 is the root, i + 1 node i
        self._lengths = running.lengths
        self._check_room(len(opening.prompt), "the prompt")

    async def converse(self, requests: AsyncIterator[Request]) -> AsyncGenerator[Reply, None]:
        """One reply for each request, in order; several for a run, which ends when another pass or a row is asked for.

        Raises as `answer` does.
        """
        request = await anext(requests, None)
        while request is not None:
            if isinstance(request, Pass) and request.run > 1:
                self._begin(request)
                run = Run(request.run)
                following = asyncio.ensure_future(self._following(requests, run))
                following.add_done_callback(run.end)
                try:
                    async with aclosing(run.replies(self._running.thread.run(self._run(request, run)))) as replies:
                        async for reply in replies:
                            yield reply
                    request = await following
                finally:
                    following.cancel()
            else:
                if not isinstance(request, RunTo):  # else that run has ended meanwhile
                    yield await self.answer(request)
                request = await anext(requests, None)

    async def answer(self, request: Pass | FetchRow) -> Reply:
        """One pass, or more of the row of a node that the latest one has answered.

        A session that was lost elsewhere goes on here: its first pass has all ids that were committed before.

        Raises:
            ProtocolBroken: the pass is not the next one, wants nodes that it does not have, or draws without a key; or
                the latest pass has not answered this node.
            ContextTooLong: committed ids and tree do not fit into the context; commit less, or ask for a smaller tree.
        """
        if isinstance(request, FetchRow):
            return await self._fetch(request)
        self._begin(request)
        return _done(request, *await self._running.thread.run(self._pass(request)))

    async def close(self) -> None:
        """Frees its KV slots."""
        with suppress(ModelThreadClosedError):  # the cache is gone with the thread
            await self._running.thread.close_session(self)

    async def _following(self, requests: AsyncIterator[Request], run: Run) -> Pass | FetchRow | None:
        """What is asked after a run; until then its length may be changed. Raises as `answer` does."""
        async for request in requests:
            if not isinstance(request, RunTo):
                return request
            if request.number == self._number:
                if request.tokens > run.tokens + MOST_RUN:
                    raise ProtocolBroken(
                        f"a run of {run.tokens} tokens is to have {request.tokens}; at most {MOST_RUN} more are "
                        "possible at once"
                    )
                size = len(self._opening.prompt) + len(self._output)
                self._check_room(size + request.tokens - 1, f"the text with a run of {request.tokens}")
                run.tokens = request.tokens
        return None

    def _begin(self, request: Pass) -> None:
        """Checks that a pass is the next one, and takes over what it commits."""
        if request.number != self._number + 1:
            raise ProtocolBroken(f"pass {request.number} is out of order; pass {self._number + 1} is next")
        if list(request.answered) != sorted({row for row in request.answered if 0 <= row <= len(request.tree)}):
            raise ProtocolBroken(f"wanted must ascend within 0 to {len(request.tree)}, got {list(request.answered)}")
        if request.draws and self._opening.noise is None:
            raise ProtocolBroken("this session was opened without a noise key, so its target has no draws of its own")
        size = len(self._opening.prompt) + len(self._output) + len(request.committed)
        what = f"a tree of {len(request.tree)}" if request.run == 1 else f"a run of {request.run}"
        self._check_room(size + max(len(request.tree), request.run - 1), f"the text with {what}")
        self._number = request.number
        self._output += request.committed
        self._offset += self._letters(request.committed)
        self._answered = ()

    def _check_room(self, size: int, what: str) -> None:
        context = self._running.description.context
        if size > context:
            raise ContextTooLong(f"{what} has {size} tokens, and the context holds {context}")

    def _letters(self, ids: tuple[int, ...]) -> int:
        return sum(map(self._lengths.__getitem__, ids))

    def _pass(self, request: Pass) -> Job[tuple[TableSlice[Row | Sample], ForwardResult]]:
        """Runs in the model thread."""
        context = (*self._opening.prompt, *self._output)
        answer: ForwardResult = yield ForwardRequest(self, context, request.tree, request.wanted)
        asked = self._nodes(answer.logits, request)
        self._answered, self._latest = request.answered, replace(asked, logits=asked.logits.clone())
        sampling: SamplerRequest[Any]
        if request.draws:
            ends = [self._offset]  # of the root's path, and of each node's: letters since the start of the output
            for token, parent in zip(request.tree.tokens, request.tree.parents, strict=True):
                ends.append(ends[parent + 1] + self._lengths[token])
            sampling = self._sampling(asked, ends if request.wanted is None else [ends[row] for row in request.wanted])
        else:
            sampling = RowRequest(asked, self._opening.head, request.listed)
        return (yield sampling), answer

    def _nodes(self, logits: Logits, request: Pass) -> Nodes:
        history = None
        if self._opening.options.penalises:
            paths = tuple(request.tree.paths())
            history = History(self._opening.prompt, self._output, [paths[row] for row in request.answered])
        return Nodes(logits, self._opening.options, history)

    def _sampling(self, nodes: Nodes, offsets: Sequence[int]) -> SampleRequest:
        assert self._opening.noise is not None
        return SampleRequest(nodes, self._running.clocks, self._opening.noise, offsets, self._opening.likely)

    def _run(self, request: Pass, run: Run) -> Job[None]:
        """Runs in the model thread: each token is drawn after those before it, and is committed when it is sent."""
        opening = self._opening
        context, offset, more, first = (*opening.prompt, *self._output), self._offset, True, 0
        stops = () if opening.ignore_stops else self._running.description.stops
        while more:
            answer: ForwardResult = yield ForwardRequest(self, context)
            history = None
            if opening.options.penalises:
                history = History(opening.prompt, context[len(opening.prompt) :], ((),))
            found = yield self._sampling(Nodes(answer.logits, opening.options, history), [offset])
            token = int(found.table.tokens[found.begin])
            context = (*context, token)
            offset += self._lengths[token]
            more = first + 1 < run.tokens and token not in stops and not run.over
            tell = partial(self._tell, run, request, found, answer, more, first)
            self._running.thread.call_soon(run.loop, tell)
            first += 1

    @staticmethod
    def _tell(run: Run, *drawn: Any) -> None:
        """The loop makes the reply: the model thread has other things to do."""
        run.drew(_done(*drawn))

    async def _fetch(self, request: FetchRow) -> RowFetched:
        """From the logits of the latest pass; no forward."""
        if request.number != self._number or not self._number:
            raise ProtocolBroken(f"rows of pass {request.number} are gone; the latest pass is {self._number}")
        if request.node not in self._answered:
            raise ProtocolBroken(f"pass {request.number} has answered {list(self._answered)}, not node {request.node}")
        place = self._answered.index(request.node)
        whole, head = self._running.description.vocabulary_size, self._opening.head
        asked = (whole, ()) if request.listed is None else (head, (request.listed,))
        row = await asyncio.to_thread(_row, self._latest, place, *asked)
        return RowFetched(request.number, request.node, row)


def _done(
    request: Pass, found: TableSlice[Row | Sample], answer: ForwardResult, more: bool = False, first: int = 0
) -> PassDone:
    """What was found, as it is sent."""
    times = answer.seconds, answer.queued
    return PassDone(request.number, found.nodes(), *times, more, 1, answer.sessions, answer.tokens, first)


def _row(nodes: Nodes, place: int, head: int, listed: Sequence[Ids]) -> Row:
    """The row of one of them."""
    history = nodes.history
    if history is not None:
        history = replace(history, paths=history.paths[place : place + 1])
    (row,) = row_table(distribution(nodes.logits[place : place + 1], nodes.options, history), head, listed).nodes()
    return row


async def target_server(options: ServeTarget) -> TargetServer:
    """Loads the model; the server does not listen yet.

    Raises:
        ValueError: the model cannot be run with these options.
    """
    running = await asyncio.to_thread(run_model, options.model, Side.TARGET)
    return Server(TARGET, TargetService(running), options.listening, options.model.emulation.marks, running.statistics)


async def serve_target(options: ServeTarget, output: TextIO = sys.stdout) -> None:
    """Serves a target until SIGTERM or SIGINT; prints one line of JSON on `output` once it listens.

    Raises:
        ValueError: the model cannot be run with these options.
        CannotListen: the address cannot be had.
    """
    await serve(await target_server(options), output)

"""The drafter service: sessions on one model, and its server."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from crossdraft.drafter.context import Context, NoRoomError
from crossdraft.drafter.conversation import Conversation, DraftProgress, Reply, Request, Send
from crossdraft.drafter.drafting import NO_BRANCHES, BranchShape, Drafting, FinishedBranches, SessionState
from crossdraft.drafter.sampling import DrawSource, OwnTokens, TargetTokens
from crossdraft.drafter.scoring import Scoring
from crossdraft.drafter.tree_drafting import TreeDrafting, TreeShape
from crossdraft.engine.model_thread import Job
from crossdraft.engine.served_model import ModelOptions, RunningModel, run_model
from crossdraft.rpc.errors import ProtocolBroken
from crossdraft.rpc.event_loop import SMALL, Beside
from crossdraft.rpc.frames import DRAFTER
from crossdraft.rpc.handlers import Replies
from crossdraft.rpc.server import Listening, Server
from crossdraft.text.affinity import Affinity, AffinityMismatch, load_affinity
from crossdraft.text.letters import NOTHING, Side
from crossdraft.types.messages import Description, Draft, Drafted, HiddenStates, OpenDrafter, Score, Scored
from crossdraft.types.rows import Whose
from crossdraft.verification.noise import KeyedNoise

MAKE_AFFINITY = "make one with `crossdraft affinity --target TARGET --drafter DRAFTER CORPUS -o FILE`"
SERVE_AFFINITY = "make one with `crossdraft affinity` and serve it with --affinity"
PROMPTS = 2  # that are tokenized at once
DrafterServer = Server[OpenDrafter, Request, Reply]


@dataclass(frozen=True, eq=False)
class DrafterService:
    """Sessions on one running model."""

    running: RunningModel
    affinity: Affinity | None = None  # for `rdk`: to the tokens of one target
    _beside: Beside = field(default_factory=partial(Beside, "prompts", PROMPTS))

    @cached_property
    def description(self) -> Description:
        return replace(self.running.description, affinity="" if self.affinity is None else self.affinity.target)

    @cached_property
    def _target_noise(self) -> KeyedNoise:
        """The noise of the target that the affinity matrix is for."""
        assert self.affinity is not None
        return KeyedNoise.of(self.affinity)

    def source(self, opening: OpenDrafter) -> DrawSource:
        """What a session's draft tokens are drawn from."""
        if not opening.redistribute:
            return OwnTokens(self.running, opening)
        assert self.affinity is not None  # `open` has checked it
        return TargetTokens(self.running, opening, self.affinity, self._target_noise)

    async def open(self, request: OpenDrafter, replies: Replies[Reply]) -> Conversation:
        """A new session. Much of a prompt or of ids is prepared in a thread, as other sessions must not wait for it.

        Raises ProtocolBroken: it is to draw tokens of a target for which this drafter has no affinity matrix.
        """
        served = self.description.affinity
        if request.redistribute and not served:
            raise ProtocolBroken(f"this drafter has no affinity matrix: {SERVE_AFFINITY}")
        if request.redistribute not in ("", served):
            what = "this drafter's affinity matrix is for a target with another tokenizer"
            raise ProtocolBroken(f"{what}: {SERVE_AFFINITY}")
        size = len(request.prompt) + (0 if request.allowed is None else len(request.allowed))
        size += 0 if request.options.grammar is None else SMALL + len(request.options.grammar.text)
        return Conversation(await self._beside.run(size, DrafterSession, self, request, replies.working), replies)

    async def close(self) -> None:
        await asyncio.to_thread(self.running.close)


class DrafterSession:
    """One output that a drafter guesses ahead of.

    The text and what is drafted after it belong to the jobs in the model thread. A job that was dropped is never
    stepped again once a later one has begun, so that they need no lock.
    """

    def __init__(self, service: DrafterService, opening: OpenDrafter, working: Callable[[], object]) -> None:
        running = service.running
        opening = replace(opening, options=opening.options.of_drafter)  # the others may be long
        self._service = service
        self._thread = running.thread
        self._working = working
        self._opening = opening
        self._state = SessionState(
            context=Context(running.tokenization, opening.prompt, running.description.context, opening.templated),
            source=service.source(opening),
            vocabulary=running.tokenization.vocabulary,
            rows=opening.row_width > 0,
            branches=FinishedBranches(),
        )
        self._pending: deque[DraftProgress] = deque()  # whose text is not the context's yet
        self._latest: tuple[DraftProgress, Drafting | TreeDrafting, Scoring] | None = None

    def close(self) -> None:
        self._thread.close_session(self._state)

    def begin(self, epoch: DraftProgress) -> None:
        self._pending.append(epoch)

    def draft(self, epoch: DraftProgress, send: Send) -> asyncio.Future[None]:
        """As in `conversation.Drafter`.

        An end of sequence is a draft token like any other: whether drafting goes on must not depend on what was drawn.
        """
        later = partial(self._thread.call_soon, asyncio.get_running_loop(), send)
        return self._thread.submit(self._job(epoch, time.perf_counter(), later), self._working)

    async def score(self, epoch: DraftProgress, request: Score) -> Scored:
        if self._state.source.whose is Whose.TARGET:
            raise ProtocolBroken("drafts of the target's tokens have no scores: open a session without redistribute")
        if self._service.running.text_columns is not None:  # texts of other sessions would change them
            what = "a head that follows texts (--vocab-follow) has no scores"
            raise ProtocolBroken(f"{what}: use another method than slrs")
        if self._latest is None or self._latest[0] is not epoch:
            raise ProtocolBroken(f"epoch {epoch.number} has no draft to be scored: the drafter stood aside")
        scoring = self._latest[2]
        return Scored(request.epoch, *await scoring.probabilities(request.strings, request.tokens))

    def _job(self, epoch: DraftProgress, asked: float, send: Send) -> Job[None]:
        """Runs in the model thread; it was asked for at this time."""
        # Each epoch's text is a change of the text of the one before, also where that one was over before its job came.
        while self._pending and self._pending[0].number <= epoch.number:
            begun = self._pending.popleft()
            self._latest = None
            try:
                self._latest = begun, *self._begin(begun)
            except NoRoomError as reason:
                begun.aside = True
                send(Drafted(begun.number, (), 0.0, str(reason)))
        if self._latest is not None and self._latest[0] is epoch:
            yield from self._latest[1].run(send, asked)

    def _begin(self, epoch: DraftProgress) -> tuple[Drafting | TreeDrafting, Scoring]:
        """Brings the text to where a new epoch begins. Raises NoRoomError and ProtocolBroken."""
        request, state, shape = epoch.request, self._state, self._shape(epoch.request)
        tree = self._tree(epoch.request)
        adopted = state.branches.adopt(request, state.context)
        if state.source.obstacle:
            raise NoRoomError(state.source.obstacle)
        if adopted is None:
            state.context.rewind(request.offset, request.letters)
        else:  # its tokens as they were drafted, not as the tokenizer would write them
            state.context.rewind(adopted.offset, NOTHING)
            state.context.append(adopted.key)
        state.context.fit(request.count + shape.room if tree is None else 1 + tree.room)
        service = self._service
        state.source.begin(epoch.number)
        context = state.context
        if (columns := service.running.text_columns) is not None:
            columns.follow(context.ids)
        self._give(request.hidden)
        text = context.letters(0, context.offset) if state.source.masking else NOTHING
        scoring = Scoring(service.running, state.source, state, context.ids, text)
        if tree is not None:
            return TreeDrafting(state, epoch, tree), scoring
        drafting = Drafting(state, epoch, shape, scoring)
        if adopted is not None:
            drafting.adopt(adopted)
        return drafting, scoring

    def _give(self, hidden: HiddenStates) -> None:
        """The target's states go to an engine that reads them; those within a token of this text are of no use."""
        size, context = self._service.description.hidden_size, self._state.context
        if not (size and hidden.places):
            return
        if len(hidden.states) != 2 * size * len(hidden.places):
            found = len(hidden.states) // (2 * len(hidden.places))
            raise ProtocolBroken(f"the hidden states have {found} numbers each, and this drafter reads such of {size}")
        states = {context.tokens_before(offset): state for offset, state in hidden.by_place().items()}
        states.pop(0, None)
        self._thread.engine.give(self._state, context.ids, states)

    def _shape(self, request: Draft) -> BranchShape:
        """No branches where each draw is audited, where they would leave too little text, nor of the target's tokens,
        whose text the drafter re-tokenizes."""
        foreign = self._state.source.whose is Whose.TARGET
        if not request.branch_depth or self._opening.audited or foreign:
            return NO_BRANCHES
        asked = BranchShape(request.branch_depth, request.branch_width)
        return asked if asked.fits(self._state.context.capacity) else NO_BRANCHES

    def _tree(self, request: Draft) -> TreeShape | None:
        """A chain where draft tokens carry rows or belong to a branch, where each draw is audited, or room is short."""
        if request.tree_nodes <= request.count:
            return None
        tree, opening = TreeShape(request.tree_nodes, request.count, request.least_likely), self._opening
        chain = request.adopt or opening.audited or self._state.rows or opening.redistribute
        small = 4 * tree.room > 3 * self._state.context.capacity
        whole = (request.first or request.chunk) >= request.count  # a tree is one reply
        return tree if whole and not (chain or small) else None


async def drafter_server(model: ModelOptions, where: Listening) -> DrafterServer:
    """Loads the model; the server does not listen yet.

    Raises ValueError: the model cannot be run with these options, or the affinity matrix is not one for it.
    """
    return server_of(await asyncio.to_thread(load_service, model), model, where)


def server_of(service: DrafterService, model: ModelOptions, where: Listening) -> DrafterServer:
    return Server(DRAFTER, service, where, model.marks, service.running.statistics)


def load_service(model: ModelOptions) -> DrafterService:
    """Raises ValueError as `drafter_server`."""
    try:
        affinity = None if model.affinity is None else load_affinity(model.affinity)
    except OSError as error:
        raise AffinityMismatch(f"{model.affinity} cannot be read: {error.strerror}; {MAKE_AFFINITY}") from error
    running = run_model(model, Side.DRAFTER)
    if affinity is not None:
        try:
            affinity.check_drafter(running.description.tokenizer_json, running.description.vocabulary_size)
        except AffinityMismatch as error:
            running.close()
            raise AffinityMismatch(f"{model.affinity}: {error}") from error
    return DrafterService(running, affinity)

"""What a streamed epoch brought, and models that stand still until they are told to go on."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from crossdraft.drafter.service import DrafterService
from crossdraft.engine.engine import Engine
from crossdraft.engine.model_thread import ModelThread
from crossdraft.engine.requests import ForwardRequest
from crossdraft.engine.served_model import RunningModel
from crossdraft.rpc.frames import DRAFTER
from crossdraft.rpc.server import Server
from crossdraft.text.letters import NOTHING, Letters
from crossdraft.types.messages import Branch, Draft, Drafted, OpenDrafter
from crossdraft.types.rows import DraftToken, Row
from tests.engine.gathering import standing
from tests.rpc.sessions import DrafterClient, ServiceSession
from tests.services.conftest import AT_ONCE, direct

LIMIT_SECONDS = 120  # seconds


@dataclass
class Epoch:
    """The replies of one epoch so far."""

    number: int
    replies: list[Drafted] = field(default_factory=list)
    first: int = 0  # place of its first draft token

    @property
    def draft_tokens(self) -> list[DraftToken]:
        return [draft_token for reply in self.replies for draft_token in reply.draft_tokens]

    @property
    def tokens(self) -> list[int]:
        return [draft_token.token for draft_token in self.draft_tokens]

    @property
    def branches(self) -> list[Branch]:
        return [branch for reply in self.replies for branch in reply.branches]

    async def hear(self, session: ServiceSession) -> Drafted:
        """The next reply, which must be of this epoch and go on where the one before ended."""
        async with asyncio.timeout(LIMIT_SECONDS):
            reply = await session.receive()
            while not self.replies and isinstance(reply, Drafted) and reply.epoch < self.number:
                reply = await session.receive()  # was on its way before this epoch was asked for
        assert reply.epoch == self.number
        assert reply.first == self.first + len(self.draft_tokens)
        self.replies.append(reply)
        return reply

    async def reach(self, session: ServiceSession, count: int) -> "Epoch":
        """Hears so many draft tokens, counted from the epoch's beginning, and whatever branches come with them."""
        while self.first + len(self.draft_tokens) < count:
            await self.hear(session)
        assert self.first + len(self.draft_tokens) == count
        return self

    async def complete(self, session: ServiceSession, count: int, branches: int = 0) -> "Epoch":
        """Hears so many draft tokens and branches, counted from the epoch's beginning."""
        while self.first + len(self.draft_tokens) < count or len(self.branches) < branches:
            await self.hear(session)
        assert (self.first + len(self.draft_tokens), len(self.branches)) == (count, branches)
        return self


async def drafted(client: DrafterClient, opening: OpenDrafter, text: Letters = NOTHING, count: int = 4) -> Drafted:
    """The first draft of a session, after this output."""
    async with client.session(opening) as session:
        return await session.draft(Draft(1, 0, text, count))


async def first_row(client: DrafterClient, opening: OpenDrafter, text: Letters = NOTHING) -> Row:
    """Of the first draft token after this output."""
    (draft_token,) = (await drafted(client, opening, text, 1)).draft_tokens
    assert draft_token.row is not None
    return draft_token.row


def masked_to_its_ids(cut: Row, full: Row) -> None:
    """The row has the shares that its ids have in the full one."""
    expected = full.probabilities_of(cut.ids) / full.probabilities_of(cut.ids).sum()
    np.testing.assert_allclose(cut.probabilities, expected, atol=1e-5)


async def together(model: RunningModel, openings: Sequence[OpenDrafter], *drafts: Draft) -> list[Drafted]:
    """The replies to drafts that are asked for at once, one of each session; the model waits until all are there."""
    sessions = [await direct(DrafterService(model), opening) for opening in openings]
    for session in sessions:
        await session.answer(Draft(1, 0, NOTHING, 1))  # the prompt is computed
    async with standing(model.thread):
        for session, draft in zip(sessions, drafts, strict=True):
            session.ask(draft)
    replies = [await session.receive() for session in sessions]
    for session in sessions:
        session.close()
    return replies


class Gate:
    """Steps that can be made to stand still before they begin."""

    def __init__(self, engine: Engine) -> None:
        self.thread = ModelThread(engine, self)
        self._stepping = engine.step
        self._closed = threading.Event()
        self._entered = threading.Semaphore(0)
        self._steps = threading.Semaphore(0)
        self.works: list[ForwardRequest] = []

    def __call__(self, shares: Sequence[ForwardRequest]) -> list[torch.Tensor | None]:
        if self._closed.is_set():
            self._entered.release()
            assert self._steps.acquire(timeout=LIMIT_SECONDS)
        self.works += shares
        return self._stepping(shares)

    def close(self) -> None:
        """Each step from now on stands still when it begins."""
        self._closed.set()

    async def entered(self) -> None:
        assert await asyncio.to_thread(self._entered.acquire, timeout=LIMIT_SECONDS)

    async def job_arrived(self, client: DrafterClient) -> None:
        """Waits until a job waits for the step that stands still."""
        async with asyncio.timeout(LIMIT_SECONDS):
            while self.thread._arrivals.empty():
                await client.describe()

    def step(self, count: int = 1) -> None:
        self._steps.release(count)

    def open(self, standing: int = 1000) -> None:
        """All steps go on from now on; so many stand still now, at most."""
        self._closed.clear()
        self._steps.release(standing)


@asynccontextmanager
async def gated(model: RunningModel) -> AsyncIterator[tuple[DrafterClient, Gate]]:
    gate = Gate(model.thread.engine)
    held = replace(model, thread=gate.thread)
    try:
        async with Server(DRAFTER, DrafterService(held), AT_ONCE) as server, DrafterClient(server.address) as client:
            try:
                yield client, gate
            finally:
                gate.open()
    finally:
        await asyncio.to_thread(held.close)

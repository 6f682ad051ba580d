"""A client that asks and never reads: little is drafted for it, and nothing is lost once it reads."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field

import numpy as np

from crossdraft.drafter.conversation import MOST_UNREAD, UNREAD_SCORES, Conversation, Epoch, Request, Send
from crossdraft.text.letters import Letters
from crossdraft.types.messages import MOST_DRAFT_TOKENS, Advance, Draft, Drafted, Score, Scored
from crossdraft.types.rows import DraftToken

NOTHING = Letters("")
ADVANCES = 50
WANTED = (1 + ADVANCES) * MOST_DRAFT_TOKENS


@dataclass
class Eager:
    """Has all that is wanted at once."""

    made: int = 0
    scored: int = 0
    began: list[int] = field(default_factory=list)

    def begin(self, epoch: Epoch) -> None:
        self.began.append(epoch.number)

    async def draft(self, epoch: Epoch, send: Send) -> None:
        while epoch.wanted:
            send(Drafted(epoch.number, (DraftToken(epoch.sent),), 0.0, first=epoch.sent))
            epoch.sent += 1
            self.made += 1

    async def score(self, epoch: Epoch, request: Score) -> Scored:
        self.scored += 1
        return Scored(request.epoch, np.zeros(1), 0.0)


@dataclass
class Asking:
    """Requests one after another, and whether all of them were taken."""

    requests: Iterable[Request]
    all_taken: asyncio.Event = field(default_factory=asyncio.Event)

    async def stream(self) -> AsyncIterator[Request]:
        for request in self.requests:
            yield request
        self.all_taken.set()


async def settled() -> None:
    """Returns when nothing more can happen by itself."""
    for _ in range(2 * WANTED):
        await asyncio.sleep(0)


async def test_a_window_does_not_run_away_from_who_reads() -> None:
    drafter = Eager()
    advances = [Advance(1, MOST_DRAFT_TOKENS * (2 + place)) for place in range(ADVANCES)]
    asking = Asking([Draft(1, 0, NOTHING, MOST_DRAFT_TOKENS, 1), *advances])
    replies = Conversation(drafter).replies(asking.stream())
    first = await anext(replies)
    await asyncio.wait_for(asking.all_taken.wait(), 60)
    await settled()
    assert drafter.made == MOST_UNREAD
    draft_tokens = [draft_token.token async for reply in replies for draft_token in reply.draft_tokens]
    assert [*(draft_token.token for draft_token in first.draft_tokens), *draft_tokens] == list(range(WANTED))
    assert drafter.made == WANTED


async def test_epochs_that_nobody_reads_are_forgotten() -> None:
    drafter = Eager()
    asking = Asking([Draft(number, 0, NOTHING, MOST_DRAFT_TOKENS, 1) for number in range(ADVANCES)])
    conversation = Conversation(drafter)
    replies = conversation.replies(asking.stream())
    await anext(replies)
    await asyncio.wait_for(asking.all_taken.wait(), 60)
    await settled()
    assert drafter.began == list(range(ADVANCES))
    assert conversation._replies.qsize() <= MOST_DRAFT_TOKENS + 1  # with the mark of the end
    left = [reply async for reply in replies]
    assert {reply.epoch for reply in left} <= {ADVANCES - 1}


async def test_scores_are_computed_as_they_are_read() -> None:
    drafter = Eager()
    asking = Asking([Draft(1, 0, NOTHING, 1), *[Score(1, 0, (Letters("a"),), 1)] * 200])
    replies = Conversation(drafter).replies(asking.stream())
    await anext(replies)
    await settled()
    assert 0 < drafter.scored <= UNREAD_SCORES + 1
    assert not asking.all_taken.is_set()
    assert len([reply async for reply in replies if isinstance(reply, Scored)]) == 200

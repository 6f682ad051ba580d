"""Replies of a run: at once where nothing follows, else together, and before a fault."""

import asyncio

import pytest

from crossdraft.rpc.errors import ContextTooLong
from crossdraft.target.service import Run, merged
from crossdraft.types.messages import PassDone, Sample


async def test_tokens_that_follow_a_reply_at_once_are_told_together_and_the_last_one_at_once() -> None:
    run, told = Run(99), asyncio.Event()

    async def drawing() -> None:
        for first in range(4):
            run.drew(PassDone(1, (Sample(first, -1.0),), 0.0, more=first < 3, first=first))
            await asyncio.sleep(0)
            if not first:
                await told.wait()

    found = []
    async for reply in run.replies(drawing()):
        found.append([node.token for node in reply.nodes if isinstance(node, Sample)])
        told.set()
    assert found == [[0], [1, 2, 3]]


async def test_what_was_drawn_before_a_fault_is_told_and_then_the_fault() -> None:
    run = Run(99)

    async def drawing() -> None:
        run.drew(PassDone(1, (Sample(5, -1.0),), 0.0, more=True))
        await asyncio.sleep(0)
        raise ContextTooLong("it is full")

    replies = run.replies(drawing())
    assert (await anext(replies)).more
    with pytest.raises(ContextTooLong):
        await anext(replies)


def test_replies_that_wait_are_told_together() -> None:
    one, other = (
        PassDone(3, (Sample(token, -1.0),), 0.5, 0.25, True, shared=token, fed=token, first=token) for token in (4, 5)
    )
    joined = merged([one, other])
    assert [node.token for node in joined.nodes if isinstance(node, Sample)] == [4, 5]
    assert (joined.seconds, joined.queued, joined.forwards, joined.shared, joined.fed) == (1.0, 0.5, 2, 5, 5)
    assert (joined.first, joined.more) == (4, True)
    assert merged([one]) is one

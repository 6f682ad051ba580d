"""The driver: commands reach services, answers and failures come back as events, nothing stays open."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from crossdraft.pipeline.events import Reason
from crossdraft.pipeline.generation import Generation
from crossdraft.rpc.errors import Closed, Internal, Unreachable
from crossdraft.verification.exchange import (
    Drafted,
    PassDone,
    RowFetched,
    Score,
    Scored,
)
from crossdraft.verification.methods import COUPLED, SLEM, SLRS, TLI, TOKENTIMING, Method
from crossdraft.verification.rows import Proposal, Row, Whose
from tests.pipeline.memory import MemoryDrafter, MemoryTarget
from tests.pipeline.sessions import assignment, toys


def generation(method: Method = SLEM, **changes: object) -> tuple[Generation, MemoryTarget, MemoryDrafter]:
    target, drafter = toys(method)
    memory_target, memory_drafter = MemoryTarget(target), MemoryDrafter(drafter)
    return Generation(assignment(method, **changes), memory_target, memory_drafter), memory_target, memory_drafter


async def texts(running: Generation) -> list[str]:
    async with asyncio.timeout(30):
        return [token.text async for token in running]


async def test_tokens_text_and_figures_agree() -> None:
    running, target, drafter = generation()
    shown = await texts(running)
    assert "".join(shown) == running.text
    assert len(running.ids) == 12
    assert running.reason is Reason.LENGTH
    assert running.statistics is not None
    assert running.statistics.tokens == 12
    assert running.statistics.drafter_lost == ""
    assert running.statistics.passes < 12
    assert (target.closed, drafter.closed) == (1, 1)


async def test_text_that_a_stop_string_takes_back_is_never_shown() -> None:
    free, _, _ = generation(max_tokens=30)
    whole = "".join(await texts(free))
    stop = whole[9:12]
    running, _, _ = generation(max_tokens=30, stop=(stop,))
    shown = "".join(await texts(running))
    assert shown == running.text == whole[: whole.find(stop)]
    assert running.reason is Reason.STOP


@pytest.mark.parametrize("trouble", ["refuses", "silent", "opened_twice"])
async def test_without_its_drafter_it_goes_on(trouble: str) -> None:
    running, _, drafter = generation(draft_seconds=0.0 if trouble == "silent" else 30.0)
    setattr(drafter, trouble, Unreachable("nobody there") if trouble == "refuses" else True)
    assert len(await texts(running)) == 12
    assert running.statistics is not None
    assert running.statistics.drafter_lost
    assert running.statistics.proposals == 0


async def test_a_target_that_refuses_raises_its_error() -> None:
    running, target, drafter = generation()
    target.refuses = Unreachable("nobody there")
    with pytest.raises(Unreachable, match="nobody there"):
        await texts(running)
    assert running.reason is Reason.FAILED
    assert drafter.closed <= 1


async def test_a_target_that_ends_the_session_raises() -> None:
    running, target, drafter = generation()
    target.fails_at = 3
    with pytest.raises(Closed, match="the target ended the session"):
        await texts(running)
    assert (target.closed, drafter.closed) == (1, 1)
    assert len(running.ids) >= 2


async def test_a_target_that_answers_another_pass_raises() -> None:
    running, target, _ = generation()
    target.replies.put_nowait(PassDone(77, (), 0.0))
    with pytest.raises(Internal, match="the target broke the protocol"):
        await texts(running)


@pytest.mark.parametrize("method", [TLI, COUPLED], ids=lambda method: method.name)
async def test_a_whole_row_that_is_not_that_of_its_head_raises(method: Method) -> None:
    running, target, _ = generation(method)
    head, whole = Row(np.array([0]), np.array([1e-12]), 1 - 1e-12), Row.certain(0)
    target.toy.run = lambda sent: PassDone(sent.number, (head,) * (1 + len(sent.tree)), 0.0)  # type: ignore[method-assign]
    target.toy.fetch = lambda number, node: RowFetched(number, node, whole)  # type: ignore[method-assign]
    with pytest.raises(
        Internal, match="the target broke the protocol: the whole row of node 0 is not that of the head"
    ):
        await texts(running)


async def test_a_drafter_that_answers_another_epoch_is_given_up() -> None:
    running, _, drafter = generation()
    drafter.replies.put_nowait(Drafted(77, (), 0.0))
    assert len(await texts(running)) == 12
    assert running.statistics is not None
    assert "broke the protocol" in running.statistics.drafter_lost


async def test_leaving_early_closes_both_sessions() -> None:
    running, target, drafter = generation(max_tokens=50)
    async with running:
        async for _ in running:
            break
        drafter.silent = True
    assert (target.closed, drafter.closed) == (1, 1)


async def test_cancelling_while_it_waits_closes_both_sessions() -> None:
    running, target, drafter = generation()
    drafter.silent = True
    task = asyncio.create_task(texts(running))
    await drafter.asked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await running.aclose()
    assert (target.closed, drafter.closed) == (1, 1)


async def test_no_stop_string_is_ever_shown() -> None:
    """Every stop string that occurs, from the first letter on."""
    free, _, _ = generation(max_tokens=20)
    whole = "".join(await texts(free))
    for begin in range(6):
        for size in (1, 2, 3, 5):
            stop = whole[begin : begin + size]
            running, _, _ = generation(max_tokens=20, stop=(stop,))
            shown = await texts(running)
            assert "".join(shown) == running.text == whole[: whole.find(stop)], stop


@pytest.mark.parametrize("method", [SLRS, TOKENTIMING], ids=lambda method: method.name)
async def test_methods_that_judge_a_whole_draft(method: Method) -> None:
    running, _, _ = generation(method, max_tokens=40)
    assert len("".join(await texts(running))) >= 40
    assert running.statistics is not None
    assert running.statistics.drafter_lost == ""
    assert running.statistics.accepted > 0
    assert (running.statistics.scores > 0) == (method is SLRS)


async def test_a_drafter_that_does_not_score_is_given_up() -> None:
    running, _, drafter = generation(SLRS, draft_seconds=0.01)
    drafter.scoreless = True
    assert len(await texts(running)) == 12
    assert running.statistics is not None
    assert "no answer within 0.01 s" in running.statistics.drafter_lost


async def test_scores_of_another_epoch_cost_the_drafter() -> None:
    running, _, drafter = generation(SLRS)
    original = drafter.toy.score

    def wrong(wanted: Score) -> Scored:
        return replace(original(wanted), epoch=wanted.epoch + 1)

    drafter.toy.score = wrong  # type: ignore[method-assign]
    assert len(await texts(running)) == 12
    assert running.statistics is not None
    assert "broke the protocol" in running.statistics.drafter_lost


BAD_PROPOSALS = [
    ((Proposal(0),), "without the whole row"),
    ((Proposal(2, Row.certain(2)),), "outside the shared tokens"),
    ((Proposal(0, Row.of([0, 99], [0.5, 0.5])),), "has ids beyond"),
    ((Proposal(7, Row.certain(7)),), "its ids are 0 to 2"),
    ((Proposal(0, Row.certain(0), Whose.TARGET),), "'tli' asks for tokens of its own"),
    ((Proposal(0, Row.certain(1)),), "cannot give it"),
    ((Proposal(0, Row.certain(0)),) * 4, "sent 4 proposals, asked for 3"),
]


@pytest.mark.parametrize(
    ("proposals", "fault"), BAD_PROPOSALS, ids=lambda value: value if isinstance(value, str) else ""
)
async def test_proposals_that_cannot_be_verified_cost_the_drafter(proposals: tuple[Proposal, ...], fault: str) -> None:
    target, drafter = toys(TLI)
    memory_drafter = MemoryDrafter(drafter)
    memory_drafter.toy.draft = lambda wanted: Drafted(wanted.epoch, proposals, 0.0)  # type: ignore[method-assign]
    running = Generation(assignment(TLI), MemoryTarget(target), memory_drafter)
    assert len(await texts(running)) == 12
    assert running.statistics is not None
    assert fault in running.statistics.drafter_lost


async def test_after_its_end_it_has_nothing_more() -> None:
    running, target, _ = generation()
    target.refuses = Unreachable("nobody there")
    with pytest.raises(Unreachable):
        await texts(running)
    assert await texts(running) == []


async def test_closed_before_it_began_it_never_begins() -> None:
    running, target, _ = generation()
    await running.aclose()
    assert await texts(running) == []
    assert target.closed == 0

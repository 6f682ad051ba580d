"""Generations over toys: tokens, text and figures, whatever happens to the services."""

import asyncio
from weakref import ref

import numpy as np
import pytest

from crossdraft.client.api import Generation
from crossdraft.rpc.errors import BadRequest, Closed, ServiceError, Unreachable
from crossdraft.rpc.server import without_collections
from crossdraft.session.events import Reason
from crossdraft.speculation.choice import Choice, Controller, Fixed, lock_step
from crossdraft.types.messages import Drafted, Scored
from crossdraft.types.rows import DraftToken, Row, Whose
from crossdraft.verification.methods import SLEM, TLI, Method
from tests.ports import MemoryDrafter, MemoryTarget, assignment, services_of, toys
from tests.verification.toys import row_of

OVERLAPPED = Fixed(Choice(max_draft_tokens=6, min_draft_tokens=2))
CONTROLLERS = pytest.mark.parametrize("controller", [lock_step(3), OVERLAPPED], ids=["lock-step", "overlapped"])


def generation(method: Method = SLEM, **changes: object) -> tuple[Generation, MemoryTarget, MemoryDrafter]:
    target, drafter = toys(method)
    services = MemoryTarget(toy=target), MemoryDrafter(toy=drafter)
    return Generation(assignment(method, **changes), services_of(*services)), *services


async def texts(running: Generation) -> list[str]:
    return [token.text async for token in running]


@CONTROLLERS
async def test_tokens_text_and_figures_agree(controller: Controller) -> None:
    running, target, drafter = generation(controller=controller)
    shown, figures = await texts(running), running.statistics
    assert ("".join(shown), len(running.ids), running.reason) == (running.text, 12, Reason.LENGTH)
    assert (figures.tokens, figures.num_speculative_tokens, figures.drafter_lost) == (12, 3, "")
    assert figures.accepted + figures.corrected + figures.bonus == 12
    assert 0 < figures.passes < 12
    assert 0 < figures.idle_share < 1
    assert figures.target_bytes + figures.drafter_bytes == figures.bytes_sent + figures.bytes_received > 0
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
            assert running.reason is Reason.STOP


@CONTROLLERS
@pytest.mark.parametrize("trouble", ["refuses", "silent", "says what nobody asked for"])
async def test_without_its_drafter_it_goes_on(trouble: str, controller: Controller) -> None:
    running, _, drafter = generation(controller=controller, draft_seconds=0.0 if trouble == "silent" else 30.0)
    if trouble == "refuses":
        drafter.refuses = BadRequest("not here")
    elif trouble == "silent":
        drafter.silent = True
    else:
        drafter.first = (Scored(1, np.zeros(1), 0.0),)
    assert len(await texts(running)) == 12
    assert running.statistics.draft_tokens == 0
    if trouble != "silent" or controller is not OVERLAPPED:
        assert running.statistics.drafter_lost
        assert (running.statistics.drafters_lost >= 1) is (trouble != "refuses")  # nothing was lost by that


async def test_a_target_that_stays_away_raises_its_error_after_a_while() -> None:
    running, target, _ = generation(target_seconds=0.0)
    target.refuses = Unreachable("nobody there")
    with pytest.raises(ServiceError, match=r"nobody there|no target within 0 s"):
        await texts(running)


@CONTROLLERS
@pytest.mark.parametrize("error", [Closed("the target ended the session"), Unreachable("gone")])
async def test_a_target_that_fails_is_opened_again_and_nothing_is_lost(error: ServiceError, controller: Controller):
    undisturbed, _, _ = generation(controller=controller)
    await texts(undisturbed)
    running, target, _ = generation(controller=controller)
    target.error, target.fails_at = error, 3
    assert ("".join(await texts(running)), running.ids) == (running.text, undisturbed.ids)
    assert len(target.opened) == target.closed == 2
    assert running.statistics.targets_lost == 1


async def test_leaving_early_closes_both_sessions_and_before_the_beginning_nothing_begins() -> None:
    running, target, drafter = generation(max_tokens=50)
    async with running:
        async for _ in running:
            break
        drafter.silent = True
    assert (target.closed, drafter.closed) == (1, 1)
    running, target, _ = generation()
    await running.aclose()
    assert await texts(running) == []
    assert target.closed == 0


BAD_DRAFT_TOKENS = [
    ((DraftToken(0),), "without the whole row"),
    ((DraftToken(2, Row.certain(2)),), "outside the shared tokens"),
    ((DraftToken(0, row_of([0, 99], [0.5, 0.5])),), "has ids beyond"),
    ((DraftToken(7, Row.certain(7)),), "its ids are 0 to 2"),
    ((DraftToken(0, Row.certain(0), Whose.TARGET),), "'tli' asks for tokens of its own"),
    ((DraftToken(0, Row.certain(1)),), "cannot give it"),
    ((DraftToken(0, Row.certain(0)),) * 4, "sent 4 draft tokens"),
]


@pytest.mark.parametrize(("draft_tokens", "fault"), BAD_DRAFT_TOKENS, ids=[fault for _, fault in BAD_DRAFT_TOKENS])
async def test_draft_tokens_that_cannot_be_verified_cost_the_drafter(draft_tokens: tuple[DraftToken, ...], fault: str):
    running, _, drafter = generation(TLI)
    drafter.first = (Drafted(1, draft_tokens, 0.0),)
    drafter.silent = True
    assert len(await texts(running)) == 12
    assert fault in running.statistics.drafter_lost


async def test_a_target_that_cannot_do_it_raises_its_error_and_nothing_follows() -> None:
    running, target, drafter = generation()
    target.refuses = BadRequest("not possible")
    with pytest.raises(BadRequest, match="not possible"):
        await texts(running)
    assert running.reason is Reason.FAILED
    assert drafter.closed <= 1
    assert await texts(running) == []
    gone = ref(running)
    with without_collections():
        del running, target, drafter
        await asyncio.sleep(0)
        assert gone() is None

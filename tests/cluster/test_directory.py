"""Who is where."""

import asyncio
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from typing import Any

import pytest

from crossdraft.cluster import directory
from crossdraft.cluster.directory import FarDirectory, announced
from crossdraft.cluster.orchestrators import OrchestratorMetrics
from crossdraft.cluster.status import EXPIRY, SETTLING, Directory, Entry, Role
from crossdraft.rpc.metrics import Exporter
from tests.rpc.clock import now, simulated
from tests.serving.exposed import faults, samples
from tests.serving.ports import free_port
from tests.target.test_metrics import read

TARGET = Entry("t", Role.TARGET, "small", "", "10.0.0.1:7000", "", "10.0.0.1", 1)
DRAFTER = Entry("d", Role.DRAFTER, "small", "byte-level", "10.0.0.2:7000", "", "10.0.0.2", 1)

ORCHESTRATOR = Entry("o", Role.ORCHESTRATOR, "small", "", "", "", "10.0.0.1", 2)


@simulated
async def test_who_announces_itself_hears_of_all_and_who_withdraws_is_gone() -> None:
    directory = Directory(9400)
    for one in (TARGET, DRAFTER):
        await directory.announce(one)
    again = replace(TARGET, address="10.0.0.1:7001", process=2)  # it was started again
    assert await directory.announce(replace(again, sessions=7)) == (9400, (DRAFTER, again))
    for _ in range(2):
        await directory.withdraw(TARGET.id)
        assert await directory.entries() == (DRAFTER,)


@simulated
async def test_who_is_silent_is_forgotten() -> None:
    directory = Directory()
    await directory.announce(TARGET)  # until it has settled
    await directory.announce(DRAFTER)
    await asyncio.sleep(EXPIRY - SETTLING - 0.5)
    assert await directory.entries() == (DRAFTER, TARGET)
    await asyncio.sleep(1.0)
    assert await directory.entries() == (DRAFTER,)


@simulated
async def test_a_new_one_answers_nobody_before_it_has_heard_of_everybody() -> None:
    began = now()
    directory = Directory()
    heard = asyncio.create_task(directory.announce(TARGET))
    await asyncio.sleep(1.0)
    await directory.announce(DRAFTER)
    assert (now(), await heard) == (began + SETTLING, (0, (DRAFTER, TARGET)))
    await directory.entries()
    assert now() == began + SETTLING


def in_this_process(actor: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory of all that is announced."""

    class Near(FarDirectory):
        async def ask(self, method: str, *given: object) -> Any:
            return await getattr(actor, method)(*given)

    monkeypatch.setattr(directory, "FarDirectory", Near)
    monkeypatch.setattr(directory, "ANNOUNCE_INTERVAL", 0.01)


async def test_one_process_of_a_node_answers_prometheus_for_all_and_another_one_when_it_has_ended(monkeypatch):
    host, port = "127.0.0.1", free_port()
    in_this_process(Directory(port), monkeypatch)
    async with AsyncExitStack() as stack:
        for process in (1, 2, 3):  # the third is of another node
            metrics = OrchestratorMetrics("small")
            metrics.services([TARGET] * process)
            exporter = Exporter(metrics.registry)
            stack.push_async_callback(exporter.stop)
            node = host if process < 3 else "127.0.0.2"
            at = exporter.start(node, 0)
            leaving = await stack.enter_async_context(AsyncExitStack())
            entry = replace(ORCHESTRATOR, id=str(process), metrics=at, node=node, process=process)
            await leaving.enter_async_context(announced(entry))
            if process == 1:
                first = leaving

        async def told() -> dict[str, float]:
            """Targets that each process of the node knows."""
            text = await asyncio.to_thread(read, f"{host}:{port}")
            assert faults(text) == []
            found = samples(text, "orchestrator_services")
            assert all(labels["crossdraft_role"] == "orchestrator" for labels, _ in found)
            return {labels["crossdraft_process"]: much for labels, much in found if labels["role"] == "target"}

        while len(await told()) < 2:  # the first has not been told of the second yet
            pass
        assert await told() == {"1": 1, "2": 2}
        await first.aclose()
        left: dict[str, float] = {}
        while left != {"2": 2}:
            with suppress(OSError):  # the port is between two processes
                left = await told()

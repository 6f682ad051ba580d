"""Who is where; Serve's own gRPC with our options, and which orchestrators it chooses."""

import asyncio
import subprocess
import sys
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from ray._private.authentication import authentication_utils
from ray.serve._private import replica
from ray.serve._private.request_router import replica_wrapper
from ray.serve.generated import serve_pb2, serve_pb2_grpc

from crossdraft.cluster import directory, failover, serve_grpc
from crossdraft.cluster.directory import FarDirectory, announced
from crossdraft.cluster.orchestrators import OrchestratorMetrics
from crossdraft.cluster.serve_grpc import AVOID_SECONDS, Elsewhere
from crossdraft.cluster.status import EXPIRY, SETTLING, Directory, Entry, Role
from crossdraft.rpc.metrics import Exporter
from crossdraft.rpc.transport import CLIENT_OPTIONS
from tests.cluster.scripted import nothing
from tests.rpc.clock import now, simulated
from tests.rpc.linked import Link
from tests.serving.exposed import faults, samples
from tests.serving.ports import free_port
from tests.target.test_sessions import read

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


class Silent(serve_pb2_grpc.ASGIServiceServicer):  # type: ignore[misc]  # Ray's classes are not typed
    """A replica that says one thing, and then nothing more."""

    async def HandleRequestStreaming(self, request: Any, context: Any) -> Any:  # noqa: N802 - Serve's name
        yield serve_pb2.ASGIResponse(serialized_message=bytes(5 * 2**20))  # more than gRPC takes by itself
        await nothing()


async def test_a_link_that_is_cut_ends_a_stream_of_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Serve makes its channels, the stream would be silent for longer than a test may take."""
    monkeypatch.setattr(authentication_utils, "is_token_auth_enabled", lambda: False)
    serve_grpc.keep_alive()
    server: Any = replica.create_grpc_server_with_interceptors(asynchronous=True, options=[])
    serve_pb2_grpc.add_ASGIServiceServicer_to_server(Silent(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with Link(f"127.0.0.1:{port}") as link:
        channel: Any = replica_wrapper.init_grpc_channel(link.address, options=[], asynchronous=True)
        call = serve_pb2_grpc.ASGIServiceStub(channel).HandleRequestStreaming(serve_pb2.ASGIRequest())
        assert (await call.read()).serialized_message
        link.cut()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call.read()
        await channel.close()
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    await server.stop(None)


@pytest.mark.parametrize("module", ["fronts", "orchestrators"])
def test_who_calls_and_who_is_called_have_these_options(module: str) -> None:
    """As Serve loads their classes; without them a front waits for half a minute for an orchestrator of a lost host."""
    made = "replica_wrapper.init_grpc_channel, replica.create_grpc_server_with_interceptors"
    script = f"""
import crossdraft.cluster.{module}
from ray.serve._private import replica
from ray.serve._private.request_router import replica_wrapper
print(*(make.func.__name__ for make in ({made})))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["_made", "_made"], done.stderr


def test_of_the_five_seconds_that_a_lost_host_may_cost_one_is_left_for_computing_the_text_again() -> None:
    limits = dict(CLIENT_OPTIONS)
    longest = 1000 + limits["grpc.http2.ping_timeout_ms"] + limits["grpc.min_reconnect_backoff_ms"]
    assert limits["grpc.keepalive_time_ms"] <= 1000  # gRPC sends a ping a second at most
    assert longest / 1000 + failover.PAUSE <= 4.0


async def test_replicas_that_are_avoided_are_chosen_only_where_there_are_no_others(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Elsewhere, "avoided", {})
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(serve_grpc, "time", SimpleNamespace(monotonic=lambda: clock.now))
    names = ["a0", "b0", "c0"]
    replicas: list[Any] = [SimpleNamespace(actor_id=bytearray.fromhex(name)) for name in names]
    router = object.__new__(Elsewhere)

    async def chosen() -> set[str]:
        rounds = [(await router.choose_replicas(replicas))[0] for _ in range(100)]
        assert {len(one) for one in rounds} <= {1, 2}
        return {one.actor_id.hex() for some in rounds for one in some}

    assert await chosen() == {*names}
    Elsewhere.avoid("b0")
    assert await chosen() == {"a0", "c0"}
    Elsewhere.avoid("a0")
    assert await chosen() == {"c0"}
    clock.now += AVOID_SECONDS - 1
    Elsewhere.avoid("c0")
    assert await chosen() == {*names}
    clock.now += 1
    assert await chosen() == {"a0", "b0"}

"""Serve's own gRPC with our options, and which orchestrators it chooses."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from ray._private.authentication import authentication_utils
from ray.serve._private import replica
from ray.serve._private.request_router import replica_wrapper
from ray.serve.generated import serve_pb2, serve_pb2_grpc

from crossdraft.cluster import failover, serve_grpc
from crossdraft.cluster.serve_grpc import AVOID_SECONDS, Elsewhere
from crossdraft.rpc.transport import CLIENT_OPTIONS
from tests.cluster.scripted import nothing
from tests.rpc.proxy import Link


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

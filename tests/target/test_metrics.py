"""What a service answers to Prometheus, on a port of its own."""

import asyncio
import json
import urllib.request

import pytest

from crossdraft.engine.served_model import RunningModel
from crossdraft.rpc.errors import CannotListen
from crossdraft.rpc.frames import TARGET
from crossdraft.rpc.server import Listening, Server
from crossdraft.target.service import TargetService
from crossdraft.types.messages import OpenTarget, Pass, SamplingOptions
from crossdraft.types.trees import TokenTree
from tests.rpc.sessions import TargetClient
from tests.serving.exposed import faults, value

MEASURED = Listening(grace_seconds=0, metrics_port=0)
OPENING = OpenTarget((5, 6), SamplingOptions(), None)


def read(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as reply:
        return str(reply.read().decode())


async def test_a_target_says_what_its_sessions_and_its_model_do(target_model: RunningModel) -> None:
    server = Server(TARGET, TargetService(target_model), MEASURED, statistics=target_model.statistics)
    async with server, TargetClient(server.address) as client:
        ready = json.loads(server.ready_line())
        address, who = ready["metrics"], {"role": "target", "model_name": ready["model"]}
        async with client.session(OPENING) as session:
            await session.run(Pass(1, (), TokenTree((7,), (-1,))))
            text = await asyncio.to_thread(read, address)
            sent = session.traffic.bytes_sent
    assert faults(text) == []
    due = {
        "open_sessions": 1, "sessions_total": 1, "passes_total": 1, "pass_nodes_total": 2, "model_steps_total": 1,
        "model_tokens_total": 3, "batch_size_count": 1, "model_answers_total": 1, "model_evictions_total": 0,
    }  # fmt: skip
    assert {name: value(text, f"service_{name}", who) for name in due} == due
    assert value(text, "service_bytes_total", who | {"direction": "received"}) == sent
    assert value(text, "service_model_seconds_total", who) > 0
    assert 0 < value(text, "service_model_queue_seconds_total", who) < 60
    assert 3 / target_model.statistics().kv_slots <= value(text, "kv_cache_usage_perc", who) <= 1
    with pytest.raises(OSError, match="refused"):
        await asyncio.to_thread(read, address)


async def test_a_port_for_metrics_is_free_checked_and_on_the_services_own_address_only(target_model: RunningModel):
    async with Server(TARGET, TargetService(target_model), MEASURED) as server:
        host, _, port = json.loads(server.ready_line())["metrics"].rpartition(":")
        assert host == "127.0.0.1"
        with pytest.raises(OSError, match="refused"):
            await asyncio.to_thread(read, f"127.0.0.2:{port}")
        taken = Listening(grace_seconds=0, metrics_port=int(port))
        with pytest.raises(CannotListen, match=r"cannot listen on .*--metrics-port"):
            await Server(TARGET, TargetService(target_model), taken).start()
    async with Server(TARGET, TargetService(target_model), Listening(grace_seconds=0)) as server:
        assert "metrics" not in server.ready_line()

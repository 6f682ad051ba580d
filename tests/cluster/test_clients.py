"""What clients have of a cluster, and what it has to bear of them: each gets the right answer, and nothing stays."""

import asyncio
import json
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import aclosing, suppress
from typing import Any

import httpx2 as httpx
import pytest
from openai import AuthenticationError

from crossdraft.client import SamplingOptions, connect
from crossdraft.cluster.orchestrators import ABANDONED
from crossdraft.cluster.status import Role
from crossdraft.serving.grpc_client import Client
from tests.cluster.running import HEAD, KEY, MODEL, OUTPUTS, PROMPT, TARGETS, RunningCluster, eventually
from tests.serving.exposed import faults, samples

GREEDY = SamplingOptions(temperature=0)
TOKENS = 40
ENDLESS = 900  # tokens: several such outputs take longer than any machine stands still
SECONDS = 600.0
CROWD = 50
HEADERS = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}


def asking(cluster: RunningCluster) -> httpx.AsyncClient:
    """Of the HTTP front, with the key."""
    limits = httpx.Limits(max_connections=CROWD)
    return httpx.AsyncClient(base_url=cluster.url, headers=HEADERS, timeout=SECONDS, limits=limits)


@pytest.fixture(scope="module")
def greedy(cluster: RunningCluster) -> str:
    """What the pipeline makes with the cluster's services, in this process."""

    async def made() -> str:
        targets = [one.address for one in cluster.entries(Role.TARGET)]
        drafters = [one.address for one in cluster.entries(Role.DRAFTER)]
        async with connect(targets, drafters) as pipeline:
            return "".join([one.text async for one in pipeline.generate(PROMPT, max_tokens=TOKENS, options=GREEDY)])

    return asyncio.run(made())


async def test_openais_client_has_the_pipelines_text(cluster: RunningCluster, greedy: str) -> None:
    async with cluster.client() as client:
        whole = await client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=TOKENS, temperature=0)
        assert whole.choices[0].text == greedy
        stream = await client.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=TOKENS, temperature=0, stream=True
        )
        chunks = [chunk.choices[0].text async for chunk in stream]
        assert len(chunks) > 1
        assert "".join(chunks) == greedy
        (model,) = (await client.models.list()).data
        assert model.id == MODEL


async def test_a_client_of_grpc_has_the_same_text(cluster: RunningCluster, greedy: str) -> None:
    (front,) = cluster.entries(Role.GRPC)
    async with Client(front.address, key=KEY) as client:
        made = client.generate(PROMPT, max_tokens=TOKENS, options=GREEDY)
        assert "".join([token.text async for token in made]) == greedy


async def test_a_client_that_leaves_ends_what_is_made_for_it(cluster: RunningCluster) -> None:
    await eventually(lambda: cluster.busy() == 0)  # all that others asked for has been counted
    before = await asyncio.to_thread(ended, cluster)
    async with cluster.client() as client:
        asked: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": ENDLESS, "n": 8}
        stream = await client.completions.create(**asked, stream=True, extra_body={"ignore_eos": True})
        async with aclosing(aiter(stream)) as chunks:
            await anext(chunks)
        await stream.close()
        await eventually(lambda: cluster.busy() == 0)
    assert await asyncio.to_thread(ended, cluster) > before


def ended(cluster: RunningCluster) -> float:
    """Outputs that were ended before their time, so far."""
    return cluster.metric(Role.ORCHESTRATOR, "orchestrator_outputs_total", outcome=ABANDONED)


async def test_a_requests_id_is_in_the_reply_and_in_the_logs_of_all_who_worked_for_it(cluster: RunningCluster) -> None:
    async with cluster.client() as client:
        reply = await client.completions.with_raw_response.create(
            model=MODEL,
            prompt=PROMPT,
            max_tokens=5,
            extra_headers={"x-request-id": "marked-1"},
            extra_body={"speculative": {"overlap": "off"}},  # in lock-step the output waits for its drafter
        )
    assert reply.headers.get_list("x-request-id", split_commas=True)[0] == "marked-1"
    for role in (Role.HTTP, Role.ORCHESTRATOR, Role.TARGET, Role.DRAFTER):
        await eventually(lambda role=role: "marked-1" in _requests(cluster, role))


async def test_prometheus_reads_every_process_itself_or_on_one_port_of_its_node(cluster: RunningCluster) -> None:
    async with asking(cluster) as client:
        for one in cluster.entries():
            assert faults((await client.get(f"http://{one.metrics}/metrics")).text) == []
        for node in (HEAD, TARGETS):
            await eventually(lambda node=node: _answers(cluster, node))
        through_serve = (await client.get("/metrics")).text
    assert samples(through_serve, "generation_tokens_total")
    assert sum(count for _, count in samples(through_serve, "output_resume_seconds_count")) >= 0


def _answers(cluster: RunningCluster, node: str) -> bool:
    """Whether the node's own port has metrics; of which processes: `test_directory`."""
    with suppress(httpx.HTTPError):
        return faults(httpx.get(f"http://{node}:{cluster.metrics}/metrics", timeout=SECONDS).text) == []
    return False


def _requests(cluster: RunningCluster, role: Role) -> set[object]:
    """Ids in the logs of a role's processes."""
    return {line.get("request_id") for one in cluster.entries(role) for line in _lines(cluster.log_of(one.process))}


def _lines(log: str) -> Iterator[dict[str, object]]:
    for line in log.splitlines():
        if line.startswith("{") and line.endswith("}"):  # and not one that is being written
            yield json.loads(line)


async def test_a_key_that_is_wrong_or_missing_is_refused_everywhere(cluster: RunningCluster) -> None:
    async with cluster.client() as client:
        with pytest.raises(AuthenticationError, match="key"):
            await client.with_options(api_key="f" * 16).completions.create(model=MODEL, prompt=PROMPT)
    async with asking(cluster) as client:
        for headers, status in (({"authorization": ""}, 401), ({}, 200)):
            assert (await client.get("/v1/models", headers=headers)).status_code == status


async def test_the_proxies_limit_connections_before_they_look_for_a_key(cluster: RunningCluster) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", cluster.http)
    writer.write(b"GET /health HTTP/1.1\r\nhost: cluster\r\nlong: " + b"x" * 100_000)
    assert await reader.readline() == b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    writer.close()


async def test_a_crowd_is_served_or_told_to_come_again(cluster: RunningCluster) -> None:
    async with asking(cluster) as client:
        replies = await asyncio.gather(*(_asked(client, seed) for seed in range(CROWD)))
        statuses = Counter(reply.status_code for reply in replies)
        assert set(statuses) <= {200, 429}, statuses
        assert statuses[200] >= OUTPUTS
        for reply in replies:
            if reply.status_code == 200:
                assert reply.json()["usage"]["completion_tokens"] == 2
            else:
                assert int(reply.headers["retry-after"]) >= 1
        await eventually(lambda: cluster.busy() == 0)
        assert (await _asked(client, 0)).status_code == 200


@pytest.mark.full
async def test_clients_that_do_not_read_are_in_nobodys_way(cluster: RunningCluster) -> None:
    silent = [_silent(cluster) for _ in range(2)]
    try:
        async with asking(cluster) as client:
            assert (await _asked(client, 1)).status_code == 200
        await eventually(lambda: cluster.busy() == 0)
    finally:
        for one in silent:
            one.close()


async def _asked(client: httpx.AsyncClient, seed: int) -> httpx.Response:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 2, "seed": seed, "ignore_eos": True}
    return await client.post("/v1/completions", json=body)


def _silent(cluster: RunningCluster) -> socket.socket:
    """A connection with a stream under way, of which nothing is read."""
    body = json.dumps(
        {"model": MODEL, "prompt": PROMPT, "max_tokens": 200, "logprobs": 5, "stream": True, "ignore_eos": True}
    )
    head = "".join(f"{name}: {value}\r\n" for name, value in (HEADERS | {"content-length": str(len(body))}).items())
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    one.connect(("127.0.0.1", cluster.http))
    one.sendall(f"POST /v1/completions HTTP/1.1\r\nhost: cluster\r\n{head}\r\n{body}".encode())
    return one

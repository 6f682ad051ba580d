"""Clients that a cluster's HTTP has to bear: each gets the right answer, and nothing of theirs stays."""

import asyncio
import json
import socket
from collections import Counter

import httpx2 as httpx
import pytest
from openai import AuthenticationError

from tests.cluster.running import KEY, MODEL, OUTPUTS, PROMPT, RunningCluster, eventually

CROWD = 50
MIB = 2**20
HEADERS = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
SECONDS = 600.0


async def test_a_key_that_is_wrong_or_missing_is_refused_everywhere(cluster: RunningCluster) -> None:
    async with cluster.client() as client:
        with pytest.raises(AuthenticationError, match="key"):
            await client.with_options(api_key="f" * 16).completions.create(model=MODEL, prompt=PROMPT)
    async with httpx.AsyncClient(base_url=cluster.url, timeout=SECONDS) as client:
        for path in ("/v1/models",):
            assert (await client.get(path)).status_code == 401
            assert (await client.get(path, headers=HEADERS)).status_code == 200


async def test_the_proxies_limit_connections_before_they_look_for_a_key(cluster: RunningCluster) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", cluster.http)
    writer.write(b"GET /health HTTP/1.1\r\nhost: cluster\r\nlong: " + b"x" * 100_000)
    assert await reader.readline() == b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    writer.close()


async def test_a_crowd_is_served_or_told_to_come_again(cluster: RunningCluster) -> None:
    limits = httpx.Limits(max_connections=CROWD)
    async with httpx.AsyncClient(base_url=cluster.url, headers=HEADERS, timeout=SECONDS, limits=limits) as client:
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
        async with httpx.AsyncClient(base_url=cluster.url, headers=HEADERS, timeout=SECONDS) as client:
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

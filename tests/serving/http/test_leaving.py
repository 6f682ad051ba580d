"""Clients that leave or do not read, and servers that are told to end."""

import asyncio
import logging
import socket

import pytest
from openai import APIError

from crossdraft.client import Kind, Token
from crossdraft.config.api import RateOptions
from crossdraft.rpc.errors import CannotListen
from crossdraft.rpc.server import Listening
from crossdraft.serving.http import HttpOptions, make_app
from crossdraft.serving.http.server import HttpServer
from tests.serving.fakes import FakeBackend
from tests.serving.http.conftest import Front, fault, front

LONG = (Token(1, "x" * 50_000, b"", Kind.BONUS, None),) * 1000  # 50 MB, more than sockets keep


@pytest.fixture
def outputs() -> FakeBackend:
    return FakeBackend(waits_after=1)


async def test_leaving_a_stream_ends_the_output(served: Front, outputs: FakeBackend) -> None:
    stream = await served.openai.completions.create(model="toy", prompt="Say", stream=True)
    assert (await anext(stream)).choices[0].text == "He"
    await outputs.wait_running(1)
    await stream.close()
    await outputs.wait_running(0)
    assert outputs.yielded == 1


@pytest.mark.parametrize(("streamed", "n"), [(False, 1), (False, 3), (True, 3)])
async def test_leaving_before_the_answer_ends_all_choices(served: Front, outputs: FakeBackend, streamed: bool, n: int):
    outputs.waits_after = 0
    asking = asyncio.create_task(served.post("/v1/completions", prompt="Say", n=n, stream=streamed))
    await outputs.wait_running(n)
    asking.cancel()
    await asyncio.wait([asking])
    await outputs.wait_running(0)
    assert outputs.yielded == 0


async def test_a_client_that_does_not_read_is_given_up(outputs: FakeBackend) -> None:
    outputs.tokens, outputs.waits_after = LONG, None
    async with front(outputs, HttpOptions(rates=RateOptions(stalled_seconds=0.2))) as hasty:
        body = {"prompt": "Say", "stream": True}
        async with hasty.http.stream("POST", "/v1/completions", json=body) as response:
            assert (response.status_code, len(outputs.requests)) == (200, 1)
            await outputs.wait_running(0)
            assert outputs.yielded < len(LONG)


async def test_draining_lets_a_stream_end_takes_no_other_and_says_that_it_waits(outputs, caplog):
    async with front(outputs, grace_seconds=30) as served:
        stream = await served.openai.completions.create(model="toy", prompt="Say", stream=True)
        first = await anext(stream)
        draining = asyncio.create_task(served.server.drain())
        await refused(served.server.address)
        assert not draining.done()
        outputs.go_on.set()
        texts = [first.choices[0].text, *[chunk.choices[0].text async for chunk in stream]]
        assert texts == ["He", "é", ""]
        await draining
    assert "waiting up to 30 s (--grace-seconds) for 1 open requests to end" in caplog.messages


async def test_the_grace_period_ends_what_goes_on_and_says_so_once(outputs, caplog):
    async with front(outputs, grace_seconds=0) as served:
        streams = [await served.openai.completions.create(model="toy", prompt="Say", stream=True) for _ in range(2)]
        for stream in streams:
            await anext(stream)
        waiting = asyncio.create_task(served.post("/v1/completions", prompt="Say"))
        await outputs.wait_running(3)
        await served.server.drain()
        await outputs.wait_running(0)
        for stream in streams:
            with pytest.raises(APIError, match="the server ends; ask again later"):
                await anext(stream)
        assert fault(await waiting) == {
            "message": "the server ends; ask again later", "type": "server_error", "param": None,
            "code": "service_unavailable",
        }  # fmt: skip
        assert (await waiting).status_code == 503
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    (said,) = [record for record in warnings if record.name != "asyncio"]  # others' come late
    assert said.getMessage() == "3 open requests are ended: the grace period of 0 s is over (--grace-seconds)"
    assert said.exc_info is None


async def test_a_drain_that_is_cancelled_ends_streams_at_once_and_with_an_event(outputs: FakeBackend) -> None:
    async with front(outputs, grace_seconds=300) as served:
        stream = await served.openai.responses.create(model="toy", input="Say", stream=True)
        while (await anext(stream)).type != "response.output_text.delta":
            pass
        draining = asyncio.create_task(served.server.drain())
        await refused(served.server.address)
        draining.cancel()
        events = [event async for event in stream]
        assert [(one.type, one.code) for one in events] == [("error", "service_unavailable")]
        with pytest.raises(asyncio.CancelledError):
            await draining
        await outputs.wait_running(0)


async def refused(address: str) -> None:
    """Returns once nobody listens there any more."""
    host, _, port = address.rpartition(":")
    async with asyncio.timeout(60):
        while True:
            try:
                _, writer = await asyncio.open_connection(host, int(port))
            except ConnectionResetError:
                continue  # it waited to be accepted
            except ConnectionRefusedError:
                return
            writer.close()


async def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CannotListen, match=f"cannot listen on 127.0.0.1:{port}.*choose another port"):
            await HttpServer(make_app(FakeBackend()), Listening(port=port)).start()

"""The API over outputs that need no model, behind a real server on loopback."""

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx2 as httpx
import pytest
from openai import AsyncOpenAI

from crossdraft.rpc.server import Listening
from crossdraft.serving.backend import Backend
from crossdraft.serving.http import HttpOptions, make_app
from crossdraft.serving.http.server import HttpServer
from tests.rpc.certificates import cluster  # noqa: F401 - a fixture
from tests.serving.fakes import FakeBackend

KEY = "a-key-that-nobody-guesses"
TRUSTED = ssl.create_default_context()  # each client would make one of its own, which takes longer than most tests
MESSAGES = [{"role": "user", "content": "Say"}]
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
PARTS = {"message", "type", "param", "code"}


def fault(response: Any) -> dict[str, Any]:
    """The error of a reply, which has OpenAI's shape."""
    (name, error), *others = response.json().items()
    assert (name, set(error), others) == ("error", PARTS, [])
    assert error["message"]
    return dict(error)


@dataclass(frozen=True)
class Front:
    """A running server and ways to ask it."""

    server: HttpServer
    openai: AsyncOpenAI
    http: httpx.AsyncClient

    async def complete(self, **asked: Any) -> Any:
        """A completion, or a stream, by the official client."""
        return await self.openai.completions.create(**{"model": "toy", "prompt": "Say"} | asked)

    async def chat(self, **asked: Any) -> Any:
        """The same of a chat."""
        return await self.openai.chat.completions.create(**{"model": "toy", "messages": MESSAGES} | asked)

    async def post(self, path: str, **body: object) -> httpx.Response:
        """Any body, also one that the official client would not send."""
        return await self.http.post(path, json=body)


@asynccontextmanager
async def front(outputs: Backend, options: HttpOptions | None = None, grace_seconds: float = 5) -> AsyncIterator[Front]:
    """A server over these outputs, for the time of the block."""
    listening = Listening(grace_seconds=grace_seconds)
    async with HttpServer(make_app(outputs, options), listening) as server:
        url = f"http://{server.address}"
        headers = {"Authorization": f"Bearer {KEY}"}
        asking = httpx.AsyncClient(verify=TRUSTED)
        async with (
            AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=60, http_client=asking) as openai,
            httpx.AsyncClient(base_url=url, headers=headers, timeout=60, verify=TRUSTED) as http,
        ):
            yield Front(server, openai, http)


@pytest.fixture
async def served(outputs: FakeBackend) -> AsyncIterator[Front]:
    """The API over `outputs`, with defaults."""
    async with front(outputs) as running:
        yield running


@pytest.fixture
async def direct(outputs: FakeBackend) -> AsyncIterator[httpx.AsyncClient]:
    """The application itself, without a server."""
    transport = httpx.ASGITransport(make_app(outputs))
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        yield client

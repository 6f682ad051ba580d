"""Requests to a server of OpenAI's HTTP API. It needs aiohttp, which the extra `http` installs.

aiohttp because the moment of each token counts: with 32 streams it hands over a chunk of a reply 1 ms after it was
sent, HTTPX after 4 ms (medians on loopback).
"""

import json
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, Self

import aiohttp
from aiohttp.http_exceptions import LineTooLong

from crossdraft.loadtest.clients import BROKEN_OFF, NO_CONNECTION, SECOND
from crossdraft.loadtest.requests import Request
from crossdraft.loadtest.timeline import Chunk, End, OutputFigures, RequestFailedError, figures_of

DONE = "[DONE]"
BAD_EVENT = "bad event"  # kind of error
TEXTS = ("content", "reasoning_content", "reasoning")  # of a chat's delta
LEARNING = aiohttp.ClientTimeout(total=10)  # seconds
LONGEST_LINE = 2**21  # bytes of a line of a stream
LONGEST_ERROR = 1000  # bytes of a refusal's body that are reported


class HttpClient:
    """A server of OpenAI's API, crossdraft's or another one. Use it with `async with`.

    Connections are kept, and each carries one request at a time.

    Args:
        base: URL of the server, without `/v1`.
        key: of the API; empty: none.
    """

    def __init__(self, base: str, key: str = "") -> None:
        self._base = base
        self._model: str | None = None  # the first of a server that is not crossdraft's
        self.chats = True  # unless the server says that its first model has no chat template
        # Compressed streams would come in blocks and not token by token.
        self._headers = {"Accept": "text/event-stream", "Accept-Encoding": "identity"}
        self._headers["User-Agent"] = "crossdraft-loadtest"
        if key:
            self._headers["Authorization"] = f"Bearer {key}"

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=self._headers,
            read_bufsize=LONGEST_LINE // 2,  # a line may have twice as many
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def learn(self) -> None:
        """Asks what is served. A server that is not crossdraft's is sent its first model's name, as some want one, and
        no trace is asked for; one that does not say is taken for crossdraft's."""
        try:
            async with self._session.get(f"{self._base}/v1/models", timeout=LEARNING) as response:
                card = (await response.json())["data"][0]
                self._model = None if "drafters" in card else str(card["id"])
                self.chats = bool(card.get("chats", True))
        except (aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError):
            self._model = None

    def _body(self, request: Request) -> dict[str, Any]:
        if self._model is None:
            return request.body
        known = {} if request.names_speculation else {"speculative": None}
        body = {"model": self._model} | request.body | known
        return {name: value for name, value in body.items() if value is not None}

    async def stream(self, request: Request) -> AsyncGenerator[Chunk | End, None]:
        reply, at = ReplyState(), 0.0
        try:
            sent = self._session.post(self._base + request.path, json=self._body(request), allow_redirects=False)
            async with sent as response:
                if response.status != 200:
                    text = (await response.read())[:LONGEST_ERROR].decode("utf-8", "replace")
                    raise RequestFailedError(f"HTTP {response.status}", text)
                async for event in _events(response):
                    at = time.monotonic()
                    if chunk := reply.hear(event, at):
                        yield chunk
        except aiohttp.ClientConnectorError as error:
            raise RequestFailedError(NO_CONNECTION, f"cannot connect to {self._base}: {error}") from error
        except aiohttp.ClientError as error:
            text = f"the server closed the connection in the middle of its reply: {error}"
            raise RequestFailedError(BROKEN_OFF, text) from error
        if not reply.done:
            raise RequestFailedError(BROKEN_OFF, "the stream ended without its last event")
        yield End(at, reply.tokens, reply.figures, reply.prompt_tokens)


async def _events(response: aiohttp.ClientResponse) -> AsyncGenerator[str, None]:
    """The data of each server-sent event, as soon as its last line is there. Raises RequestFailedError."""
    data: list[str] = []
    try:
        async for line in response.content:
            text = line.decode("utf-8", "replace").strip()
            if text.startswith("data:"):
                data.append(text[5:].lstrip())
            elif not text and data:
                yield "\n".join(data)
                data = []
    except LineTooLong as error:
        raise RequestFailedError(BAD_EVENT, f"an event has a line over {LONGEST_LINE >> 20} MiB") from error


@dataclass
class ReplyState:
    """What the events of one reply have said so far."""

    tokens: int | None = None  # of the output; None: not said
    prompt_tokens: int = 0  # 0: not said
    figures: OutputFigures | None = None  # None: not said
    done: bool = False  # the last event came

    def hear(self, event: str, at: float) -> Chunk | None:
        """The chunk that an event received `at` is, if it has a token. Raises RequestFailedError."""
        if event == DONE:
            self.done = True
            return None
        try:
            return self._heard(json.loads(event), at)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise RequestFailedError(BAD_EVENT, f"an event means nothing ({error}): {event[:200]}") from error

    def _heard(self, said: dict[str, Any], at: float) -> Chunk | None:
        if "error" in said:
            raise RequestFailedError("error in the stream", str(said["error"]))
        if usage := said.get("usage"):
            self.tokens, self.prompt_tokens = int(usage["completion_tokens"]), int(usage.get("prompt_tokens", 0))
        trace = said.get("crossdraft") or {}
        if statistics := trace.get("statistics"):
            self.figures = figures_of(statistics)
        made = trace.get("milliseconds")
        return Chunk(at, None if made is None else made / SECOND) if _has_token(said, trace) else None


def _has_token(said: dict[str, Any], trace: dict[str, Any]) -> bool:
    """With a trace each token has a chunk with its kind; without one, a chunk with any text counts."""
    if trace:
        return trace.get("kind") is not None
    choices = said.get("choices") or [{}]
    delta = choices[0].get("delta") or {}
    return bool(choices[0].get("text") or any(delta.get(name) for name in TEXTS))

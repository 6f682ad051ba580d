"""Requests to crossdraft's HTTP server. It needs aiohttp, which the extra `http` installs.

aiohttp because the moment of each token counts: with 32 streams it hands over a chunk of a reply 1 ms after it was
sent, HTTPX after 4 ms (medians on loopback).
"""

import json
from collections.abc import Mapping
from typing import Any, Self

import aiohttp
from aiohttp.http_exceptions import LineTooLong
from pydantic import TypeAdapter

from crossdraft.lab.loadtest.clients import SECOND
from crossdraft.lab.loadtest.requests import Request
from crossdraft.lab.loadtest.runner import Chunk, OutputFigures, Pieces, RequestFailedError

DONE = "[DONE]"
NO_CONNECTION, BROKEN_OFF, BAD_EVENT = "no connection", "broken off", "bad event"  # kinds of errors
LEARNING = aiohttp.ClientTimeout(total=10)  # seconds
LONGEST_LINE = 2**21  # bytes of a line of a stream
LONGEST_ERROR = 1000  # bytes of a refusal's body that are reported
FIGURES = TypeAdapter(OutputFigures)


class HttpClient:
    """A server of crossdraft's. Use it with `async with`.

    Connections are kept, and each carries one request at a time.

    Args:
        base: URL of the server, without `/v1`.
        key: of the API; empty: none.
    """

    def __init__(self, base: str, key: str = "") -> None:
        self._base = base
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
            headers=self._headers,
            read_bufsize=LONGEST_LINE // 2,  # a line may have twice as many
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def learn(self) -> None:
        """Asks whether the server's model has a chat template. Where it does not answer, requests will say so."""
        try:
            async with self._session.get(f"{self._base}/v1/models", timeout=LEARNING) as response:
                self.chats = bool((await response.json())["data"][0]["chats"])
        except (aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError):
            self.chats = True

    async def stream(self, request: Request) -> Pieces:
        figures: OutputFigures | None = None
        event = ""
        try:
            sent = self._session.post(self._base + request.path, json=request.body, allow_redirects=False)
            async with sent as response:
                if response.status != 200:
                    text = (await response.read())[:LONGEST_ERROR].decode("utf-8", "replace")
                    raise RequestFailedError(f"HTTP {response.status}", text)
                async for line in response.content:
                    if not line.startswith(b"data:"):
                        continue
                    event = line[5:].decode("utf-8", "replace").strip()
                    if event == DONE:
                        break
                    piece = piece_in(json.loads(event))
                    if isinstance(piece, Chunk):
                        yield piece
                    figures = piece if isinstance(piece, OutputFigures) else figures
        except aiohttp.ClientConnectorError as error:
            raise RequestFailedError(NO_CONNECTION, f"cannot connect to {self._base}: {error}") from error
        except aiohttp.ClientError as error:
            text = f"the server closed the connection in the middle of its reply: {error}"
            raise RequestFailedError(BROKEN_OFF, text) from error
        except LineTooLong as error:
            raise RequestFailedError(BAD_EVENT, f"an event has a line over {LONGEST_LINE >> 20} MiB") from error
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise RequestFailedError(BAD_EVENT, f"an event means nothing ({error}): {event[:200]}") from error
        if event != DONE:
            raise RequestFailedError(BROKEN_OFF, "the stream ended without its last event")
        if figures is None:
            raise RequestFailedError(BAD_EVENT, "the server does not say what the output cost: is it crossdraft's?")
        yield figures


def piece_in(said: Mapping[str, Any]) -> Chunk | OutputFigures | None:
    """What an event is: a token, or what the output cost.

    Raises:
        RequestFailedError: it is an error of the server's.
        ValueError, TypeError, LookupError or AttributeError: it is no event of crossdraft's.
    """
    if "error" in said:
        raise RequestFailedError("error in the stream", str(said["error"]))
    trace = said.get("crossdraft") or {}
    if statistics := trace.get("statistics"):
        return FIGURES.validate_python(statistics | {"lanes": [_lane(one) for one in statistics["lanes"]]})
    return Chunk(trace["milliseconds"] / SECOND) if trace.get("kind") else None


def _lane(given: Mapping[str, Any]) -> dict[str, Any]:
    """As `LaneFigures` has it."""
    names = {"counts": "trip_counts", "seconds": "trip_seconds", "queued_seconds": "queued_seconds"}
    return {**given, "address": "", "trips": {name: given[sent] for name, sent in names.items()}}

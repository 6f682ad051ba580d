"""What a load test sends, and when replies came.

It needs aiohttp, which the extra `http` installs: with 32 streams it hands over a chunk of a reply 1 ms after it was
sent, HTTPX after 4 ms (medians on loopback), and the moment of each token counts. All moments are seconds of one clock.
"""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any

from crossdraft.lab.outputs import MILLISECONDS, Output, OutputFigures

DONE = "[DONE]"
TIMED_OUT, NO_CONNECTION, BROKEN_OFF, BAD_EVENT = "timed out", "no connection", "broken off", "bad event"  # errors
LONGEST_LINE = 2**21  # bytes of a line of a stream
LONGEST_ERROR = 1000  # bytes of a refusal's body that are reported
# Compressed streams would come in blocks and not token by token.
HEADERS = {"Accept": "text/event-stream", "Accept-Encoding": "identity", "User-Agent": "crossdraft-loadtest"}


class RequestFailedError(Exception):
    """A request failed or was refused: its kind, out of a small set to count errors by, and what happened."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


Body = dict[str, Any]  # of a request
# Of an output: for each chunk that has a token the seconds from when the server had read the request until it was made,
# as these come; then what the output cost.
Pieces = AsyncGenerator[float | OutputFigures, None]
Stream = Callable[[Body], Pieces]  # has an output made; closing it early cancels that. It raises RequestFailedError.


async def send(
    stream: Stream, asked: Body, timeout_seconds: float, now: Callable[[], float] = time.monotonic
) -> Output:
    """Sends a request and waits for its end, so long at most."""
    sent, error, fault = now(), "", ""
    chunks: list[float] = []
    made: list[float] = []
    figures: OutputFigures | None = None
    try:
        async with asyncio.timeout(timeout_seconds), aclosing(stream(asked)) as pieces:
            async for piece in pieces:
                if isinstance(piece, OutputFigures):
                    figures = piece
                else:
                    chunks.append(now())
                    made.append(piece)
    except TimeoutError:
        error, fault = TIMED_OUT, f"no end after {timeout_seconds:g} s"
    except RequestFailedError as failure:
        error, fault = failure.kind, str(failure)
    return Output(sent, tuple(chunks), now(), (), figures, tuple(made), error, fault)


@asynccontextmanager
async def http_stream(base: str, key: str = "", chat: bool = False) -> AsyncIterator[Stream]:
    """Of a server of crossdraft's by its URL without `/v1`; connections are kept, one request at a time on each.

    Requests have a `prompt`, or are chats with `messages`. Raises ImportError: there is no aiohttp."""
    import aiohttp

    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
        headers=HEADERS | ({"Authorization": f"Bearer {key}"} if key else {}),
        read_bufsize=LONGEST_LINE // 2,  # a line may have twice as many
    )
    async with session:
        yield partial(_streamed, session, f"{base}/v1/{'chat/' * chat}completions")


async def _streamed(session: Any, url: str, asked: Body) -> Pieces:
    """Raises RequestFailedError."""
    import aiohttp
    from aiohttp.http_exceptions import LineTooLong

    figures: OutputFigures | None = None
    event = ""
    try:
        async with session.post(url, json=asked, allow_redirects=False) as response:
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
                if isinstance(piece, OutputFigures):
                    figures = piece
                elif piece is not None:
                    yield piece
    except aiohttp.ClientConnectorError as error:
        raise RequestFailedError(NO_CONNECTION, f"cannot connect to {url}: {error}") from error
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


def piece_in(said: Mapping[str, Any]) -> float | OutputFigures | None:
    """What an event is: a token, made so many seconds after the request was read, or what the output cost. Raises
    RequestFailedError: it is an error of the server's; ValueError, TypeError, LookupError or AttributeError: it is no
    event of crossdraft's."""
    from pydantic import TypeAdapter

    if "error" in said:
        raise RequestFailedError("error in the stream", str(said["error"]))
    trace = said.get("crossdraft") or {}
    if statistics := trace.get("statistics"):
        found = statistics | {"lanes": [_lane(lane) for lane in statistics["lanes"]]}
        return TypeAdapter(OutputFigures).validate_python(found)
    return float(trace["milliseconds"]) / MILLISECONDS if trace.get("kind") else None


def _lane(given: Mapping[str, Any]) -> dict[str, Any]:
    """As `LaneFigures` has it."""
    names = {"counts": "trip_counts", "seconds": "trip_seconds", "queued_seconds": "queued_seconds"}
    return {**given, "address": "", "trips": {name: given[sent] for name, sent in names.items()}}

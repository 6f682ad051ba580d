"""Outputs by OpenAI's HTTP API."""

import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from crossdraft.loadtest.asking import Question
from crossdraft.loadtest.figures import Figures, figures_of
from crossdraft.loadtest.hearing import Chunk, Failure, Over
from crossdraft.loadtest.http_stream import BROKEN_OFF, Head, HttpStreams, Piece

DONE = "[DONE]"
SECOND = 1000.0  # milliseconds


@dataclass
class Events:
    """Server-sent events of a body that comes in pieces. Pure."""

    rest: bytes = b""  # of an event that is not whole

    def feed(self, data: bytes) -> Iterator[str]:
        """The data of the events that are whole now."""
        *whole, self.rest = (self.rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in whole:
            lines = [line[5:].strip() for line in event.decode("utf-8", "replace").split("\n") if line[:5] == "data:"]
            if lines:
                yield "\n".join(lines)


@dataclass
class Reading:
    """What the events of one reply say. Pure."""

    tokens: int | None = None
    figures: Figures | None = None
    done: bool = False
    events: Events = field(default_factory=Events)

    def read(self, piece: Piece) -> Iterator[Chunk]:
        """The chunks with a token that a piece of the body ends. Raises Failure."""
        for event in self.events.feed(piece.data):
            if event == DONE:
                self.done = True
                continue
            chunk = _object(event)
            if "error" in chunk:
                raise Failure("error in the stream", str(chunk["error"]))
            if usage := chunk.get("usage"):
                self.tokens = int(usage["completion_tokens"])
            trace = chunk.get("crossdraft") or {}
            if statistics := trace.get("statistics"):
                self.figures = _figures(statistics)
            if _has_token(chunk, trace):
                made = trace.get("milliseconds")
                yield Chunk(piece.at, None if made is None else made / SECOND)


@dataclass(frozen=True, eq=False)
class OverHttp:
    """A server of OpenAI's API: this project's, or another one (`Wishes.trace` false)."""

    streams: HttpStreams

    async def ask(self, question: Question) -> AsyncGenerator[Chunk | Over, None]:
        """As in `hearing.Way`."""
        reading, at, refused = Reading(), 0.0, b""
        status = 200
        async with aclosing(self.streams.post(question.path, question.body)) as parts:
            async for part in parts:
                match part:
                    case Head():
                        status = part.status
                    case Piece() if status != 200:
                        refused += part.data
                    case Piece():
                        at = part.at
                        for chunk in reading.read(part):
                            yield chunk
        if status != 200:
            raise Failure(f"HTTP {status}", refused[:1000].decode("utf-8", "replace"))
        if not reading.done:
            raise Failure(BROKEN_OFF, "the stream ended without its last event")
        yield Over(at, reading.tokens, reading.figures)


def _object(event: str) -> dict[str, Any]:
    try:
        found = json.loads(event)
    except ValueError as error:
        raise Failure("bad event", f"an event is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise Failure("bad event", f"an event is no object: {event[:200]}")
    return found


def _figures(statistics: dict[str, Any]) -> Figures:
    try:
        return figures_of(statistics)
    except ValueError as error:
        raise Failure("bad event", str(error)) from error


def _has_token(chunk: dict[str, Any], trace: dict[str, Any]) -> bool:
    """With a trace each token has a chunk with its kind; else a chunk with any text counts."""
    if trace:
        return trace.get("kind") is not None
    choices = chunk.get("choices") or [{}]
    return bool(choices[0].get("text") or (choices[0].get("delta") or {}).get("content"))

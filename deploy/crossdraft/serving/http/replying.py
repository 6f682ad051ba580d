"""From the items of outputs to the body of a reply."""

import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from pydantic import BaseModel

from crossdraft.pipeline import Token
from crossdraft.pipeline.watching import Span
from crossdraft.serving.http.answers import Figures, Trace, Usage
from crossdraft.serving.http.asking import Asking
from crossdraft.serving.http.errors import FOREIGN, refusal_of
from crossdraft.serving.http.formats import Format, Written
from crossdraft.serving.http.merging import merged
from crossdraft.serving.orders import Ended, Outputs, Traced

log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"

Item = tuple[int, Token | Traced | Ended]  # the choice's index, and what came of it


def items(outputs: Outputs, asking: Asking) -> AsyncGenerator[Item, None]:
    """Those of all choices, as they come."""
    return merged([outputs.stream(order) for order in asking.orders])


async def whole(outputs: Outputs, asking: Asking, format: Format) -> BaseModel:
    """The answer when everything has come.

    Raises:
        Exception: one of errors.FOREIGN.
    """
    written = [Written() for _ in asking.orders]
    async with aclosing(items(outputs, asking)) as coming:
        async for choice, item in coming:
            match item:
                case Token():
                    written[choice].add(item)
                case Ended():
                    written[choice].ended = item
    return format.whole(written, usage_of(asking, written))


class Chunks:
    """The chunks of a stream, each a server-sent event."""

    def __init__(self, asking: Asking, format: Format) -> None:
        self._asking = asking
        self._format = format
        self._written = [Written() for _ in asking.orders]
        self._spans: list[list[Span]] = [[] for _ in asking.orders]
        self._began = time.perf_counter()

    async def stream(self, first: Item, rest: AsyncGenerator[Item, None]) -> AsyncGenerator[bytes, None]:
        """All chunks, the last event included. What fails now is an event, too: the status was sent."""
        async with aclosing(rest):
            try:
                for event in self._events(first):
                    yield event
                async for item in rest:
                    for event in self._events(item):
                        yield event
            except FOREIGN as error:
                yield event_of(refusal_of(error, self._asking.id).reply)
            else:
                if self._asking.include_usage:
                    yield event_of(self._format.usage(usage_of(self._asking, self._written)))
            yield DONE

    def _events(self, item: Item) -> Sequence[bytes]:
        choice, what = item
        written = self._written[choice]
        match what:
            case Traced(spans):
                self._spans[choice] += spans
                return ()
            case Token():
                chunk = self._piece(choice, written, what)
                written.add(what)
            case Ended():
                chunk = self._format.end(choice, written, what, self._trace(choice, ended=what))
                written.ended = what
        if chunk is None:
            return ()
        written.begun = True
        return (event_of(chunk),)

    def _piece(self, choice: int, written: Written, token: Token) -> BaseModel | None:
        if not (token.text or self._asking.logprobs or self._asking.trace):
            return None  # its characters are not whole yet, or may be the beginning of a stop string
        return self._format.piece(choice, written, token, self._trace(choice, token=token))

    def _trace(self, choice: int, token: Token | None = None, ended: Ended | None = None) -> Trace | None:
        if not self._asking.trace:
            return None
        milliseconds = 1000 * (time.perf_counter() - self._began)
        found: dict[str, object] = {"milliseconds": milliseconds}
        if token is not None:
            found |= {"kind": token.kind, "bytes": list(token.raw)}
        if ended is not None:
            found["statistics"] = Figures.of(ended.statistics)
        if self._spans[choice]:
            found["spans"], self._spans[choice] = self._spans[choice], []
        return Trace.model_validate(found)


def usage_of(asking: Asking, written: Sequence[Written]) -> Usage:
    """Each prompt once, and all outputs."""
    figures = [one.ended.statistics for one in written if one.ended is not None]
    each = len(asking.orders) // asking.prompts
    return Usage.of(sum(one.prompt_tokens for one in figures[::each]), sum(one.tokens for one in figures))


def event_of(value: BaseModel) -> bytes:
    """A server-sent event."""
    return b"data: " + value.model_dump_json(exclude_unset=True).encode() + b"\n\n"

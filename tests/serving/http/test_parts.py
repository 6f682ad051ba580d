"""Merged streams, request ids and texts of tokens, by themselves."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from crossdraft.serving.http.middleware import _named
from crossdraft.serving.http.responses import shown
from crossdraft.serving.http.streaming import merged


@pytest.mark.parametrize("given", [None, "", "../x", "a b", "-a", "a" * 129, "é", "a\n"])
def test_an_id_that_could_be_no_file_is_replaced(given: str | None) -> None:
    assert _named(given) not in (given, _named(given))
    assert _named("a-1.B_2:c") == "a-1.B_2:c"


def test_tokens_have_different_texts() -> None:
    assert [shown(1, b"\xc3\xa9"), shown(2, b"\xc3"), shown(3, b"")] == ["é", r"bytes:\xc3", "token_id:3"]


class Source:
    """A stream that yields what it is given, and says when it was closed."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[str | Exception | None] = asyncio.Queue()
        self.closed = False

    async def stream(self) -> AsyncGenerator[str, None]:
        try:
            while (item := await self.queue.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self.closed = True


@pytest.mark.parametrize("count", [1, 2])
async def test_merged_streams_end_with_the_last_of_them(count: int) -> None:
    sources = [Source() for _ in range(count)]
    coming = merged([source.stream() for source in sources])
    for place in reversed(range(count)):
        sources[place].queue.put_nowait("a")
        assert await anext(coming) == (place, "a")
        sources[place].queue.put_nowait(None)
    with pytest.raises(StopAsyncIteration):
        await anext(coming)
    assert all(source.closed for source in sources)


@pytest.mark.parametrize("count", [1, 2])
async def test_an_error_or_a_close_closes_all(count: int) -> None:
    for close in (False, True):
        sources = [Source() for _ in range(count)]
        coming = merged([source.stream() for source in sources])
        for source in sources:
            source.queue.put_nowait("a")
        assert [await anext(coming) for _ in sources] == [(place, "a") for place in range(count)]
        if close:
            await coming.aclose()
        else:
            sources[0].queue.put_nowait(OSError("gone"))
            with pytest.raises(OSError, match="gone"):
                await anext(coming)
        assert all(source.closed for source in sources)

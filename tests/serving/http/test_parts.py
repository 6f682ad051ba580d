"""Rates, merged streams and request ids, by themselves."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from crossdraft.serving.http import RateLimit
from crossdraft.serving.http.middleware import request_id
from crossdraft.serving.http.responses import shown
from crossdraft.serving.http.streaming import merged
from crossdraft.serving.limits import MAX_CLIENTS, Rates


def test_a_bucket_holds_a_burst_and_fills_at_its_rate() -> None:
    rates = Rates(RateLimit(per_minute=30, burst=3))
    assert [rates.take("a", 10.0) for _ in range(4)] == [0, 0, 0, pytest.approx(2.0)]
    assert rates.take("b", 10.0) == 0
    assert rates.take("a", 11.0) == pytest.approx(1.0)
    assert rates.take("a", 12.0) == 0
    assert rates.take("a", 12.0) == pytest.approx(2.0)
    assert [rates.take("a", 1e6) for _ in range(4)] == [0, 0, 0, pytest.approx(2.0)]


def test_buckets_of_those_who_asked_long_ago_are_forgotten() -> None:
    rates = Rates(RateLimit(per_minute=1, burst=1))
    for client in range(MAX_CLIENTS + 1):
        assert rates.take(str(client), 0.0) == 0
    assert rates.take(str(MAX_CLIENTS), 0.0) > 0
    assert rates.take("0", 0.0) == 0


@pytest.mark.parametrize(("per_minute", "burst"), [(0, 1), (-1, 1), (1, 0), (float("inf"), 1), (float("nan"), 1)])
def test_a_rate_that_is_none(per_minute: float, burst: int) -> None:
    with pytest.raises(ValueError, match="requests a minute above 0 and a burst of at least 1"):
        RateLimit(per_minute, burst)


@pytest.mark.parametrize("given", [None, "", "../x", "a b", "-a", "a" * 101, "é", "a\n"])
def test_an_id_that_could_be_no_file_is_replaced(given: str | None) -> None:
    assert request_id(given) not in (given, request_id(given))
    assert request_id("a-1.B_2:c") == "a-1.B_2:c"


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

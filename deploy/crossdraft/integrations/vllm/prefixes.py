"""Which request a row of vLLM's batch belongs to: vLLM names none to proposers, so that it is told by the row's ids.

A request's ids only ever grow by what was sampled: the row that had n ids and was sampled s more is the request that
was last seen with those n ids. That holds when rows move, and after a preemption. Of the ids the first and the last
few and their number are compared: requests that agree in these are interchangeable for drafting, where a mistake costs
acceptance and never correctness.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

TokenIds = NDArray[np.int32]  # a row of vLLM's `token_ids_cpu`, as far as it is set
HEAD = 16  # first ids that are compared
TAIL = 64  # last ids that are compared: longer than texts of different requests agree by chance

Key = tuple[int, bytes, bytes]
Request = TypeVar("Request")


def key_of(ids: TokenIds) -> Key:
    """What a request is found by: how many ids it has, the first and the last of them."""
    return len(ids), ids[:HEAD].tobytes(), ids[-TAIL:].tobytes()


@dataclass(eq=False)
class Prefixes(Generic[Request]):
    """The requests that were seen, by their ids so far."""

    make: Callable[[], Request]  # one that was not seen before
    seconds: (
        float  # after which one that is not seen again is forgotten; preempted requests come back later than others
    )

    def __post_init__(self) -> None:
        # Requests with the same ids so far, and when each was seen, in seconds; the oldest keys first.
        self._known: dict[Key, deque[tuple[Request, float]]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._known.values()))

    def step(self, rows: Sequence[TokenIds], sampled: Sequence[int], now: float) -> list[Request]:
        """The request of each row, in their order. Rows have all ids, of which so many were `sampled` now, at least 1;
        `now` is in seconds of a monotonic clock."""
        # All are taken before any is put back: one row's ids now may be what another's were.
        found = [self._take(ids[: len(ids) - count]) for ids, count in zip(rows, sampled, strict=True)]
        requests = [self.make() if one is None else one for one in found]
        for ids, request in zip(rows, requests, strict=True):
            self._known.setdefault(key_of(ids), deque()).append((request, now))
        return requests

    def forget(self, now: float) -> list[Request]:
        """The requests that were not seen for too long, which are seen as new ones if they come back."""
        gone: list[Request] = []
        for key, waiting in list(self._known.items()):
            while waiting and waiting[0][1] < now - self.seconds:
                gone.append(waiting.popleft()[0])
            if not waiting:
                del self._known[key]
        return gone

    def _take(self, ids: TokenIds) -> Request | None:
        key = key_of(ids)
        waiting = self._known.get(key)
        if waiting is None:
            return None
        request, _ = waiting.popleft()
        if not waiting:
            del self._known[key]
        return request

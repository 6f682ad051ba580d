"""One request over time. Pure.

All moments are seconds of one clock. Latencies count from when a request was due, not from when it was sent: where
a client falls behind its schedule, the wait that its requests had before they left is theirs (coordinated omission).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from crossdraft.loadtest.figures import Figures


@dataclass(frozen=True)
class Timeline:
    """What happened to one request."""

    number: int  # from 0, in the order in which they are due
    category: str  # of its prompt
    due: float  # when it was to be sent
    sent: float
    chunks: tuple[float, ...]  # when each piece of the output with a token in it came
    ended: float  # when its end came, or its error
    tokens: int  # of the output
    made: tuple[float, ...] = ()  # for each chunk: seconds after which the server made it; none: it does not say
    error: str = ""  # what kind of error ended it; empty: none
    figures: Figures | None = None  # None: the server does not say

    @property
    def fine(self) -> bool:
        """Whether it has a whole answer, with any token."""
        return not self.error and bool(self.chunks)

    @property
    def late(self) -> float:
        """Seconds by which it was sent too late."""
        return self.sent - self.due

    @property
    def first_token(self) -> float:
        """Seconds until its first token came; it must be fine."""
        return self.chunks[0] - self.due

    @property
    def end_to_end(self) -> float:
        """Seconds until its end came."""
        return self.ended - self.due

    @property
    def per_token(self) -> float | None:
        """Seconds for each token after the first; None: there is none."""
        return (self.chunks[-1] - self.chunks[0]) / (self.tokens - 1) if self.fine and self.tokens > 1 else None

    @property
    def between_chunks(self) -> tuple[float, ...]:
        """Seconds from each chunk to the next."""
        return tuple(after - before for before, after in pairwise(self.chunks))

    @property
    def front(self) -> tuple[float, ...]:
        """For each chunk the seconds that it and the request were on their way between client and server, together."""
        return tuple(came - self.sent - made for came, made in zip(self.chunks, self.made, strict=False))


def at_once(timelines: Iterable[Timeline], moment: float) -> int:
    """Requests that were due at a moment and had no end yet."""
    return sum(one.due <= moment < one.ended for one in timelines)

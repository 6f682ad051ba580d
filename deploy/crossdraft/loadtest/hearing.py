"""What a client hears of an output while it is made."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from crossdraft.loadtest.asking import Question
from crossdraft.loadtest.figures import Figures


@dataclass(frozen=True)
class Chunk:
    """A piece of the output with a token in it."""

    at: float  # seconds of the monotonic clock
    made: float | None = None  # seconds after which the server made it, since it had read the request


@dataclass(frozen=True)
class Over:
    """The end."""

    at: float  # seconds of the monotonic clock
    tokens: int | None = None  # of the output; None: one for each chunk
    figures: Figures | None = None  # None: the server does not say


class Failure(Exception):  # noqa: N818 - it says what happened
    """An output failed, or was refused.

    Args:
        kind: a few words, of which there are not many, to count by.
        text: what the server says, or what happened.
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class Way(Protocol):
    """A way to have outputs made."""

    def ask(self, question: Question) -> AsyncGenerator[Chunk | Over, None]:
        """One output: its chunks as they come, then its end. Closing it early cancels it.

        Raises:
            Failure: it failed, or was refused.
        """
        ...

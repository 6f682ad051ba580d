"""What passes between those who speak with clients and those who make outputs, as plain values.

A front (HTTP, gRPC) makes `Order`s and hands them to `Outputs`, which may be in the same process (`local`) or
replicas on other nodes. Values can be pickled: inside a cluster they travel through Ray.
"""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from crossdraft.pipeline import GenerationRequest, Reason, Statistics, Token
from crossdraft.pipeline.watching import Span


@dataclass(frozen=True)
class ServedModel:
    """A model that outputs can be ordered of."""

    name: str
    created: int  # seconds since 1970, when it began to be served
    context: int  # tokens, prompt and output together
    drafters: tuple[str, ...]  # names that an order may ask for, the default first; none: decoding is plain
    methods: tuple[str, ...]  # that its pairs allow, of `verification.methods.METHODS`
    chats: bool  # it has a chat template of its own
    there: bool = True  # a target of it can be reached now; else orders fail until one is back


@dataclass(frozen=True)
class Order:
    """One output that a client asked for."""

    id: str  # of the client's request; in every log line that concerns it, and the name of its journal
    model: str  # name of a ServedModel
    request: GenerationRequest  # `committed` in it: what was delivered already
    drafter: str | None = None  # name of one of the model's drafters; None: its default one; "": plain decoding
    trace: bool = False  # what the session does is wanted, too, as it happens


@dataclass(frozen=True)
class Traced:
    """What a session did, before the token or the end that comes next; only in an order with `trace`."""

    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Ended:
    """The end of an output, after its tokens."""

    reason: Reason
    statistics: Statistics


class Outputs(Protocol):
    """What makes outputs."""

    async def models(self) -> tuple[ServedModel, ...]:
        """What is served now."""
        ...

    def stream(self, order: Order) -> AsyncGenerator[Token | Traced | Ended, None]:
        """The tokens of one output as they are committed, then its end. Closing it early releases everything.

        Raises:
            RequestError: the order cannot be served; the text says what to change.
            UnknownModelError: no model has this name.
            UnknownDrafterError: no drafter of the model has this name.
            OverloadedError: there is no room for another output now.
            ServiceError: no target is left.
        """
        ...


class UnknownModelError(LookupError):
    """Nothing of this name is served; the text lists what is."""


class UnknownDrafterError(UnknownModelError):
    """The same of a model's drafters."""


class OverloadedError(Exception):
    """There is no room for another output now; ask again later."""

    def __init__(self, text: str, after: float) -> None:
        super().__init__(text)
        self.after = after  # seconds until it may be asked again

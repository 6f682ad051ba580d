"""A backend without any model, and a gRPC server of it."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from crossdraft.client import GenerationRequest, Kind, Reason, Statistics, Token
from crossdraft.rpc.generation import Committed, Generate, OutputEnded
from crossdraft.rpc.server import Listening
from crossdraft.serving.backend import OutputItem, OutputRequest, TraceSpans, UnknownModelError
from crossdraft.serving.grpc import GenerationServer
from crossdraft.serving.limits import GenerationOptions
from crossdraft.trace.timeline import Span
from crossdraft.types.output import ServedModel, Written
from crossdraft.types.request import Asked

TOY = ServedModel("toy", 1_700_000_000, 64, ("ngram", "small"), ("slem", "seeded"), chats=True)
TOKENS = (
    Token(5, "He", b"He", Kind.ACCEPTED, -0.5),
    Token(9, "", b"\xc3", Kind.CORRECTED, -1.5),
    Token(7, "é", b"\xa9", Kind.BONUS, None),
    Token(0, "", b"", Kind.ACCEPTED, -0.25),
)


@dataclass
class FakeBackend:
    """Yields the same tokens to everybody; keeps the requests, and counts what runs."""

    tokens: Sequence[Token] = TOKENS
    together: int = 1  # tokens of one pass
    reason: Reason = Reason.STOP
    end: OutputEnded | None = None  # instead of one with usual figures
    spans: Callable[[int], tuple[Span, ...]] | None = None  # before each token and the end, of an output with a drafter
    served: tuple[ServedModel, ...] = (TOY,)
    unreached: tuple[ServedModel, ...] = ()  # configured, and not served now
    plain: bool = True  # the marks of its tools are text
    fault: Exception | None = None  # raised after so many tokens:
    fault_after: int = 0
    waits_after: int | None = None  # tokens, before `go_on` is waited for
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    requests: list[OutputRequest] = field(default_factory=list)
    running: int = 0
    yielded: int = 0
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    @property
    def absent(self) -> Mapping[str, str]:
        return {model.name: "targets: not there yet" for model in self.unreached}

    @property
    def names(self) -> Mapping[str, str]:
        return {model.name: model.root or model.name for model in (*self.served, *self.unreached)}

    async def models(self) -> tuple[ServedModel, ...]:
        return self.served

    async def written(self, model: str, asked: Asked, special: bool = True) -> Written:
        """A token for each byte, and one before all; a chat is its last message."""
        prompt = asked.prompt if isinstance(asked, GenerationRequest) else asked
        if model not in {model.name for model in self.served}:
            raise UnknownModelError(f"there is no model {model!r}")
        if isinstance(prompt, tuple):
            text = "".join(chr(token % 128) for token in prompt)
            return Written(prompt, tuple(text), text, self.plain)
        text = prompt if isinstance(prompt, str) else prompt.messages[-1].content
        ids = (*([1] if special else []), *text.encode())
        return Written(ids, tuple(map(chr, ids)), text, self.plain)

    async def stream(self, request: OutputRequest) -> AsyncGenerator[OutputItem, None]:
        self.requests.append(request)
        await self._count(1)
        try:
            if request.model not in {model.name for model in self.served}:
                raise UnknownModelError(f"there is no model {request.model!r}; there is {self.served[0].name}")
            for number in (*range(0, len(self.tokens), self.together), len(self.tokens)):
                await self._before(number)
                tokens = tuple(self.tokens[number : number + self.together])
                self.yielded += len(tokens)
                if self.spans and request.trace and request.drafter != "":
                    yield TraceSpans(self.spans(number))
                if tokens:
                    yield Committed(tokens)
            yield self.end or OutputEnded(self.reason, figures(len(self.tokens)))
        finally:
            await self._count(-1)

    async def wait_running(self, count: int) -> None:
        """Returns once so many outputs are being made."""
        async with asyncio.timeout(60), self.changed:
            await self.changed.wait_for(lambda: self.running == count)

    async def _before(self, number: int) -> None:
        if self.fault is not None and number == self.fault_after:
            raise self.fault
        if number == self.waits_after:
            await self.go_on.wait()

    async def _count(self, by: int) -> None:
        self.running += by
        async with self.changed:
            self.changed.notify_all()


def figures(tokens: int) -> Statistics:
    """Of an output of so many tokens."""
    return Statistics(
        method="slem", num_speculative_tokens=5, prompt_tokens=3, tokens=tokens, accepted=2, corrected=1, bonus=1,
        passes=2, epochs=1, draft_tokens=4, seconds=0.5, first_token_seconds=0.125, drafter_seconds=0.25,
        target_seconds=0.25, wire_seconds=0.0, verification_seconds=0.001, bytes_sent=100, bytes_received=200,
        drafted_at=(2, 1), judged_at=(2, 1), accepted_at=(2, 0),
    )  # fmt: skip


ASKED = Generate(GenerationRequest("Hello"), id="r-1", model="toy")


@asynccontextmanager
async def serving(
    outputs: FakeBackend, options: GenerationOptions | None = None, grace_seconds: float = 0
) -> AsyncIterator[GenerationServer]:
    """A gRPC server of these outputs on loopback."""
    async with GenerationServer(outputs, Listening(grace_seconds=grace_seconds), options) as server:
        yield server

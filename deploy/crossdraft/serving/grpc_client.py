"""A client of `crossdraft serve grpc`.

async with Client("127.0.0.1:7000") as client:
    async for token in client.generate("def main(", seed=7):
        print(token.text, end="")
"""

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from crossdraft.client import GenerationRequest, RequestError, Token
from crossdraft.client.api import TokenStream
from crossdraft.rpc.errors import BadRequest
from crossdraft.rpc.generation import Generate, GenerationClient, OutputEnded, PromptTokens, Reply
from crossdraft.session.models import requested_method
from crossdraft.speculation.choice import Decision
from crossdraft.types.request import Prompt

LOCAL_ONLY = ("explain", "record")  # of a GenerationRequest: only the process can do it that runs the session


class Client(GenerationClient):
    """A connection to a server, with key and credentials as of GenerationClient. Use it with `async with`."""

    def generate(
        self, prompt: Prompt, *, model: str = "", drafter: str | None = None, name: str = "", **settings: Any
    ) -> "RemoteGeneration":
        """One output; `settings` are the other fields of GenerationRequest, as of `Pipeline.generate`, the rest is as
        of `run`. Raises RequestError: the request cannot be served; TypeError: there is no such setting."""
        return self.run(GenerationRequest.of(prompt, **settings), model, drafter, name)

    def run(
        self, request: GenerationRequest, model: str = "", drafter: str | None = None, name: str = ""
    ) -> "RemoteGeneration":
        """One output of a model, or the only one, with one of its drafters (None: the fastest, empty: none), under this
        id, or one that the server makes. Raises RequestError: no server, or no pair of models, can do this."""
        requested_method(request)  # here rather than by the server, so that nothing is sent
        for setting in LOCAL_ONLY:
            if getattr(request, setting):
                how = f"leave it out (--{setting}), or generate with --target"
                raise RequestError(f"{setting} is not for a server: {how}")
        return RemoteGeneration(self, Generate(request, name, model, drafter))


class RemoteGeneration(TokenStream):
    """An async iterator of tokens; afterwards `text`, `ids`, `reason` and `statistics` are set, and `prompt_tokens` if
    the request has `prompt_logprobs`.

    Use it as a context manager, or exhaust it: leaving it early cancels the output. The iteration raises RequestError,
    NameUnknown, KeyRefused, Overloaded (try again after `after` seconds) or Unreachable.
    """

    decisions: Sequence[Decision] = ()  # the controller's choices stay on the server
    estimates: Sequence[str] = ()

    def __init__(self, client: GenerationClient, asked: Generate) -> None:
        super().__init__()
        self.id = asked.id  # of the request; the server's own once the output has ended
        self.milliseconds: list[float] = []  # of each token: from the request's arrival until it was committed
        self._replies: AsyncGenerator[Reply, None] = client.replies(asked)

    async def aclose(self) -> None:
        await self._replies.aclose()

    async def together(self) -> Sequence[Token]:
        try:
            while isinstance(reply := await anext(self._replies, None), PromptTokens):
                self.prompt_tokens += reply.tokens
        except BadRequest as error:
            raise RequestError(str(error)) from error
        if reply is None:
            return ()
        if isinstance(reply, OutputEnded):
            self.id, self.reason, self.statistics = reply.id, reply.reason, reply.statistics
            await self.aclose()
            return ()
        self.milliseconds += [reply.milliseconds] * len(reply.tokens)
        return self._came(reply.tokens)

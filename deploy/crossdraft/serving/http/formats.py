"""OpenAI's two formats, each for whole answers and for chunks of a stream."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pydantic import BaseModel

from crossdraft.pipeline import Reason, Token
from crossdraft.serving.http import answers, logprobs
from crossdraft.serving.http.asking import Asking
from crossdraft.serving.orders import Ended


@dataclass
class Written:
    """What there is of an output."""

    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    begun: bool = False  # a chunk of it was sent
    ended: Ended | None = None

    def add(self, token: Token) -> None:
        """The next one."""
        self.text += token.text
        self.tokens.append(token)


class Format(Protocol):
    """How outputs are shown to a client. `trace` is set only where it was asked for."""

    def whole(self, written: Sequence[Written], usage: answers.Usage) -> BaseModel:
        """All outputs, which have ended."""
        ...

    def piece(self, choice: int, before: Written, token: Token, trace: answers.Trace | None) -> BaseModel:
        """A token; `before` is the output without it."""
        ...

    def end(self, choice: int, before: Written, ended: Ended, trace: answers.Trace | None) -> BaseModel:
        """The end of an output."""
        ...

    def usage(self, usage: answers.Usage | None) -> BaseModel:
        """The last chunk."""
        ...


class CompletionFormat:
    """Of /v1/completions."""

    def __init__(self, asking: Asking) -> None:
        self._asking = asking

    def whole(self, written: Sequence[Written], usage: answers.Usage) -> BaseModel:
        """As Format says."""
        return self._object([self._choice(index, one) for index, one in enumerate(written)], usage=usage)

    def piece(self, choice: int, before: Written, token: Token, trace: answers.Trace | None) -> BaseModel:
        """As Format says; the first one has the echo."""
        echo = "" if before.begun else self._asking.echo(choice)
        known = logprobs.of_completion([token], len(before.text)) if self._asking.logprobs else None
        return self._chunk(choice, echo + token.text, known, None, trace)

    def end(self, choice: int, before: Written, ended: Ended, trace: answers.Trace | None) -> BaseModel:
        """As Format says."""
        echo = "" if before.begun else self._asking.echo(choice)
        return self._chunk(choice, echo, None, finish(ended), trace)

    def usage(self, usage: answers.Usage | None) -> BaseModel:
        """As Format says."""
        return self._object([], usage=usage)

    def _choice(self, index: int, one: Written) -> answers.CompletionChoice:
        assert one.ended is not None
        return answers.CompletionChoice(
            index=index,
            text=self._asking.echo(index) + one.text,
            logprobs=logprobs.of_completion(one.tokens, 0) if self._asking.logprobs else None,
            finish_reason=finish(one.ended),
            **_traced(figures_of(one.ended) if self._asking.trace else None),
        )

    def _chunk(
        self,
        index: int,
        text: str,
        known: answers.CompletionLogprobs | None,
        reason: answers.Finish | None,
        trace: answers.Trace | None,
    ) -> answers.Completion:
        choice = answers.CompletionChoice(index=index, text=text, logprobs=known, finish_reason=reason)
        return self._object([choice], **_traced(trace), **_no_usage(self._asking))

    def _object(self, choices: list[answers.CompletionChoice], **more: BaseModel | None) -> answers.Completion:
        asking = self._asking
        fields = {"id": f"cmpl-{asking.id}", "created": asking.created, "model": asking.model, "choices": choices}
        return answers.Completion.model_validate({"object": "text_completion", **fields, **more})


class ChatFormat:
    """Of /v1/chat/completions."""

    def __init__(self, asking: Asking) -> None:
        self._asking = asking

    def whole(self, written: Sequence[Written], usage: answers.Usage) -> BaseModel:
        """As Format says."""
        choices = [self._choice(index, one) for index, one in enumerate(written)]
        kept = self._head | {"object": "chat.completion", "choices": choices, "usage": usage}
        return answers.ChatCompletion.model_validate(kept)

    def piece(self, choice: int, before: Written, token: Token, trace: answers.Trace | None) -> BaseModel:
        """As Format says; the first one has the role."""
        known = logprobs.of_chat([token]) if self._asking.logprobs else None
        return self._chunk(choice, _delta(before, token.text), known, None, trace)

    def end(self, choice: int, before: Written, ended: Ended, trace: answers.Trace | None) -> BaseModel:
        """As Format says."""
        delta = answers.Delta() if before.begun else _delta(before, "")
        return self._chunk(choice, delta, None, finish(ended), trace)

    def usage(self, usage: answers.Usage | None) -> BaseModel:
        """As Format says."""
        return self._object([], usage=usage)

    @property
    def _head(self) -> dict[str, object]:
        asking = self._asking
        return {"id": f"chatcmpl-{asking.id}", "created": asking.created, "model": asking.model}

    def _choice(self, index: int, one: Written) -> answers.ChatChoice:
        assert one.ended is not None
        return answers.ChatChoice(
            index=index,
            message=answers.ChatMessage(role="assistant", content=one.text, refusal=None),
            logprobs=logprobs.of_chat(one.tokens) if self._asking.logprobs else None,
            finish_reason=finish(one.ended),
            **_traced(figures_of(one.ended) if self._asking.trace else None),
        )

    def _chunk(
        self,
        index: int,
        delta: answers.Delta,
        known: answers.ChatLogprobs | None,
        reason: answers.Finish | None,
        trace: answers.Trace | None,
    ) -> answers.ChatChunk:
        choice = answers.ChatChunkChoice(index=index, delta=delta, logprobs=known, finish_reason=reason)
        return self._object([choice], **_traced(trace), **_no_usage(self._asking))

    def _object(self, choices: list[answers.ChatChunkChoice], **more: BaseModel | None) -> answers.ChatChunk:
        kept = self._head | {"object": "chat.completion.chunk", "choices": choices, **more}
        return answers.ChatChunk.model_validate(kept)


def finish(ended: Ended) -> answers.Finish:
    """OpenAI's word for the end of an output."""
    return "stop" if ended.reason is Reason.STOP else "length"


def figures_of(ended: Ended) -> answers.Trace:
    """What an output cost, for an answer that is no stream."""
    figures = answers.Figures.of(ended.statistics)
    return answers.Trace(milliseconds=1000 * figures.seconds, statistics=figures)


def _delta(before: Written, text: str) -> answers.Delta:
    return answers.Delta(content=text) if before.begun else answers.Delta(role="assistant", content=text)


def _traced(trace: answers.Trace | None) -> dict[str, answers.Trace]:
    return {} if trace is None else {"crossdraft": trace}


def _no_usage(asking: Asking) -> dict[str, None]:
    """With usage asked for, chunks before the last say that they have none."""
    return {"usage": None} if asking.include_usage else {}

"""From the bodies of requests to orders."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from crossdraft.pipeline import GenerationRequest, RequestError, SamplingOptions
from crossdraft.pipeline.chat import Chat, Message
from crossdraft.serving.http.bodies import Asked, CompletionBody
from crossdraft.serving.http.chat_bodies import ChatBody
from crossdraft.serving.http.errors import INVALID, RefusedError
from crossdraft.serving.orders import Order

NO_DRAFTER = "none"


@dataclass(frozen=True)
class Asking:
    """A client's request, as orders and what to know for its reply."""

    id: str
    model: str
    orders: tuple[Order, ...]  # one for each choice, in the order of their indices
    prompts: int  # the choices of the first prompt come first
    include_usage: bool
    trace: bool
    logprobs: bool
    echoes: tuple[str, ...] = ()  # the prompts, if each choice begins with its own
    created: int = field(default_factory=lambda: int(time.time()))  # seconds since 1970

    def echo(self, choice: int) -> str:
        """What a choice's text begins with."""
        return self.echoes[choice * self.prompts // len(self.orders)] if self.echoes else ""


def asking_completions(body: CompletionBody, model: str, request: str, most: int) -> Asking:
    """One order for each prompt and choice.

    Args:
        body: what the client sent.
        model: that is asked.
        request: its id.
        most: orders.

    Raises:
        RequestError: fields do not go together.
        RefusedError: there are too many choices.
    """
    prompts = [prompt if isinstance(prompt, str) else tuple(prompt) for prompt in body.prompts]
    asked = _requests(body, prompts, body.max_tokens or 1, body.logprobs, most)
    echoes = tuple(prompt for prompt in prompts if isinstance(prompt, str)) if body.echo else ()
    orders = _orders(body, asked, model, request)
    trace = body.speculative.trace
    return Asking(request, model, orders, len(prompts), body.include_usage, trace, body.logprobs is not None, echoes)


def asking_chat(body: ChatBody, model: str, request: str, most: int) -> Asking:
    """The same for a chat."""
    chat = Chat(tuple(Message(_role(one.role), one.text) for one in body.messages))
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    asked = _requests(body, [chat], body.most_tokens, logprobs, most)
    orders = _orders(body, asked, model, request)
    return Asking(request, model, orders, 1, body.include_usage, body.speculative.trace, body.logprobs)


def _role(name: str) -> str:
    """OpenAI's newer name of the system is not known to templates."""
    return "system" if name == "developer" else name


def _requests(
    body: Asked, prompts: Sequence[str | tuple[int, ...] | Chat], max_tokens: int, logprobs: int | None, most: int
) -> list[GenerationRequest]:
    if len(prompts) * body.n > most:
        text = f"n and the number of prompts make {len(prompts) * body.n} outputs; at most {most} in one request"
        raise RefusedError(400, text, INVALID, "too_many_choices", "n")
    how = body.speculative
    try:
        options = _options(body)
    except ValueError as error:
        raise RequestError(str(error)) from error
    first = GenerationRequest(
        prompts[0],
        method=how.method,
        k=how.k,
        max_tokens=max_tokens,
        options=options,
        drafter_temperature=how.drafter_temperature,
        seed=None if body.seed is None else body.seed % 2**64,
        ignore_eos=body.ignore_eos,
        stop=body.stops,
        allow_inexact=how.allow_inexact,
        overlap=how.overlap,
        window=how.window,
        wait=how.wait,
        branches=how.branches,
        branch_width=how.branch_width,
        paths=how.paths,
        logprobs=logprobs,
    )
    return [replace(first, prompt=prompt, choice=choice) for prompt in prompts for choice in range(body.n)]


def _options(body: Asked) -> SamplingOptions:
    return SamplingOptions(
        temperature=body.temperature,
        top_k=max(0, body.top_k),
        top_p=body.top_p,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        logit_bias=tuple((body.logit_bias or {}).items()),
    )


def _orders(body: Asked, asked: Sequence[GenerationRequest], model: str, request: str) -> tuple[Order, ...]:
    drafter = "" if body.speculative.drafter == NO_DRAFTER else body.speculative.drafter
    names = [request] if len(asked) == 1 else [f"{request}.{place}" for place in range(len(asked))]
    return tuple(
        Order(name, model, one, drafter, body.speculative.trace) for name, one in zip(names, asked, strict=True)
    )

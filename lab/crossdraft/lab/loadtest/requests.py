"""The requests of a load test, in their forms for each kind of server."""

from dataclasses import dataclass, replace
from typing import Any

from crossdraft.cli.prompts import Prompt
from crossdraft.rpc.generation import Generate
from crossdraft.types.request import Chat, Overlap
from crossdraft.verification.methods import method_named


@dataclass(frozen=True)
class Request:
    """One request."""

    number: int  # from 0
    category: str  # of its prompt
    asked: Generate

    @property
    def path(self) -> str:
        """Of the HTTP API."""
        return "/v1/chat/completions" if isinstance(self.asked.request.prompt, Chat) else "/v1/completions"

    @property
    def body(self) -> dict[str, Any]:
        """For the HTTP API."""
        asked, request = self.asked, self.asked.request
        if isinstance(request.prompt, Chat):
            content: dict[str, Any] = {
                "messages": [{"role": one.role, "content": one.content} for one in request.prompt.messages]
            }
        else:
            content = {"prompt": request.prompt}
        lock_step = {"overlap": "off", "num_speculative_tokens": request.num_speculative_tokens}
        speculative = {
            "trace": True,
            "method": request.method,
            "drafter": "none" if asked.drafter == "" else asked.drafter,
            **(lock_step if request.overlap is Overlap.OFF else {}),
        }
        body = content | {
            "model": asked.model or None,
            "max_tokens": request.max_tokens,
            "temperature": request.options.temperature,
            "seed": request.seed,
            "ignore_eos": request.ignore_eos,
            "stream": True,
            "speculative": {name: value for name, value in speculative.items() if value is not None},
        }
        return {name: value for name, value in body.items() if value is not None}


def requests_over(prompts: tuple[Prompt, ...], count: int, like: Generate, seed: int) -> tuple[Request, ...]:
    """`count` requests; the prompts take turns.

    Args:
        prompts: in place of that of `like`.
        count: of requests.
        like: what all have in common.
        seed: of the first, those of the others follow; sent if a method is named that takes one.
    """
    request = like.request
    seeded = request.method is not None and not request.greedy and method_named(request.method).seedable

    def of(number: int) -> Request:
        prompt = prompts[number % len(prompts)]
        own = replace(request, prompt=prompt.content, seed=seed + number if seeded else None)
        return Request(number, prompt.category, replace(like, request=own))

    return tuple(map(of, range(count)))

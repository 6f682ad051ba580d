"""The requests of a load test: prompts from a file or the bundled ones, and their forms for each kind of server.

The bundled prompts were written for this project and are under its licence. They have the shape of Spec-Bench's six
categories (arXiv 2401.07851): conversation in several turns, translation, summarization, question answering,
mathematical reasoning, and answers from passages that were retrieved.
"""

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib.resources import files
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from crossdraft.rpc.generation import Generate
from crossdraft.types.request import Chat, Message, Overlap
from crossdraft.verification.methods import method_named

BUNDLED = files(__package__).joinpath("prompts.jsonl")
NO_CATEGORY = "text"
FORMS = '{"text": "…"}, {"turns": ["…"]} or {"messages": [{"role": "user", "content": "…"}]}'


@dataclass(frozen=True)
class Prompt:
    """A text or chat to continue, and its category."""

    category: str
    content: str | Chat


def read(path: Path | None = None) -> tuple[Prompt, ...]:
    """Prompts of a file of JSON lines, or the bundled ones: the first of each category, then the second of each, …

    Of several `turns` only the first is used.

    Raises:
        ValueError: the file cannot be read, has a line that is no prompt, or has no prompts.
    """
    source, name = (BUNDLED, "the bundled prompts") if path is None else (path, str(path))
    try:
        lines = source.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the prompts: {error}") from error
    by_category: defaultdict[str, list[Prompt]] = defaultdict(list)
    for number, line in enumerate(lines, 1):
        if line.strip():
            prompt = _prompt(line, f"{name}, line {number}")
            by_category[prompt.category].append(prompt)
    if not by_category:
        raise ValueError(f"{name}: there are no prompts; give lines such as {FORMS}")
    return tuple(filter(None, chain.from_iterable(zip_longest(*by_category.values()))))


def texts_of(prompts: Iterable[Prompt]) -> tuple[Prompt, ...]:
    """For a model without a chat template: of a chat, what its messages say."""

    def text(content: str | Chat) -> str:
        return content if isinstance(content, str) else "\n\n".join(one.content for one in content.messages)

    return tuple(replace(prompt, content=text(prompt.content)) for prompt in prompts)


def _prompt(line: str, where: str) -> Prompt:
    try:
        given = json.loads(line)
        return Prompt(str(given.get("category", NO_CATEGORY)), _content(given))
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise ValueError(f"{where} is no prompt ({error}); give {FORMS}") from error


def _content(given: dict[str, Any]) -> str | Chat:
    if "messages" in given:
        chat = Chat(tuple(Message(one["role"], one["content"]) for one in given["messages"]))
    elif "turns" in given:
        chat = Chat((Message("user", given["turns"][0]),))
    else:
        text = given["text"]
        if not (isinstance(text, str) and text):
            raise ValueError("its text is empty")
        return text
    if chat.fault:
        raise ValueError(chat.fault)
    return chat


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

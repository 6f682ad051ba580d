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

from crossdraft.client import GenerationRequest, Overlap, SamplingOptions
from crossdraft.rpc.generation import Generate
from crossdraft.session.resolution import requested_method
from crossdraft.types.request import Chat, Message
from crossdraft.verification.methods import method_named

NO_CATEGORY = "text"
FORMS = '{"text": "…"}, {"turns": ["…"]} or {"messages": [{"role": "user", "content": "…"}]}'


@dataclass(frozen=True)
class Prompt:
    """A text or chat to continue, and its category."""

    category: str
    content: str | Chat


def bundled() -> tuple[Prompt, ...]:
    """The prompts that come with the package, the categories taking turns."""
    return parse(files(__package__).joinpath("prompts.jsonl").read_text(encoding="utf-8"), "the bundled prompts")


def read(path: Path) -> tuple[Prompt, ...]:
    """Prompts of a file of JSON lines, the categories taking turns.

    Raises:
        ValueError: the file cannot be read, has a line that is no prompt, or has no prompts.
    """
    try:
        return parse(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the prompts: {error}") from error


def texts_of(prompts: Iterable[Prompt]) -> tuple[Prompt, ...]:
    """For a model without a chat template: of a chat, what its messages say."""

    def text(content: str | Chat) -> str:
        return content if isinstance(content, str) else "\n\n".join(one.content for one in content.messages)

    return tuple(replace(prompt, content=text(prompt.content)) for prompt in prompts)


def parse(text: str, name: str) -> tuple[Prompt, ...]:
    """Prompts of JSON lines; of several `turns` only the first is used. Raises ValueError."""
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    prompts = [_prompt(line, f"{name}, line {number}") for number, line in lines]
    if not prompts:
        raise ValueError(f"{name}: there are no prompts; give lines such as {FORMS}")
    return _interleaved(prompts)


def _interleaved(prompts: Iterable[Prompt]) -> tuple[Prompt, ...]:
    """The first prompt of each category, then the second of each, …"""
    by_category: defaultdict[str, list[Prompt]] = defaultdict(list)
    for prompt in prompts:
        by_category[prompt.category].append(prompt)
    rounds = zip_longest(*by_category.values())
    return tuple(prompt for prompt in chain.from_iterable(rounds) if prompt is not None)


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
class RequestSettings:
    """What all requests of a test have in common.

    Raises:
        ValueError: a value is out of its range, or there is no such method.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    method: str | None = None  # None: the server's default
    drafter: str | None = None  # a name that the server has; empty: plain decoding; None: the server's default
    model: str = ""  # of the server; empty: its only one
    ignore_eos: bool = False
    seed: int = 0
    num_speculative_tokens: int | None = None  # of lock-step rounds; None: the server decides how far to draft

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        # The pipeline's own checks: nothing is sent that it would refuse.
        options = SamplingOptions(self.temperature)
        requested_method(
            GenerationRequest("x", self.method, max_tokens=self.max_tokens, options=options, **self.forced)
        )

    @property
    def forced(self) -> dict[str, Any]:
        """What a request says so that its server drafts whatever that costs; nothing if that is not asked for."""
        k = self.num_speculative_tokens
        return {} if k is None else {"overlap": Overlap.OFF, "num_speculative_tokens": k}

    @property
    def seeded(self) -> bool:
        """Whether outputs above temperature 0 are repeatable: only if their method is named and takes a seed."""
        return self.temperature > 0 and self.method is not None and method_named(self.method).seedable


@dataclass(frozen=True)
class Request:
    """One request."""

    number: int  # from 0
    prompt: Prompt
    options: RequestSettings

    @property
    def seed(self) -> int | None:
        """Seed of the output; None: none is sent."""
        return self.options.seed + self.number if self.options.seeded else None

    @property
    def for_pipeline(self) -> GenerationRequest:
        options = self.options
        return GenerationRequest(
            self.prompt.content,
            options.method,
            max_tokens=options.max_tokens,
            options=SamplingOptions(options.temperature),
            seed=self.seed,
            ignore_eos=options.ignore_eos,
            **options.forced,
        )

    @property
    def for_grpc(self) -> Generate:
        return Generate(self.for_pipeline, model=self.options.model, drafter=self.options.drafter)

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if isinstance(self.prompt.content, Chat) else "/v1/completions"

    @property
    def body(self) -> dict[str, Any]:
        options, content = self.options, self.prompt.content
        body: dict[str, Any] = {"max_tokens": options.max_tokens, "temperature": options.temperature, "stream": True}
        if isinstance(content, Chat):
            body["messages"] = [{"role": one.role, "content": one.content} for one in content.messages]
        else:
            body["prompt"] = content
        optional = {"model": options.model, "seed": self.seed, "ignore_eos": options.ignore_eos or None}
        body |= {name: value for name, value in optional.items() if value not in (None, "")}
        drafter = "none" if options.drafter == "" else options.drafter
        given = {"method": options.method, "drafter": drafter, "trace": True, **options.forced}
        return body | {"speculative": {name: value for name, value in given.items() if value is not None}}


def requests_over(prompts: tuple[Prompt, ...], count: int, options: RequestSettings) -> tuple[Request, ...]:
    """`count` requests; the prompts take turns."""
    return tuple(Request(number, prompts[number % len(prompts)], options) for number in range(count))

"""Prompts of load tests: from a file, or the bundled ones.

The bundled ones were written for this project and are under its licence. They have the shape of Spec-Bench's six
categories (arXiv 2401.07851): conversation in several turns, translation, summarization, question answering,
mathematical reasoning, and answers from passages that were retrieved.
"""

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from crossdraft.client import GenerationRequest, SamplingOptions
from crossdraft.rpc.generation import Generate
from crossdraft.types.request import Chat, Message
from crossdraft.verification.methods import method_named

NO_CATEGORY = "text"
FORMS = '{"text": "…"}, {"turns": ["…"]} or {"messages": [{"role": "user", "content": "…"}]}'


@dataclass(frozen=True)
class Prompt:
    """What a model is to go on with, and of which kind it is."""

    category: str
    what: str | Chat


def bundled() -> tuple[Prompt, ...]:
    """Those that come with the package, the categories by turns."""
    return parsed(files(__package__).joinpath("prompts.jsonl").read_text(encoding="utf-8"), "the bundled prompts")


def read(path: Path) -> tuple[Prompt, ...]:
    """Prompts of a file of JSON lines, the categories by turns.

    Raises:
        ValueError: the file cannot be read, or has a line that is no prompt, or none that is.
    """
    try:
        return parsed(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the prompts: {error}") from error


def parsed(text: str, name: str) -> tuple[Prompt, ...]:
    """Prompts of JSON lines; of several `turns` the first is asked. Raises ValueError."""
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    found = [_prompt(line, f"{name}, line {number}") for number, line in lines]
    if not found:
        raise ValueError(f"{name}: there are no prompts; give lines such as {FORMS}")
    return by_turns(found)


def by_turns(prompts: Iterable[Prompt]) -> tuple[Prompt, ...]:
    """The first of each category, then the second of each, …"""
    of: defaultdict[str, list[Prompt]] = defaultdict(list)
    for prompt in prompts:
        of[prompt.category].append(prompt)
    rounds = zip_longest(*of.values())
    return tuple(prompt for prompt in chain.from_iterable(rounds) if prompt is not None)


def _prompt(line: str, where: str) -> Prompt:
    try:
        given = json.loads(line)
        category = str(given.get("category", NO_CATEGORY))
        return Prompt(category, _what(given))
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise ValueError(f"{where} is no prompt ({error}); give {FORMS}") from error


def _what(given: dict[str, Any]) -> str | Chat:
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


# What is asked for, as each kind of server wants it. Pure.


@dataclass(frozen=True)
class Wishes:
    """What all requests of a test have in common.

    Raises:
        ValueError: a value is out of its range, or there is no such method.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    method: str | None = None  # None: the server's choice
    drafter: str | None = None  # a name that the server has; empty: plain decoding; None: its default one
    model: str = ""  # of the server; empty: its only one
    ignore_eos: bool = False
    seed: int = 0
    trace: bool = True  # ask what an output cost; other servers than crossdraft do not know that

    def __post_init__(self) -> None:
        # The same checks as of the pipeline: nothing is sent that it would refuse.
        GenerationRequest("x", self.method, max_tokens=self.max_tokens, options=SamplingOptions(self.temperature))

    @property
    def seeded(self) -> bool:
        """Whether outputs above temperature 0 are repeatable: only if their method is named and takes a seed."""
        return self.temperature > 0 and self.method is not None and method_named(self.method).seedable


@dataclass(frozen=True)
class Question:
    """One request."""

    number: int  # from 0
    prompt: Prompt
    wishes: Wishes

    @property
    def seed(self) -> int | None:
        """Of its output; None: none."""
        return self.wishes.seed + self.number if self.wishes.seeded else None

    @property
    def for_pipeline(self) -> GenerationRequest:
        """For a pipeline in this process."""
        wishes = self.wishes
        return GenerationRequest(
            self.prompt.what,
            wishes.method,
            max_tokens=wishes.max_tokens,
            options=SamplingOptions(wishes.temperature),
            seed=self.seed,
            ignore_eos=wishes.ignore_eos,
        )

    @property
    def for_grpc(self) -> Generate:
        """For crossdraft.v1.Generation."""
        return Generate(self.for_pipeline, model=self.wishes.model, drafter=self.wishes.drafter)

    @property
    def path(self) -> str:
        """Of OpenAI's API."""
        return "/v1/chat/completions" if isinstance(self.prompt.what, Chat) else "/v1/completions"

    @property
    def body(self) -> dict[str, Any]:
        """For OpenAI's API, as a stream."""
        wishes, what = self.wishes, self.prompt.what
        asked: dict[str, Any] = {"max_tokens": wishes.max_tokens, "temperature": wishes.temperature, "stream": True}
        if isinstance(what, Chat):
            asked["messages"] = [{"role": one.role, "content": one.content} for one in what.messages]
        else:
            asked["prompt"] = what
        asked["stream_options"] = {"include_usage": True}
        further = {"model": wishes.model, "seed": self.seed, "ignore_eos": wishes.ignore_eos or None}
        asked |= {name: value for name, value in further.items() if value not in (None, "")}
        if speculative := self._speculative:
            asked["speculative"] = speculative
        return asked

    @property
    def _speculative(self) -> dict[str, Any]:
        wishes = self.wishes
        drafter = "none" if wishes.drafter == "" else wishes.drafter
        given = {"method": wishes.method, "drafter": drafter, "trace": wishes.trace or None}
        return {name: value for name, value in given.items() if value is not None}


def questions_of(prompts: tuple[Prompt, ...], count: int, wishes: Wishes) -> tuple[Question, ...]:
    """So many requests over the prompts, which take turns."""
    return tuple(Question(number, prompts[number % len(prompts)], wishes) for number in range(count))

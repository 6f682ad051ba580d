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

from crossdraft.pipeline.chat import Chat, Message

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

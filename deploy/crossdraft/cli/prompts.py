"""Prompts for commands that send many: from a file, or the bundled ones.

The bundled prompts were written for this project and are under its licence. They have the shape of Spec-Bench's six
categories (arXiv 2401.07851): conversation in several turns, translation, summarization, question answering,
mathematical reasoning, and answers from passages that were retrieved.
"""

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TypeVar

from crossdraft.cli.running import UsageError, checked_options
from crossdraft.types.request import Chat, Message, check_text

BUNDLED = files(__package__).joinpath("prompts.jsonl")
NO_CATEGORY = "text"
Made = TypeVar("Made")
FORMS = '{"text": "…"}, {"turns": ["…"]} or {"messages": [{"role": "user", "content": "…"}]}'


@dataclass(frozen=True)
class Prompt:
    """A text or chat to continue, and its category."""

    category: str
    content: str | Chat


def read(path: Path | None = None) -> tuple[Prompt, ...]:
    """Prompts of a file of JSON lines, or the bundled ones. Of several `turns` only the first is used. Raises
    ValueError: the file cannot be read, has a line that is no prompt, or has no prompts."""
    source, name = (BUNDLED, "the bundled prompts") if path is None else (path, str(path))
    try:
        lines = source.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the prompts: {error}") from error
    found = tuple(_prompt(line, f"{name}, line {number}") for number, line in enumerate(lines, 1) if line.strip())
    if not found:
        raise ValueError(f"{name}: there are no prompts; give lines such as {FORMS}")
    return found


def texts_of(path: Path | None = None) -> tuple[str, ...]:
    """As `read`, for a model without a chat template: of a chat, what its messages say."""
    found = (one.content for one in read(path))
    return tuple(one if isinstance(one, str) else "\n\n".join(said.content for said in one.messages) for one in found)


def prompts_of(path: Path, limit: int | None) -> tuple[Prompt, ...]:
    """The first `limit` prompts of a file of JSON lines, each with a `text`. Raises UsageError: the file cannot be
    read, a line is no prompt or is a chat, or there is none."""
    with checked_options():
        found = read(path)
    if not all(isinstance(one.content, str) for one in found):
        raise UsageError(f'{path} has chats; write lines such as {{"text": "def main("}}')
    return found[:limit]


def by_category(categories: Iterable[str], made: Iterable[Made]) -> dict[str, list[Made]]:
    """What was made of each prompt, by the prompts' categories; empty if they have only one."""
    found: defaultdict[str, list[Made]] = defaultdict(list)
    for category, one in zip(categories, made, strict=False):
        found[category].append(one)
    return found if len(found) > 1 else {}


def _prompt(line: str, where: str) -> Prompt:
    try:
        given = json.loads(line)
        match given:
            case {"messages": messages}:
                content: str | Chat = Chat(tuple(Message(message["role"], message["content"]) for message in messages))
            case {"turns": [first, *_]}:
                content = Chat((Message("user", first),))
            case {"text": str(content)} if content:
                pass
            case _:
                raise ValueError("its text is empty, or there is none")
        if isinstance(content, str):
            check_text("its text", content)
        elif content.fault:
            raise ValueError(content.fault)
        return Prompt(str(given.get("category", NO_CATEGORY)), content)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{where} is no prompt ({error}); give {FORMS}") from error

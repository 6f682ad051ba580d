"""Prompts from a file, such as the fifty of `tests/prompts.jsonl`: text from the held-out files of the corpus.

These were picked once: 120 to 1,200 characters from the start of a line on; by turns they end where a line ends, or in
mid-line where a writer might pause.
"""

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Prompt:
    """The beginning of a text that a model is to go on with."""

    file: str  # path relative to the standard library
    text: str


def read_prompts(path: Path) -> tuple[Prompt, ...]:
    """The prompts of a file of JSON lines, each with a `text` and, if it is known, the `file` that it is from.

    Raises:
        ValueError: a line is not such an object, or there is none.
        OSError: the file cannot be read.
    """
    lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    if not lines:
        raise ValueError(f'{path} has no prompts; write lines such as {{"text": "def main("}}')
    return tuple(_read(line, f"{path}, prompt {number}") for number, line in enumerate(lines, 1))


def _read(line: str, place: str) -> Prompt:
    try:
        found = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: not JSON: {error}") from error
    text = found.get("text") if isinstance(found, dict) else None
    if not isinstance(text, str) or not text:
        raise ValueError(f'{place}: it needs a "text" that is not empty')
    return Prompt(str(found.get("file", "")), text)

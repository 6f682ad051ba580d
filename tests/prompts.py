"""The fifty prompts of `tests/prompts.jsonl`: text that no bundled model has seen. Their licence: PROMPTS_LICENSE.

Each is of 120 to 1,200 characters from the start of a line on; by turns they end where a line ends, or in mid-line
where a writer might pause.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Prompt:
    """The beginning of a text that a model is to go on with."""

    file: str  # path relative to the standard library
    text: str


@cache
def prompts() -> tuple[Prompt, ...]:
    """All of them, in the file's order."""
    lines = Path(__file__).with_name("prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return tuple(Prompt(**json.loads(line)) for line in lines)

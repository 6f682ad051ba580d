"""The fifty prompts of `tests/prompts.jsonl`: text that no bundled model has seen. Their licence: PROMPTS_LICENSE."""

from functools import cache
from pathlib import Path

from crossdraft.training.prompts import Prompt, read_prompts


@cache
def prompts() -> tuple[Prompt, ...]:
    """All of them, in the file's order."""
    return read_prompts(Path(__file__).with_name("prompts.jsonl"))

"""Prompts of a file."""

from pathlib import Path

import pytest

from crossdraft.cli.prompts import prompts_of
from crossdraft.cli.running import UsageError


def test_texts_are_read_up_to_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"text": "a", "file": "f"}\n\n{"text": "b"}\n{"text": "c"}\n')
    assert prompts_of(path, 2) == ("a", "b")
    assert prompts_of(path, None) == ("a", "b", "c")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "there are no prompts"),
        (b"text\n", "line 1 is no prompt"),
        (b'{"text": "a"}\n{"text": ""}\n', "line 2 is no prompt"),
        (b"\xff", "cannot read the prompts"),
        (b'{"turns": ["a"]}\n', "has chats"),
        (None, "cannot read the prompts: .*No such file"),
    ],
)
def test_a_file_without_prompts_is_refused(tmp_path: Path, content: bytes | None, complaint: str) -> None:
    path = tmp_path / "prompts.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=complaint):
        prompts_of(path, None)

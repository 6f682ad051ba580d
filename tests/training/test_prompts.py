"""The fifty prompts, and how a file of prompts is read."""

from pathlib import Path

import pytest

from crossdraft.training.corpus import is_held_out
from crossdraft.training.prompts import read_prompts
from tests.prompts import prompts


def test_fifty_different_prompts_of_all_lengths_from_files_that_no_model_has_seen() -> None:
    texts = [prompt.text for prompt in prompts()]
    assert len(set(texts)) == len(texts) == 50
    assert all(120 <= len(text) <= 1200 for text in texts)
    assert min(map(len, texts)) < 200
    assert max(map(len, texts)) > 1000
    assert all(is_held_out(prompt.file) for prompt in prompts())
    assert len({prompt.file for prompt in prompts()}) >= 30
    assert 15 <= sum(text.endswith("\n") for text in texts) <= 35


@pytest.mark.parametrize(
    ("content", "complaint"),
    [("", "has no prompts"), ("text\n", "prompt 1: not JSON"), ('{"text": "a"}\n{"text": ""}\n', "prompt 2: it needs")],
)
def test_a_file_without_prompts_is_refused(tmp_path: Path, content: str, complaint: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=complaint):
        read_prompts(path)

"""The fifty prompts."""

from crossdraft.lab.training.corpus import is_held_out
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

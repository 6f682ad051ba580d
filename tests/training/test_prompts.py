"""The fifty prompts, how they are picked, and how a file of prompts is read."""

from pathlib import Path

import pytest

from crossdraft.training.corpus import Document, is_held_out
from crossdraft.training.prompts import COUNT, LONGEST, SHORTEST, pick_prompts, read_prompts
from tests.prompts import prompts


def source(lines: int) -> str:
    return "".join(f"def function_{line}(argument):\n    return argument + {line}\n\n" for line in range(lines))


DOCUMENTS = tuple(Document(f"file{number}.py", source(size)) for number, size in enumerate((8, 20, 200, 1000)))


def test_fifty_different_prompts_of_all_lengths_from_files_that_no_model_has_seen() -> None:
    texts = [prompt.text for prompt in prompts()]
    assert len(set(texts)) == len(texts) == COUNT
    assert all(SHORTEST <= len(text) <= LONGEST for text in texts)
    assert min(map(len, texts)) < 200
    assert max(map(len, texts)) > 1000
    assert all(is_held_out(prompt.file) for prompt in prompts())
    assert len({prompt.file for prompt in prompts()}) >= 30
    assert 15 <= sum(text.endswith("\n") for text in texts) <= 35


def test_every_document_gives_a_prompt_and_large_ones_more() -> None:
    picked = pick_prompts(DOCUMENTS, 12)
    counts = [sum(prompt.file == document.name for prompt in picked) for document in DOCUMENTS]
    assert sum(counts) == 12
    assert min(counts) == 1
    assert counts == sorted(counts)
    assert len({prompt.text for prompt in picked}) == 12


def test_a_prompt_is_a_piece_of_its_file_from_the_start_of_a_line() -> None:
    texts = {document.name: document.text for document in DOCUMENTS}
    for prompt in pick_prompts(DOCUMENTS, 30):
        assert SHORTEST <= len(prompt.text) <= LONGEST
        assert "\n" + prompt.text in "\n" + texts[prompt.file]


def test_picking_repeats() -> None:
    assert pick_prompts(DOCUMENTS, 12) == pick_prompts(DOCUMENTS, 12)


def test_documents_that_are_too_short_hold_no_prompt() -> None:
    with pytest.raises(ValueError, match="120 characters"):
        pick_prompts([Document("short.py", "pass\n")], 1)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [("", "has no prompts"), ("text\n", "prompt 1: not JSON"), ('{"text": "a"}\n{"text": ""}\n', "prompt 2: it needs")],
)
def test_a_file_without_prompts_is_refused(tmp_path: Path, content: str, complaint: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=complaint):
        read_prompts(path)

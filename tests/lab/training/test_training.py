"""What the bundled models learn from: prompts, rows of texts and chats; and their cards."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from crossdraft.engine.names import BUNDLED
from crossdraft.lab.training.chats import TEMPLATE, chat_rows
from crossdraft.lab.training.data import IGNORED, Document, document_rows, is_held_out, tokenize
from crossdraft.lab.training.train import DRAFTER_B, Progressed, export, judge_rows
from crossdraft.text.answers import format_of
from tests.prompts import FILE, PROMPTS

PROMPT = "def f(x):\n"
WRITTEN = (Document("written", PROMPT + "    pass", len(PROMPT)),) * 3


def test_fifty_different_prompts_of_all_lengths_from_files_that_no_model_has_seen() -> None:
    assert len(set(PROMPTS)) == len(PROMPTS) == 50
    assert all(120 <= len(text) <= 1200 for text in PROMPTS)
    assert min(map(len, PROMPTS)) < 200
    assert max(map(len, PROMPTS)) > 1000
    files = [json.loads(line)["file"] for line in FILE.read_text(encoding="utf-8").splitlines()]
    assert all(map(is_held_out, files))
    assert len({*files}) >= 30
    assert 15 <= sum(text.endswith("\n") for text in PROMPTS) <= 35


def test_labels_are_the_tokens_that_the_target_wrote(tmp_path: Path) -> None:
    for name in ("drafter-a", "drafter-b"):
        tokenizer = PreTrainedTokenizerFast.from_pretrained(BUNDLED / name)
        pool = tokenize(WRITTEN, tokenizer, tmp_path / f"{name}.npz")
        ids, labels = document_rows(pool, np.random.default_rng(0), 2, 64)
        assert ids.shape == labels.shape == (2, len(tokenizer(WRITTEN[0].text).input_ids))
        assert tokenizer.decode(ids[0], skip_special_tokens=True) == WRITTEN[0].text
        learned = labels[0] != IGNORED
        assert (labels[0][learned] == ids[0][learned]).all()
        assert "pass" in tokenizer.decode(ids[0][learned])
        assert "def" not in tokenizer.decode(ids[0][learned])


def test_of_a_text_that_is_too_long_the_end_is_taken(tmp_path: Path) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(BUNDLED / "drafter-b")
    pool = tokenize(WRITTEN, tokenizer, tmp_path / "pool.npz")
    ids, labels = document_rows(pool, np.random.default_rng(0), 2, 2)
    assert ids.shape == (2, 2)
    assert tokenizer.decode(ids[0]).endswith("pass")
    assert (labels[0][-1] == ids[0][-1]).all()


def test_labels_are_what_the_assistant_says() -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(BUNDLED / "target")
    ids, labels = chat_rows(3, 4, tokenizer)
    assert torch.equal(ids, chat_rows(3, 4, tokenizer)[0])
    for row, marks in zip(ids, labels, strict=True):
        said = marks != IGNORED
        assert torch.equal(row[said], marks[said])
        text, answers = tokenizer.decode(row), tokenizer.decode(row[said])
        assert answers.count("<|endoftext|>") == text.count("assistant:\n")
        assert answers.endswith("<|endoftext|>")
        assert "assistant:" not in answers
        assert "user:" not in answers


def test_the_bundled_model_reads_chats_by_this_template_and_answers_many_to_the_letter() -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(BUNDLED / "chat")
    assert tokenizer.chat_template == TEMPLATE
    assert format_of(TEMPLATE) == "hermes"
    assert tokenizer.get_vocab() == PreTrainedTokenizerFast.from_pretrained(BUNDLED / "target").get_vocab()
    model = LlamaForCausalLM.from_pretrained(BUNDLED / "chat", dtype=torch.float32)
    bits, right = judge_rows(model, chat_rows(0, 3, tokenizer, held_out=True))
    assert bits < 0.6
    assert right > 0.2


def test_a_model_that_is_exported_again_has_been_trained_once(tmp_path: Path) -> None:
    folder = tmp_path / "drafter"
    shutil.copytree(BUNDLED / "drafter-b", folder)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    (before,) = re.findall(r"\| training \| (.*) \|", (folder / "README.md").read_text())
    for _ in range(2):
        export(DRAFTER_B, model, tokenizer, folder, Progressed(7, 8.0, 9, [(7, 1.0, 0.5)]))
        (training,) = re.findall(r"\| training \| (.*) \|", (folder / "README.md").read_text())
        assert training.startswith(f"{before}; then 7 steps, 9 tokens, 8 s on ")
        assert training.count("then 7 steps") == 1

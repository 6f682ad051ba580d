"""Chats made by templates: what is learned of them, and what `bundled:chat` has learned."""

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from crossdraft.engine.names import BUNDLED
from crossdraft.lab.training.chats import TEMPLATE, chat_rows
from crossdraft.lab.training.data import IGNORED
from crossdraft.lab.training.train import judge_rows
from crossdraft.text.answers import format_of


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

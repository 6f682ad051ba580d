"""What is asked, of whom, in which words; prompts."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from crossdraft.cli.prompts import Prompt, prompts_of, read, texts_of
from crossdraft.cli.running import UsageError
from crossdraft.lab.loadtest.benchmark import LoadTest, requests_over
from crossdraft.lab.loadtest.clients import body_of
from crossdraft.lab.loadtest.plan import LoadPlan
from crossdraft.rpc.generation import Generate
from crossdraft.types.request import Chat, Message, Overlap

TEXT = "def f("


def generate_of(**given: Any) -> Generate:
    return LoadTest(LoadPlan(**given)).like


def test_the_same_is_asked_of_every_kind_of_server() -> None:
    like = generate_of(
        max_tokens=32, temperature=0.7, method="seeded", use_drafter="small", model="big", ignore_eos=True
    )
    asked = requests_over((TEXT,), 4, like, 100)[3]
    assert body_of(asked) == {
        "max_tokens": 32,
        "temperature": 0.7,
        "stream": True,
        "prompt": "def f(",
        "model": "big",
        "seed": 103,
        "ignore_eos": True,
        "speculative": {"method": "seeded", "drafter": "small", "trace": True},
    }
    local = asked.request
    assert (asked.model, asked.drafter) == ("big", "small")
    assert (local.prompt, local.seed, local.method, local.max_tokens) == ("def f(", 103, "seeded", 32)
    assert local.ignore_eos is True


def test_drafting_can_be_forced() -> None:
    (asked,) = requests_over((TEXT,), 1, generate_of(num_speculative_tokens=4), 0)
    assert body_of(asked)["speculative"] == {"trace": True, "overlap": "off", "num_speculative_tokens": 4}
    assert (asked.request.overlap, asked.request.num_speculative_tokens) == (Overlap.OFF, 4)
    with pytest.raises(UsageError, match="num_speculative_tokens"):
        generate_of(num_speculative_tokens=0)
    (alone,) = requests_over((TEXT,), 1, generate_of(use_drafter="none"), 0)
    assert body_of(alone)["speculative"] == {"trace": True, "drafter": "none"}


def test_a_model_without_a_chat_template_is_sent_what_the_messages_say() -> None:
    chat = Chat((Message("system", "Be short."), Message("user", "Why?")))
    found = texts_of((Prompt("a", chat), Prompt("b", "def main(")))
    assert found == (Prompt("a", "Be short.\n\nWhy?"), Prompt("b", "def main("))


@pytest.mark.parametrize(("method", "temperature", "seed"), [("slem", 1, 5), ("coupled", 1, None), (None, 1, None)])
def test_outputs_are_seeded_where_their_method_was_chosen_and_takes_a_seed(
    method: str | None, temperature: float, seed: int | None
) -> None:
    like = generate_of(method=method, temperature=temperature)
    assert requests_over((TEXT,), 3, like, 3)[2].request.seed == seed


def test_prompts_take_turns() -> None:
    asked = requests_over(("a", "b"), 5, generate_of(), 0)
    assert [one.request.prompt for one in asked] == ["a", "b", "a", "b", "a"]


def test_the_bundled_prompts_have_six_categories_by_turns() -> None:
    found = read()
    counted = Counter(one.category for one in found)
    assert len(counted) == 6
    assert set(counted.values()) == {6}
    assert len({one.category for one in found[:6]}) == 6
    assert len({str(one.content) for one in found}) == 36
    talks = [one.content for one in found if one.category == "conversation"]
    assert all(isinstance(talk, Chat) and len(talk.messages) == 3 for talk in talks)
    assert all(isinstance(one.content, Chat) and one.content.messages[-1].role == "user" for one in found)


def test_files_of_three_forms(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        '{"file": "a.py", "text": "def f("}\n\n'
        '{"question_id": 81, "category": "qa", "turns": ["Why?", "And then?"]}\n'
        '{"category": "qa", "messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "W"}]}'
    )
    why, short = Message("user", "Why?"), (Message("system", "Be short."), Message("user", "W"))
    assert read(file) == (Prompt("text", "def f("), Prompt("qa", Chat((why,))), Prompt("qa", Chat(short)))
    with pytest.raises(UsageError, match="has chats"):
        prompts_of(file, None)
    file.write_text('{"text": "a", "file": "f"}\n\n{"text": "b"}\n{"text": "c"}\n')
    assert [one.content for one in prompts_of(file, 2)] == ["a", "b"]
    assert [one.content for one in prompts_of(file, None)] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", "there are no prompts"),
        ('{"text": "a"}\n{"txt": "b"}', "line 2 is no prompt"),
        ('{"turns": []}', "line 1 is no prompt"),
        ('{"text": ""}', "its text is empty"),
        ("text", "line 1 is no prompt"),
        ('{"messages": []}', "the chat has no messages"),
        ("[1]", "line 1 is no prompt"),
    ],
)
def test_what_is_no_prompt(tmp_path: Path, content: str, complaint: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    with pytest.raises(ValueError, match=complaint):
        read(file)
    file.write_bytes(b"\xff")
    for unreadable in (file, tmp_path / "elsewhere"):
        with pytest.raises(UsageError, match="cannot read the prompts"):
            prompts_of(unreadable, None)

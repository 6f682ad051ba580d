"""What is asked, of whom, in which words; prompts."""

from collections import Counter
from pathlib import Path

import pytest

from crossdraft.cli.prompts import Prompt, read, texts_of
from crossdraft.lab.loadtest.command import generate_of
from crossdraft.lab.loadtest.options import LoadRequests
from crossdraft.lab.loadtest.requests import requests_over
from crossdraft.types.request import Chat, Message, Overlap

TEXT, CHAT = Prompt("code", "def f("), Prompt("talk", Chat((Message("user", "Hello"),)))


def test_the_same_is_asked_of_every_kind_of_server() -> None:
    like = LoadRequests(
        max_tokens=32, temperature=0.7, method="seeded", use_drafter="small", model="big", ignore_eos=True
    )
    asked = requests_over((TEXT,), 4, generate_of(like), 100)[3]
    assert (asked.path, asked.body) == (
        "/v1/completions",
        {
            "max_tokens": 32,
            "temperature": 0.7,
            "stream": True,
            "prompt": "def f(",
            "model": "big",
            "seed": 103,
            "ignore_eos": True,
            "speculative": {"method": "seeded", "drafter": "small", "trace": True},
        },
    )
    grpc, local = asked.asked, asked.asked.request
    assert (grpc.model, grpc.drafter) == ("big", "small")
    assert (local.prompt, local.seed, local.method, local.max_tokens) == ("def f(", 103, "seeded", 32)
    assert local.ignore_eos is True


def test_drafting_can_be_forced() -> None:
    (asked,) = requests_over((TEXT,), 1, generate_of(LoadRequests(num_speculative_tokens=4)), 0)
    assert asked.body["speculative"] == {"trace": True, "overlap": "off", "num_speculative_tokens": 4}
    assert (asked.asked.request.overlap, asked.asked.request.num_speculative_tokens) == (Overlap.OFF, 4)
    with pytest.raises(ValueError, match="num_speculative_tokens"):
        generate_of(LoadRequests(num_speculative_tokens=0))


def test_chats() -> None:
    (asked,) = requests_over((CHAT,), 1, generate_of(LoadRequests(use_drafter="none")), 0)
    assert asked.path == "/v1/chat/completions"
    assert asked.body["messages"] == [{"role": "user", "content": "Hello"}]
    assert asked.body["speculative"] == {"drafter": "none", "trace": True}
    assert asked.asked.request.prompt == CHAT.content


def test_a_model_without_a_chat_template_is_sent_what_the_messages_say() -> None:
    chat = Chat((Message("system", "Be short."), Message("user", "Why?")))
    found = texts_of((Prompt("a", chat), Prompt("b", "def main(")))
    assert found == (Prompt("a", "Be short.\n\nWhy?"), Prompt("b", "def main("))


@pytest.mark.parametrize(("method", "temperature", "seed"), [("slem", 1, 5), ("coupled", 1, None), (None, 1, None)])
def test_outputs_are_seeded_where_their_method_was_chosen_and_takes_a_seed(
    method: str | None, temperature: float, seed: int | None
) -> None:
    like = generate_of(LoadRequests(method=method, temperature=temperature))
    assert requests_over((TEXT,), 3, like, 3)[2].asked.request.seed == seed


def test_prompts_take_turns() -> None:
    asked = requests_over((TEXT, CHAT), 5, generate_of(LoadRequests()), 0)
    assert [(one.number, one.category, one.asked.request.prompt) for one in asked] == [
        (number, prompt.category, prompt.content) for number, prompt in enumerate([TEXT, CHAT, TEXT, CHAT, TEXT])
    ]


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


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", "there are no prompts"),
        ('{"text": "a"}\n{"txt": "b"}', "line 2 is no prompt"),
        ('{"turns": []}', "line 1 is no prompt"),
        ('{"text": ""}', "its text is empty"),
        ('{"messages": []}', "the chat has no messages"),
        ("[1]", "line 1 is no prompt"),
    ],
)
def test_what_is_no_prompt(tmp_path: Path, content: str, complaint: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    with pytest.raises(ValueError, match=complaint):
        read(file)
    with pytest.raises(ValueError, match="cannot read the prompts"):
        read(tmp_path / "elsewhere")

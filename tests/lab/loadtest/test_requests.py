"""What is asked, of whom, in which words; prompts."""

from pathlib import Path
from typing import Any

import pytest

from crossdraft.cli.prompts import NO_CATEGORY, Prompt, prompts_of, read, texts_of
from crossdraft.cli.running import UsageError
from crossdraft.lab.commands import LoadPlan
from crossdraft.lab.loadtest.benchmark import LoadTest
from crossdraft.types.request import Chat, Message


def asked(count: int, prompts: tuple[str, ...] = ("def f(",), **given: Any) -> list[dict[str, Any]]:
    test = LoadTest(LoadPlan(**given))
    test.prompts = tuple({"prompt": one} for one in prompts)
    return list(test.requests(count))


def test_what_is_asked_for() -> None:
    same = {"max_tokens": 32, "temperature": 0.7, "model": "big", "ignore_eos": True}
    speculative = {"method": "seeded", "drafter": "small", "trace": True}
    assert asked(4, method="seeded", use_drafter="small", seed=100, **same)[3] == same | {
        **{"stream": True, "prompt": "def f(", "seed": 103, "speculative": speculative}
    }


def test_drafting_can_be_forced() -> None:
    (forced,) = asked(1, num_speculative_tokens=4)
    assert forced["speculative"] == {"trace": True, "overlap": "off", "num_speculative_tokens": 4}
    with pytest.raises(UsageError, match="num-speculative-tokens"):
        asked(1, num_speculative_tokens=0)
    assert asked(1, use_drafter="none")[0]["speculative"] == {"trace": True, "drafter": "none"}


@pytest.mark.parametrize(("method", "seed"), [("slem", 5), ("coupled", None), (None, None)])
def test_outputs_are_seeded_where_their_method_is_named_and_takes_a_seed(method: str | None, seed: int | None) -> None:
    assert asked(3, method=method, temperature=1.0, seed=3)[2].get("seed") == seed


def test_prompts_take_turns() -> None:
    assert [one["prompt"] for one in asked(5, ("a", "b"))] == ["a", "b", "a", "b", "a"]


def test_chats_go_to_the_chat_endpoint_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        '{"text": "Hi"}\n{"messages": [{"role": "system", "content": "A"}, {"role": "user", "content": "B"}]}'
    )
    hi, both = LoadTest(LoadPlan(prompts=file, chat=True)).requests(2)
    assert hi["messages"] == [{"role": "user", "content": "Hi"}]
    assert both["messages"] == [{"role": "system", "content": "A"}, {"role": "user", "content": "B"}]
    assert "prompt" not in hi
    assert [one["prompt"] for one in LoadTest(LoadPlan(prompts=file)).requests(2)] == ["Hi", "A\n\nB"]


def test_the_bundled_prompts_have_six_categories_by_turns() -> None:
    """The first six are one of each."""
    found = read()
    assert len({one.content for one in found}) == 36
    assert all(isinstance(one.content, Chat) and one.content.messages[-1].role == "user" for one in found)
    assert len({one.category for one in found[:6]}) == 6


def test_files_of_three_forms(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        '{"file": "a.py", "text": "def f("}\n\n'
        '{"question_id": 81, "category": "qa", "turns": ["Why?", "And then?"]}\n'
        '{"category": "qa", "messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "W"}]}'
    )
    why, short = Message("user", "Why?"), (Message("system", "Be short."), Message("user", "W"))
    assert read(file) == (Prompt(NO_CATEGORY, "def f("), Prompt("qa", Chat((why,))), Prompt("qa", Chat(short)))
    assert texts_of(file) == ("def f(", "Why?", "Be short.\n\nW")
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
        ('{"text": ""}', "its text is empty, or there is none"),
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

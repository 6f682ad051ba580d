"""Prompts of all forms, as target and drafter read them, and fields of a request that are of a wrong type."""

from dataclasses import fields, replace
from typing import Any

import pytest

from crossdraft.session.resolution import prompts_of, tokenization_of
from crossdraft.text.chat_template import ChatTemplate
from crossdraft.text.letters import Letters, Role, Side, from_bytes
from crossdraft.text.tokenization import Tokenization
from crossdraft.types.messages import Description
from crossdraft.types.request import KINDS, Chat, GenerationRequest, Message, RequestError, plain
from tests.text.kinds import kind

CHAT = Chat((Message("system", "Be brief."), Message("user", "How  are you? 🦄")))
CHATML = ChatTemplate(
    "{% for m in messages %}{{ bos_token if loop.first }}<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    (("bos_token", "<s>"), ("eos_token", "</s>")),
)
REFUSING = ChatTemplate("{{ raise_exception('no system message') }}")


def described(name: str = "llama2", template: ChatTemplate | None = None) -> Description:
    some = kind(name)
    controls = ((some.id_of(some.begin), "BEGIN_OF_SEQUENCE"), (some.id_of(some.end), "END_OF_SEQUENCE"))
    if some.begin == some.end:
        controls = controls[1:]
    return Description(name, some.json, controls, (), some.size, 128, "", chat_template=template)


def of(about: Description) -> Tokenization:
    return tokenization_of(about, Side.TARGET)


@pytest.mark.parametrize("name", ["gpt2", "llama2", "llama3"])
@pytest.mark.parametrize("text", ["Hello there", " two  spaces", "naïve 🦄"])
def test_the_drafter_gets_the_letters_of_the_ids_without_what_begins_every_prompt(name: str, text: str) -> None:
    about = described(name)
    ids = of(about).encode_prompt(text)
    prompts = prompts_of(ids, about, of(about), None)
    assert prompts.target == ids
    assert prompts.drafter == from_bytes(text.encode())


def test_ids_that_are_no_text_are_letters_all_the_same() -> None:
    about = described()
    end = kind("llama2").id_of("</s>")
    assert prompts_of((end,), about, of(about), None).drafter == Role.END_OF_SEQUENCE.letter


def test_an_id_that_the_target_has_not() -> None:
    about = described()
    with pytest.raises(RequestError, match=rf"has the id {about.vocabulary_size}; the target's ids are 0 to"):
        prompts_of((1, about.vocabulary_size), about, of(about), None)


def test_each_model_renders_with_its_own_template() -> None:
    target, drafter = described("llama2", CHATML), described("gpt2", ChatTemplate("D:{{ messages[0].content }}"))
    prompts = prompts_of(CHAT, target, of(target), drafter)
    begin, end = (kind("llama2").id_of(name) for name in ("<s>", "</s>"))
    assert [token for token in prompts.target if token in (begin, end)] == [begin, end, end]
    assert prompts.target[0] == begin
    assert (prompts.drafter, prompts.templated) == (Letters("D:Be brief."), True)


def test_without_a_template_a_chat_is_plain_text() -> None:
    target, text = described(), plain(CHAT)
    assert text == "System: Be brief.\n\nUser: How  are you? 🦄\n\nAssistant:"
    prompts = prompts_of(CHAT, target, of(target), described("gpt2"))
    assert prompts.target == of(target).encode_prompt(text)
    assert (prompts.drafter, prompts.templated) == (from_bytes(text.encode()), False)


def test_a_template_that_refuses_costs_the_request_if_it_is_the_targets() -> None:
    target = described("llama2", REFUSING)
    with pytest.raises(RequestError, match="the chat template of 'llama2' cannot write this chat: no system message"):
        prompts_of(CHAT, target, of(target), None)
    drafter = replace(described("gpt2"), chat_template=REFUSING)
    target = described("llama2", CHATML)
    assert not prompts_of(CHAT, target, of(target), drafter).templated


@pytest.mark.parametrize(
    ("prompt", "complaint"),
    [
        ((), "the prompt is empty"),
        ("", "the prompt is empty"),
        ((1, -1), "prompt must be token ids, whole numbers from 0 on, and has -1"),
        ((1, True), "has True"),
        (("a",), "has 'a'"),
        ("a\ud800", "the prompt has half of a surrogate pair"),
        (Chat(()), "the chat has no messages"),
        (Chat([Message("user", "x")]), "must be a tuple of Message"),  # type: ignore[arg-type]
        (Chat((Message("", "x"),)), "message 0 of the chat needs a role"),
        (Chat((Message("user", "\udc00"),)), "message 0 of the chat has half of a surrogate pair"),
    ],
)
def test_prompts_that_are_none(prompt: object, complaint: str) -> None:
    with pytest.raises(RequestError, match=complaint):
        GenerationRequest(prompt)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"seed": "x"}, "seed must be a whole number, got 'x'"),
        ({"num_speculative_tokens": "5"}, "num_speculative_tokens must be a whole number, got '5'"),
        ({"num_speculative_tokens": None}, "num_speculative_tokens must be a whole number, got None"),
        ({"max_tokens": 1.5}, "max_tokens must be a whole number, got 1.5"),
        ({"max_draft_tokens": True}, "max_draft_tokens must be a whole number, got True"),
        ({"audit": 1}, "audit must be True or False, got 1"),
        ({"prompt": b"x"}, "prompt must be a text, a tuple of token ids, or a Chat, got b'x'"),
        ({"method": 3}, "method must be the name of a method, got 3"),
        ({"drafter_temperature": "warm"}, "drafter_temperature must be a number"),
        ({"options": {"temperature": 0}}, "options must be SamplingOptions"),
        ({"stop": "end"}, "stop must be a tuple of texts, got 'end'"),
        ({"record": "file"}, "record must be a Path, got 'file'"),
    ],
)
def test_a_wrong_type_is_an_error_that_names_the_field(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(RequestError) as raised:
        GenerationRequest(**{"prompt": "x"} | settings)
    assert str(raised.value).startswith(complaint)


def test_every_field_has_a_kind_that_its_default_is_of() -> None:
    assert {field.name for field in fields(GenerationRequest)} == {name for name, *_ in KINDS} | {"overlap"}
    GenerationRequest("x", drafter_temperature=1)

"""Prompts of all forms, as target and drafter read them, and fields of a request that are of a wrong type."""

from dataclasses import fields, replace
from typing import Any

import pytest

from crossdraft.config.fields import typed
from crossdraft.session.models import Models, tokenization_of
from crossdraft.session.resolution import Prompts, prompts_of, resolve
from crossdraft.text.chat_template import ChatTemplate, ChatTemplateError
from crossdraft.text.letters import ControlRole, Letters, Side, from_bytes
from crossdraft.text.tokenization import Tokenization
from crossdraft.types.messages import Description
from crossdraft.types.request import (
    KINDS,
    Chat,
    GenerationRequest,
    Message,
    Prompt,
    PromptTooLongError,
    RequestError,
    plain,
    rendered,
)
from tests.text.kinds import kind

CHAT = Chat((Message("system", "Be brief."), Message("user", "How  are you? 🦄")))
CHATML = ChatTemplate(
    "{% for m in messages %}{{ bos_token if loop.first }}<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    (("bos_token", "<s>"), ("eos_token", "</s>")),
)
WHOLE = ChatTemplate("{{ messages[0].content }}")
REFUSING = ChatTemplate("{{ raise_exception('no system message') }}")


def described(name: str = "llama2", template: ChatTemplate | None = None) -> Description:
    return kind(name).described(chat_template=template)


def of(about: Description) -> Tokenization:
    return tokenization_of(about, Side.TARGET)


def prompts(prompt: Prompt, target: Description, drafter: Description | None = None) -> Prompts:
    return prompts_of(GenerationRequest(prompt), Models(target, of(target), drafter))


@pytest.mark.parametrize("name", ["gpt2", "llama2", "llama3"])
@pytest.mark.parametrize("text", ["Hello there", " two  spaces", "naïve 🦄"])
def test_the_drafter_gets_the_letters_of_the_ids_without_what_begins_every_prompt(name: str, text: str) -> None:
    about = described(name)
    ids = of(about).encode_prompt(text)
    made = prompts(ids, about)
    assert made.target == ids
    assert made.drafter == from_bytes(text.encode())


def test_ids_that_are_no_text_are_letters_all_the_same() -> None:
    about = described()
    end = kind("llama2").id_of("</s>")
    assert prompts((end,), about).drafter == ControlRole.END_OF_SEQUENCE.letter


def test_an_empty_prompt_is_the_symbol_that_prompts_begin_with_if_there_is_one() -> None:
    begin = kind("llama2").id_of("<s>")
    assert prompts("", described()) == Prompts((begin,), Letters(""))
    with pytest.raises(RequestError, match="the prompt has no tokens"):
        prompts("", described("gpt2"))


@pytest.mark.parametrize("truncate", [None, 2])
def test_special_tokens_may_be_left_out_before_a_text(truncate: int | None) -> None:
    about, text = described(), "<s>the dog"
    request = GenerationRequest(text, add_special_tokens=False, truncate_prompt_tokens=truncate)
    ids = prompts_of(request, Models(about, of(about))).target
    assert ids == of(about).encode_prompt(text)[1:][-truncate if truncate else 0 :]
    with pytest.raises(RequestError, match="the prompt has no tokens"):
        prompts_of(GenerationRequest("", add_special_tokens=False), Models(about, of(about)))


def test_a_token_beyond_the_rows_is_refused_in_prompts_chats_and_bad_words() -> None:
    narrow = replace(described("llama2", CHATML), vocabulary_size=kind("llama2").id_of("<tool_call>"))
    models, needs = Models(narrow, of(narrow)), "the text has '<tool_call>', which is id"
    chat = Chat((Message("user", "the <tool_call>"),))
    for request, name in (
        (GenerationRequest("the <tool_call>"), "prompt"),
        (GenerationRequest(chat), "prompt"),
        (GenerationRequest("the", bad_words=("<tool_call>",)), "bad_words"),
    ):
        with pytest.raises(RequestError, match=needs) as refused:
            resolve(request, models)
        assert refused.value.field == name


def test_an_id_that_the_target_has_not() -> None:
    about = described()
    with pytest.raises(RequestError, match=rf"no token with the id {about.vocabulary_size}; the target's ids are 0 to"):
        prompts((1, about.vocabulary_size), about)


def test_each_model_renders_with_its_own_template() -> None:
    target, drafter = described("llama2", CHATML), described("gpt2", ChatTemplate("D:{{ messages[0].content }}"))
    made = prompts(CHAT, target, drafter)
    begin, end = (kind("llama2").id_of(name) for name in ("<s>", "</s>"))
    assert [token for token in made.target if token in (begin, end)] == [begin, end, end]
    assert made.target[0] == begin
    assert (made.drafter, made.templated) == (Letters("D:Be brief."), True)


def test_without_a_template_a_chat_is_refused_but_a_drafter_reads_plain_text() -> None:
    with pytest.raises(RequestError, match=r"'llama2' has no chat template: .* \(--chat-template FILE\)"):
        prompts(CHAT, described())
    made = prompts(CHAT, described("llama2", CHATML), described("gpt2"))
    text = "System: Be brief.\n\nUser: How  are you? 🦄"
    assert (made.drafter, made.templated) == (from_bytes(f"{text}\n\nAssistant:".encode()), False)
    assert plain(replace(CHAT, add_generation_prompt=False)) == text


@pytest.mark.parametrize(
    ("chat", "end"),
    [
        (replace(CHAT, add_generation_prompt=False), "<|user|>\nHow  are you? 🦄</s>\n"),
        (replace(CHAT, add_generation_prompt=False, continue_final_message=True), "<|user|>\nHow  are you? 🦄"),
        (replace(CHAT, template_kwargs='{"eos_token": "<end>"}'), "🦄<end>\n<|assistant|>\n"),
    ],
)
def test_how_a_chat_ends_is_the_requests_to_say(chat: Chat, end: str) -> None:
    assert rendered(chat, CHATML).endswith(end)


def test_a_message_that_a_template_changes_cannot_be_continued() -> None:
    chat = replace(CHAT, add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(ChatTemplateError, match="does not show the last message as it is"):
        rendered(chat, ChatTemplate("{% for m in messages %}{{ m.content | upper }}{% endfor %}"))
    stripped = ChatTemplate("{% for m in messages %}{{ m.content | trim }}.{% endfor %}")
    assert rendered(replace(chat, messages=(Message("user", " so "),)), stripped) == "so"


def test_a_template_that_refuses_costs_the_request_if_it_is_the_targets() -> None:
    target = described("llama2", REFUSING)
    with pytest.raises(RequestError, match="the chat template of 'llama2' cannot write this chat: no system message"):
        prompts(CHAT, target)
    drafter = replace(described("gpt2"), chat_template=REFUSING)
    target = described("llama2", CHATML)
    assert not prompts(CHAT, target, drafter).templated


class Refusing(Tokenization):
    """Must not be asked to tokenize."""

    def __init__(self, longest: int) -> None:
        self.longest = longest


@pytest.mark.parametrize(
    ("prompt", "size"),
    [
        ("x" * 1281, "1281 bytes of text, and a token has at most 10"),
        (Chat((Message("user", "é" * 700),)), "1400 bytes of text"),
        ((1,) * 128, "128 input tokens"),
    ],
    ids=["text", "chat", "ids"],
)
def test_what_cannot_fit_is_refused_before_it_is_tokenized(prompt: Prompt, size: str) -> None:
    beginning = r"This model's maximum context length is 128 tokens. However, your request has "
    with pytest.raises(PromptTooLongError, match=beginning + size):
        prompts_of(GenerationRequest(prompt), Models(described("llama2", WHOLE), Refusing(10)))


def test_a_text_of_the_longest_tokens_is_not_refused_before_it_is_tokenized() -> None:
    about = described("llama2")
    longest = max((letters for letters in of(about).vocabulary.letters), key=len)
    assert of(about).longest >= len(longest)
    with pytest.raises(PromptTooLongError, match=r"your request has \d+ input tokens"):
        prompts("<s>" * 128, about)
    assert len(prompts("<s>" * 100, about).target) == 101


@pytest.mark.parametrize(
    ("prompt", "complaint"),
    [
        ((), "the prompt is empty"),
        (Chat(CHAT.messages, template_kwargs="[]"), "template_kwargs must be a JSON object"),
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
        ({"num_speculative_tokens": None}, "num_speculative_tokens must be a whole number, got None"),
        ({"audit": 1}, "audit must be True or False, got 1"),
        ({"prompt": b"x"}, "prompt must be a text, a tuple of token ids, or a Chat, got b'x'"),
        ({"method": 3}, "method must be a text, got 3"),
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
    stated = {option.name for option, *_ in typed(GenerationRequest)}
    assert {field.name for field in fields(GenerationRequest)} == {name for name, *_ in KINDS} | stated
    GenerationRequest("x", drafter_temperature=1)

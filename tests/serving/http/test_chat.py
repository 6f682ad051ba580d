"""/v1/chat/completions, as the official client sees it."""

import json
from typing import Any

import pytest

from crossdraft.client import Grammar
from crossdraft.serving.http.requests import MAX_TOKENS
from crossdraft.types.request import Chat, Message
from tests.serving.fakes import FakeBackend
from tests.serving.http.conftest import MESSAGES, Front


async def test_a_whole_answer(served: Front, outputs: FakeBackend) -> None:
    done = await served.chat(
        messages=[
            {"role": "developer", "content": "Be kind."},
            {"role": "user", "content": [{"type": "text", "text": "Say"}, {"type": "text", "text": " it"}]},
            {"role": "assistant", "content": "What?"},
            {"role": "user", "content": "This", "name": "me"},
        ],
        max_completion_tokens=9,
        seed=5,
    )
    (choice,) = done.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "Heé", "stop")
    assert done.usage.total_tokens == 7
    (order,) = outputs.requests
    said = (("system", "Be kind."), ("user", "Say it"), ("assistant", "What?"), ("user", "This"))
    assert order.generation.prompt == Chat(tuple(Message(*one) for one in said))
    assert (order.generation.max_tokens, order.generation.seed) == (9, 5)
    assert done.id == f"chatcmpl-{order.id}"


async def test_a_message_that_was_answered_can_be_sent_again(served: Front, outputs: FakeBackend) -> None:
    done = await served.chat()
    empty = {"role": "assistant", "content": None}
    again = [*MESSAGES, done.choices[0].message.model_dump(), empty, {"role": "user", "content": "More"}]
    await served.chat(messages=again)
    prompt = outputs.requests[1].generation.prompt
    assert prompt.messages[1:3] == (Message("assistant", "Heé"), Message("assistant", ""))


async def test_a_stream_begins_each_choice_with_its_role(served: Front) -> None:
    stream = await served.chat(n=2, stream=True, stream_options={"include_usage": True})
    *chunks, last = [chunk async for chunk in stream]
    for index in range(2):
        choices = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert [choice.delta.content for choice in choices] == ["He", "é", None]
        assert [choice.delta.role for choice in choices] == ["assistant", None, None]
        assert [choice.finish_reason for choice in choices] == [None, None, "stop"]
    assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.choices) == (3, 8, [])


async def test_an_output_without_text_still_has_a_role_and_an_end(served: Front, outputs: FakeBackend) -> None:
    outputs.tokens = ()
    stream = await served.chat(stream=True)
    (only,) = [chunk.choices[0] async for chunk in stream]
    assert (only.delta.role, only.delta.content, only.finish_reason) == ("assistant", "", "stop")


async def test_without_max_tokens_a_chat_may_fill_the_context_and_a_completion_is_short(served, outputs):
    await served.chat()
    await served.complete()
    assert [order.generation.max_tokens for order in outputs.requests] == [MAX_TOKENS, 16]


async def test_how_the_template_is_used_is_the_clients_to_say(served: Front, outputs: FakeBackend) -> None:
    how = {"add_generation_prompt": False, "continue_final_message": True}
    more = how | {"chat_template_kwargs": {"enable_thinking": False}}
    await served.chat(extra_body=more)
    due = Chat((Message("user", "Say"),), False, True, '{"enable_thinking": false}')
    assert outputs.requests[0].generation.prompt == due


SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"enum": ["ü"]}}}
FORM = {"type": "json_schema", "json_schema": {"name": "s", "strict": True, "schema": SCHEMA}}
TIGHT = {"disable_any_whitespace": True, "disable_fallback": True}


@pytest.mark.parametrize(
    ("body", "grammar"),
    [
        ({"response_format": {"type": "json_object"}}, Grammar.json({"type": "object"})),
        ({"response_format": FORM}, Grammar.json(SCHEMA)),
        ({"structured_outputs": {"json": SCHEMA}}, Grammar.json(SCHEMA)),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)} | TIGHT}, Grammar.json(SCHEMA, whitespace_flexible=False)),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"whitespace_pattern": " ?"}},
            Grammar.json({"type": "object"}, whitespace_pattern=" ?"),
        ),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"disable_any_whitespace": True}},
            Grammar.json({"type": "object"}, whitespace_flexible=False),
        ),
        ({"structured_outputs": {"regex": "a+", "json_object": False}}, Grammar.regex("a+")),
        ({"structured_outputs": {"choice": ["a", "ü"]}}, Grammar.choice(["a", "ü"])),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, Grammar.ebnf('root ::= "a"')),
    ],
)
async def test_structured_outputs_by_openais_and_vllms_names(served, outputs, body, grammar):
    await served.chat(extra_body=body)
    await served.complete(extra_body=body)
    for order in outputs.requests:
        found = order.generation.options.grammar
        assert found.kind is grammar.kind
        if grammar.kind != "json":
            assert found == grammar
        else:  # in the order of its keys, which is that of the output
            assert json.dumps(json.loads(found.text)) == json.dumps(json.loads(grammar.text))


NOTHING: dict[str, Any] = {
    "skip_special_tokens": True, "spaces_between_special_tokens": True, "use_beam_search": False, "length_penalty": 1.0,
    "early_stopping": False, "priority": 0, "response_format": {"type": "text"}, "best_of": 1, "suffix": "",
    "structured_outputs": None, "include_reasoning": True, "return_tokens_as_token_ids": False, "documents": [],
    "mm_processor_kwargs": {}, "logits_processors": [], "verbosity": "medium",
}  # fmt: skip
ALWAYS: dict[str, Any] = {
    "store": False, "metadata": {"a": "b"}, "user": "me", "service_tier": "auto", "safety_identifier": "me",
    "prompt_cache_key": "a", "prompt_cache_retention": "24h", "logit_bias": {}, "stop": [],
}  # fmt: skip


@pytest.mark.parametrize(
    "more",
    [
        {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
        {"functions": [], "function_call": "none", "modalities": ["text"]},
        {"logprobs": False, "top_logprobs": 0, "echo": False, "add_special_tokens": False},
    ],
)
async def test_fields_that_ask_for_nothing_are_taken(served: Front, outputs: FakeBackend, more: dict[str, Any]) -> None:
    await served.chat()
    await served.chat(extra_body=NOTHING | ALWAYS | more)
    plain, other = (one.generation for one in outputs.requests)
    assert plain == other
    await served.complete(extra_body=NOTHING | ALWAYS)
    assert outputs.requests[-1].generation.prompt == "Say"


async def test_what_else_messages_and_parts_have_is_not_for_the_model(served: Front, outputs: FakeBackend) -> None:
    answer = {
        "role": "assistant", "content": "No.", "type": "message", "id": "msg_1", "status": "completed", "refusal": None,
        "annotations": [], "tool_calls": [], "function_call": None, "audio": None, "reasoning": {"a": 1},
    }  # fmt: skip
    part = {"type": "text", "text": "Say", "cache_control": {"type": "ephemeral"}, "annotations": [{"a": 1}]}
    messages: Any = [{"role": "user", "content": [part], "timestamp": 1.5}, answer]
    await served.chat(messages=messages)
    (order,) = outputs.requests
    assert order.generation.prompt == Chat((Message("user", "Say"), Message("assistant", "No.")))

"""/v1/responses, as the official client sees it."""

import json
from dataclasses import fields, replace
from typing import Any

import openai
import pytest
from openai.types.responses import ParsedResponse, Response
from pydantic import BaseModel

from crossdraft.client import Reason
from crossdraft.config.api import HttpSettings, ReasoningParser
from crossdraft.config.request import Sampling
from crossdraft.rpc.errors import Unreachable
from crossdraft.serving.http import HttpOptions
from crossdraft.types.request import Message
from tests.serving.fakes import TOY, FakeBackend
from tests.serving.http.conftest import Front, fault, front
from tests.serving.http.test_tools import CALL, WEATHER, tokens_of
from tests.text.test_answers import accepted

PATH = "/v1/responses"
TOOL: Any = {"type": "function", **WEATHER["function"]}  # type: ignore[dict-item]
ASKED: dict[str, Any] = {"model": "toy", "input": "Say", "tools": [TOOL]}


class City(BaseModel):
    """What an answer is to be."""

    city: str


@pytest.fixture
def outputs() -> FakeBackend:
    return FakeBackend(tokens_of("Hé!"), served=(replace(TOY, tool_format="hermes"),))


async def both(served: Front, **asked: Any) -> tuple[Response, list[Any]]:
    """A reply, and the events of the same, streamed, which the client has put together."""
    whole = await served.openai.responses.create(**ASKED | asked)
    Response.model_validate(whole.to_dict())  # whose types the client takes for granted
    async with served.openai.responses.stream(**ASKED | asked) as stream:
        events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert outline(events[-1].response) == outline(whole)
    return whole, events


def outline(response: Response | ParsedResponse[Any]) -> list[Any]:
    ids = ("id", "call_id", "parsed", "parsed_arguments")
    items = [{name: value for name, value in one.to_dict().items() if name not in ids} for one in response.output]
    for item in items:
        parts: Any = item.get("content") or ()
        item["content"] = [{name: value for name, value in part.items() if name != "parsed"} for part in parts]
    return [response.status, items]


async def test_a_text_whole_and_streamed(served: Front, outputs: FakeBackend) -> None:
    whole, events = await both(served, instructions="Be kind.", max_output_tokens=9, temperature=0.5, store=False)
    assert (whole.output_text, whole.status, whole.object, whole.model) == ("Hé!", "completed", "response", "toy")
    assert (whole.usage.input_tokens, whole.usage.output_tokens, whole.usage.total_tokens) == (3, 3, 6)
    assert whole.to_dict()["text"] == {"format": {"type": "text"}}
    assert (whole.instructions, whole.max_output_tokens, whole.temperature) == ("Be kind.", 9, 0.5)
    order, _ = outputs.requests
    assert whole.id == f"resp_{order.id}"
    prompt = order.generation.prompt
    assert prompt.messages == (Message("system", "Be kind."), Message("user", "Say"))
    assert (order.generation.max_tokens, order.generation.options.temperature) == (9, 0.5)
    assert [event.type for event in events] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        *["response.output_text.delta"] * 3, "response.output_text.done", "response.content_part.done",
        "response.output_item.done", "response.completed",
    ]  # fmt: skip


async def test_calls_come_after_content_and_results_go_back(served: Front, outputs: FakeBackend) -> None:
    outputs.tokens = tokens_of(f"See: {CALL}")
    whole, events = await both(served, tool_choice="auto")
    message, call = whole.output
    assert (message.type, call.type, whole.output_text) == ("message", "function_call", "See: ")
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "weather", {"city": "b"})
    assert any(event.type == "response.function_call_arguments.delta" for event in events)
    again: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "Say"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}], "id": "rs"},
        *(one.to_dict() for one in whole.output),
        {"type": "function_call_output", "call_id": call.call_id, "output": "5°"},
    ]
    await served.openai.responses.create(**ASKED | {"input": again})
    prompt = outputs.requests[-1].generation.prompt
    assert [(one.role, one.content) for one in prompt.messages] == [
        ("user", "Say"), ("assistant", "See: "), ("tool", "5°")
    ]  # fmt: skip
    shown = prompt.messages[1].more
    assert shown["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "b"}}
    assert (shown["tool_calls"][0]["id"], shown["reasoning_content"]) == (call.call_id, "Hm")
    assert (prompt.messages[2].more, prompt.settings["tools"]) == ({"tool_call_id": call.call_id}, [WEATHER])


async def test_reasoning_is_an_item_of_its_own(outputs: FakeBackend) -> None:
    outputs.tokens = tokens_of(["<think>Hm", "</think>", "\n", "Yes"])
    answers = HttpSettings(reasoning_parser=ReasoningParser.qwen3)
    async with front(outputs, HttpOptions(http=answers)) as served:
        whole, _ = await both(served, tools=[])
    reasoning, message = outline(whole)[1]
    assert (reasoning["type"], message["type"], whole.output_text) == ("reasoning", "message", "Yes")
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm"}]
    assert whole.usage.output_tokens_details.reasoning_tokens == 1


async def test_what_is_asked_for_is_kept_to(served: Front, outputs: FakeBackend) -> None:
    outputs.tokens = tokens_of('{"city": "x"}')
    parsed = await served.openai.responses.parse(model="toy", input="Say", text_format=City)
    assert parsed.output_parsed == City(city="x")
    shown: Any = parsed.to_dict()["text"]
    form = shown["format"]
    assert (form["type"], form["name"], form["strict"]) == ("json_schema", "City", True)
    assert "city" in form["schema"]["properties"]
    grammar = outputs.requests[-1].generation.options.grammar
    assert [accepted(grammar, one) for one in ('{"city": "x"}', "x")] == [True, False]
    outputs.tokens = tokens_of(CALL)
    named: Any = {"type": "function", "name": "weather"}
    allowed: Any = {"type": "allowed_tools", "mode": "required", "tools": [named]}
    for choice in ("required", named, allowed):
        whole, _ = await both(served, tool_choice=choice)
        assert [one["type"] for one in outline(whole)[1]] == ["function_call"]
        assert accepted(outputs.requests[-1].generation.options.grammar, CALL)


async def test_an_output_that_is_cut_or_empty(served: Front, outputs: FakeBackend) -> None:
    outputs.reason = Reason.LENGTH
    raw = (await served.post(PATH, **ASKED, stream=True)).text
    events = [json.loads(one.split("data: ")[1]) for one in raw.strip().split("\n\n")]
    whole = await served.openai.responses.create(**ASKED)
    assert (whole.status, events[-1]["type"]) == ("incomplete", "response.incomplete")
    assert (events[-2]["item"]["status"], whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    outputs.tokens, outputs.reason = (), Reason.STOP
    whole, _ = await both(served)
    assert (whole.output_text, len(whole.output)) == ("", 1)


async def test_errors_before_the_first_token_have_a_status_and_later_ones_are_events(served, outputs):
    outputs.fault, outputs.fault_after = Unreachable("gone"), 0
    with pytest.raises(openai.APIStatusError) as refused:
        await served.openai.responses.create(**ASKED, stream=True)
    assert refused.value.status_code == 503
    outputs.fault_after = 2
    events = [event async for event in await served.openai.responses.create(**ASKED, stream=True)]
    assert (events[-1].type, events[-1].code) == ("error", "service_unavailable")


@pytest.mark.parametrize(
    ("body", "param", "text"),
    [
        ({"store": True}, "store", "store true is not served: it may be false"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "previous_response_id is not served: leave it"),
        ({"conversation": "c"}, "conversation", "conversation is not served"),
        ({"background": True}, "background", "background true is not served"),
        ({"truncation": "auto"}, "truncation", "is not served"),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort", "is not served: it may be 'none'"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice", 'of type "function", with the name'),
        ({"tools": [TOOL, TOOL]}, "tools", "names must differ, and 'weather' is there more than once"),
        ({"include": ["file_search_call.results"]}, "include.0", "is not served"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type", "it may be 'function'"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "`tools` must be set"),
        ({"tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "does not match any"),
        ({"tools": [{"type": "function", "name": ""}]}, "tools.0.name", "it must have at least 1 character"),
        ({"input": [{"type": "function_call", "call_id": "1", "name": "", "arguments": ""}]}, "input.0.name", "1 char"),
        ({"stop_token_ids": [-1]}, "stop_token_ids.0", "greater than or equal to 0"),
        ({"n": 2}, "n", "Unrecognized request argument"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type", "is not served: it may be 'message'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0.type", "not served"),
        ({"input": []}, "input", "at least 1 item"),
        ({"input": [{"role": "user"}]}, "input.0", "content is required in a message"),
        ({"messages": []}, "messages", "Unrecognized request argument"),
        ({"temperature": 5e400}, "temperature", "finite"),
        ({"effort": "low"}, "effort", "argument supplied: effort; it belongs to reasoning: reasoning.effort"),
        ({"format": {"type": "text"}}, "format", "it belongs to text: text.format"),
        ({"k": 3}, "k", "it belongs to speculative: speculative.k"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format", "json_schema must be provided"),
    ],
)
async def test_what_is_not_served_is_named(direct, outputs, body, param, text):
    response = await direct.post(PATH, content=json.dumps(ASKED | body), headers={"content-type": "application/json"})
    error = fault(response)
    assert (response.status_code, error["param"]) == (400, param), error
    assert text in error["message"]
    assert not outputs.requests


async def test_every_sampling_parameter_of_chats_is_one_here(direct, outputs) -> None:
    asked = {one.name: one.metadata.get("le", 1) for one in fields(Sampling)}
    lists = {"logit_bias": {"3": 2.5}, "allowed_token_ids": [3, 4]}
    others = {"ignore_eos": True, "stop_token_ids": [5], "bad_words": ["x"], "include_stop_str_in_output": True}
    assert (await direct.post(PATH, json=ASKED | asked | lists | others)).status_code == 200
    generation = outputs.requests[0].generation
    assert {name: getattr(generation.options, name) for name in asked} == asked
    assert (generation.options.logit_bias, generation.options.allowed_token_ids) == (((3, 2.5),), (3, 4))
    lists = {"stop_token_ids": (5,), "bad_words": ("x",)}
    assert {name: getattr(generation, name) for name in others} == others | lists


@pytest.mark.parametrize(("text", "status"), [("\ud800", 400), ("😀", 200)])
async def test_half_of_a_surrogate_pair_is_refused_also_where_a_response_would_show_it(direct, outputs, text, status):
    shown = {"type": "object", "title": text}
    for body in (
        {"user": text},
        {"metadata": {text: "a"}},
        {"tools": [{"type": "function", "name": "f", "parameters": shown}]},
        {"text": {"format": {"type": "json_schema", "name": "x", "description": text, "schema": shown}}},
    ):
        raw = json.dumps(ASKED | body)
        response = await direct.post(PATH, content=raw, headers={"content-type": "application/json"})
        assert response.status_code == status
        assert status == 200 or "half of a surrogate pair" in fault(response)["message"]

"""Tools and reasoning in /v1/chat/completions, as the official client sees them."""

import json
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion

from crossdraft.client import Grammar, Kind, Reason, RequestError, Token
from crossdraft.config.api import HttpSettings, ReasoningParser, ToolCallParser
from crossdraft.serving.http import HttpOptions
from crossdraft.text.answers import REASONINGS, TOOL_FORMATS, AnswerForm
from crossdraft.text.grammar import MAX_LENGTH
from crossdraft.types.request import Message
from tests.serving.fakes import TOY, FakeBackend
from tests.serving.http.conftest import MESSAGES, Front, fault, front
from tests.text.test_answers import accepted

SCHEMA = {"type": "object", "properties": {"city": {"enum": ["a", "b"]}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Now.", "parameters": SCHEMA}}
TIME = {"type": "function", "function": {"name": "time"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "b"}}\n</tool_call>'
OTHER_CALL = CALL.replace("weather", "time").replace('"city": "b"', "")
ASKED: dict[str, Any] = {"model": "toy", "messages": MESSAGES, "tools": [WEATHER, TIME]}


def tokens_of(text: str | Iterable[str]) -> list[Token]:
    """One for each piece; a name in [] is that of a control symbol."""
    return [
        Token(5, "", b"", Kind.ACCEPTED, None, names=((5, piece),))
        if piece.startswith("[") and piece.endswith("]")
        else Token(7, piece, piece.encode(), Kind.ACCEPTED, None)
        for piece in text
    ]


@pytest.fixture
def outputs() -> FakeBackend:
    return FakeBackend(tokens_of(CALL), served=(replace(TOY, tool_format="hermes"),))


@pytest.fixture
async def thinking(outputs: FakeBackend) -> AsyncIterator[Front]:
    async with front(outputs, HttpOptions(http=HttpSettings(reasoning_parser=ReasoningParser.qwen3))) as running:
        yield running


async def both(served: Front, **asked: Any) -> tuple[Any, list[Any]]:
    """A whole reply and what the client makes of the same, streamed; and the chunks."""
    whole = await served.chat(**ASKED | asked)
    chunks = []
    async with served.openai.chat.completions.stream(**ASKED | asked) as stream:
        async for event in stream:
            chunks += [event.chunk] if event.type == "chunk" else []
        made = await stream.get_final_completion()
    assert outline(whole) == outline(made)
    return whole.choices[0], [chunk.choices[0] for chunk in chunks]


def outline(completion: ChatCompletion) -> list[Any]:
    return [
        (
            one.finish_reason,
            one.message.content or None,
            getattr(one.message, "reasoning_content", None),
            [(call.function.name, call.function.arguments) for call in one.message.tool_calls or ()],  # type: ignore[union-attr]
        )
        for one in completion.choices
    ]


async def test_calls_whole_and_streamed(served: Front, outputs: FakeBackend) -> None:
    outputs.tokens = tokens_of(f"See:\n{CALL}\n{CALL}")
    choice, chunks = await both(served)
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "See:\n")
    first, second = choice.message.tool_calls
    called = first.type, first.function.name, json.loads(first.function.arguments)
    assert called == ("function", "weather", {"city": "b"})
    assert first.id != second.id
    pieces = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
    assert [(one.index, one.function.name) for one in pieces if one.id] == [(0, "weather"), (1, "weather")]
    assert len([one for one in pieces if not one.id]) > 10  # arguments come as they are written
    assert [chunk.delta.role for chunk in chunks if chunk.delta.role] == ["assistant"]
    assert not any("<" in (chunk.delta.content or "") for chunk in chunks)
    kept, _ = await both(served, parallel_tool_calls=False)
    assert len(kept.message.tool_calls) == 1


async def test_an_answer_without_calls_is_content_and_one_that_is_cut_has_its_length(served, outputs):
    outputs.tokens = tokens_of(["No", " <tool"])
    choice, _ = await both(served)
    assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("stop", "No <tool", None)
    for cut, reason, arguments in (
        (15, Reason.LENGTH, '{"city": "b"'),
        (15, Reason.STOP, '{"city": "b"'),  # by a string within the call
        (3, Reason.LENGTH, '{"city": "b"}'),  # within the mark at its end
    ):
        outputs.tokens, outputs.reason = tokens_of(CALL[:-cut]), reason
        assert outline(await served.chat(**ASKED)) == [(reason.value, None, None, [("weather", arguments)])]


class Late(FakeBackend):
    """The first that needs a model reaches its target."""

    async def written(self, *asked: Any, **options: Any) -> Any:
        self.served, self.unreached = (*self.served, *self.unreached), ()
        return await super().written(*asked, **options)


async def test_the_form_of_calls_is_that_of_a_target_that_is_reached_only_now() -> None:
    outputs = Late(tokens_of(CALL), served=(), unreached=(replace(TOY, tool_format="hermes"),))
    async with front(outputs, HttpOptions()) as served:
        whole = await served.chat(**ASKED)
    assert outline(whole) == [("tool_calls", None, None, [("weather", '{"city": "b"}')])]


async def test_without_tools_nothing_is_read_as_a_call(served: Front) -> None:
    for asked in ({"tools": []}, {"tool_choice": "none"}):
        choice, _ = await both(served, **asked)
        assert (choice.finish_reason, choice.message.content) == ("stop", CALL)


async def test_the_template_gets_tools_calls_and_results(served: Front, outputs: FakeBackend) -> None:
    done = await served.chat(**ASKED)
    answer = done.choices[0].message
    assert answer.tool_calls
    broken = {"role": "assistant", "content": None, "reasoning": "Hm",
              "tool_calls": [{"id": "x", "function": {"name": "time", "arguments": "{"}}]}  # fmt: skip
    result = {"role": "tool", "tool_call_id": answer.tool_calls[0].id, "content": "5°", "name": "weather"}
    await served.chat(**ASKED | {"messages": [*MESSAGES, answer, result, broken]})
    prompt = outputs.requests[-1].generation.prompt
    assert prompt.settings["tools"] == [WEATHER, TIME]
    _, called, told, kept = (Message(one.role, one.content, one.fields).more for one in prompt.messages)
    function = {"name": "weather", "arguments": {"city": "b"}}
    assert called == {"tool_calls": [{"id": answer.tool_calls[0].id, "type": "function", "function": function}]}
    assert told == {"tool_call_id": answer.tool_calls[0].id, "name": "weather"}
    assert (kept["tool_calls"][0]["function"], kept["reasoning_content"]) == ({"name": "time", "arguments": "{"}, "Hm")


@pytest.mark.parametrize("depth", [100, 500, 960, 985, 20_000])
async def test_arguments_of_any_depth_can_be_sent_again(served: Front, outputs: FakeBackend, depth: int) -> None:
    call = {"function": {"name": "time", "arguments": '{"a":' * depth + "1" + "}" * depth}}
    messages = [*MESSAGES, {"role": "assistant", "tool_calls": [call]}]
    response = await served.post("/v1/chat/completions", messages=messages, tools=[TIME])
    assert response.status_code == 200
    prompt = outputs.requests[-1].generation.prompt
    shown = prompt.messages[-1].fields
    assert Message("assistant", "", shown).more["tool_calls"][0]["function"]["name"] == "time"


async def grammar_of(served: Front, outputs: FakeBackend, **asked: Any) -> Grammar | None:
    await served.chat(**ASKED | asked)
    return outputs.requests[-1].generation.options.grammar


async def test_what_must_be_called_is_called_by_its_schema(served: Front, outputs: FakeBackend) -> None:
    for choice, fitting, others in (
        ("required", (CALL, OTHER_CALL, f"{CALL}\n{OTHER_CALL}"), ("Hi", CALL.replace('"b"', '"c"'), "")),
        ({"type": "function", "function": {"name": "weather"}}, (CALL,), (OTHER_CALL, f"{CALL}\n{CALL}", "Hi")),
    ):
        grammar = await grammar_of(served, outputs, tool_choice=choice)
        assert all(accepted(grammar, text) for text in fitting)
        assert not any(accepted(grammar, text) for text in others)
    single = await grammar_of(served, outputs, tool_choice="required", parallel_tool_calls=False)
    assert accepted(single, CALL)
    assert not accepted(single, f"{CALL}\n{CALL}")


async def test_only_allowed_tools_are_shown_and_may_be_called(served: Front, outputs: FakeBackend) -> None:
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "time"}}]}
    grammar = await grammar_of(served, outputs, tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert [accepted(grammar, one) for one in (OTHER_CALL, CALL, "Hi")] == [True, False, False]
    prompt = outputs.requests[-1].generation.prompt
    assert prompt.settings["tools"] == [TIME]
    allowed["mode"] = "auto"
    grammar = await grammar_of(served, outputs, tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert [accepted(grammar, one) for one in (OTHER_CALL, CALL, "Hi")] == [True, False, True]


async def test_the_effort_of_reasoning_is_the_templates_to_read(served: Front, outputs: FakeBackend) -> None:
    for effort, more in (("low", {}), ("none", {"enable_thinking": False})):
        await served.chat(**ASKED, reasoning_effort=effort)  # type: ignore[call-overload]
        settings = outputs.requests[-1].generation.prompt.settings
        given = {name: settings[name] for name in settings.keys() - {"tools", "add_generation_prompt"}}
        assert given == {"reasoning_effort": effort, **more}


async def test_where_something_must_be_called_what_was_cut_before_is_no_content(served: Front, outputs: FakeBackend):
    outputs.reason = Reason.LENGTH
    for cut in (CALL[:5], CALL[:20], CALL[:24]):
        outputs.tokens = tokens_of(cut)
        whole = await served.chat(**ASKED, tool_choice="required")
        assert outline(whole) == [("length", None, None, [])]
        stream = await served.chat(**ASKED, tool_choice="required", stream=True)
        assert not any([chunk.choices[0].delta.content async for chunk in stream])


async def test_with_auto_calls_are_calls_and_forms_of_content_are_kept_to(served: Front, outputs: FakeBackend) -> None:
    wrong = CALL.replace('"b"', '"c"')
    grammar = await grammar_of(served, outputs)
    broken = (CALL.replace('"b"', "b"), CALL.replace("weather", "wether"), CALL.replace("}}", "}"))
    assert [accepted(grammar, text) for text in ("Hi", f"Hi {CALL}!", wrong, *broken)] == [True] * 3 + [False] * 3
    strict = WEATHER | {"function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
    grammar = await grammar_of(served, outputs, tools=[strict, TIME])
    fits = [accepted(grammar, text) for text in ("Hi", f"Hi {CALL}!", wrong, wrong.replace("weather", "time"))]
    assert fits == [True, True, False, True]
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": 7}}}
    grammar = await grammar_of(served, outputs, response_format=form)
    assert [accepted(grammar, text) for text in ("7", wrong, "Hi", "8")] == [True, True, False, False]
    many = [TIME | {"function": {"name": f"{at:064}"}} for at in range(512)]
    assert accepted(await grammar_of(served, outputs, tools=many), CALL.replace("weather", f"{511:064}"))
    longer = [TIME | {"function": {"name": f"{at:0200}"}} for at in range(512)]  # too many letters for a grammar
    asked = [await grammar_of(served, outputs, tools=longer)]
    outputs.plain = False  # its mark is a control symbol, which no grammar writes
    assert [*asked, await grammar_of(served, outputs)] == [None, None]


async def test_the_format_is_the_templates_or_the_servers_to_say(outputs: FakeBackend) -> None:
    outputs.tokens = tokens_of(["[TOOL_CALLS]", '[{"name": "weather", ', '"arguments": {"city": "b"}}]'])
    parser = HttpOptions(http=HttpSettings(tool_call_parser=ToolCallParser.mistral))
    async with front(outputs, parser) as served:
        choice, _ = await both(served)
        assert choice.message.tool_calls[0].function.arguments == '{"city": "b"}'
    assert ({*ToolCallParser}, {*ReasoningParser}) == ({"auto", *TOOL_FORMATS}, {"none", *REASONINGS})


async def test_reasoning_is_beside_the_content(thinking: Front, outputs: FakeBackend) -> None:
    outputs.tokens = tokens_of(f"<think>\nHm</think>\n\nSo:{CALL}")
    choice, chunks = await both(thinking)
    assert (choice.message.reasoning, choice.message.reasoning_content) == ("\nHm", "\nHm")
    assert (choice.message.content, len(choice.message.tool_calls)) == ("So:", 1)
    assert "".join(getattr(chunk.delta, "reasoning", None) or "" for chunk in chunks) == "\nHm"
    quiet = await thinking.chat(**ASKED, extra_body={"include_reasoning": False})
    assert (quiet.choices[0].message.content, quiet.choices[0].message.to_dict().get("reasoning")) == ("So:", None)


@pytest.mark.parametrize(
    ("said", "text", "parts"),
    [
        ("Hi <think>\n", "Hm</think>Yes", ("Hm", "Yes")),
        ("Hi <think>\n\n</think>\n\n", "<think>Yes", (None, "<think>Yes")),
        ("Hi", "Yes</think>", (None, "Yes</think>")),
        ("Hi", "<think>Hm", ("Hm", None)),
    ],
)
async def test_a_prompt_may_have_begun_or_ended_the_reasoning(thinking, outputs, said, text, parts):
    outputs.tokens = tokens_of(text)
    choice, _ = await both(thinking, messages=[{"role": "user", "content": said}], tools=openai.omit)
    message = choice.message.to_dict()
    assert (message.get("reasoning"), message["content"]) == parts
    form = {"response_format": {"type": "json_object"}}
    grammar = await grammar_of(thinking, outputs, messages=[{"role": "user", "content": said}], tools=[], **form)
    within = said.endswith("<think>\n")
    assert [accepted(grammar, one) for one in ("{}", "Hm</think>\n{}")] == [not within, within]


def test_reasoning_of_any_length_comes_before_what_a_grammar_wants() -> None:
    grammar = AnswerForm(None, REASONINGS["qwen3"]).grammar((), True, Grammar.choice(["x"]))
    assert accepted(grammar, f"<think>{'Hm <b>. ' * 100}</think>\n\nx")
    assert not accepted(grammar, "<think>Hm</think>y")
    assert (accepted(grammar, "x"), accepted(grammar, " x")) == (True, False)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
async def test_an_error_of_a_grammar_names_the_field_that_it_is_made_of(direct, outputs, path):
    async def named(rule: str, **asked: Any) -> str | None:
        text = f"Grammar error: {rule}: failed to compile JSON schema: Invalid type: foo"
        outputs.fault, outputs.fault_after = RequestError(text, "structured_outputs"), 0
        param: str | None = fault(await direct.post(path, json=body | asked))["param"]
        return param

    chat = "chat" in path
    body: dict[str, Any] = {"messages": ASKED["messages"]} if chat else {"input": "x"}
    some = [WEATHER, {"type": "function", "function": {"name": "bad", "parameters": {"enum": ["foo"]}}}, TIME]
    tools = some if chat else [{"type": "function", **one["function"]} for one in some]  # type: ignore[dict-item]
    kind, form = {"type": "json_schema"}, {"name": "x", "schema": {}}
    how = {"response_format": kind | {"json_schema": form}} if chat else {"text": {"format": kind | form}}
    inner = "function.parameters" if chat else "parameters"
    assert await named("function_1_bad_arguments", tools=tools, tool_choice="required") == f"tools.1.{inner}"
    assert await named("no output is possible", tools=tools, tool_choice="required") == "tools"
    assert await named("function_7_a_arguments", tools=tools, tool_choice="required") == "tools"
    assert await named("function_1_a_arguments", tools=tools, **how) != f"tools.1.{inner}"
    assert await named("content", **how) == ("response_format" if chat else "text.format")


async def test_schemas_of_many_tools_are_one_grammar(served: Front, outputs: FakeBackend) -> None:
    long = {f"p{at}": {"type": "string", "description": "x" * 100, "enum": ["a", "b"]} for at in range(20)}
    tools = [
        {"type": "function", "function": {"name": f"f{at}", "parameters": {"properties": long, "title": f"{at}"}}}
        for at in range(50)
    ]
    grammar = await grammar_of(served, outputs, tools=tools, tool_choice="required")
    assert len(grammar.text) > 2 * MAX_LENGTH
    assert accepted(grammar, '<tool_call>\n{"name": "f49", "arguments": {"p0": "a"}}\n</tool_call>')
    assert not accepted(grammar, '<tool_call>\n{"name": "f49", "arguments": {"p0": "c"}}\n</tool_call>')

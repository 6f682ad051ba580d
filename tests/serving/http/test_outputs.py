"""Completions and chats by OpenAI's and vLLM's fields, as the official client sees them, and the routes beside them."""

import json
from dataclasses import replace
from typing import Any

import pytest
from openai import NotFoundError

from crossdraft.client import Grammar, Kind, Overlap, Reason, Token
from crossdraft.client.api import software
from crossdraft.config.api import HttpSettings, SpeculativeMetrics
from crossdraft.rpc.generation import OutputEnded
from crossdraft.serving.http import HttpOptions
from crossdraft.serving.http.middleware import _named
from crossdraft.serving.http.requests import MAX_TOKENS
from crossdraft.serving.limits import Keys
from crossdraft.session.models import with_defaults
from crossdraft.types.messages import SamplingDefaults, SamplingOptions
from crossdraft.types.request import Chat, Message
from tests.serving.fakes import TOKENS, TOY, FakeBackend, figures
from tests.serving.http.conftest import CHAT, COMPLETIONS, KEY, MESSAGES, Front, fault, front


async def test_a_whole_answer(served: Front, outputs: FakeBackend) -> None:
    done = await served.complete(max_tokens=9, temperature=0)
    (choice,) = done.choices
    assert (choice.text, choice.finish_reason, choice.index, choice.logprobs) == ("Heé", "stop", 0, None)
    assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.total_tokens) == (3, 4, 7)
    assert done.id == f"cmpl-{outputs.requests[0].id}"
    assert "crossdraft" not in json.loads(done.model_dump_json())
    await outputs.wait_running(0)


@pytest.mark.parametrize(
    ("asked", "reason"), [({"stop": "x"}, None), ({"stop": ["x", "eé"]}, "eé"), ({"stop_token_ids": [9, 7]}, 7)]
)
async def test_what_stopped_an_output_is_told_as_by_vllm(served: Front, outputs: FakeBackend, asked, reason) -> None:
    outputs.tokens = TOKENS[:3]
    for ended, told in ((Reason.STOP, reason), (Reason.LENGTH, None)):
        outputs.reason = ended
        assert (await served.complete(extra_body=asked)).choices[0].stop_reason == told
        chunks = [chunk.choices[0].stop_reason async for chunk in await served.chat(stream=True, extra_body=asked)]
        assert chunks == [None, None, told]


async def test_an_empty_prompt_and_one_without_special_tokens_are_asked_for(served: Front, outputs: FakeBackend):
    for prompt, special in (("", True), ("", False), ("Say", False)):
        await served.complete(prompt=prompt, extra_body={"add_special_tokens": special, "return_token_ids": True})
        asked = outputs.requests[-1].generation
        assert (asked.prompt, asked.add_special_tokens) == (prompt, special)


@pytest.mark.parametrize(("together", "texts"), [(1, ["He", "é"]), (2, ["He", "é"]), (3, ["Heé"]), (4, ["Heé"])])
async def test_a_stream_has_whole_characters_of_each_pass_then_its_end(served, outputs, together, texts):
    outputs.together, texts = together, [*texts, ""]
    chunks = [chunk async for chunk in await served.complete(stream=True)]
    assert [chunk.choices[0].text for chunk in chunks] == texts
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [*[None] * (len(texts) - 1), "stop"]
    assert all(chunk.usage is None for chunk in chunks)
    chat = await served.chat(stream=True)
    assert [chunk.choices[0].delta.content or "" async for chunk in chat] == texts
    done = await served.complete()
    assert (done.choices[0].text, done.usage.completion_tokens) == ("Heé", 4)


async def test_usage_is_the_last_chunk_of_a_stream_that_asks_for_it(served: Front) -> None:
    stream = await served.complete(prompt=["a", "b"], n=2, stream=True, stream_options={"include_usage": True})
    *chunks, last = [chunk async for chunk in stream]
    assert last.choices == []
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (6, 16)  # two prompts, four outputs
    assert all(chunk.usage is None for chunk in chunks)


async def test_each_prompt_and_choice_is_one_order(served: Front, outputs: FakeBackend) -> None:
    done = await served.complete(prompt=[[1, 2], [3]], n=2, seed=-1, extra_headers={"x-request-id": "mine"})
    assert [choice.index for choice in done.choices] == [0, 1, 2, 3]
    requests = [order.generation for order in outputs.requests]
    asked = [(request.prompt, request.choice) for request in requests]
    assert asked == [((1, 2), 0), ((1, 2), 1), ((3,), 0), ((3,), 1)]
    assert {request.seed for request in requests} == {2**64 - 1}
    assert [order.id for order in outputs.requests] == ["mine.0", "mine.1", "mine.2", "mine.3"]


async def test_every_option_reaches_the_pipeline(served: Front, outputs: FakeBackend) -> None:
    openais = {"temperature": 0.7, "top_p": 0.9, "presence_penalty": 0.5, "logit_bias": {"5": -3}}
    vllms = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1}
    own = {
        "method": "coupled", "num_speculative_tokens": 3, "drafter_temperature": 0.5, "overlap": "on",
        "max_draft_tokens": 9, "min_draft_tokens": 2, "branches": 4, "branch_width": 2, "paths": 3,
    }  # fmt: skip
    more = vllms | {"ignore_eos": True, "speculative": own | {"drafter": "small"}}
    request: Any = {"model": "toy", "prompt": "Say", "max_tokens": 7, "stop": ["x", "y"]} | openais
    await served.openai.completions.create(**request, extra_body=more)
    (order,) = outputs.requests
    found, options = order.generation, order.generation.options
    assert (order.model, order.drafter, order.trace) == ("toy", "small", False)
    for name, value in (openais | vllms | {"logit_bias": ((5, -3.0),)}).items():
        assert getattr(options, name) == value, name
    for name, value in (own | {"max_tokens": 7, "stop": ("x", "y"), "ignore_eos": True, "seed": None}).items():
        assert getattr(found, name) == value, name
    assert found.overlap is Overlap.ON


async def test_no_drafter_the_only_model_and_short_names_of_options(served: Front, outputs: FakeBackend) -> None:
    how = {"drafter": "none", "k": 3, "window": 9, "wait": 2}
    await served.post("/v1/completions", prompt="Say", speculative=how, temperature=None, stop=None)
    (order,) = outputs.requests
    request = order.generation
    assert (request.num_speculative_tokens, request.max_draft_tokens, request.min_draft_tokens) == (3, 9, 2)
    assert (order.model, order.drafter, order.generation.options.temperature) == ("toy", "", 1.0)


@pytest.mark.parametrize("streamed", [False, True])
async def test_echo_begins_each_choice_with_its_prompt(served: Front, streamed: bool) -> None:
    made = await served.complete(prompt=["one", "two"], echo=True, stream=streamed)
    texts = ["", ""]
    for done in [chunk async for chunk in made] if streamed else [made]:
        for choice in done.choices:
            texts[choice.index] += choice.text
    assert texts == ["oneHeé", "twoHeé"]


async def test_a_trace_says_how_each_token_was_made_and_what_all_cost(served: Front) -> None:
    stream = await served.complete(stream=True, extra_body={"speculative": {"trace": True}})
    *tokens, end = [chunk.model_dump()["crossdraft"] async for chunk in stream]
    assert [(token["kind"], bytes(token["bytes"])) for token in tokens] == [(one.kind.value, one.raw) for one in TOKENS]
    times = [token["milliseconds"] for token in tokens]
    assert times == sorted(times)
    figures = end["statistics"]
    assert (figures["tokens_per_pass"], figures["passes"], figures["wire_bytes"]) == (2.0, 2, 300)
    assert figures["acceptance"] == pytest.approx(2 / 3)


async def test_the_models(served: Front) -> None:
    (card,) = (await served.openai.models.list()).data
    assert card == await served.openai.models.retrieve("toy")
    assert (await served.http.get("/v1/models/")).json()["data"] == [card.to_dict()]
    assert card.to_dict() == {
        "id": "toy", "object": "model", "created": 1_700_000_000, "owned_by": "crossdraft", "root": "toy",
        "max_model_len": 64, "drafters": ["ngram", "small"], "auto": "ngram", "methods": ["slem", "seeded"],
        "chats": True, "detail": [],
    }  # fmt: skip
    with pytest.raises(NotFoundError, match="there is no model 'org/other'; there is toy"):
        await served.openai.models.retrieve("org/other")


LIKELY = (
    Token(5, "He", b"He", Kind.ACCEPTED, -0.5, ((5, b"He", -0.5), (6, b"Hi", -1.0))),
    Token(9, "", b"\xc3", Kind.CORRECTED, -1.5, ((7, b"\xa9", -0.25), (9, b"\xc3", -1.5))),
    Token(7, "é", b"\xa9", Kind.BONUS, -0.125, ((7, b"\xa9", -0.125), (0, b"", float("-inf")))),
    Token(2, "", b"", Kind.BONUS, -1.0, ((2, b"", -1.0), (3, b"", -2.0)), ((2, "</s>"), (3, "<unk>"))),
)


@pytest.fixture(params=[1, 2, 4])
def likely(outputs: FakeBackend, request: pytest.FixtureRequest) -> None:
    """So many tokens come together."""
    outputs.tokens, outputs.together = LIKELY, request.param


async def logprobs_of(made: Any, streamed: bool) -> list[Any]:
    """Those of a reply, or of a stream's chunks; its end has none."""
    if not streamed:
        return [made.choices[0].logprobs]
    *found, end = [chunk.choices[0].logprobs async for chunk in made]
    assert end is None
    return found


@pytest.mark.usefixtures("likely")
@pytest.mark.parametrize("streamed", [False, True])
async def test_log_probabilities_of_a_completion(served: Front, outputs: FakeBackend, streamed: bool) -> None:
    found = await logprobs_of(await served.complete(logprobs=2, stream=streamed), streamed)
    together: dict[str, list[object]] = {}
    for one in found:
        for name, values in one.to_dict().items():
            together.setdefault(name, []).extend(values)
    assert together == {
        "tokens": ["He", r"bytes:\xc3", r"bytes:\xa9", "</s>"],
        "token_logprobs": [-0.5, -1.5, -0.125, -1.0],
        "top_logprobs": [
            {"He": -0.5, "Hi": -1.0},
            {r"bytes:\xa9": -0.25, r"bytes:\xc3": -1.5},
            {r"bytes:\xa9": -0.125, "token_id:0": -9999.0},
            {"</s>": -1.0, "<unk>": -2.0},
        ],
        "text_offset": [0, 2, 2, 3],
    }
    assert outputs.requests[0].generation.logprobs == 2


@pytest.mark.usefixtures("likely")
@pytest.mark.parametrize("streamed", [False, True])
async def test_log_probabilities_of_a_chat(served: Front, outputs: FakeBackend, streamed: bool) -> None:
    made = await served.chat(logprobs=True, top_logprobs=2, stream=streamed)
    found = await logprobs_of(made, streamed)
    tokens = [token for one in found if one is not None for token in one.content or ()]
    assert [(token.token, token.logprob, token.bytes) for token in tokens] == [
        ("He", -0.5, [72, 101]),
        (r"bytes:\xc3", -1.5, [0xC3]),
        (r"bytes:\xa9", -0.125, [0xA9]),
        ("</s>", -1.0, None),
    ]
    likely = [(one.token, one.logprob, one.bytes) for one in tokens[2].top_logprobs]
    assert likely == [(r"bytes:\xa9", -0.125, [0xA9]), ("token_id:0", -9999.0, None)]
    assert outputs.requests[0].generation.logprobs == 2


async def test_a_token_that_is_none_of_the_likely_ones_is_listed_beside_them(served: Front, outputs: FakeBackend):
    outputs.tokens = LIKELY
    for count, wanted in ((0, {"He": -0.5}), (1, {r"bytes:\xa9": -0.25, r"bytes:\xc3": -1.5})):
        made = await served.complete(logprobs=count)
        assert made.choices[0].logprobs.top_logprobs[count] == wanted


async def test_log_probabilities_without_others_and_lengths_that_nobody_asked_for(served: Front, outputs: FakeBackend):
    """A chat may fill the context, a completion is short."""
    await served.chat(logprobs=True)
    await served.complete(logprobs=0)
    await served.complete()
    asked = [(order.generation.logprobs, order.generation.max_tokens) for order in outputs.requests]
    assert asked == [(0, MAX_TOKENS), (0, 16), (None, 16)]


@pytest.mark.parametrize("given", [None, "", "../x", "a b", "-a", "a" * 129, "é", "a\n"])
def test_an_id_that_could_be_no_file_is_replaced(given: str | None) -> None:
    assert _named(given) not in (given, _named(given))
    assert _named("a-1.B_2:c") == "a-1.B_2:c"


async def test_a_whole_answer_of_a_chat(served: Front, outputs: FakeBackend) -> None:
    messages = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "Say"}, {"type": "text", "text": " it"}]},
        {"role": "assistant", "content": "What?"},
        {"role": "user", "content": "This", "name": "me"},
    ]
    done = await served.chat(messages=messages, max_completion_tokens=9, seed=5)
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
        found = [(choice.delta.content, choice.delta.role, choice.finish_reason) for choice in choices]
        assert found == [("He", "assistant", None), ("é", None, None), (None, None, "stop")]
    assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.choices) == (3, 8, [])


async def test_an_output_without_text_still_has_a_role_and_an_end(served: Front, outputs: FakeBackend) -> None:
    outputs.tokens = ()
    stream = await served.chat(stream=True)
    (only,) = [chunk.choices[0] async for chunk in stream]
    assert (only.delta.role, only.delta.content, only.finish_reason) == ("assistant", "", "stop")


async def test_how_the_template_is_used_is_the_clients_to_say(served: Front, outputs: FakeBackend) -> None:
    how = {"add_generation_prompt": False, "continue_final_message": True}
    more = how | {"chat_template_kwargs": {"enable_thinking": False}}
    await served.chat(extra_body=more)
    due = Chat((Message("user", "Say"),), False, True, '{"enable_thinking": false}')
    assert outputs.requests[0].generation.prompt == due


SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"enum": ["ü"]}}}
FORM = {"type": "json_schema", "json_schema": {"name": "s", "strict": True, "schema": SCHEMA}}
NO_SPACE = {"disable_any_whitespace": True}
TIGHT = NO_SPACE | {"disable_fallback": True}
OBJECT = {"type": "object"}
JSON = {"response_format": {"type": "json_object"}}


@pytest.mark.parametrize(
    ("body", "grammar"),
    [
        (JSON, Grammar.json(OBJECT)),
        ({"response_format": FORM}, Grammar.json(SCHEMA)),
        ({"structured_outputs": {"json": SCHEMA}}, Grammar.json(SCHEMA)),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)} | TIGHT}, Grammar.json(SCHEMA, whitespace_flexible=False)),
        (JSON | {"structured_outputs": {"whitespace_pattern": " ?"}}, Grammar.json(OBJECT, whitespace_pattern=" ?")),
        (JSON | {"structured_outputs": NO_SPACE}, Grammar.json(OBJECT, whitespace_flexible=False)),
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
    "mm_processor_kwargs": {}, "logits_processors": [], "verbosity": "medium", "metadata": {"a": "b"},
    "user": "me", "service_tier": "auto", "safety_identifier": "me", "prompt_cache_key": "a",
    "prompt_cache_retention": "24h", "logit_bias": {}, "stop": [],
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
    await served.chat(extra_body=NOTHING | more)
    plain, other = (one.generation for one in outputs.requests)
    assert plain == other
    await served.complete(extra_body=NOTHING)
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


IDS = [5, 9, 7, 0]  # of the output
PROMPT = [1, *b"Say"]


@pytest.mark.parametrize(
    ("given", "due"),
    [
        ({}, (0.5, 20, 0.8, 0.1, 1.05)),
        (dict.fromkeys(("temperature", "top_k", "top_p", "min_p", "repetition_penalty")), (0.5, 20, 0.8, 0.1, 1.05)),
        ({"temperature": 1.0, "top_k": -1, "top_p": 1, "min_p": 0, "repetition_penalty": 1}, (1.0, 0, 1.0, 0.0, 1.0)),
        ({"top_k": 0}, (0.5, 0, 0.8, 0.1, 1.05)),
    ],
)
async def test_what_a_body_leaves_out_is_the_models_own(served, outputs, given, due):
    own = SamplingDefaults(0.5, 20, 0.8, 0.1, 1.05, 700, 900)
    for route, body, tokens in (
        (COMPLETIONS, {"prompt": "Say"}, 16),  # as with OpenAI and vLLM, whatever the model's own
        (COMPLETIONS, {"prompt": "Say", "max_tokens": 1000}, 900),
        (CHAT, {"messages": MESSAGES}, 700),
        (CHAT, {"messages": MESSAGES, "max_tokens": 5}, 5),
    ):
        assert (await served.http.post(route, json={"model": "toy", **body, **given})).status_code == 200
        request = with_defaults(outputs.requests[-1].generation, own)
        assert (request.options, request.max_tokens) == (SamplingOptions(*due), tokens)


async def test_ping_version_and_the_models_that_are_there(served: Front, outputs: FakeBackend) -> None:
    assert (await served.http.get("/ping")).status_code == (await served.http.post("/ping")).status_code == 200
    assert (await served.http.get("/version")).json() == {"version": software()}
    outputs.served = TOY, replace(TOY, name="gone", there=False)
    assert (await served.http.get("/ready")).json() == {"status": "ready", "models": ["toy"]}


async def test_the_load_is_the_number_of_requests_under_way(served: Front, outputs: FakeBackend) -> None:
    async def load() -> int:
        found: int = (await served.http.get("/load")).json()["server_load"]
        return found

    outputs.waits_after = 1
    assert await load() == 0
    stream = await served.complete(stream=True)
    await anext(stream)
    assert await load() == 1
    outputs.go_on.set()
    async for _ in stream:
        pass
    assert await load() == 0


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"prompt": "Say"}, PROMPT),
        ({"prompt": "Say", "add_special_tokens": False}, PROMPT[1:]),
        ({"model": "toy", "messages": MESSAGES, "add_generation_prompt": False}, PROMPT),
    ],
)
async def test_tokens_of_a_text_and_back_and_what_cannot_be_tokenized(
    served: Front, body: dict[str, Any], tokens: list[int]
) -> None:
    found = (await served.post("/tokenize", **body)).json()
    assert found == {"count": len(tokens), "max_model_len": 64, "tokens": tokens, "token_strs": None}
    named = (await served.post("/tokenize", **body, return_token_strs=True)).json()
    assert named["token_strs"] == [chr(token) for token in tokens]
    back = await served.post("/detokenize", tokens=tokens)
    assert back.json()["prompt"].endswith("Say")
    assert (await served.post("/detokenize", tokens=[])).json() == {"prompt": ""}  # as vLLM
    for wrong in ({}, {"prompt": "a", "messages": MESSAGES}):
        refused = await served.post("/tokenize", **wrong)
        assert (refused.status_code, fault(refused)["message"]) == (400, "the body: give either prompt or messages")


async def test_ids_of_prompt_and_output(served: Front) -> None:
    body = {"extra_body": {"return_token_ids": True}}
    done = await served.complete(prompt=["Say", "So"], **body)
    for choice, text in zip(done.choices, (b"Say", b"So"), strict=True):
        extra = choice.model_extra or {}
        assert (extra["prompt_token_ids"], extra["token_ids"]) == ([1, *text], IDS)
    answer = await served.chat(**body)
    assert (answer.model_extra or {})["prompt_token_ids"] == PROMPT
    assert (answer.choices[0].model_extra or {})["token_ids"] == IDS


@pytest.mark.parametrize(("path", "asked"), [(COMPLETIONS, {"prompt": "Say"}), (CHAT, {"messages": MESSAGES})])
async def test_ids_and_usage_in_each_chunk(served: Front, path: str, asked: dict[str, Any]) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    create: Any = served.openai.completions.create if path == COMPLETIONS else served.openai.chat.completions.create
    extra = {"return_token_ids": True}
    stream = await create(model="toy", **asked, stream=True, stream_options=options, extra_body=extra)
    *chunks, last = [chunk async for chunk in stream]
    assert [chunk.usage.completion_tokens for chunk in chunks] == [1, 2, 3, 4, 4]
    assert {chunk.usage.prompt_tokens for chunk in chunks} == {len(PROMPT)}
    assert [token for chunk in chunks for token in chunk.choices[0].model_extra["token_ids"]] == IDS
    holder = chunks[0].choices[0] if path == COMPLETIONS else chunks[0]
    assert holder.model_extra["prompt_token_ids"] == PROMPT
    assert last.usage.completion_tokens == 4


async def test_pages_of_other_servers_may_use_it_if_that_is_asked_for(outputs: FakeBackend) -> None:
    asked = {"origin": "https://a.example", "access-control-request-method": "POST"}
    allowed = HttpSettings(allowed_origins=("https://a.example",), allowed_methods=("GET", "POST"))
    async with front(outputs, HttpOptions(Keys.of({"me": KEY}), http=allowed)) as shared:
        first = await shared.http.options(COMPLETIONS, headers={**asked, "authorization": ""})
        assert (first.status_code, first.headers["access-control-allow-origin"]) == (200, "https://a.example")
        other = await shared.http.options(COMPLETIONS, headers={**asked, "origin": "https://b.example"})
        assert "access-control-allow-origin" not in other.headers
        models = await shared.http.get("/v1/models", headers=asked)
        assert models.headers["access-control-expose-headers"] == "x-request-id"
    async with front(outputs) as alone:
        assert "access-control-allow-origin" not in (await alone.http.get("/v1/models", headers=asked)).headers
    assert HttpSettings().cors == {}


async def test_a_large_body_is_read_beside_the_event_loop(served, monkeypatch):
    """As what is read there is asked which thread it runs in, no clock decides."""
    from threading import current_thread

    from crossdraft.serving.http import app

    threads: list[str] = []
    read = app.parsed
    monkeypatch.setattr(app, "parsed", lambda *given: (threads.append(current_thread().name), read(*given))[1])
    for prompt in ("a", "a" * 100_000):
        assert (await served.post(COMPLETIONS, prompt=prompt)).status_code == 200
    assert [name.startswith("bodies") for name in threads] == [False, True]


async def test_metrics_of_speculative_decoding_are_as_vllms_if_they_are_wanted(served: Front, outputs: FakeBackend):
    """In whole replies and in the last chunk, for one output."""
    wanted = {
        "mean_acceptance_length": 2, "draft_acceptance_rate": 2 / 3, "acceptance_histogram": [0, 2, 0],
        "num_spec_steps": 2, "num_accepted_draft_tokens": 2, "num_draft_tokens": 3, "num_spec_tokens": 2,
    }  # fmt: skip
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    answers = HttpSettings(per_request_spec_decode_metrics=SpeculativeMetrics.summary)
    async with front(outputs, HttpOptions(http=answers)) as telling:
        for path, body in (("/v1/completions", {"prompt": "Say"}), ("/v1/chat/completions", {"messages": MESSAGES})):
            whole = (await telling.post(path, **body)).json()
            assert whole["metrics"] == {"speculative_decoding": wanted}
            last = (await telling.post(path, **body | usage)).text.split("\n\n")[-3]
            assert json.loads(last.removeprefix("data: "))["metrics"] == {"speculative_decoding": wanted}
            assert "metrics" not in (await telling.post(path, **body, n=2)).json()
            assert "metrics" not in (await served.post(path, **body)).json()
        outputs.end = OutputEnded(Reason.STOP, replace(figures(4), drafted_at=(), accepted_at=()))
        assert "metrics" not in (await telling.post("/v1/completions", prompt="Say")).json()

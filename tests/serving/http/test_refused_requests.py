"""Requests that are refused: who may ask, what a body must be, and what goes wrong later, in OpenAI's shape."""

import asyncio
import inspect
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import httpx2 as httpx
import pytest
from openai import APIError, APIStatusError, AuthenticationError, BadRequestError, RateLimitError
from starlette.applications import Starlette
from starlette.routing import Mount

from crossdraft.client import Reason, RequestError
from crossdraft.config.api import HttpSettings, RateOptions
from crossdraft.rpc import errors
from crossdraft.rpc.generation import OutputEnded
from crossdraft.serving import backend
from crossdraft.serving.backend import UnknownModelError
from crossdraft.serving.http import HttpOptions, make_app
from crossdraft.serving.http.errors import MEANINGS, refusal_of
from crossdraft.serving.limits import Keys
from crossdraft.trace.timeline import Span, What
from crossdraft.types.request import PromptTooLongError
from tests.serving.fakes import TOY, FakeBackend, figures
from tests.serving.http.conftest import CHAT, COMPLETIONS, KEY, Front, fault, front


async def test_keys_are_asked_for_where_a_model_is_used(outputs: FakeBackend) -> None:
    async with front(outputs, HttpOptions(Keys.given(None, [KEY]))) as guarded:
        assert (await guarded.openai.models.list()).data[0].id == "toy"
        with pytest.raises(AuthenticationError, match="this API key is not known") as caught:
            await guarded.openai.with_options(api_key=KEY + "!").models.list()
        assert (caught.value.response.headers["www-authenticate"], caught.value.code) == ("Bearer", "invalid_api_key")
        for path in (COMPLETIONS, "/tokenize", "/detokenize"):
            anonymous = await guarded.http.post(path, headers={"authorization": ""}, json={})
            assert (anonymous.status_code, fault(anonymous)["type"]) == (401, "authentication_error")
        assert (await guarded.post("/tokenize", prompt="Say")).status_code == 200
        for path in ("/health", "/ready", "/openapi.json", "/"):
            assert (await guarded.http.get(path, headers={"authorization": ""})).status_code == 200


async def test_each_key_and_salt_has_a_scope_of_its_own(outputs: FakeBackend) -> None:
    other = KEY + "!"
    async with front(outputs, HttpOptions(Keys.of({"me": KEY, "you": other}))) as guarded:
        for key in (KEY, KEY, other):
            for salt in ({}, {"cache_salt": "mine"}):
                client = guarded.openai.with_options(api_key=key)
                await client.completions.create(model="toy", prompt="Say", extra_body=salt)
    scopes = [one.generation.cache_salt for one in outputs.requests]
    assert (scopes[:2], len({"", "mine", *scopes})) == (scopes[2:4], 6)


async def test_keys_are_asked_for_where_the_application_is_mounted(outputs: FakeBackend) -> None:
    app = Starlette(routes=[Mount("/some/where", make_app(outputs, HttpOptions(Keys.of({"me": KEY}))))])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as client:
        assert (await client.get("/some/where/v1/models")).status_code == 401
        known = await client.get("/some/where/v1/models", headers={"authorization": f"Bearer {KEY}"})
        assert (known.status_code, (await client.get("/some/where/health")).status_code) == (200, 200)


async def test_a_client_that_asks_too_often_is_told_when(outputs: FakeBackend) -> None:
    async with front(outputs, HttpOptions(rates=RateOptions(rate=0.1, burst=2))) as limited:
        for _ in range(2):
            await limited.openai.models.list()
        with pytest.raises(RateLimitError) as caught:
            await limited.openai.models.list()
        assert caught.value.code == "rate_limit_exceeded"
        assert 500 <= int(caught.value.response.headers["retry-after"]) <= 600
        assert (await limited.http.get("/health")).status_code == 200


SAY = {"prompt": "a"}
TOOL = {"type": "function", "function": {"name": "f"}}
NAMED = {"type": "function", "function": {"name": "g"}}
OF_ARRAYS = {"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}
CALLED = "messages.0.tool_calls.0.function"
CHATTING = {"messages": [{"role": "user", "content": "a"}]}
HOW = "speculative"


def within(name: str) -> Callable[..., dict[str, object]]:
    return lambda **fields: {name: fields}


drafting, forced, formed = map(within, (HOW, "structured_outputs", "response_format"))


def said(**message: object) -> dict[str, object]:
    return {"messages": [message]}


WRONG_COMPLETIONS: list[tuple[dict[str, object], str | None, str]] = [  # beside the prompt: a body, what is named, why
    ({"prompt": []}, "prompt", "it must have at least 1 item"),
    ({"prompt": [True]}, "prompt.0", "valid"),
    ({"prompt": 5}, "prompt", "prompt: it must be a text, a list of token ids, or a list of either"),
    (
        drafting(overlap="off", max_draft_tokens=4),
        f"{HOW}.max_draft_tokens",
        f"{HOW}.max_draft_tokens has no effect with overlap off: leave it out, or turn overlap on",
    ),
    (drafting(method="tokentiming") | {"temperature": 1}, f"{HOW}.method", f"or allow it with {HOW}.allow_inexact"),
    ({"temperature": -1}, "temperature", "greater than or equal to 0"),
    ({"max_tokens": True}, "max_tokens", "must be a number, not true or false"),
    ({"temperature": False}, "temperature", "must be a number, not true or false"),
    ({"seed": 2**64}, "seed", "less than"),
    ({"stop": ["a", ""]}, "stop.1", "at least 1 character"),
    ({"stop": ["a"] * 17}, "stop", "at most 16 items"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5", "less than or equal to 100"),
    ({"min_tokens": 17}, "min_tokens", "must be less than or equal to max_tokens=16, got 17"),
    ({"stop_token_ids": [-1]}, "stop_token_ids.0", "greater than or equal to 0"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "must not be 0"),
    ({"prompt_logprobs": 1, "stream": True}, None, "are not available when `stream=True`"),
    ({"temprature": 1}, "temprature", "argument supplied: temprature; did you mean temperature?"),
    ({"speculation": {"k": 3}}, "speculation", "argument supplied: speculation; did you mean speculative?"),
    ({"n": 33}, "n", "at most 32"),
    ({"best_of": 2}, "best_of", "best_of is not served: use n, and choose among the outputs"),
    ({"drafter": "small"}, "drafter", "argument supplied: drafter; it belongs to speculative: speculative.drafter"),
    ({"k": 4}, "k", "argument supplied: k; it belongs to speculative: speculative.k"),
    ({"regex": "a"}, "regex", "it belongs to structured_outputs: structured_outputs.regex"),
    ({"include_usage": True}, "include_usage", "it belongs to stream_options: stream_options.include_usage"),
    ({"stop": "a" * 40_000, "bad_words": ["b" * 40_000]}, "stop", "stop must have at most 65536 characters, those of"),
    ({HOW: 5}, HOW, "speculative: it must be a JSON object"),
    ({"metadata": 5}, "metadata", "metadata: it must be a JSON object"),
    (drafting(k=3, num_speculative_tokens=3), HOW, "k is a short name of num_speculative_tokens: give one of them"),
    (forced(grammar=""), "structured_outputs.grammar", "at least 1 character"),
    ({"stream_options": {}}, None, "needs stream"),
    (drafting(num_speculative_tokens=0), f"{HOW}.num_speculative_tokens", "greater than or equal to 1"),
    (drafting(max_draft_tokens=2, min_draft_tokens=3), f"{HOW}.min_draft_tokens", f"at most {HOW}.max_draft_tokens"),
    (drafting(method="coupled") | {"seed": 1, "temperature": 1}, f"{HOW}.method", "use the method 'seeded'"),
    ({"prompt": [[5]] * 2049}, "prompt", "it must have at most 2048 items"),
    ({"prompt": ["a", [5] * (2**20 + 1)]}, "prompt.1", "it must have at most 1048576 items"),
    ({"allowed_token_ids": [5] * (2**20 + 1)}, "allowed_token_ids", "at most 1048576 items"),
    ({"suffix": "b"}, "suffix", "suffix is not served: leave it out"),
    ({"guided_json": {}}, "guided_json", "Unrecognized request argument"),
    (forced(json=[1]), "structured_outputs.json", "it must be a JSON sch"),
    (
        forced(choice=["b"], regex="a"),
        "structured_outputs",
        "You can only use one kind of structured outputs constraint but multiple are specified: regex, choice",
    ),
    (forced(disable_any_whitespace=True), "structured_outputs", "use one kind of structured outputs constraint but"),
    (forced(regex="a", structural_tag="b"), "structured_outputs.structural_tag", "structural_tag is not served: leave"),
    (forced(choice=[]), "structured_outputs.choice", "at least 1 item"),
    (forced(regex="a" * (2**16 + 1)), "structured_outputs", "may have 65536 characters"),
    ({f"a{number}": None for number in range(2000)} | {"temprature": 0}, "temprature", "Unrecognized request argument"),
    ({f"a{number}": 1 for number in range(2000)}, "a0", "Unrecognized request argument"),
    ({"logit_bias": {f"a{number}": 1 for number in range(2000)}}, "logit_bias", "at most 1024"),
    ({"prompt": [{}] * 60_000}, "prompt.0", "valid"),
]
WRONG_CHATS: list[tuple[dict[str, object], str | None, str]] = [  # beside the messages
    ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
    ({"messages": []}, "messages", "at least 1"),
    ({"tools": [{}], "tool_choice": "auto"}, "tools.0.type", "it is required"),
    ({"tools": [{"type": "custom"}]}, "tools.0.type", "it may be 'function'"),
    ({"tools": [TOOL] * 513}, "tools", "at most 512 items"),
    ({"tools": [OF_ARRAYS]}, "tools.0.function.parameters", 'its type must be "object"'),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools.0.function.name", "at least 1 character"),
    (said(role="assistant", tool_calls=[{"function": {"name": ""}}]), f"{CALLED}.name", "at least 1 character"),
    ({"tools": [TOOL], "tool_choice": NAMED}, "tool_choice", "does not match any of the specified `tools`"),
    *(
        ({"tools": [TOOL], "tool_choice": choice}, "tool_choice", 'or of type "allowed_tools"')
        for choice in (
            "any",
            7,
            {"type": "function"},
            {"type": "function", "function": {"name": [1]}},
            {"type": "allowed_tools"},
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
            {"type": "allowed_tools", "allowed_tools": {"mode": "named", "tools": [TOOL]}},
        )
    ),
    ({"tool_choice": NAMED}, "tool_choice", "`tools` must be set"),
    ({"tools": [TOOL, TOOL]}, "tools", "names must differ, and 'f' is there more than once"),
    ({"tool_choice": "required"}, "tool_choice", "`tools` must be set"),
    ({"top_logprobs": 2}, None, "needs logprobs"),
    ({"reasoning_effort": "much"}, "reasoning_effort", "is not served: it may be 'none'"),
    ({"skip_special_tokens": False}, "skip_special_tokens", "is not served"),
    ({"use_beam_search": True, "length_penalty": 1}, "use_beam_search", "is not served"),
    ({"seeed": None, "temprature": 0}, "temprature", "Unrecognized request argument"),
    (said(role="assistant", tool_calls=[{"id": "a"}]), CALLED, "it is required"),
    (said(role="assistant", audio={"id": "a"}), "messages.0.audio", "messages.0.audio: it is not served: leave it out"),
    ({"messages": CHATTING["messages"] * 4097}, "messages", "it must have at most 4096 items"),
    (formed(type="structural_tag"), "response_format.type", "it may be 'text', 'json_object' or 'json_schema'"),
    (formed(type="json_schema"), "response_format", "json_schema must be provided"),
    (formed(type="json_schema", json_schema={"schema": {}}), "response_format.json_schema.name", "it is required"),
    (said(role="user", content=None), "messages.0.content", "it is required"),
    ({"continue_final_message": True}, None, "cannot both be true"),
    (
        said(role="user", content=[{"type": "image_url", "image_url": {}}]),
        "messages.0.content.0.type",
        "messages.0.content.0.type \"image_url\" is not served: it may be 'text'",
    ),
]


@pytest.mark.parametrize(
    ("path", "body", "param", "text"),
    [
        (COMPLETIONS, {}, "prompt", "prompt: it is required"),
        *((COMPLETIONS, SAY | body, *why) for body, *why in WRONG_COMPLETIONS),
        *((CHAT, CHATTING | body, *why) for body, *why in WRONG_CHATS),
    ],
)
async def test_a_wrong_field_is_named(direct, outputs, path, body, param, text):
    response = await direct.post(path, json=body)
    error = fault(response)
    assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert text in error["message"]
    assert not outputs.requests


JSON = "application/json"
OBJECT = "it must be a JSON object"
MANY_SIGNS = json.dumps('x["a"] = {"\\\\": [1]}\\n' * 20_000).encode()


@pytest.mark.parametrize(
    ("content", "kind", "text"),
    [
        (b"", JSON, OBJECT),
        (b"[]", JSON, OBJECT),
        (b'"text"', JSON, OBJECT),
        (b'{"prompt": "a"}', "text/plain", "`content-type: application/json`"),
        (b'{"prompt": "a"}', "application/x-www-form-urlencoded", "`content-type: application/json`"),
        (b"{", JSON, "not JSON: Expecting property name enclosed in double quotes at character 1"),
        (b"\xff", JSON, "not UTF-8"),
        (b"[" * 100_000, JSON, "nested too deeply"),
        (b'{"logit_bias": ' + b'{"a":' * 200 + b"1" + b"}" * 201, JSON, "nested too deeply"),
        (b'{"prompt": "\\ud800"}', JSON, "it is not Unicode text"),
        (b'{"prompt": NaN}', JSON, "it must be a text, a list"),
        (b'{"prompt": ' + b"1" * 5000 + b"}", JSON, "too many digits"),
        (b'{"prompt": ' + MANY_SIGNS + b', "n": 0}', JSON, "n: it must be"),
    ],
)
async def test_what_is_no_request_at_all(direct, outputs, content, kind, text):
    response = await direct.post(COMPLETIONS, content=content, headers={"content-type": kind})
    assert (response.status_code, fault(response)["type"]) == (400, "invalid_request_error")
    assert text in fault(response)["message"]
    assert not outputs.requests


async def test_a_model_must_be_named_where_there_are_several(direct, outputs) -> None:
    outputs.served = (TOY, replace(TOY, name="second"))
    for path, body in ((COMPLETIONS, SAY), (CHAT, CHATTING), ("/tokenize", SAY), ("/detokenize", {"tokens": [1]})):
        error = fault(await direct.post(path, json=body))
        assert (error["message"], error["param"]) == ("name the model; there are toy, second", "model")


async def test_paths_and_methods_that_are_not_there(served: Front) -> None:
    response = await served.http.get("/v1/nothing")
    assert (response.status_code, fault(response)["code"]) == (404, "not_found")
    response = await served.http.get(COMPLETIONS)
    assert (response.status_code, fault(response)["code"]) == (405, "method_not_allowed")
    assert (response.headers["allow"], fault(response)["message"]) == ("POST", f"{COMPLETIONS} takes POST")


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_over_the_limit(outputs: FakeBackend, chunked: bool) -> None:
    async def pieces() -> Any:
        for _ in range(20):
            yield b" " * 100

    async with front(outputs, HttpOptions(http=HttpSettings(max_body_mib=1000 / 2**20))) as small:
        kind = {"content-type": "application/json"}
        content = pieces() if chunked else b" " * 2000
        response = await small.http.post(COMPLETIONS, content=content, headers=kind)
        assert (response.status_code, fault(response)["code"]) == (413, "request_too_large")
        assert (await small.post(COMPLETIONS, prompt="a" * 800)).status_code == 200


async def test_all_bodies_together_have_a_limit_too(outputs: FakeBackend) -> None:
    outputs.waits_after = 0
    large = {"prompt": "a" * 100_000}
    async with front(outputs, HttpOptions(http=HttpSettings(max_bodies_mib=150_000 / 2**20))) as small:
        held = asyncio.create_task(small.post(COMPLETIONS, **large))
        await outputs.wait_running(1)
        refused = await small.post(COMPLETIONS, **large)
        assert (refused.status_code, fault(refused)["code"], refused.headers["retry-after"]) == (429, "overloaded", "1")
        outputs.go_on.set()
        assert (await small.post(COMPLETIONS, prompt="a" * 60_000)).status_code == 200
        assert (await held).status_code == 200
        assert (await small.post(COMPLETIONS, **large)).status_code == 200


@pytest.mark.parametrize(
    "value",
    [[[]] * 120_000, ["a"] * 120_000, [{"a": 1}] * 60_000, ["\\", '"', "[{"] * 40_000],
    ids=["lists", "texts", "objects", "signs"],
)
async def test_bodies_with_more_parts_than_a_request_has_are_not_made(direct, value, monkeypatch):
    content = json.dumps({"prompt": value}).encode()
    with monkeypatch.context() as patched:
        patched.setattr(json, "loads", lambda _: pytest.fail("made"))
        refused = await direct.post(COMPLETIONS, content=content, headers={"content-type": JSON})
    kind = {"type": "invalid_request_error", "param": None, "code": "invalid_value"}
    message = "the body has more than 100000 strings, lists and objects; send less"
    assert fault(refused) == kind | {"message": message}


def test_every_foreign_error_has_a_meaning_of_its_own() -> None:
    ours, theirs = (dict(inspect.getmembers(module, inspect.isclass)).values() for module in (errors, backend))
    services = {kind for kind in ours if issubclass(kind, errors.ServiceError)}
    known = {kind for kind in theirs if issubclass(kind, Exception)}
    assert (services | known) - {errors.ServiceError, errors.ServiceFault} <= set(MEANINGS)
    assert set(errors.MEANINGS.values()) <= set(MEANINGS)


def test_a_more_special_error_is_looked_up_first() -> None:
    seen: list[type[Exception]] = []
    for kind in MEANINGS:
        assert not any(issubclass(kind, earlier) for earlier in seen), kind
        seen.append(kind)


OF_SERVICES = [kind for kind in MEANINGS if issubclass(kind, errors.ServiceError)]


@pytest.mark.parametrize("kind", OF_SERVICES)
def test_where_services_are_is_for_the_log_and_not_for_clients(kind: type[Exception], caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")
    refused = refusal_of(kind("target at 10.0.0.1:7001: k must be smaller"), "some")
    assert "10.0.0.1" not in refused.message
    assert MEANINGS[kind].message or refused.message == "target: k must be smaller"
    assert "target at 10.0.0.1:7001: k must be smaller" in caplog.text


async def test_a_trace_does_not_say_where_services_are(served: Front, outputs: FakeBackend) -> None:
    why = "drafter at 10.0.0.1:7002: gone"
    outputs.end = OutputEnded(Reason.STOP, replace(figures(4), drafter_lost=why))
    told = [("drafter", What.LOST, why), ("output", What.ACCEPTED, "a:1")]
    spans = tuple(Span(lane, 0.0, 0.0, what, label, 1) for lane, what, label in told)
    outputs.spans = lambda place: () if place else spans
    reply = await served.post(COMPLETIONS, prompt="Say", stream=True, speculative={"trace": True})
    assert "10.0.0.1" not in reply.text
    assert reply.text.count("drafter: gone") == 2
    assert '"a:1"' in reply.text


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (RequestError("method 'tli' needs another drafter"), 400, None),
        (errors.ContextTooLong("the prompt has 9 tokens"), 400, "context_length_exceeded"),
        (PromptTooLongError("the prompt has 9 tokens"), 400, "context_length_exceeded"),
        (errors.Overloaded("64 outputs are being made", 2.2), 429, "overloaded"),
        (UnknownModelError("there is no model"), 404, "model_not_found"),
        (errors.Unreachable("gone"), 503, "service_unavailable"),
        (errors.TimedOut("late"), 504, "timeout"),
        (errors.BadMessage("nonsense"), 500, "internal_error"),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
async def test_an_error_before_the_first_token_has_its_status(served, outputs, error, status, code, streamed):
    outputs.fault = error
    response = await served.post(COMPLETIONS, prompt="Say", stream=streamed)
    assert (response.status_code, fault(response)["code"]) == (status, code)
    assert fault(response)["param"] == ("model" if status == 404 else None)
    if status == 400:
        assert fault(response)["message"] == str(error)
    assert response.headers.get("retry-after") == ("3" if status == 429 else None)
    await outputs.wait_running(0)


@pytest.mark.parametrize("n", [1, 2])
async def test_an_error_in_a_stream_is_its_last_event_and_ends_its_other_outputs(served, outputs, n, monkeypatch):
    texts, late = [], iter([errors.TimedOut("late")])

    async def before(number: int) -> None:
        if number == 3:
            for error in late:
                raise error
            await outputs.go_on.wait()  # another output waits for ever

    monkeypatch.setattr(outputs, "_before", before)
    stream = await served.complete(stream=True, n=n)
    with pytest.raises(APIError, match="no target answered in time"):
        [texts.append(chunk.choices[0].text) async for chunk in stream]
    assert [*dict.fromkeys(texts)] == ["He", "é"]
    await outputs.wait_running(0)


async def test_a_bug_is_an_error_of_the_server(served: Front, outputs: FakeBackend) -> None:
    outputs.fault = ZeroDivisionError("a bug")
    with pytest.raises(APIStatusError) as caught:
        await served.complete()
    assert (caught.value.status_code, caught.value.response.headers["connection"]) == (500, "close")
    assert caught.value.response.headers["x-request-id"] == outputs.requests[0].id
    assert "a bug" not in fault(caught.value.response)["message"]
    with pytest.raises(BadRequestError):
        await served.complete(prompt=[])
    await outputs.wait_running(0)


async def test_a_bug_behind_a_question_for_the_head_is_an_error_of_the_server(served, outputs, monkeypatch) -> None:
    monkeypatch.setattr(outputs, "models", Mock(side_effect=ZeroDivisionError("a bug")))
    reply = await served.http.head("/v1/models", headers={"x-request-id": "r-1"})
    assert (reply.status_code, reply.headers["x-request-id"]) == (500, "r-1")
    assert reply.headers["content-type"] == "application/json"

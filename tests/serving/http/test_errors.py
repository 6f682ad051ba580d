"""What goes wrong, in OpenAI's shape."""

import inspect
from typing import Any

import httpx2 as httpx
import pytest
from openai import (
    APIError,
    APIStatusError,
    AuthenticationError,
    BadRequestError,
    InternalServerError,
    NotFoundError,
    RateLimitError,
)
from starlette.applications import Starlette
from starlette.routing import Mount

from crossdraft.pipeline import RequestError
from crossdraft.pipeline.request import PromptTooLongError
from crossdraft.rpc import errors as rpc
from crossdraft.serving import orders
from crossdraft.serving.http import HttpOptions, RateLimit, make_app
from crossdraft.serving.http.errors import MEANINGS, refusal_of
from crossdraft.serving.keys import Keys
from crossdraft.serving.orders import OverloadedError
from tests.serving.fakes import FakeOutputs
from tests.serving.http.conftest import KEY, Front, front

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
PARTS = {"message", "type", "param", "code"}


def fault(response: Any) -> dict[str, Any]:
    """The error of a reply, which has OpenAI's shape."""
    (name, error), *others = response.json().items()
    assert (name, set(error), others) == ("error", PARTS, [])
    assert error["message"]
    return dict(error)


def test_every_foreign_error_has_a_meaning_of_its_own() -> None:
    services = {kind for _, kind in inspect.getmembers(rpc, inspect.isclass) if issubclass(kind, rpc.ServiceError)}
    known = {kind for _, kind in inspect.getmembers(orders, inspect.isclass) if issubclass(kind, Exception)}
    assert (services | known) - {rpc.ServiceError} <= set(MEANINGS)
    assert set(rpc.MEANINGS.values()) <= set(MEANINGS)


def test_a_more_special_error_is_looked_up_first() -> None:
    seen: list[type[Exception]] = []
    for kind in MEANINGS:
        assert not any(issubclass(kind, earlier) for earlier in seen), kind
        seen.append(kind)


@pytest.mark.parametrize("kind", [kind for kind, meaning in MEANINGS.items() if meaning.status >= 500])
def test_what_services_say_of_themselves_is_not_for_clients(kind: type[Exception]) -> None:
    assert "10.0.0.1" not in refusal_of(kind("target at 10.0.0.1:7001: gone"), "some").message


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (RequestError("method 'tli' needs another drafter"), 400, None),
        (rpc.ContextTooLong("the prompt has 9 tokens"), 400, "context_length_exceeded"),
        (PromptTooLongError("the prompt has 9 tokens"), 400, "context_length_exceeded"),
        (OverloadedError("64 outputs are being made", 2.2), 429, "overloaded"),
        (rpc.Unreachable("gone"), 503, "service_unavailable"),
        (rpc.TimedOut("late"), 504, "timeout"),
        (rpc.BadMessage("nonsense"), 500, "internal_error"),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
async def test_an_error_before_the_first_token_has_its_status(
    served: Front, outputs: FakeOutputs, error: Exception, status: int, code: str | None, streamed: bool
) -> None:
    outputs.fault = error
    response = await served.post(COMPLETIONS, prompt="Say", stream=streamed)
    assert (response.status_code, fault(response)["code"]) == (status, code)
    if status == 400:
        assert fault(response)["message"] == str(error)
    assert response.headers.get("retry-after") == ("3" if status == 429 else None)
    await outputs.wait_running(0)


async def test_an_error_of_one_choice_ends_the_others(served: Front, outputs: FakeOutputs) -> None:
    outputs.fault, outputs.fault_after = rpc.Unreachable("gone"), 2
    with pytest.raises(InternalServerError, match="no target can be reached"):
        await served.openai.completions.create(model="toy", prompt="Say", n=3)
    assert len(outputs.orders) == 3
    await outputs.wait_running(0)


async def test_an_error_in_a_stream_is_its_last_event(served: Front, outputs: FakeOutputs) -> None:
    outputs.fault, outputs.fault_after = rpc.TimedOut("late"), 3
    stream = await served.openai.completions.create(model="toy", prompt="Say", stream=True)
    assert [(await anext(stream)).choices[0].text for _ in range(2)] == ["He", "é"]
    with pytest.raises(APIError, match="no target answered in time"):
        await anext(stream)


async def test_a_model_that_is_not_there(served: Front) -> None:
    with pytest.raises(NotFoundError, match="there is no model 'other'; there is toy") as caught:
        await served.openai.completions.create(model="other", prompt="Say")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize(
    ("path", "body", "param", "text"),
    [
        (COMPLETIONS, {}, "prompt", "Field required"),
        (COMPLETIONS, {"prompt": ""}, "prompt", "String should have at least 1 character"),
        (COMPLETIONS, {"prompt": []}, "prompt", "at least 1 item"),
        (COMPLETIONS, {"prompt": [True]}, "prompt.0", "valid"),
        (COMPLETIONS, {"prompt": "a", "temperature": -1}, "temperature", "greater than or equal to 0"),
        (COMPLETIONS, {"prompt": "a", "temperature": "warm"}, "temperature", "valid number"),
        (COMPLETIONS, {"prompt": "a", "top_p": 0}, "top_p", "greater than 0"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        (COMPLETIONS, {"prompt": "a", "seed": 2**63}, "seed", "less than"),
        (COMPLETIONS, {"prompt": "a", "stop": ["a", ""]}, "stop.1", "at least 1 character"),
        (COMPLETIONS, {"prompt": "a", "stop": ["a"] * 17}, "stop", "at most 16 items"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"5": 101}}, "logit_bias.5", "less than or equal to 100"),
        (COMPLETIONS, {"prompt": "a", "frequency_penalty": 1}, "frequency_penalty", "Input should be 0"),
        (COMPLETIONS, {"prompt": "a", "temprature": 1}, "temprature", "Unrecognized request argument supplied"),
        (COMPLETIONS, {"prompt": "a", "n": 33}, "n", "at most 32"),
        (COMPLETIONS, {"prompt": "a", "best_of": 2}, None, "best_of is not served"),
        (COMPLETIONS, {"prompt": [1], "echo": True}, None, "echo is served for prompts of text"),
        (COMPLETIONS, {"prompt": "a", "stream_options": {}}, None, "needs stream"),
        (COMPLETIONS, {"prompt": "a", "speculative": {"k": 0}}, "speculative.k", "greater than or equal to 1"),
        (
            COMPLETIONS,
            {"prompt": "a", "speculative": {"method": "best"}},
            "speculative.method",
            "unknown method 'best'",
        ),
        (
            COMPLETIONS,
            {"prompt": "a", "speculative": {"overlap": "off", "window": 3}},
            "speculative.window",
            "overlap off",
        ),
        (
            COMPLETIONS,
            {"prompt": "a", "speculative": {"window": 2, "wait": 3}},
            "speculative.wait",
            "at most window",
        ),
        (
            COMPLETIONS,
            {"prompt": "a", "seed": 1, "speculative": {"method": "coupled"}},
            "speculative.method",
            "use --method seeded",
        ),
        (CHAT, {"messages": []}, "messages", "at least 1"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages.0.content", "Field required"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages.0.content", "valid"),
        (CHAT, {"messages": [{"role": "user", "content": "a"}], "tools": [{}]}, "tools", "at most 0"),
        (CHAT, {"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2}, None, "needs logprobs"),
    ],
)
async def test_a_wrong_field_is_named(
    direct: httpx.AsyncClient, outputs: FakeOutputs, path: str, body: dict[str, Any], param: str | None, text: str
) -> None:
    response = await direct.post(path, json=body)
    error = fault(response)
    assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert text in error["message"]
    assert not outputs.orders


JSON = "application/json"
OBJECT = "it must be a JSON object"


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
        (b'{"prompt": "\\ud800"}', JSON, "unicode string"),
        (b'{"prompt": NaN}', JSON, "valid string"),
    ],
)
async def test_what_is_no_request_at_all(
    direct: httpx.AsyncClient, outputs: FakeOutputs, content: bytes, kind: str, text: str
) -> None:
    response = await direct.post(COMPLETIONS, content=content, headers={"content-type": kind})
    assert (response.status_code, fault(response)["type"]) == (400, "invalid_request_error")
    assert text in fault(response)["message"]
    assert not outputs.orders


async def test_paths_and_methods_that_are_not_there(served: Front) -> None:
    response = await served.http.get("/v1/nothing")
    assert (response.status_code, fault(response)["code"]) == (404, "not_found")
    response = await served.http.get(COMPLETIONS)
    assert (response.status_code, fault(response)["code"]) == (405, "method_not_allowed")


async def test_keys_are_asked_for_under_v1_only(outputs: FakeOutputs) -> None:
    async with front(outputs, HttpOptions(Keys.of({"me": KEY}))) as guarded:
        assert (await guarded.openai.models.list()).data[0].id == "toy"
        with pytest.raises(AuthenticationError, match="this API key is not known") as caught:
            await guarded.openai.with_options(api_key=KEY + "!").models.list()
        assert caught.value.response.headers["www-authenticate"] == "Bearer"
        assert caught.value.code == "invalid_api_key"
        anonymous = await guarded.http.post(COMPLETIONS, headers={"authorization": ""}, json={})
        assert (anonymous.status_code, fault(anonymous)["type"]) == (401, "authentication_error")
        for path in ("/health", "/ready", "/openapi.json", "/"):
            assert (await guarded.http.get(path, headers={"authorization": ""})).status_code == 200


async def test_keys_are_asked_for_where_the_application_is_mounted(outputs: FakeOutputs) -> None:
    app = Starlette(routes=[Mount("/some/where", make_app(outputs, HttpOptions(Keys.of({"me": KEY}))))])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as client:
        assert (await client.get("/some/where/v1/models")).status_code == 401
        known = await client.get("/some/where/v1/models", headers={"authorization": f"Bearer {KEY}"})
        assert (known.status_code, (await client.get("/some/where/health")).status_code) == (200, 200)


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_over_the_limit(outputs: FakeOutputs, chunked: bool) -> None:
    async def pieces() -> Any:
        for _ in range(20):
            yield b" " * 100

    async with front(outputs, HttpOptions(most_bytes=1000)) as small:
        kind = {"content-type": "application/json"}
        content = pieces() if chunked else b" " * 2000
        response = await small.http.post(COMPLETIONS, content=content, headers=kind)
        assert (response.status_code, fault(response)["code"]) == (413, "request_too_large")
        assert (await small.post(COMPLETIONS, prompt="a" * 800)).status_code == 200


async def test_a_client_that_asks_too_often_is_told_when(outputs: FakeOutputs) -> None:
    async with front(outputs, HttpOptions(rate=RateLimit(per_minute=1, burst=2))) as limited:
        for _ in range(2):
            await limited.openai.models.list()
        with pytest.raises(RateLimitError) as caught:
            await limited.openai.models.list()
        assert caught.value.code == "rate_limit_exceeded"
        assert 50 <= int(caught.value.response.headers["retry-after"]) <= 60
        assert (await limited.http.get("/health")).status_code == 200


async def test_nothing_can_be_served_yet(outputs: FakeOutputs) -> None:
    outputs.served = ()
    async with front(outputs) as empty:
        for response in (await empty.http.get("/ready"), await empty.post(COMPLETIONS, prompt="a")):
            assert (response.status_code, fault(response)["code"]) == (503, "service_unavailable")
        assert (await empty.http.get("/health")).json() == {"status": "ok"}


async def test_a_bug_is_an_error_of_the_server(served: Front, outputs: FakeOutputs) -> None:
    outputs.fault = ZeroDivisionError("a bug")
    with pytest.raises(APIStatusError) as caught:
        await served.openai.completions.create(model="toy", prompt="Say")
    assert caught.value.status_code == 500
    assert "a bug" not in fault(caught.value.response)["message"]
    with pytest.raises(BadRequestError):
        await served.openai.completions.create(model="toy", prompt="")
    await outputs.wait_running(0)

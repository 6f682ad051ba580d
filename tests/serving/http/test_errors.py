"""What goes wrong, in OpenAI's shape."""

import inspect
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

import pytest
from openai import APIError, APIStatusError, BadRequestError

from crossdraft.client import Reason, RequestError
from crossdraft.rpc import errors
from crossdraft.rpc.generation import OutputEnded
from crossdraft.serving import backend
from crossdraft.serving.backend import OutputItem, OutputRequest, OverloadedError, TraceSpans, UnknownModelError
from crossdraft.serving.http.errors import MEANINGS, refusal_of
from crossdraft.trace.timeline import Span, What
from crossdraft.types.request import PromptTooLongError
from tests.serving.fakes import FakeBackend, figures
from tests.serving.http.conftest import COMPLETIONS, Front, fault, front


def test_every_foreign_error_has_a_meaning_of_its_own() -> None:
    services = {
        kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.ServiceError)
    }
    known = {kind for _, kind in inspect.getmembers(backend, inspect.isclass) if issubclass(kind, Exception)}
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
    assert MEANINGS[kind].text or refused.message == "target: k must be smaller"
    assert "target at 10.0.0.1:7001: k must be smaller" in caplog.text


async def test_a_trace_does_not_say_where_services_are(outputs: FakeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    why = "drafter at 10.0.0.1:7002: gone"
    outputs.end = OutputEnded(Reason.STOP, replace(figures(4), drafter_lost=why))
    stream = outputs.stream

    async def traced(request: OutputRequest) -> AsyncGenerator[OutputItem, None]:
        yield TraceSpans(
            (Span("drafter", 0.0, 0.0, What.LOST, why, 1), Span("output", 0.0, 0.0, What.ACCEPTED, "a:1", 1))
        )
        async with aclosing(stream(request)) as items:
            async for item in items:
                yield item

    monkeypatch.setattr(outputs, "stream", traced)
    async with front(outputs) as served:
        body = {"prompt": "Say", "stream": True, "speculative": {"trace": True}}
        reply = await served.post(COMPLETIONS, **body)
    assert "10.0.0.1" not in reply.text
    assert reply.text.count("drafter: gone") == 2
    assert '"a:1"' in reply.text


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (RequestError("method 'tli' needs another drafter"), 400, None),
        (errors.ContextTooLong("the prompt has 9 tokens"), 400, "context_length_exceeded"),
        (PromptTooLongError("the prompt has 9 tokens"), 400, "context_length_exceeded"),
        (OverloadedError("64 outputs are being made", 2.2), 429, "overloaded"),
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


async def test_an_error_in_a_stream_is_its_last_event(served: Front, outputs: FakeBackend) -> None:
    outputs.fault, outputs.fault_after = errors.TimedOut("late"), 3
    stream = await served.openai.completions.create(model="toy", prompt="Say", stream=True)
    assert [(await anext(stream)).choices[0].text for _ in range(2)] == ["He", "é"]
    with pytest.raises(APIError, match="no target answered in time"):
        await anext(stream)


async def test_a_bug_is_an_error_of_the_server(served: Front, outputs: FakeBackend) -> None:
    outputs.fault = ZeroDivisionError("a bug")
    with pytest.raises(APIStatusError) as caught:
        await served.openai.completions.create(model="toy", prompt="Say")
    assert (caught.value.status_code, caught.value.response.headers["connection"]) == (500, "close")
    assert "a bug" not in fault(caught.value.response)["message"]
    with pytest.raises(BadRequestError):
        await served.openai.completions.create(model="toy", prompt=[])
    await outputs.wait_running(0)

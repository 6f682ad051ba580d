"""What goes wrong, in OpenAI's shape."""

import inspect

import pytest
from openai import APIError, APIStatusError, BadRequestError, InternalServerError

from crossdraft.client import RequestError
from crossdraft.rpc import errors
from crossdraft.serving import backend
from crossdraft.serving.backend import OverloadedError, UnknownModelError
from crossdraft.serving.http.errors import MEANINGS, refusal_of
from crossdraft.types.request import PromptTooLongError
from tests.serving.fakes import FakeBackend
from tests.serving.http.conftest import Front, front
from tests.serving.http.faults import COMPLETIONS, fault


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


@pytest.mark.parametrize("kind", [kind for kind, meaning in MEANINGS.items() if meaning.status >= 500])
def test_what_services_say_of_themselves_is_not_for_clients(kind: type[Exception]) -> None:
    assert "10.0.0.1" not in refusal_of(kind("target at 10.0.0.1:7001: gone"), "some").message


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
async def test_an_error_before_the_first_token_has_its_status(
    served: Front, outputs: FakeBackend, error: Exception, status: int, code: str | None, streamed: bool
) -> None:
    outputs.fault = error
    response = await served.post(COMPLETIONS, prompt="Say", stream=streamed)
    assert (response.status_code, fault(response)["code"]) == (status, code)
    assert fault(response)["param"] == ("model" if status == 404 else None)
    if status == 400:
        assert fault(response)["message"] == str(error)
    assert response.headers.get("retry-after") == ("3" if status == 429 else None)
    await outputs.wait_running(0)


async def test_an_error_of_one_choice_ends_the_others(served: Front, outputs: FakeBackend) -> None:
    outputs.fault, outputs.fault_after = errors.Unreachable("gone"), 2
    with pytest.raises(InternalServerError, match="no target can be reached"):
        await served.openai.completions.create(model="toy", prompt="Say", n=3)
    assert len(outputs.requests) == 3
    await outputs.wait_running(0)


async def test_an_error_in_a_stream_is_its_last_event(served: Front, outputs: FakeBackend) -> None:
    outputs.fault, outputs.fault_after = errors.TimedOut("late"), 3
    stream = await served.openai.completions.create(model="toy", prompt="Say", stream=True)
    assert [(await anext(stream)).choices[0].text for _ in range(2)] == ["He", "é"]
    with pytest.raises(APIError, match="no target answered in time"):
        await anext(stream)


async def test_nothing_can_be_served_yet(outputs: FakeBackend) -> None:
    outputs.served = ()
    async with front(outputs) as empty:
        response = await empty.http.get("/ready")
        assert (response.status_code, fault(response)["code"]) == (503, "service_unavailable")
        assert (await empty.http.get("/health")).json() == {"status": "ok"}


async def test_a_bug_is_an_error_of_the_server(served: Front, outputs: FakeBackend) -> None:
    outputs.fault = ZeroDivisionError("a bug")
    with pytest.raises(APIStatusError) as caught:
        await served.openai.completions.create(model="toy", prompt="Say")
    assert caught.value.status_code == 500
    assert "a bug" not in fault(caught.value.response)["message"]
    with pytest.raises(BadRequestError):
        await served.openai.completions.create(model="toy", prompt=[])
    await outputs.wait_running(0)

"""Who may ask, and how often."""

import httpx2 as httpx
import pytest
from openai import AuthenticationError, RateLimitError
from starlette.applications import Starlette
from starlette.routing import Mount

from crossdraft.config.api import RateOptions
from crossdraft.serving.http import HttpOptions, make_app
from crossdraft.serving.limits import Keys
from tests.serving.fakes import FakeBackend
from tests.serving.http.conftest import COMPLETIONS, KEY, fault, front


async def test_keys_are_asked_for_where_a_model_is_used(outputs: FakeBackend) -> None:
    async with front(outputs, HttpOptions(Keys.given(None, [KEY]))) as guarded:
        assert (await guarded.openai.models.list()).data[0].id == "toy"
        with pytest.raises(AuthenticationError, match="this API key is not known") as caught:
            await guarded.openai.with_options(api_key=KEY + "!").models.list()
        assert caught.value.response.headers["www-authenticate"] == "Bearer"
        assert caught.value.code == "invalid_api_key"
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
    assert scopes[:2] == scopes[2:4]
    assert len({"", "mine", *scopes}) == 6


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

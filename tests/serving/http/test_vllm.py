"""What vLLM adds to OpenAI's API: routes beside it, names of a model, ids, usage in each chunk, origins."""

import json
from dataclasses import replace
from typing import Any

import httpx2 as httpx
import pytest

from crossdraft.client import Reason
from crossdraft.client.api import software
from crossdraft.config.api import HttpSettings, SpeculativeMetrics
from crossdraft.rpc.generation import OutputEnded
from crossdraft.serving.http import HttpOptions
from crossdraft.serving.limits import Keys
from crossdraft.session.models import with_defaults
from crossdraft.types.messages import SamplingDefaults, SamplingOptions
from tests.serving.fakes import FakeBackend, figures
from tests.serving.http.conftest import CHAT, COMPLETIONS, KEY, MESSAGES, Front, fault, front

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


async def test_ping_and_version(served: Front) -> None:
    assert (await served.http.get("/ping")).status_code == (await served.http.post("/ping")).status_code == 200
    assert (await served.http.get("/version")).json() == {"version": software()}


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
async def test_tokens_of_a_text_and_back(served: Front, body: dict[str, Any], tokens: list[int]) -> None:
    found = (await served.post("/tokenize", **body)).json()
    assert found == {"count": len(tokens), "max_model_len": 64, "tokens": tokens, "token_strs": None}
    named = (await served.post("/tokenize", **body, return_token_strs=True)).json()
    assert named["token_strs"] == [chr(token) for token in tokens]
    back = await served.post("/detokenize", tokens=tokens)
    assert back.json()["prompt"].endswith("Say")


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": MESSAGES}])
async def test_what_cannot_be_tokenized(direct: httpx.AsyncClient, body: dict[str, Any]) -> None:
    refused = await direct.post("/tokenize", json=body)
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


async def test_a_large_body_is_read_beside_the_event_loop(served, outputs, monkeypatch):
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

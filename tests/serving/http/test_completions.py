"""/v1/completions and what both endpoints share, as the official client sees them."""

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from openai import NotFoundError

from crossdraft.client import Kind, Overlap, Token
from crossdraft.serving.http.middleware import _named
from crossdraft.serving.http.responses import shown
from crossdraft.serving.http.streaming import merged
from tests.serving.fakes import TOKENS, FakeBackend
from tests.serving.http.conftest import MESSAGES, Front


async def test_a_whole_answer(served: Front, outputs: FakeBackend) -> None:
    done = await served.complete(max_tokens=9, temperature=0)
    (choice,) = done.choices
    assert (choice.text, choice.finish_reason, choice.index, choice.logprobs) == ("Heé", "stop", 0, None)
    assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.total_tokens) == (3, 4, 7)
    assert done.id == f"cmpl-{outputs.requests[0].id}"
    assert "crossdraft" not in json.loads(done.model_dump_json())
    await outputs.wait_running(0)


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


@pytest.mark.usefixtures("likely")
@pytest.mark.parametrize("streamed", [False, True])
async def test_log_probabilities_of_a_completion(served: Front, outputs: FakeBackend, streamed: bool) -> None:
    create = served.openai.completions.create
    if streamed:
        chunks = [chunk async for chunk in await create(model="toy", prompt="Say", logprobs=2, stream=True)]
        found = [chunk.choices[0].logprobs for chunk in chunks]
        assert found.pop() is None  # of the end
    else:
        found = [(await create(model="toy", prompt="Say", logprobs=2)).choices[0].logprobs]
    together: dict[str, list[object]] = {}
    for one in found:
        for name, values in one.to_dict().items():
            assert isinstance(values, list)
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
    create = served.openai.chat.completions.create
    if streamed:
        stream = await create(model="toy", messages=MESSAGES, logprobs=True, top_logprobs=2, stream=True)
        found = [chunk.choices[0].logprobs async for chunk in stream]
        assert found.pop() is None
    else:
        done = await create(model="toy", messages=MESSAGES, logprobs=True, top_logprobs=2)
        found = [done.choices[0].logprobs]
    tokens = [token for one in found if one is not None for token in one.content or ()]
    assert [(token.token, token.logprob, token.bytes) for token in tokens] == [
        ("He", -0.5, [72, 101]),
        (r"bytes:\xc3", -1.5, [0xC3]),
        (r"bytes:\xa9", -0.125, [0xA9]),
        ("</s>", -1.0, None),
    ]
    likely = tokens[2].top_logprobs
    assert [(one.token, one.logprob, one.bytes) for one in likely] == [
        (r"bytes:\xa9", -0.125, [0xA9]),
        ("token_id:0", -9999.0, None),
    ]
    assert outputs.requests[0].generation.logprobs == 2


async def test_log_probabilities_without_others(served: Front, outputs: FakeBackend) -> None:
    await served.chat(logprobs=True)
    await served.complete(logprobs=0)
    await served.complete()
    assert [order.generation.logprobs for order in outputs.requests] == [0, 0, None]


@pytest.mark.parametrize("given", [None, "", "../x", "a b", "-a", "a" * 129, "é", "a\n"])
def test_an_id_that_could_be_no_file_is_replaced(given: str | None) -> None:
    assert _named(given) not in (given, _named(given))
    assert _named("a-1.B_2:c") == "a-1.B_2:c"


def test_tokens_have_different_texts() -> None:
    assert [shown(1, b"\xc3\xa9"), shown(2, b"\xc3"), shown(3, b"")] == ["é", r"bytes:\xc3", "token_id:3"]


class Source:
    """A stream that yields what it is given, and says when it was closed."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[str | Exception | None] = asyncio.Queue()
        self.closed = False

    async def stream(self) -> AsyncGenerator[str, None]:
        try:
            while (item := await self.queue.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self.closed = True


@pytest.mark.parametrize("count", [1, 2])
async def test_merged_streams_end_with_the_last_of_them(count: int) -> None:
    sources = [Source() for _ in range(count)]
    coming = merged([source.stream() for source in sources])
    for place in reversed(range(count)):
        sources[place].queue.put_nowait("a")
        assert await anext(coming) == (place, "a")
        sources[place].queue.put_nowait(None)
    with pytest.raises(StopAsyncIteration):
        await anext(coming)
    assert all(source.closed for source in sources)


@pytest.mark.parametrize("count", [1, 2])
async def test_an_error_or_a_close_closes_all(count: int) -> None:
    for close in (False, True):
        sources = [Source() for _ in range(count)]
        coming = merged([source.stream() for source in sources])
        for source in sources:
            source.queue.put_nowait("a")
        assert [await anext(coming) for _ in sources] == [(place, "a") for place in range(count)]
        if close:
            await coming.aclose()
        else:
            sources[0].queue.put_nowait(OSError("gone"))
            with pytest.raises(OSError, match="gone"):
                await anext(coming)
        assert all(source.closed for source in sources)

"""The official client before running services: the text is the pipeline's, and nothing is left open."""

import asyncio
from collections.abc import AsyncIterator

import openai
import pytest
import pytest_asyncio

from crossdraft.client import SamplingOptions
from tests.prompts import prompts
from tests.serving.http.conftest import KEY, MESSAGES
from tests.serving.http.stack import MOST, Stack, running

PROMPT = prompts()[0].text
TOKENS = 24
GREEDY = SamplingOptions(temperature=0)
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[Stack]:
    async with running() as stack:
        yield stack


async def test_greedy_text_is_the_pipelines(stack: Stack) -> None:
    wanted = await stack.text(PROMPT, options=GREEDY, max_tokens=TOKENS)
    create = stack.front.openai.completions.create
    done = await create(model="demo", prompt=PROMPT, temperature=0, max_tokens=TOKENS)
    assert (done.choices[0].text, done.choices[0].finish_reason) == (wanted, "length")
    assert done.usage is not None
    assert done.usage.completion_tokens == TOKENS
    stream = await create(model="demo", prompt=PROMPT, temperature=0, max_tokens=TOKENS, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == wanted
    plain = await create(
        model="demo", prompt=PROMPT, temperature=0, max_tokens=TOKENS, extra_body={"speculative": {"drafter": "none"}}
    )
    assert plain.choices[0].text == wanted


async def test_the_synchronous_client(stack: Stack) -> None:
    def ask() -> tuple[str, str]:
        with openai.OpenAI(base_url=str(stack.front.openai.base_url), api_key=KEY, max_retries=0) as client:
            asked = {"model": "demo", "prompt": PROMPT, "temperature": 0, "max_tokens": 8}
            whole = client.completions.create(**asked).choices[0].text
            return whole, "".join(chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True))

    whole, streamed = await asyncio.to_thread(ask)
    assert whole == streamed == await stack.text(PROMPT, options=GREEDY, max_tokens=8)


async def test_seeded_choices_differ_and_repeat(stack: Stack) -> None:
    asked = {"model": "demo", "prompt": PROMPT, "n": 3, "seed": 7, "max_tokens": TOKENS}
    done = await stack.front.openai.completions.create(**asked)
    texts = [choice.text for choice in done.choices]
    assert len(set(texts)) == 3
    assert texts[1] == await stack.text(PROMPT, seed=7, choice=1, max_tokens=TOKENS)
    streamed = ["", "", ""]
    async for chunk in await stack.front.openai.completions.create(**asked, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == texts
    alone = {"speculative": {"drafter": "none"}}
    assert [
        one.text for one in (await stack.front.openai.completions.create(**asked, extra_body=alone)).choices
    ] == texts


async def test_token_ids_are_the_same_prompt(stack: Stack) -> None:
    async with stack.connect() as pipeline:
        ids = list(pipeline.models.tokenization.encode_prompt(PROMPT))
    wanted = await stack.text(PROMPT, options=GREEDY, max_tokens=8)
    done = await stack.front.openai.completions.create(
        model="demo", prompt=[ids, ids], temperature=0, max_tokens=8, stop=None
    )
    assert [choice.text for choice in done.choices] == [wanted, wanted]
    assert done.usage is not None
    assert done.usage.prompt_tokens == 2 * len(ids)


async def test_a_stop_string_is_not_in_the_text(stack: Stack) -> None:
    whole = await stack.text(PROMPT, options=GREEDY, max_tokens=TOKENS)
    stop = whole[10:14]
    done = await stack.front.openai.completions.create(
        model="demo", prompt=PROMPT, temperature=0, max_tokens=TOKENS, stop=[stop, "never written"]
    )
    assert (done.choices[0].text, done.choices[0].finish_reason) == (whole[: whole.index(stop)], "stop")


async def test_a_chat_with_a_model_that_has_no_template(stack: Stack) -> None:
    done = await stack.front.openai.chat.completions.create(
        model="demo", messages=MESSAGES, temperature=0, max_completion_tokens=6
    )
    assert done.choices[0].message.content == await stack.text("User: Say\n\nAssistant:", options=GREEDY, max_tokens=6)


async def test_what_the_pair_cannot_do_is_said(stack: Stack) -> None:
    with pytest.raises(openai.BadRequestError, match="needs a drafter with the target's vocabulary") as refused:
        await ask(stack, {"method": "standard"})
    assert refused.value.param == "speculative.method"
    with pytest.raises(openai.NotFoundError, match="'demo' has no drafter 'b'; there is a") as unknown:
        await ask(stack, {"drafter": "b"})
    assert (unknown.value.code, unknown.value.param) == ("drafter_not_found", "speculative.drafter")
    with pytest.raises(openai.BadRequestError, match="shorten the prompt") as long:
        await stack.front.openai.completions.create(model="demo", prompt="word " * 2000)
    assert long.value.code == "context_length_exceeded"
    await stack.released()


async def ask(stack: Stack, speculative: dict[str, object]) -> None:
    await stack.front.openai.completions.create(model="demo", prompt="a", extra_body={"speculative": speculative})


async def test_leaving_releases_the_sessions(stack: Stack) -> None:
    stream = await endless(stack, n=2)
    await anext(stream)
    assert stack.outputs.running == 2
    async with asyncio.timeout(60):
        while stack.servers[0].activity.open < 2:  # noqa: ASYNC110 - the first one may be here before the other is there
            await asyncio.sleep(0)
    await stream.close()
    await stack.released()


async def test_a_full_process_refuses_more(stack: Stack) -> None:
    stream = await endless(stack, n=MOST)
    await anext(stream)
    with pytest.raises(openai.RateLimitError) as caught:
        await stack.front.openai.completions.create(model="demo", prompt="a")
    assert (caught.value.code, int(caught.value.response.headers["retry-after"]) >= 1) == ("overloaded", True)
    await stream.close()
    await stack.released()
    assert (await stack.front.openai.completions.create(model="demo", prompt="a", max_tokens=1)).choices


async def endless(stack: Stack, n: int) -> openai.AsyncStream[openai.types.Completion]:
    """Outputs that go on longer than a test."""
    return await stack.front.openai.completions.create(
        model="demo", prompt=PROMPT, n=n, max_tokens=900, stream=True, extra_body={"ignore_eos": True}
    )


async def test_what_is_served(stack: Stack) -> None:
    (card,) = (await stack.front.openai.models.list()).data
    found = card.to_dict()
    assert (found["id"], found["drafters"], found["chats"]) == ("demo", ["a"], False)
    methods = found["methods"]
    assert isinstance(methods, list)
    assert {"slem", "seeded", "coupled", "tli"} <= set(methods)
    assert "standard" not in methods


async def test_log_probabilities_are_the_models(stack: Stack) -> None:
    done = await stack.front.openai.completions.create(
        model="demo", prompt=PROMPT, temperature=0, max_tokens=6, logprobs=3
    )
    found = done.choices[0].logprobs
    assert found is not None
    assert found.tokens is not None
    assert found.top_logprobs is not None
    assert found.token_logprobs is not None
    for token, value, likely in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
        assert len(likely) == 3
        assert value == pytest.approx(max(likely.values())) == pytest.approx(likely[token])
        assert value <= 0

"""Both fronts before the bundled models behind gRPC: the output is the pipeline's, and nothing is left open."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any

import openai
import pytest
import pytest_asyncio

from crossdraft.client import GenerationRequest, Overlap, Pipeline, RequestError, SamplingOptions, connect
from crossdraft.drafter.service import ServeDrafter, drafter_server
from crossdraft.engine.served_model import ModelOptions
from crossdraft.rpc.errors import Overloaded
from crossdraft.rpc.server import Listening, Server
from crossdraft.serving.backend import LocalBackend, LocalModel, LocalOptions, NamedDrafter
from crossdraft.serving.client import Client
from crossdraft.serving.grpc import serve_generation
from crossdraft.target.service import ServeTarget, target_server
from crossdraft.types.request import Chat, Message
from tests.serving.http.conftest import KEY, MESSAGES, Front, front

pytestmark = pytest.mark.asyncio(loop_scope="module")
AT_ONCE = Listening(grace_seconds=0)
MAX = 8  # outputs at once
PROMPT = "def main("
TOKENS = 24
GREEDY = GenerationRequest(
    PROMPT, max_tokens=TOKENS, options=SamplingOptions(0.0), ignore_eos=True, overlap=Overlap.OFF
)
SEEDED = replace(GREEDY, options=SamplingOptions(), seed=7)
PLAIN = {"speculative": {"drafter": "none"}}


@dataclass(frozen=True)
class Stack:
    """Two services, a backend, its fronts, and a pipeline to the same services."""

    front: Front  # HTTP
    client: Client  # gRPC
    direct: Pipeline
    backend: LocalBackend
    servers: tuple[Server[Any, Any, Any], ...]  # target and drafter

    async def text(self, prompt: str = PROMPT, **settings: Any) -> str:
        """What the pipeline makes; greedy unless there is a seed."""
        request = replace(SEEDED if "seed" in settings else GREEDY, prompt=prompt, **settings)
        async with self.direct.run(request) as generation:
            async for _ in generation:
                pass
            return generation.text

    async def complete(self, **settings: Any) -> openai.types.Completion:
        """A whole reply of the HTTP front; greedy unless there is a seed."""
        always = {"model": "demo", "prompt": PROMPT, "max_tokens": TOKENS}
        chosen = {} if "seed" in settings else {"temperature": 0}
        found: openai.types.Completion = await self.front.openai.completions.create(**always | chosen | settings)
        return found

    async def released(self) -> None:
        """Returns once no service has a session any more."""
        async with asyncio.timeout(60):
            while self.backend.running or any(server.activity.open for server in self.servers):  # noqa: ASYNC110
                await asyncio.sleep(0)  # what ends them runs in this loop, too


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    options = {name: ModelOptions(f"bundled:{name}", budget=256, threads=1) for name in ("target", "drafter-b")}
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m.role | capitalize }}: {{ m.content }}\n\n{% endfor %}Assistant:")
    options["target"] = replace(options["target"], chat_template=template)
    async with AsyncExitStack() as exits:
        target = await exits.enter_async_context(await target_server(ServeTarget(options["target"], AT_ONCE)))
        drafter = await exits.enter_async_context(await drafter_server(ServeDrafter(options["drafter-b"], AT_ONCE)))
        model = LocalModel("demo", (target.address,), (NamedDrafter("b", (drafter.address,)),), ("other",))
        backend = await exits.enter_async_context(LocalBackend((model,), LocalOptions(MAX)))
        http = await exits.enter_async_context(front(backend))
        grpc = await exits.enter_async_context(serve_generation(backend, AT_ONCE))
        client = await exits.enter_async_context(Client(grpc.address))
        direct = await exits.enter_async_context(connect(target.address, drafter.address, needs_drafter=True))
        yield Stack(http, client, direct, backend, (target, drafter))


@pytest.mark.parametrize("request_", [GREEDY, SEEDED], ids=["greedy", "seeded"])
async def test_over_grpc_the_output_is_the_pipelines(stack: Stack, request_: GenerationRequest) -> None:
    async with stack.direct.run(request_) as direct:
        made = [token async for token in direct]
    for drafter in (None, "b", ""):
        async with stack.client.run(request_, "demo", drafter) as generation:
            got = [token async for token in generation]
        assert (generation.text, generation.ids, generation.reason) == (direct.text, direct.ids, direct.reason)
        assert [(token.text, token.raw) for token in got] == [(token.text, token.raw) for token in made]
        assert generation.statistics is not None
        assert generation.statistics.tokens == TOKENS
        assert (generation.statistics.draft_tokens > 0) == (drafter != "")
        assert len(generation.milliseconds) == TOKENS


async def test_over_http_greedy_text_is_the_pipelines(stack: Stack) -> None:
    wanted = await stack.text()
    done = await stack.complete()
    assert (done.choices[0].text, done.choices[0].finish_reason) == (wanted, "length")
    assert done.usage is not None
    assert done.usage.completion_tokens == TOKENS
    assert (await stack.complete(extra_body=PLAIN)).choices[0].text == wanted


async def test_the_synchronous_client(stack: Stack) -> None:
    def ask() -> tuple[str, str]:
        with openai.OpenAI(base_url=str(stack.front.openai.base_url), api_key=KEY, max_retries=0) as client:
            asked = {"model": "demo", "prompt": PROMPT, "temperature": 0, "max_tokens": 8}
            whole = client.completions.create(**asked).choices[0].text
            return whole, "".join(chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True))

    whole, streamed = await asyncio.to_thread(ask)
    assert whole == streamed == await stack.text(max_tokens=8)


async def test_seeded_choices_differ_and_repeat(stack: Stack) -> None:
    asked = {"n": 3, "seed": 7}
    texts = [choice.text for choice in (await stack.complete(**asked)).choices]
    assert len(set(texts)) == 3
    assert texts[1] == await stack.text(seed=7, choice=1, ignore_eos=False)
    streamed = ["", "", ""]
    async for chunk in await stack.complete(**asked, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == texts
    assert [choice.text for choice in (await stack.complete(**asked, extra_body=PLAIN)).choices] == texts


async def test_an_output_goes_on_after_what_was_delivered(stack: Stack) -> None:
    async with stack.client.run(SEEDED) as whole:
        async for _ in whole:
            pass
    async with stack.client.run(replace(SEEDED, committed=tuple(whole.ids[:10]))) as rest:
        async for _ in rest:
            pass
    assert rest.ids == whole.ids[10:]
    assert whole.text.endswith(rest.text)


async def test_token_ids_and_chats_as_prompts(stack: Stack) -> None:
    ids = list(stack.direct.models.tokenization.encode_prompt(PROMPT))
    wanted = await stack.text(max_tokens=8)
    done = await stack.complete(prompt=[ids, ids], max_tokens=8)
    assert [choice.text for choice in done.choices] == [wanted, wanted]
    assert done.usage is not None
    assert done.usage.prompt_tokens == 2 * len(ids)
    for prompt in (tuple(ids), Chat((Message("user", "Say something."),))):
        asked = replace(GREEDY, prompt=prompt, max_tokens=6)
        async with stack.direct.run(asked) as direct, stack.client.run(asked) as generation:
            assert [token.id async for token in direct] == [token.id async for token in generation]
    chat = await stack.front.openai.chat.completions.create(
        model="demo", messages=MESSAGES, temperature=0, max_completion_tokens=6
    )
    assert chat.choices[0].message.content == await stack.text("User: Say\n\nAssistant:", max_tokens=6)


async def test_a_stop_string_is_not_in_the_text(stack: Stack) -> None:
    whole = await stack.text()
    stop = whole[10:14]
    done = await stack.complete(stop=[stop, "never written"])
    assert (done.choices[0].text, done.choices[0].finish_reason) == (whole[: whole.index(stop)], "stop")


async def test_over_http_what_cannot_be_served_is_said(stack: Stack) -> None:
    with pytest.raises(openai.BadRequestError, match="needs a drafter with the target's vocabulary") as refused:
        await stack.complete(extra_body={"speculative": {"method": "standard"}})
    assert refused.value.param == "speculative.method"
    with pytest.raises(openai.NotFoundError, match="'demo' has no drafter 'x'; there is b") as unknown:
        await stack.complete(extra_body={"speculative": {"drafter": "x"}})
    assert (unknown.value.code, unknown.value.param) == ("drafter_not_found", "speculative.drafter")
    with pytest.raises(openai.BadRequestError, match="shorten the prompt") as long:
        await stack.complete(prompt="word " * 2000)
    assert long.value.code == "context_length_exceeded"
    await stack.released()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"prompt": "word " * 5000}, "context"),
        ({"method": "standard"}, "needs a drafter with the target's vocabulary"),
        ({"options": SamplingOptions(logit_bias=((10**6, 1.0),))}, "logit_bias names id 1000000"),
        ({"prompt": (10**6,)}, "1000000"),
    ],
)
async def test_over_grpc_what_cannot_be_served_is_said(stack: Stack, change: dict[str, object], complaint: str) -> None:
    with pytest.raises(RequestError, match=complaint):
        await anext(stack.client.run(replace(GREEDY, **change)))
    assert stack.backend.running == 0


async def endless(stack: Stack, n: int) -> openai.AsyncStream[openai.types.Completion]:
    """Outputs that go on longer than a test."""
    return await stack.complete(n=n, seed=1, max_tokens=900, stream=True, extra_body={"ignore_eos": True})


async def test_leaving_releases_the_sessions(stack: Stack) -> None:
    stream = await endless(stack, n=2)
    await anext(stream)
    assert stack.backend.running == 2
    async with asyncio.timeout(60):
        while stack.servers[0].activity.open < 2:  # noqa: ASYNC110 - the first one may be here before the other is there
            await asyncio.sleep(0)
    await stream.close()
    await stack.released()
    for _ in range(3):
        async with stack.client.run(replace(GREEDY, max_tokens=900)) as generation:
            await anext(generation)
        await stack.released()


async def test_a_full_process_refuses_more(stack: Stack) -> None:
    stream = await endless(stack, n=MAX)
    await anext(stream)
    with pytest.raises(openai.RateLimitError) as caught:
        await stack.complete()
    assert (caught.value.code, int(caught.value.response.headers["retry-after"]) >= 1) == ("overloaded", True)
    with pytest.raises(Overloaded, match=f"{MAX} outputs are being generated") as raised:
        await anext(stack.client.run(GREEDY))
    assert raised.value.after >= 1
    await stream.close()
    await stack.released()
    assert (await stack.complete(max_tokens=1)).choices


async def test_what_is_served(stack: Stack) -> None:
    (card,) = (await stack.front.openai.models.list()).data
    found = card.to_dict()
    assert (found["id"], found["drafters"], found["chats"]) == ("demo", ["b"], True)
    methods = found["methods"]
    assert isinstance(methods, list)
    assert {"slem", "seeded", "coupled", "tli"} <= set(methods)
    assert "standard" not in methods


async def test_log_probabilities_are_the_models(stack: Stack) -> None:
    found = (await stack.complete(max_tokens=6, logprobs=3)).choices[0].logprobs
    assert found is not None
    assert found.tokens is not None
    assert found.top_logprobs is not None
    assert found.token_logprobs is not None
    for token, value, likely in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
        assert len(likely) == 3
        assert value == pytest.approx(max(likely.values())) == pytest.approx(likely[token])
        assert value <= 0


async def test_a_further_name_is_the_same_model(stack: Stack) -> None:
    cards = (await stack.front.openai.models.list()).data
    assert [(card.id, (card.model_extra or {})["root"]) for card in cards] == [("demo", "demo"), ("other", "demo")]
    done = await stack.complete(model="other", max_tokens=4)
    assert (done.model, done.choices[0].text) == ("other", await stack.text(max_tokens=4))
    unnamed = await stack.front.post("/v1/completions", prompt=PROMPT, temperature=0, max_tokens=4)
    assert unnamed.json()["model"] == "demo"


async def test_the_tokenizer_is_the_targets(stack: Stack) -> None:
    found = (await stack.front.post("/tokenize", prompt=PROMPT, return_token_strs=True)).json()
    ids = tuple(found["tokens"])
    assert ids == stack.direct.models.tokenization.encode_prompt(PROMPT)
    assert (found["max_model_len"], len(found["token_strs"])) == (1024, len(ids))
    assert (await stack.front.post("/detokenize", tokens=ids)).json() == {"prompt": PROMPT}
    chat = (await stack.front.post("/tokenize", messages=MESSAGES)).json()["tokens"]
    text = (await stack.front.post("/detokenize", tokens=chat)).json()["prompt"]
    assert text == "User: Say\n\nAssistant:"
    done = await stack.complete(max_tokens=6, extra_body={"return_token_ids": True})
    extra = done.choices[0].model_extra or {}
    assert (tuple(extra["prompt_token_ids"]), len(extra["token_ids"])) == (ids, 6)


async def test_a_prompt_that_cannot_fit_is_refused_in_vllms_words(stack: Stack) -> None:
    wanted = r"This model's maximum context length is 1024 tokens. However, your request has 3000000 bytes"
    with pytest.raises(openai.BadRequestError, match=wanted) as refused:
        await stack.complete(prompt="x" * 3_000_000)
    assert refused.value.code == "context_length_exceeded"

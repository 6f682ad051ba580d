"""Both fronts before the bundled models behind gRPC: the output is the pipeline's, and nothing is left open."""

import asyncio
import json
import math
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from threading import current_thread
from typing import Any, Literal

import openai
import pytest
import pytest_asyncio
from pydantic import BaseModel, Field

from crossdraft.client import GenerationRequest, Overlap, Pipeline, SamplingOptions, api, connect
from crossdraft.config.engine import NgramOptions
from crossdraft.drafter.ngram import ngram_server
from crossdraft.drafter.service import drafter_server
from crossdraft.rpc.server import Server
from crossdraft.serving.backend import LocalBackend, LocalModel, LocalOptions, NamedDrafter
from crossdraft.serving.grpc import GenerationServer
from crossdraft.serving.grpc_client import Client
from crossdraft.target.service import target_server
from crossdraft.types.request import Chat, Message
from tests.client.together import ended
from tests.endtoend.reference import Reference
from tests.endtoend.stack import TARGET, model
from tests.rpc.clock import until
from tests.rpc.linked import AT_ONCE
from tests.serving.http.conftest import MESSAGES, Front, fault, front

pytestmark = pytest.mark.asyncio(loop_scope="module")
MAX = 8  # outputs at once
PROMPT = "def main("
TOKENS = 16
GREEDY = GenerationRequest(PROMPT, max_tokens=TOKENS, options=SamplingOptions(0), ignore_eos=True, overlap=Overlap.OFF)
SEEDED = replace(GREEDY, options=SamplingOptions(), seed=7)
PLAIN = {"speculative": {"drafter": "none"}}
DRAFTED: dict[str, Any] = {"speculative": {"overlap": "off"}}


@dataclass(frozen=True)
class Stack:
    """Two services, a backend, its fronts, and a pipeline to the same target."""

    front: Front  # HTTP
    client: Client  # gRPC
    direct: Pipeline
    backend: LocalBackend
    servers: tuple[Server[Any, Any, Any], ...]  # target and drafter

    async def text(self, prompt: str = PROMPT, **settings: Any) -> str:
        """What the pipeline makes; greedy unless there is a seed."""
        request = replace(SEEDED if "seed" in settings else GREEDY, prompt=prompt, **settings)
        return (await ended(self.direct.run(request))).text

    async def complete(self, **settings: Any) -> openai.types.Completion:
        """A whole reply of the HTTP front; greedy unless there is a seed, and without a drafter unless one is named."""
        always = {"model": "demo", "prompt": PROMPT, "max_tokens": TOKENS}
        chosen = {} if "seed" in settings else {"temperature": 0}
        chosen["extra_body"] = PLAIN | settings.pop("extra_body", {})
        found: openai.types.Completion = await self.front.openai.completions.create(**always | chosen | settings)
        return found

    async def released(self) -> None:
        """Returns once no service has a session any more."""
        await until(lambda: not (self.backend.running or any(server.activity.open for server in self.servers)))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m.role | capitalize }}: {{ m.content }}\n\n{% endfor %}Assistant:")
    async with AsyncExitStack() as exits:
        templated = replace(model(TARGET), chat_template=template)
        target = await exits.enter_async_context(await target_server(templated, AT_ONCE))
        drafter = await exits.enter_async_context(await drafter_server(model("drafter-b"), AT_ONCE))
        served = LocalModel("demo", (target.address,), (NamedDrafter("b", (drafter.address,)),), ("other",))
        backend = await exits.enter_async_context(LocalBackend(served, LocalOptions(MAX)))
        http = await exits.enter_async_context(front(backend))
        grpc = await exits.enter_async_context(GenerationServer(backend, AT_ONCE))
        client = await exits.enter_async_context(Client(grpc.address))
        direct = await exits.enter_async_context(connect(target.address))
        yield Stack(http, client, direct, backend, (target, drafter))


@pytest.mark.parametrize(("request_", "drafters"), [(GREEDY, ("b", "")), (SEEDED, (None,))], ids=["greedy", "seeded"])
async def test_over_grpc_the_output_is_the_pipelines(stack, request_, drafters):
    async with stack.direct.run(request_) as direct:
        made = [token async for token in direct]
    for drafter in drafters:
        async with stack.client.run(request_, "demo", drafter) as generation:
            got = [token async for token in generation]
        assert (generation.text, generation.ids, generation.reason) == (direct.text, direct.ids, direct.reason)
        assert [(token.text, token.raw) for token in got] == [(token.text, token.raw) for token in made]
        assert generation.statistics.tokens == TOKENS
        assert (generation.statistics.draft_tokens > 0) == (drafter != "")
        assert len(generation.milliseconds) == TOKENS


async def test_seeded_choices_differ_and_repeat(stack: Stack) -> None:
    asked = {"n": 3, "seed": 7}
    texts = [choice.text for choice in (await stack.complete(**asked, extra_body=DRAFTED)).choices]
    assert (len(set(texts)), texts[1]) == (3, await stack.text(seed=7, choice=1, ignore_eos=False))
    streamed = ["", "", ""]
    async for chunk in await stack.complete(**asked, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == texts


async def test_token_ids_and_chats_as_prompts(stack: Stack) -> None:
    ids = list(stack.direct.models.tokenization.encode_prompt(PROMPT))
    wanted = await stack.text(max_tokens=8)
    done = await stack.complete(prompt=[ids, ids], max_tokens=8)
    assert [choice.text for choice in done.choices] == [wanted, wanted]
    assert done.usage.prompt_tokens == 2 * len(ids)
    for prompt in (tuple(ids), Chat((Message("user", "Say something."),))):
        asked = replace(GREEDY, prompt=prompt, max_tokens=6)
        async with stack.direct.run(asked) as direct, stack.client.run(asked) as generation:
            assert [token.id async for token in direct] == [token.id async for token in generation]
    chat = await stack.front.chat(model="demo", temperature=0, max_completion_tokens=6)
    assert chat.choices[0].message.content == await stack.text("User: Say\n\nAssistant:", max_tokens=6)


async def test_over_http_what_cannot_be_served_is_said(stack: Stack) -> None:
    with pytest.raises(openai.BadRequestError, match="needs a drafter with the target's vocabulary") as refused:
        await stack.complete(extra_body={"speculative": {"method": "standard"}})
    assert refused.value.param == "speculative.method"
    with pytest.raises(openai.NotFoundError, match="'demo' has no drafter 'x'; there is b") as unknown:
        await stack.complete(extra_body={"speculative": {"drafter": "x"}})
    assert (unknown.value.code, unknown.value.param) == ("drafter_not_found", "speculative.drafter")
    with pytest.raises(openai.BadRequestError, match="Please reduce the length of the prompt") as long:
        await stack.complete(prompt="word " * 2000)
    assert long.value.code == "context_length_exceeded"
    await stack.released()


class Point(BaseModel):
    """What an answer is to be."""

    name: Literal["ab", "abc"]
    x: int = Field(ge=0, le=99)
    tags: list[Literal["a", "b"]] = Field(max_length=3)


@pytest.mark.parametrize("drafter", ["none", "b"])
async def test_structured_outputs_by_openais_client(stack: Stack, drafter: str) -> None:
    """Whole, parsed and streamed; with log-probabilities, which are those of what may be written."""
    chat = stack.front.openai.chat.completions
    asked: Any = {"model": "demo", "messages": MESSAGES, "seed": 5, "max_completion_tokens": 200}
    spaces = {"whitespace_pattern": " ?"}
    asked["extra_body"] = {"speculative": {"drafter": drafter}, "structured_outputs": spaces}
    parsed = await chat.parse(**asked, response_format=Point)
    assert parsed.choices[0].finish_reason == "stop"
    assert isinstance(point := parsed.choices[0].message.parsed, Point)
    assert point == Point.model_validate_json(parsed.choices[0].message.content or "")
    form = {"name": "point", "strict": True, "schema": Point.model_json_schema()}
    shape: Any = {"type": "json_schema", "json_schema": form}
    chunks = [chunk async for chunk in await chat.create(**asked, response_format=shape, stream=True)]
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert Point.model_validate_json("".join(pieces)) == point
    async with chat.stream(**asked, response_format=Point) as stream:
        assert (await stream.get_final_completion()).choices[0].message.parsed
    done = await chat.create(**asked, response_format=shape, logprobs=True, top_logprobs=20)
    for token in done.choices[0].logprobs.content or ():
        assert 0 < len(token.top_logprobs) <= 20
        assert sum(math.exp(one.logprob) for one in token.top_logprobs) <= 1 + 1e-5
        assert token.logprob > -9999


async def test_leaving_releases_the_sessions(stack: Stack) -> None:
    endless = {"max_tokens": 900, "extra_body": {"ignore_eos": True}}  # longer than a test
    stream = await stack.complete(n=2, seed=1, stream=True, **endless)
    await anext(stream)
    assert stack.backend.running == 2
    await until(lambda: stack.servers[0].activity.open == 2)  # the first one may be here before the other is there
    await stream.close()
    await stack.released()
    async with stack.client.run(replace(GREEDY, max_tokens=900)) as generation:
        await anext(generation)
    await stack.released()


async def test_what_is_served_also_under_a_further_name(stack: Stack) -> None:
    cards: list[Any] = [card.to_dict() for card in (await stack.front.openai.models.list()).data]
    assert [(card["id"], card["root"]) for card in cards] == [("demo", "demo"), ("other", "demo")]
    assert (cards[0]["drafters"], cards[0]["chats"]) == (["b"], True)
    assert {"slem", "seeded", "coupled", "tli"} <= set(cards[0]["methods"])
    assert "standard" not in cards[0]["methods"]
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
    assert (await stack.front.post("/detokenize", tokens=[])).json() == {"prompt": ""}
    unknown = fault(await stack.front.post("/detokenize", tokens=[10**6]))
    why = "there is no token with the id 1000000"
    assert (unknown["param"], unknown["message"].partition(";")[0]) == ("tokens", why)
    chat = (await stack.front.post("/tokenize", messages=MESSAGES)).json()["tokens"]
    text = (await stack.front.post("/detokenize", tokens=chat)).json()["prompt"]
    assert text == "User: Say\n\nAssistant:"
    done = await stack.complete(max_tokens=6, extra_body={"return_token_ids": True})
    extra = done.choices[0].model_extra or {}
    assert (tuple(extra["prompt_token_ids"]), len(extra["token_ids"])) == (ids, 6)


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference("target")


LONG = "class Point:\n    def __init__(self, x, y):\n" * 9  # more than one piece of a prompt that is scored
EXACTLY = 1e-3  # nats


@pytest.mark.parametrize(("max_tokens", "ids"), [(0, True), (3, False)])
async def test_the_echo_has_the_log_probabilities_of_the_prompt(stack, reference, max_tokens, ids):
    prompt = reference.encode(LONG)
    due = reference.log_probabilities(prompt)
    asked = {"prompt": prompt if ids else LONG, "max_tokens": max_tokens, "echo": True, "logprobs": 2}
    done = await stack.complete(**asked)
    choice, logprobs = done.choices[0], done.choices[0].logprobs
    text = await stack.text(LONG, max_tokens=max_tokens) if max_tokens else ""
    assert choice.text.startswith(LONG)
    assert (choice.text[len(LONG) :], choice.finish_reason) == (text, "length")
    assert len(logprobs.tokens) == len(prompt) + max_tokens == done.usage.total_tokens
    assert (logprobs.token_logprobs[0], logprobs.top_logprobs[0]) == (None, None)
    for place, token in enumerate(prompt[1:], 1):
        assert logprobs.token_logprobs[place] == pytest.approx(float(due[place - 1][token]), abs=EXACTLY)
        likely = sorted(logprobs.top_logprobs[place].values(), reverse=True)[:2]
        assert likely == pytest.approx(due[place - 1].topk(2).values.tolist(), abs=EXACTLY)
    streamed = [chunk.choices[0] async for chunk in await stack.complete(**asked, stream=True)]
    assert "".join(one.text for one in streamed) == choice.text
    values = [value for one in streamed if one.logprobs for value in one.logprobs.token_logprobs]
    assert values == [None, *(pytest.approx(value, abs=EXACTLY) for value in logprobs.token_logprobs[1:])]
    offsets = [offset for one in streamed if one.logprobs for offset in one.logprobs.text_offset]
    assert offsets == logprobs.text_offset


@pytest.mark.parametrize("kept", [1, 2, 3])  # of the tokens of the last character
async def test_a_character_that_the_prompt_begins_and_the_output_ends_is_one(stack, reference, kept):
    begin, char = reference.encode("a "), reference.encode("a 🦄")
    assert len(char) == len(begin) + 4
    prompt, rest = char[: len(begin) + kept], char[len(begin) + kept :]
    for token in (*rest[:1], *begin[:1]):
        prompt_text = reference.tokenizer.decode(begin)
        asked = {"prompt": prompt, "max_tokens": 1, "extra_body": {"allowed_token_ids": [token]}, "logprobs": 0}
        whole = reference.tokenizer.decode([*prompt, token])
        for echo in (False, True):
            choice = (await stack.complete(**asked, echo=echo)).choices[0]
            assert choice.text == (whole if echo else whole.removeprefix(prompt_text))
            pieces = [chunk.choices[0] async for chunk in await stack.complete(**asked, echo=echo, stream=True)]
            assert "".join(piece.text for piece in pieces) == choice.text
            offsets = [place for piece in pieces if piece.logprobs for place in piece.logprobs.text_offset]
            assert offsets == choice.logprobs.text_offset
            assert offsets[-1] == len(prompt_text) * echo
        only = SamplingOptions(allowed_token_ids=(token,))
        request = GenerationRequest(tuple(prompt), max_tokens=1, options=only, prompt_logprobs=0)
        async with stack.client.run(request) as generation:
            text = "".join([one.text async for one in generation])
            assert "".join(one.text for one in generation.prompt_tokens) + text == whole
    done = await stack.complete(prompt=prompt, max_tokens=0, echo=True)
    assert done.choices[0].text == reference.tokenizer.decode(prompt)


async def test_an_echo_is_the_text_of_the_prompt_also_where_its_tokenizer_begins_it_with_a_space() -> None:
    reference = Reference("drafter-a")
    async with AsyncExitStack() as exits:
        server = await target_server(model("drafter-a"), AT_ONCE)
        served = LocalModel("demo", ((await exits.enter_async_context(server)).address,))
        http = await exits.enter_async_context(front(await exits.enter_async_context(LocalBackend(served))))
        asked: dict[str, Any] = {"model": "demo", "max_tokens": 2, "echo": True}
        for prompt in (PROMPT, f" {PROMPT}", reference.encode(PROMPT)):
            text = prompt if isinstance(prompt, str) else PROMPT
            for logprobs in (None, 0):
                done = await http.openai.completions.create(**asked, prompt=prompt, logprobs=logprobs)
                choice = done.choices[0]
                assert choice.text.startswith(text)
                offsets = choice.logprobs and choice.logprobs.text_offset
                assert not offsets or offsets[-2] == len(text)


async def test_nothing_but_a_prompt_may_be_read(stack: Stack, reference: Reference) -> None:
    done = await stack.complete(max_tokens=0)
    assert (done.choices[0].text, done.usage.prompt_tokens) == ("", len(reference.encode(PROMPT)))
    done = await stack.complete(prompt=reference.encode(PROMPT), max_tokens=0, echo=True)
    assert (done.choices[0].text, done.choices[0].logprobs, done.usage.completion_tokens) == (PROMPT, None, 0)


async def test_log_probabilities_of_a_prompt_as_in_vllm(stack: Stack, reference: Reference) -> None:
    body = {"prompt_logprobs": 3}
    done = await stack.complete(max_tokens=2, extra_body=body)
    chat = await stack.front.chat(model="demo", temperature=0, max_tokens=2, extra_body=body)
    for found, text in ((done.choices[0], PROMPT), (chat, "User: Say\n\nAssistant:")):
        prompt, scores = reference.encode(text), (found.model_extra or {})["prompt_logprobs"]
        assert scores[0] is None
        for token, row, one in zip(prompt[1:], reference.log_probabilities(prompt)[:-1], scores[1:], strict=True):
            assert one[str(token)]["logprob"] == pytest.approx(float(row[token]), abs=EXACTLY)
            assert one[str(token)]["rank"] == int((row >= row[token]).sum())
            assert one[str(token)]["decoded_token"] == reference.tokenizer.decode([token])
            likely = {str(id) for id in row.topk(3).indices.tolist()}
            assert set(one) == likely | {str(token)}
    async with stack.client.run(replace(GREEDY, prompt_logprobs=3)) as generation:
        assert len([token async for token in generation]) == TOKENS
        read = generation.prompt_tokens
    assert [token.id for token in read] == reference.encode(PROMPT)
    scores = (done.choices[0].model_extra or {})["prompt_logprobs"]
    ranks = [one[str(token.id)]["rank"] for token, one in zip(read[1:], scores[1:], strict=True)]
    assert [token.rank for token in read[1:]] == ranks


async def test_what_grows_with_a_request_is_made_once_for_all_its_choices_beside_the_loop(stack, monkeypatch):
    made: list[tuple[str, str]] = []  # what, and the thread
    for name in ("sampling_of", "prompts_of"):
        real = getattr(api, name)

        def noted(*given: Any, name: str = name, real: Any = real) -> Any:
            made.append((name, current_thread().name.split()[0]))
            return real(*given)

        monkeypatch.setattr(api, name, noted)
    lists = {"bad_words": [f"never{number}" for number in range(200)], "allowed_token_ids": [*range(300)] * 20}
    words = {**lists, "temperature": 1, "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1}
    done = await stack.complete(prompt="def main(" * 200, n=4, max_tokens=2, extra_body=words)
    assert len(done.choices) == 4
    assert sorted(made) == [("prompts_of", "tokenizing"), ("sampling_of", "tokenizing")]
    checked: list[object] = []
    check = GenerationRequest.__post_init__
    monkeypatch.setattr(GenerationRequest, "__post_init__", lambda one: (checked.append(one), check(one))[1])
    done = await stack.complete(prompt=["one " * 400, "two " * 400], n=2, max_tokens=2, extra_body=words)
    assert [name for name, _ in sorted(made[2:])] == ["prompts_of", "prompts_of", "sampling_of"]
    assert len(checked) == 2  # of each prompt once
    before = len(made)
    async with stack.client.generate("three " * 400, max_tokens=2, bad_words=tuple(lists["bad_words"])) as generation:
        assert len([token async for token in generation]) == 2
    assert {thread for _, thread in made[before:]} == {"tokenizing"}
    await stack.released()


async def test_requests_of_equal_prompts_are_resolved_each_by_itself(stack: Stack) -> None:
    """Python has one object for all texts of one character."""
    both = [stack.complete(prompt="a", max_tokens=tokens, seed=7) for tokens in (2, 3)]
    assert [done.usage and done.usage.completion_tokens for done in await asyncio.gather(*both)] == [2, 3]


async def test_the_drafter_is_chosen_where_a_request_names_none(stack: Stack) -> None:
    """Real services, two drafters, one of which copies: texts are equal whichever is used, and each is named."""
    target, drafter = stack.servers
    async with AsyncExitStack() as exits:
        ngram = await exits.enter_async_context(ngram_server(NgramOptions(), AT_ONCE))
        named = NamedDrafter("b", (drafter.address,)), NamedDrafter("copies", (ngram.address,))
        backend = await exits.enter_async_context(LocalBackend(LocalModel("demo", (target.address,), named)))
        both = await exits.enter_async_context(front(backend))
        for name in ("b", "copies"):
            await backend._pipelines[name].ready()
        asked: dict[str, Any] = {"model": "demo", "prompt": PROMPT, "max_tokens": 48, "temperature": 0}
        texts, used = set(), []
        for chosen in ("b", "copies", "none", *["auto"] * 4, None):
            options = {"trace": True} | ({} if chosen is None else {"drafter": chosen})
            chunks = await both.openai.completions.create(**asked, stream=True, extra_body={"speculative": options})
            text = ""
            async for chunk in chunks:
                text += chunk.choices[0].text if chunk.choices else ""
                shown = (chunk.model_extra or {}).get("crossdraft") or {}
                if shown.get("statistics"):
                    used.append(shown["statistics"]["drafter"])
            texts.add(text)
        assert (len(texts), used[:3]) == (1, ["b", "copies", ""])
        assert set(used[3:]) <= {"b", "copies"}
        assert len(used) == 8
        choice = backend._choice
        for gains in ({"b": 1.0, "copies": 3.0}, {"b": 4.0, "copies": 3.0}):
            fastest = choice.usual(gains)
            assert (await both.openai.models.retrieve("demo")).to_dict()["auto"] == fastest == max(gains, key=gains.get)  # type: ignore[arg-type]


async def test_the_bundled_chat_model_calls_tools_says_what_they_answer_and_writes_json(stack: Stack) -> None:
    """OpenAI's client in the loop of an agent: nothing is constrained but the form of calls."""
    weather = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    sums = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
    tools: Any = [
        {"type": "function", "function": {"name": name, "description": text, "parameters": parameters}}
        for name, text, parameters in (
            ("weather", "The weather in a city.", weather),
            ("calculator", "Evaluate an arithmetic expression.", sums),
        )
    ]
    async with AsyncExitStack() as exits:
        target = await exits.enter_async_context(await target_server(model("chat"), AT_ONCE))
        served = LocalModel("chat", (target.address,), (NamedDrafter("b", (stack.servers[1].address,)),))
        http = await exits.enter_async_context(front(await exits.enter_async_context(LocalBackend(served))))
        chat = http.openai.chat.completions
        asked: Any = {"model": "chat", "temperature": 0, "max_completion_tokens": 80, "tools": tools}
        for drafter in ("b", "none"):
            asked["extra_body"] = {"speculative": {"drafter": drafter}}
            said: list[Any] = []
            for question, called, result, answer in (
                ("How is the weather in Oslo?", ("weather", {"city": "Oslo"}), "18 degrees, rain", "18 degrees"),
                ("What is 12 * 7?", ("calculator", {"expression": "12 * 7"}), "84", "84"),
                ("How is the weather in Paris?", ("weather", {"city": "Paris"}), "21 degrees, sunny", "21 degrees"),
            ):
                said.append({"role": "user", "content": question})
                done = (await chat.create(**asked, messages=said)).choices[0]
                (call,) = done.message.tool_calls or ()
                assert call.type == "function"
                made = call.function.name, json.loads(call.function.arguments)
                assert (made, done.finish_reason) == (called, "tool_calls")
                said += [done.message, {"role": "tool", "tool_call_id": call.id, "content": result}]
                async with chat.stream(**asked, messages=said) as stream:
                    final = (await stream.get_final_completion()).choices[0]
                assert final.finish_reason == "stop"
                assert answer in (final.message.content or "")
                said.append({"role": "assistant", "content": final.message.content})
        text = "Ada is 36 years old and lives in Paris. Write name, age, city as JSON."
        for form in ("text", "json_object"):
            asked["response_format"] = {"type": form}
            done = await chat.create(**asked | {"tools": []}, messages=[{"role": "user", "content": text}])
            assert json.loads(done.choices[0].message.content) == {"name": "Ada", "age": 36, "city": "Paris"}

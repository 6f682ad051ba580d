"""The Python API over real gRPC, with tiny random models whose tokenizers differ."""

import asyncio
import json
import threading
from dataclasses import replace
from pathlib import Path
from weakref import ref

import pytest

from crossdraft.client import GenerationRequest, Kind, Pipeline, RequestError, SamplingOptions, connect
from crossdraft.rpc.errors import ServiceError
from crossdraft.rpc.frames import TARGET
from crossdraft.rpc.server import Listening, Server
from crossdraft.session.assignment import Secrets
from crossdraft.types.request import ALIASES
from crossdraft.verification.noise import KeyedNoise
from tests.client.together import ended
from tests.rpc.linked import DESCRIPTION, PuppetService
from tests.text.kinds import kind

PROMPT = "def main(argument):"
GREEDY = SamplingOptions(temperature=0)
KINDS = {kind.value for kind in Kind}


@pytest.fixture
def same_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two outputs of one request without a seed are the same."""
    monkeypatch.setattr(Secrets, "drawn", staticmethod(lambda: Secrets(noise=1, audit=2, chooser=3)))


async def ids_of(pipeline: Pipeline, **settings: object) -> list[int]:
    return (await ended(pipeline.generate(PROMPT, max_tokens=24, **settings))).ids


async def test_short_names_of_settings(pipeline: Pipeline) -> None:
    for short, value in (("k", 0), ("window", 0), ("wait", -1)):
        with pytest.raises(RequestError, match=f"^{ALIASES[short]} must be between"):
            pipeline.generate(PROMPT, **{short: value})
        with pytest.raises(TypeError, match=ALIASES[short]):
            pipeline.generate(PROMPT, **{short: value, ALIASES[short]: value})


async def test_noise_is_never_made_in_the_event_loop(target, drafter, monkeypatch):
    made, make = [], KeyedNoise.__init__

    def seen_make(noise: KeyedNoise, *of: object) -> None:
        made.append(threading.current_thread())
        make(noise, *of)

    monkeypatch.setattr(KeyedNoise, "__init__", seen_make)
    async with connect(target.address, drafter.address) as pipeline:
        assert await ids_of(pipeline, audit=True)
    assert len(made) == 2
    assert threading.current_thread() not in made


@pytest.mark.parametrize(
    ("said", "complaint"),
    [
        ({"vocabulary_size": 2**32 - 1}, r"4294\d+ of 4294967295 ids have no text in tokenizer.json"),
        ({"tokenizer_json": "no json"}, "Expecting value"),
    ],
)
async def test_a_tokenizer_that_cannot_be_used_is_a_fault_of_its_service(said: dict[str, object], complaint: str):
    described = replace(DESCRIPTION, **({"tokenizer_json": kind("gpt2").json} | said))  # type: ignore[arg-type]
    async with Server(TARGET, PuppetService(description=described), Listening(grace_seconds=0)) as server:
        with pytest.raises(ServiceError, match=f"the tokenizer of the target 'toy' cannot be used: {complaint}"):
            async with connect(server.address):
                pass


async def test_a_record_is_whole_whenever_the_generation_ends(pipeline: Pipeline, tmp_path: Path) -> None:
    for tokens in (0, 1, 5):
        file = tmp_path / str(tokens)
        settings = {"max_tokens": 24, "ignore_eos": True, "record": file, "overlap": "on"}
        async with pipeline.generate(PROMPT, **settings) as generation:
            first = asyncio.create_task(anext(generation))
            if not tokens:
                await asyncio.sleep(0)  # it has begun, and its session has not
            for _ in range(tokens):
                await first
                first = asyncio.create_task(anext(generation))
            first.cancel()
        events = json.loads(file.read_text())["traceEvents"]
        assert sum(one["cat"] in KINDS for one in events if one["ph"] == "i") >= tokens


@pytest.mark.usefixtures("drafter_first")
async def test_outputs_at_once_share_a_controller(pipeline: Pipeline) -> None:
    """Each has its own text, and epochs add up; not all need to draft."""
    due = [await ids_of(pipeline, seed=seed, overlap="off") for seed in range(3)]
    runs = [pipeline.generate(PROMPT, max_tokens=24, seed=seed, explain=True) for seed in range(3)]
    assert [one.ids for one in await asyncio.gather(*map(ended, runs))] == due
    for run in runs:
        assert sum(decision.epochs for decision in run.decisions) == run.statistics.epochs
        assert any(line.startswith(("in use: ", "on trial: ")) for line in run.estimates)


@pytest.mark.usefixtures("same_secrets")
@pytest.mark.parametrize("settings", [{}, {"seed": 3, "logprobs": 2}, {"method": "coupled", "overlap": "on"}])
async def test_without_drafting_an_output_is_that_of_no_drafter(target, drafter, settings):
    request = GenerationRequest.of(PROMPT, max_tokens=24, **settings)
    async with connect(target.address) as plain:
        wanted = await ended(plain.run(request))
    async with connect(target.address, drafter.address, trusted=False) as pipeline:
        found = await ended(pipeline.run(request, drafting=False))
    assert (found.ids, found.text) == (wanted.ids, wanted.text)
    assert found.statistics.method == wanted.statistics.method
    assert (found.statistics.draft_tokens, found.statistics.drafter_lost) == (0, "")


async def test_what_choices_share_is_never_that_of_another_request() -> None:
    """Shared by identity: as long as a result can be found, what it is of must exist, lest others get its place."""
    pipeline = Pipeline("127.0.0.1:1")
    request = GenerationRequest("one's own")
    gone = ref(request)
    asking = asyncio.create_task(pipeline._once(lambda *_: None, 0, request, object(), ()))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    asking.cancel()
    del asking, request
    while pipeline._making:
        assert gone() is not None
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert gone() is None

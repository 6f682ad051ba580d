"""The Python API over real gRPC with tiny random models: what fronts ask of a pipeline, and runs of plain decoding;
and audits: honest drafters pass, one that lies about its rows is caught."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from weakref import ref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from crossdraft import client
from crossdraft.drafter.service import DrafterService
from crossdraft.engine.loader import LoadOptions, load_model
from crossdraft.engine.sampling.clocks import Clocks
from crossdraft.engine.served_model import ModelOptions, RunningModel
from crossdraft.rpc.errors import ServiceError
from crossdraft.rpc.frames import DRAFTER, TARGET
from crossdraft.rpc.server import Listening, Server, without_collections
from crossdraft.session import session
from crossdraft.session.assignment import Audit, Secrets
from crossdraft.session.events import Emitted, Reason, Replied
from crossdraft.session.resolution import resolve
from crossdraft.speculation.choice import Choice
from crossdraft.target.service import TargetService
from crossdraft.text.chat_template import ChatTemplate
from crossdraft.text.letters import NOTHING, Side, from_bytes
from crossdraft.types.messages import Draft, Drafted, NoiseKey, OpenDrafter, PassDone
from crossdraft.types.request import ALIASES, plain
from crossdraft.types.rows import DraftToken, Probabilities, Row, Whose
from crossdraft.verification.methods import METHODS, SLEM
from crossdraft.verification.noise import KeyedNoise
from tests.client.together import ended
from tests.engine.tiny import generated
from tests.ports import assignment
from tests.rpc.linked import DESCRIPTION, PuppetService
from tests.rpc.sessions import DrafterClient, TargetClient
from tests.services.conftest import AT_ONCE, save
from tests.tables import pair_of, pseudo_distribution
from tests.text.kinds import kind
from tests.trace.recordings import Keeper

PROMPT = "def main(argument):"
GREEDY = client.SamplingOptions(temperature=0)  # the tiny target's likeliest tokens are text that the drafter can read
KINDS = {kind.value for kind in client.Kind}
TEMPLATE = "{% for m in messages %}{{ bos_token }}{{ m.role }}\n{{ m.content }}{{ eos_token }}\n{% endfor %}assistant\n"
CHAT = client.Chat((client.Message("system", "Be brief."), client.Message("user", "naïve 🦄?")))
ONE_BY_ONE = Choice(0)
OFFSETS = st.integers(0, 10**6)
FEW = 12  # examples, of a hundred draws each
MASKED = client.SamplingOptions(0.9, 30, repetition_penalty=1.3, frequency_penalty=0.5, bad_word_ids=((5,), (6, 7)))
AHEAD = {"overlap": "on", "max_draft_tokens": 6, "min_draft_tokens": 1, "paths": 3}
EVERY = [name for name, method in METHODS.items() if not (method.same_vocabulary or method.redistributed)]


@pytest.fixture
def same_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two outputs of one request without a seed are the same."""
    monkeypatch.setattr(Secrets, "drawn", staticmethod(lambda: Secrets(noise=1, audit=2, chooser=3)))


async def ids_of(pipeline: client.Pipeline, **settings: object) -> list[int]:
    return (await ended(pipeline.generate(PROMPT, max_tokens=24, **settings))).ids


async def test_short_names_of_settings(pipeline: client.Pipeline) -> None:
    for short, value in (("k", 0), ("window", 0), ("wait", -1)):
        with pytest.raises(client.RequestError, match=f"^{ALIASES[short]} must be between"):
            pipeline.generate(PROMPT, **{short: value})
        with pytest.raises(TypeError, match=ALIASES[short]):
            pipeline.generate(PROMPT, **{short: value, ALIASES[short]: value})


async def test_noise_is_never_made_in_the_event_loop(target, drafter, monkeypatch):
    made, make = [], KeyedNoise.__init__

    def seen_make(noise: KeyedNoise, *of: object) -> None:
        made.append(threading.current_thread())
        make(noise, *of)

    monkeypatch.setattr(KeyedNoise, "__init__", seen_make)
    async with client.connect(target.address, drafter.address) as pipeline:
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
            async with client.connect(server.address):
                pass


async def test_a_record_is_whole_whenever_the_generation_ends(pipeline: client.Pipeline, tmp_path: Path) -> None:
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


async def test_who_is_cancelled_while_a_record_is_written_knows_how_it_has_ended(pipeline, tmp_path, monkeypatch):
    loop, begun, whole = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    def written(*_: object) -> None:
        loop.call_soon_threadsafe(begun.set)
        whole.wait()

    monkeypatch.setattr("crossdraft.client.api._write_trace", written)
    generation = pipeline.generate(PROMPT, max_tokens=3, ignore_eos=True, record=tmp_path / "record")
    reading = asyncio.create_task(ended(generation))
    await begun.wait()
    reading.cancel()
    await asyncio.wait([reading])
    whole.set()
    assert [token async for token in generation] == []
    assert (generation.reason, generation.statistics.tokens) == (Reason.LENGTH, 3)


@pytest.mark.usefixtures("drafter_first")
async def test_outputs_at_once_share_a_controller(pipeline: client.Pipeline) -> None:
    """Each has its own text, and epochs add up; not all need to draft."""
    due = [await ids_of(pipeline, seed=seed, overlap="off") for seed in range(3)]
    runs = [pipeline.generate(PROMPT, max_tokens=24, seed=seed, explain=True) for seed in range(3)]
    assert [one.ids for one in await asyncio.gather(*map(ended, runs))] == due
    for run in runs:
        assert sum(decision.epochs for decision in run.decisions) == run.statistics.epochs
        assert any(line.startswith(("in use: ", "on trial: ")) for line in run.estimates)


async def test_who_reads_an_output_beside_somebody_else_ends_with_it(pipeline: client.Pipeline) -> None:
    generation = pipeline.generate(PROMPT, max_tokens=24, seed=3)
    await asyncio.gather(ended(generation), ended(generation))
    assert len(generation.ids) == 24


@pytest.mark.usefixtures("same_secrets")
@pytest.mark.parametrize("settings", [{}, {"seed": 3, "logprobs": 2}, {"method": "coupled", "overlap": "on"}])
async def test_without_drafting_an_output_is_that_of_no_drafter(target, drafter, settings):
    request = client.GenerationRequest.of(PROMPT, max_tokens=24, **settings)
    async with client.connect(target.address) as plain:
        wanted = await ended(plain.run(request))
    async with client.connect(target.address, drafter.address, trusted=False) as pipeline:
        found = await ended(pipeline.run(request, drafting=False))
    with pytest.raises(RuntimeError, match="use the pipeline inside"):
        pipeline.run(request)
    with pytest.raises(RuntimeError, match="entered once"):
        await pipeline.__aenter__()
    ours, theirs = ((one.ids, one.text, one.statistics.method) for one in (found, wanted))
    assert ours == theirs
    assert (found.statistics.draft_tokens, found.statistics.drafter_lost) == (0, "")


async def test_what_an_ended_output_holds_is_freed_without_a_collection(pipeline):
    with without_collections():
        watch = Keeper()
        gone = ref(watch)
        run = await ended(pipeline.run(client.GenerationRequest.of(PROMPT, max_tokens=8, overlap="off"), watch))
        assert run.statistics.draft_tokens
        assert (len(run.statistics.lanes), run.addresses) == (2, frozenset())
        del watch, run
        await asyncio.sleep(0)
        assert gone() is None


@pytest.mark.usefixtures("drafter_first", "same_secrets")
async def test_services_of_this_process_give_what_those_behind_a_wire_give(target_model, drafter_model):
    """The same output, and the same rows: those of a target are rounded on any link."""
    settings = {"method": "coupled", "overlap": "off", "num_speculative_tokens": 3, "audit": True}
    async with (
        Server(TARGET, TargetService(target_model), AT_ONCE) as target,
        Server(DRAFTER, DrafterService(drafter_model), AT_ONCE) as drafter,
    ):
        made = []
        for addresses in ((target.address, drafter.address), (target.here, drafter.here)):
            async with client.connect(*addresses) as pipeline:
                keeper = Keeper()
                request = client.GenerationRequest.of(PROMPT, max_tokens=40, logprobs=2, **settings)
                await ended(pipeline.run(request, keeper))
            steps = keeper.steps
            tokens = [one for step in steps for one in step.commands if isinstance(one, Emitted)]
            replies = [step.event.reply for step in steps if isinstance(step.event, Replied)]
            nodes = [node for reply in replies if isinstance(reply, PassDone) for node in reply.nodes]
            rows = [(node.ids.tolist(), node.probabilities.tolist()) for node in nodes if isinstance(node, Row)]
            made.append((tokens, rows))
    assert made[0] == made[1]
    assert len(made[0][1]) > 10


async def test_what_choices_share_is_never_that_of_another_request() -> None:
    """Shared by identity: as long as a result can be found, what it is of must exist, lest others get its place."""
    pipeline = client.Pipeline("127.0.0.1:1")
    request = client.GenerationRequest("one's own")
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


@pytest.mark.usefixtures("drafter_first")
@pytest.mark.parametrize(
    "settings",
    [{}, {"seed": 4, "options": GREEDY}, {"head": 1, "options": MASKED}, {"method": "coupled", "head": 3, **AHEAD}]
    + [{"method": "slrs", "overlap": "off", "options": MASKED}]
    + [pytest.param({"method": name, "overlap": "off", "options": MASKED}, marks=pytest.mark.full) for name in EVERY],
    ids=str,
)
async def test_logprobs_are_the_models(pipeline, target_model, settings):
    """Whatever the method, and whatever it draws from: they are of the model itself."""
    generation = pipeline.generate(PROMPT, max_tokens=10, logprobs=4, allow_inexact=True, **settings)
    tokens = [token async for token in generation]
    prompt = pipeline.models.tokenization.encode_prompt(PROMPT)
    letters = pipeline.models.tokenization.vocabulary.letters
    with torch.inference_mode():
        logits = target_model.thread.engine.model(torch.tensor([[*prompt, *generation.ids]])).logits[0].float()
    for token, row in zip(tokens, logits[len(prompt) - 1 :].log_softmax(-1), strict=False):
        assert token.log_probability == pytest.approx(float(row[token.id]), abs=1e-3)
        values, ids = row.topk(4)
        assert [value for _, _, value in token.top] == pytest.approx(values.tolist(), abs=1e-3)
        assert [one for one, _, _ in token.top] == ids.tolist()
        assert all(raw == letters[one].encode("latin-1", "ignore") for one, raw, _ in token.top)


async def test_control_symbols_have_their_names(pipeline: client.Pipeline) -> None:
    end, nameless = kind("gpt2").id_of("<|im_end|>"), kind("gpt2").id_of("<|fill_in|>")
    prompt = (*pipeline.models.tokenization.encode_prompt(PROMPT), nameless)
    only = client.SamplingOptions(allowed_token_ids=(end,))
    generation = pipeline.generate(prompt, max_tokens=1, logprobs=1, prompt_logprobs=1, options=only)
    (token,) = [token async for token in generation]
    assert (token.id, token.raw, token.text, dict(token.names)[end]) == (end, b"", "", "<|im_end|>")
    assert dict(generation.prompt_tokens[-1].names)[nameless] == "<|fill_in|>"
    assert {id for one in generation.prompt_tokens for id, _ in one.names} <= {*pipeline.models.pair.target.names}


@pytest.mark.usefixtures("drafter_first")
async def test_drafting_goes_on_after_the_targets_unknown_token(tmp_path: Path, drafter: DrafterClient) -> None:
    some, text = kind("small_unigram"), "the dog"
    options = ModelOptions(str(save(tmp_path, some, 128)), cache_mib=1)
    model = RunningModel.of(load_model(options), Side.TARGET, options)
    only = client.SamplingOptions(allowed_token_ids=(some.id_of("<unk>"), some.id_of("▁the")))
    async with (
        Server(TARGET, TargetService(model), AT_ONCE) as server,
        client.connect(server.address, drafter.address, needs_drafter=True) as pipeline,
    ):
        for method in ("slem", "seeded", "coupled", "union", "slrs"):
            generation = await ended(pipeline.generate(text, max_tokens=12, method=method, overlap="off", options=only))
            figures = generation.statistics
            assert some.id_of("<unk>") in generation.ids
            assert (figures.tokens, figures.stood_aside, figures.undrafted) == (12, 0, "")
            assert figures.draft_tokens >= 5 * (figures.epochs - 1)  # the last epoch may be for one token
    model.close()


async def test_how_many_logprobs_there_are(pipeline: client.Pipeline) -> None:
    for wanted, count in ((None, 0), (0, 0), (20, 20)):
        tokens = [token async for token in pipeline.generate(PROMPT, max_tokens=3, seed=1, logprobs=wanted)]
        assert {len(token.top) for token in tokens} == {count}
    with pytest.raises(client.RequestError, match="logprobs must be between 0 and 20, got 21"):
        pipeline.generate(PROMPT, logprobs=21)


@pytest.fixture
def chatting(target_folder: Path, tmp_path: Path) -> Iterator[RunningModel]:
    """The target with a chat template."""
    for file in target_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    settings = json.loads((target_folder / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    model = RunningModel.of(load_model(LoadOptions(str(tmp_path))), Side.TARGET, ModelOptions("", cache_mib=1))
    yield model
    model.close()


async def test_a_chat_is_what_transformers_makes_of_it(chatting: RunningModel, drafter: DrafterClient) -> None:
    reference = PreTrainedTokenizerFast.from_pretrained(chatting.description.model)
    messages = [{"role": one.role, "content": one.content} for one in CHAT.messages]
    ids = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert kind("gpt2").id_of("<|endoftext|>") in ids
    serving = Server(TARGET, TargetService(chatting), AT_ONCE)
    async with serving as server, client.connect(server.address, drafter.address) as pipeline:
        settings = {"max_tokens": 8, "options": GREEDY, "overlap": "off"}  # else it need not draft
        generation = await ended(pipeline.generate(CHAT, **settings))
        assert generation.ids == generated(chatting.thread.engine.model, ids, 8)
        assert generation.statistics.prompt_tokens == len(ids)
        assert generation.statistics.draft_tokens > 0


@pytest.mark.parametrize("trusted", [True, False])
async def test_a_template_of_a_drafter_that_is_not_trusted_is_not_run(target, drafter_model, trusted):
    about = replace(drafter_model.description, chat_template=ChatTemplate("{{ messages[0].content }}"))
    serving = Server(DRAFTER, DrafterService(replace(drafter_model, description=about)), AT_ONCE)
    async with serving as server, client.connect(target.address, server.address, trusted=trusted) as pipeline:
        chats = replace(pipeline.models.target, chat_template=ChatTemplate(TEMPLATE))
        opening = resolve(client.GenerationRequest(CHAT), replace(pipeline.models, target=chats)).open_drafter
        wanted = CHAT.messages[0].content if trusted else plain(CHAT)
        assert (opening.prompt, opening.templated) == (from_bytes(wanted.encode()), trusted)


async def test_a_drafter_reads_special_tokens_in_its_templated_prompt(drafter, drafter_model):
    text = "<s>user\nHello</s>\nassistant\n"
    ids = drafter_model.tokenization.encode_prompt(text, special=False)
    assert ids[0] == kind("llama2").id_of("<s>")
    with torch.inference_mode():
        model = drafter_model.thread.engine.model
        wanted = int(model(torch.tensor([ids])).logits[0, -1].argmax())
        plain = drafter_model.tokenization.encode_prompt_letters(from_bytes(text.encode()))
        assert int(model(torch.tensor([plain])).logits[0, -1].argmax()) != wanted
    opening = OpenDrafter(from_bytes(text.encode()), GREEDY, None, 0, templated=True)
    for begun, same in ((opening, True), (replace(opening, templated=False), False)):
        async with drafter.session(begun) as session:
            drafted = await session.draft(Draft(1, 0, NOTHING, 1))
            assert (drafted.draft_tokens[0].token == wanted) == same


@pytest.fixture
async def alone(target: TargetClient) -> AsyncIterator[client.Pipeline]:
    async with client.connect(target.address) as connected:
        yield connected


@pytest.mark.parametrize(
    "settings", [{"options": GREEDY}, {"seed": 3, "method": "slem"}, {"seed": 5, "logprobs": 2}], ids=str
)
async def test_with_runs_the_text_is_that_of_passes_one_by_one(alone, settings, monkeypatch):
    with_runs = await ended(alone.generate(PROMPT, max_tokens=50, **settings))
    with monkeypatch.context() as patched:
        patched.setattr(session, "PLAIN", ONE_BY_ONE)
        without = await ended(alone.generate(PROMPT, max_tokens=50, **settings))
    assert (with_runs.ids, with_runs.text, with_runs.reason) == (without.ids, without.text, without.reason)
    ours, theirs = with_runs.statistics, without.statistics
    assert (ours.passes, ours.tokens, ours.tokens_per_pass) == (theirs.passes, theirs.tokens, 1)
    assert (ours.runs > 0, theirs.runs) == (True, 0)
    assert ours.bytes_sent < theirs.bytes_sent / 2


async def test_tokens_come_while_the_run_goes_on(alone: client.Pipeline, target_model: RunningModel) -> None:
    """They are not kept until the run is over: nor is one drawn after the output was left."""
    generation = alone.generate(PROMPT, max_tokens=100, seed=7, ignore_eos=True)
    await anext(generation)
    steps = target_model.thread.steps
    assert steps < 100
    await generation.aclose()


async def test_a_recorded_run_has_its_passes(alone: client.Pipeline, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    await ended(alone.generate(PROMPT, max_tokens=40, seed=7, ignore_eos=True, record=path))
    passes = [one for one in json.loads(path.read_text())["traceEvents"] if one.get("cat") == "pass"]
    assert len(passes) > 1
    assert all(before["ts"] + before["dur"] <= after["ts"] + 100 for before, after in pairwise(passes))


PAIR = pair_of(("a", "b", "ab", "ba", "c"), ("a", "b", "bc", "cab", "a", "aa"))
SMALL = pair_of(("a", "b", "ab"), ("a", "b", "ba"))
NOISES = KeyedNoise.of(PAIR.drafter), KeyedNoise.of(PAIR.target)
SHARPNESS = 3.0  # of the toys' rows: a lie about a flat row is small
PEAKED = 0.2  # temperature of the tiny drafter, whose rows are flat at 1
Distribution = Callable[[Probabilities], Probabilities]  # `positive` is honest, `sqrt` flattens


def audit(seed: int, each_epoch: bool = True) -> Audit:
    return Audit(NoiseKey(seed, 5), each_epoch, *NOISES)


def drafted(given: Audit, epoch: int, offset: int, drawn_from: Distribution, whose: Whose, count: int = 5) -> Drafted:
    """A draft whose rows are the toys' distributions, and whose draws are from `drawn_from` of them."""
    key = NoiseKey(given.key.seed, epoch) if given.each_epoch else given.key
    vocabulary, noise = (PAIR.drafter, NOISES[0]) if whose is Whose.DRAFTER else (PAIR.target, NOISES[1])
    draft_tokens = []
    for place in range(count):
        distribution = pseudo_distribution("toy", (epoch, offset, place), vocabulary.size) ** SHARPNESS
        row = Row(np.arange(vocabulary.size), distribution / distribution.sum())
        token = noise.draw(row.ids, drawn_from(row.probabilities), key, offset)
        draft_tokens.append(DraftToken(token, row, whose))
        offset += len(vocabulary.letters[token])
    return Drafted(epoch, tuple(draft_tokens), 0.0)


@given(st.integers(0, 2**64 - 1), st.integers(1, 10**6), OFFSETS, st.booleans(), st.sampled_from(Whose))
def test_an_honest_draft_is_never_blamed(seed: int, epoch: int, offset: int, each: bool, whose: Whose) -> None:
    given = audit(seed, each)
    assert given.fault_of(drafted(given, epoch, offset, np.positive, whose), offset, PAIR) == ""


@settings(max_examples=FEW)
@given(st.integers(0, 2**64 - 1), st.sampled_from(Whose))
def test_a_lie_about_the_row_is_found_within_a_few_tens_of_draft_tokens(seed: int, whose: Whose) -> None:
    given = audit(seed)
    drafts = (drafted(given, epoch, 7 * epoch, np.sqrt, whose) for epoch in range(1, 21))
    faults = [given.fault_of(draft, 7 * draft.epoch, PAIR) for draft in drafts]
    assert any("was not drawn from its row" in fault for fault in faults)


@settings(max_examples=FEW)
@given(st.integers(0, 2**64 - 1), OFFSETS)
def test_draws_of_another_epoch_or_place_are_blamed_in_the_end(seed: int, offset: int) -> None:
    given = audit(seed)
    drafts = [drafted(given, epoch, offset, np.positive, Whose.DRAFTER) for epoch in range(1, 21)]
    assert any(given.fault_of(draft, offset + 1, PAIR) for draft in drafts)
    renamed = [Drafted(draft.epoch + 1, draft.draft_tokens, 0.0) for draft in drafts]
    assert any(given.fault_of(draft, offset, PAIR) for draft in renamed)


def test_rows_are_checked_before_draws_are_whatever_the_method_needs() -> None:
    noises = map(KeyedNoise.of, (SMALL.drafter, SMALL.target))
    given = replace(assignment(SLEM), audit=Audit(NoiseKey(1), True, *noises))
    rows = (None, Row(np.array([99]), np.ones(1)), Row(np.array([1]), np.ones(1)))
    faults = [given.fault_of(Drafted(1, (DraftToken(0, row),), 0.0), 0, 1) for row in rows]
    wanted = ("without the whole row", "has ids beyond 2", "cannot give it")
    assert all(text in fault for text, fault in zip(wanted, faults, strict=True)), faults
    assert "without the row" in audit(1).fault_of(Drafted(1, (DraftToken(0),), 0.0), 0, PAIR)


async def finished(pipeline: client.Pipeline, method: str, audit: bool = True, **changes: object) -> client.Generation:
    asked = {"method": method, "audit": audit, "allow_inexact": True, "drafter_temperature": PEAKED}
    usual = {"max_tokens": 24, "options": GREEDY, "overlap": "off"}
    return await ended(pipeline.generate(PROMPT, **asked, **(usual | changes)))


# Tokens that both have, scores; a key for each epoch, and the target's. The others draw like one of them.
CASES = [("coupled-shared", "off"), ("slrs", "off"), ("coupled", "on"), ("seeded", "on")]


@pytest.mark.usefixtures("drafter_first")
@pytest.mark.parametrize(("method", "overlap"), CASES)
async def test_a_real_drafter_passes_and_changes_nothing(pipeline, method, overlap):
    how = {"overlap": overlap, "max_tokens": 12}
    audited, plain = [await finished(pipeline, method, audit, **how) for audit in (True, False)]
    assert audited.statistics.drafter_lost == ""
    assert audited.statistics.audited == audited.statistics.draft_tokens > 0
    assert audited.ids == plain.ids


@pytest.mark.parametrize("method", ["coupled", "seeded"])
async def test_a_real_drafter_that_lies_is_given_up(pipeline, method, monkeypatch):
    """It draws from q^0.5, and says q."""
    draw = Clocks.draw
    monkeypatch.setattr(Clocks, "draw", lambda clocks, rows, *given: draw(clocks, rows.sqrt(), *given))
    generation = await finished(pipeline, method)
    assert "was not drawn from its row" in generation.statistics.drafter_lost
    assert generation.statistics.draft_tokens < 60
    assert len(generation.ids) == generation.statistics.tokens > 0  # the target goes on alone

"""What fronts ask of the pipeline, over real gRPC with tiny random models: ids, chats, logprobs, resuming."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from crossdraft.client import Chat, GenerationRequest, Message, Pipeline, RequestError, SamplingOptions, Token, connect
from crossdraft.client.api import Generation
from crossdraft.drafter.service import DrafterService
from crossdraft.engine.loader import LoadOptions, load_model
from crossdraft.engine.served_model import RunningModel
from crossdraft.rpc.frames import DRAFTER, TARGET
from crossdraft.rpc.server import Server
from crossdraft.session.resolution import resolve
from crossdraft.target.service import TargetService
from crossdraft.text.chat_template import ChatTemplate
from crossdraft.text.letters import NOTHING, Side, from_bytes
from crossdraft.types.messages import Draft, OpenDrafter
from crossdraft.types.request import plain
from crossdraft.verification.methods import METHODS
from tests.rpc.sessions import DrafterClient
from tests.services.conftest import AT_ONCE, save
from tests.text.kinds import kind

PROMPT = "def main(argument):"
GREEDY = SamplingOptions(temperature=0)
TEMPLATE = "{% for m in messages %}{{ bos_token }}{{ m.role }}\n{{ m.content }}{{ eos_token }}\n{% endfor %}assistant\n"
CHAT = Chat((Message("system", "Be brief."), Message("user", "naïve 🦄?")))


async def tokens_of(generation: Generation) -> list[Token]:
    return [token async for token in generation]


MASKED = SamplingOptions(0.9, top_k=30, repetition_penalty=1.3, frequency_penalty=0.5, bad_word_ids=((5,), (6, 7)))
AHEAD = {"overlap": "on", "max_draft_tokens": 6, "min_draft_tokens": 1, "paths": 3}
EVERY = [name for name, method in METHODS.items() if not (method.same_vocabulary or method.redistributed)]


@pytest.mark.usefixtures("drafter_first")
@pytest.mark.parametrize(
    "settings",
    [{}, {"seed": 4, "options": GREEDY}, {"head": 1, "options": MASKED}, {"method": "coupled", "head": 3, **AHEAD}]
    + [{"method": "slrs", "overlap": "off", "options": MASKED}]
    + [pytest.param({"method": name, "overlap": "off", "options": MASKED}, marks=pytest.mark.full) for name in EVERY],
    ids=str,
)
async def test_logprobs_are_the_models(pipeline: Pipeline, target_model: RunningModel, settings: dict[str, object]):
    """Whatever the method, and whatever it draws from: they are of the model itself."""
    generation = pipeline.generate(PROMPT, max_tokens=10, logprobs=4, allow_inexact=True, **settings)
    tokens = await tokens_of(generation)
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


async def test_control_symbols_have_their_names(pipeline: Pipeline) -> None:
    end, nameless = kind("gpt2").id_of("<|im_end|>"), kind("gpt2").id_of("<|fill_in|>")
    prompt = (*pipeline.models.tokenization.encode_prompt(PROMPT), nameless)
    only = SamplingOptions(allowed_token_ids=(end,))
    generation = pipeline.generate(prompt, max_tokens=1, logprobs=1, prompt_logprobs=1, options=only)
    (token,) = await tokens_of(generation)
    assert (token.id, token.raw, token.text, dict(token.names)[end]) == (end, b"", "", "<|im_end|>")
    assert dict(generation.prompt_tokens[-1].names)[nameless] == "<|fill_in|>"
    assert {id for one in generation.prompt_tokens for id, _ in one.names} <= {*pipeline.models.pair.target.names}


@pytest.mark.usefixtures("drafter_first")
async def test_drafting_goes_on_after_the_targets_unknown_token(tmp_path: Path, drafter: DrafterClient) -> None:
    some, text = kind("small_unigram"), "the dog"
    model = RunningModel.of(load_model(LoadOptions(str(save(tmp_path, some, 128)))), Side.TARGET, 1)
    only = SamplingOptions(allowed_token_ids=(some.id_of("<unk>"), some.id_of("▁the")))
    async with (
        Server(TARGET, TargetService(model), AT_ONCE) as server,
        connect(server.address, drafter.address, needs_drafter=True) as pipeline,
    ):
        for method in ("slem", "seeded", "coupled", "union", "slrs"):
            generation = pipeline.generate(text, max_tokens=12, method=method, overlap="off", options=only)
            await tokens_of(generation)
            figures = generation.statistics
            assert some.id_of("<unk>") in generation.ids
            assert (figures.tokens, figures.stood_aside, figures.undrafted) == (12, 0, "")
            assert figures.draft_tokens >= 5 * (figures.epochs - 1)  # the last epoch may be for one token
    model.close()


async def test_how_many_logprobs_there_are(pipeline: Pipeline) -> None:
    for wanted, count in ((None, 0), (0, 0), (20, 20)):
        tokens = await tokens_of(pipeline.generate(PROMPT, max_tokens=3, seed=1, logprobs=wanted))
        assert {len(token.top) for token in tokens} == {count}
    with pytest.raises(RequestError, match="logprobs must be between 0 and 20, got 21"):
        pipeline.generate(PROMPT, logprobs=21)


@pytest.fixture
def chatting(target_folder: Path, tmp_path: Path) -> Iterator[RunningModel]:
    """The target with a chat template."""
    for file in target_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    settings = json.loads((target_folder / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    model = RunningModel.of(load_model(LoadOptions(str(tmp_path))), Side.TARGET, 1)
    yield model
    model.close()


async def test_a_chat_is_what_transformers_makes_of_it(chatting: RunningModel, drafter: DrafterClient) -> None:
    reference = PreTrainedTokenizerFast.from_pretrained(chatting.description.model)
    messages = [{"role": one.role, "content": one.content} for one in CHAT.messages]
    ids = torch.tensor([reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)])
    assert kind("gpt2").id_of("<|endoftext|>") in ids[0]
    with torch.inference_mode():
        out = chatting.thread.engine.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, min_new_tokens=8, do_sample=False
        )
    async with (
        Server(TARGET, TargetService(chatting), AT_ONCE) as server,
        connect(server.address, drafter.address) as pipeline,
    ):
        generation = pipeline.generate(CHAT, max_tokens=8, options=GREEDY, overlap="off")  # else it need not draft
        await tokens_of(generation)
        assert generation.ids == out[0, ids.shape[1] :].tolist()
        assert generation.statistics.prompt_tokens == ids.shape[1]
        assert generation.statistics.draft_tokens > 0


@pytest.mark.parametrize("trusted", [True, False])
async def test_a_template_of_a_drafter_that_is_not_trusted_is_not_run(target, drafter_model, trusted):
    about = replace(drafter_model.description, chat_template=ChatTemplate("{{ messages[0].content }}"))
    service = DrafterService(replace(drafter_model, description=about))
    async with (
        Server(DRAFTER, service, AT_ONCE) as server,
        connect(target.address, server.address, trusted=trusted) as pipeline,
    ):
        chats = replace(pipeline.models.target, chat_template=ChatTemplate(TEMPLATE))
        opening = resolve(GenerationRequest(CHAT), replace(pipeline.models, target=chats)).open_drafter
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
    for given, same in ((opening, True), (replace(opening, templated=False), False)):
        async with drafter.session(given) as session:
            drafted = await session.draft(Draft(1, 0, NOTHING, 1))
            assert (drafted.draft_tokens[0].token == wanted) == same

"""What draft tokens are drawn from: the whole head or a cut one, or the target's tokens (`rdk`); and what it costs."""

import math
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from crossdraft.drafter.sampling import OwnTokens
from crossdraft.drafter.service import DrafterService, drafter_server
from crossdraft.engine.loader import LoadedModel, LoadOptions, load_model
from crossdraft.engine.sampling.sampler import SamplerSteps
from crossdraft.engine.served_model import ModelOptions, RunningModel
from crossdraft.rpc.errors import ProtocolBroken, ServiceError
from crossdraft.text.affinity import Affinity, Matrix, save_affinity
from crossdraft.text.frequencies import count_frequencies
from crossdraft.text.letters import NOTHING, Letters, Side, from_bytes
from crossdraft.text.pairs import Pair
from crossdraft.text.vocabulary import tokenizer_digest
from crossdraft.types.messages import Draft, NoiseKey, OpenDrafter, SamplingOptions, Score
from crossdraft.types.rows import DraftToken, Row, Whose
from crossdraft.verification.noise import KeyedNoise, fault_of_draw
from tests.drafter.streaming import drafted, first_row, masked_to_its_ids, together
from tests.engine.taped import waits
from tests.engine.tiny import result
from tests.rpc.sessions import DrafterClient
from tests.services.conftest import AT_ONCE, drafting, running_of
from tests.text.kinds import kind

T = TypeVar("T")
TARGET_JSON = kind("gpt2").json
PAIR = Pair(kind("gpt2").vocabulary(), kind("llama2").vocabulary(Side.DRAFTER))
SPREAD = 5  # target tokens that each shared token's mass goes to
KEEP = 60
PROMPT = from_bytes(b"The quick brown fox")
FIRST = Draft(1, 0, Letters(""), 6)
KEY = NoiseKey(77)
WHOLE = 4096  # a row that is not cut short


def read_alone(asking: SamplerSteps[T]) -> T:
    """What it returns when each of its readings is answered by itself."""
    try:
        wanted = next(asking)
        while True:
            (found,) = result(wanted)
            wanted = asking.send(found)
    except StopIteration as end:
        found: T = end.value
        return found


class Copied(TorchFunctionMode):
    """The sizes of what is copied to tensors and from them."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if getattr(function, "__name__", "") in ("new_tensor", "tensor", "numpy"):
            self.sizes.append(math.prod(result.shape))
        return result


def test_a_step_copies_no_more_than_the_row(drafter_model: RunningModel) -> None:
    size = drafter_model.tokenization.vocabulary.size
    for allowed in (None, np.arange(size - 1)):
        own = OwnTokens(drafter_model, OpenDrafter(from_bytes(b"The"), SamplingOptions(), NoiseKey(77), 8, allowed))
        with Copied() as copied:
            ((ids, _),) = read_alone(own.distributions(torch.arange(size, dtype=torch.float32)[None]))
        assert ids.tolist() == [size - 1 - (allowed is not None) - place for place in range(8)]
        assert max(copied.sizes) == 16  # ids and probabilities


SETTINGS = {
    "greedy": (SamplingOptions(temperature=0), None, 0),
    "keyed": (SamplingOptions(0.8), NoiseKey(77), 0),
    "truncated": (SamplingOptions(0.8, top_k=20, min_p=0.01), NoiseKey(77), 0),
    "nucleus": (SamplingOptions(0.8, top_p=0.9), NoiseKey(77), 0),
    "fresh": (SamplingOptions(0.8), None, 0),
    "rows": (SamplingOptions(0.8, top_k=20), NoiseKey(77), 8),
    "rows of a nucleus": (SamplingOptions(0.8, top_p=0.9), NoiseKey(77), 8),
    "greedy rows": (SamplingOptions(temperature=0), NoiseKey(77), 8),
}


@pytest.mark.parametrize("settings", [*([each] for each in SETTINGS), [*SETTINGS]], ids=lambda names: names[-1])
async def test_a_draft_waits_for_the_device_once(drafter_model, monkeypatch, settings):
    """Several sessions together, also with settings of which none is like another."""
    openings = [
        OpenDrafter(from_bytes(b"The quick" + bytes(number)), *SETTINGS[name])
        for number, name in enumerate(3 * settings if len(settings) == 1 else settings)
    ]
    steps, count = drafter_model.thread.steps, len(openings)
    with waits(monkeypatch) as calls:
        drafts = await together(drafter_model, openings, *[Draft(2, 0, Letters(""), 5)] * count)
    assert [len(draft.draft_tokens) for draft in drafts] == [5] * count
    assert calls == ["cpu"] * (count + 1)  # of the prompts, and of all drafts
    assert drafter_model.thread.steps - steps == count + 5


@pytest.fixture(scope="session")
def frequencies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    some, path = kind("llama2"), tmp_path_factory.mktemp("ranking") / "frequencies"
    text = "The quick brown fox jumps over the lazy dog while def main(argument): return argument + 1\n"
    count_frequencies(some.json, some.tokenization(Side.DRAFTER), [text]).write(path)
    return path


@pytest.fixture
def following_model(drafter_folder: Path, frequencies: Path) -> Iterator[RunningModel]:
    loaded = load_model(LoadOptions(str(drafter_folder), vocab_keep=KEEP, frequencies=frequencies, vocab_follow=6))
    yield from running_of(loaded, Side.DRAFTER)


@pytest.fixture
async def following(following_model: RunningModel) -> AsyncIterator[DrafterClient]:
    async with drafting(DrafterService(following_model)) as client:
        yield client


@pytest.fixture(scope="session")
def loaded(drafter_folder: Path, frequencies: Path) -> LoadedModel:
    return load_model(LoadOptions(str(drafter_folder), vocab_keep=KEEP, frequencies=frequencies))


@pytest.fixture
def pruned_model(loaded: LoadedModel) -> Iterator[RunningModel]:
    yield from running_of(loaded, Side.DRAFTER)


@pytest.fixture
async def pruned(pruned_model: RunningModel) -> AsyncIterator[DrafterClient]:
    async with drafting(DrafterService(pruned_model)) as client:
        yield client


def test_the_description_is_that_of_the_whole_vocabulary(loaded: LoadedModel, drafter_folder: Path) -> None:
    assert loaded.description == load_model(LoadOptions(str(drafter_folder))).description
    assert len(loaded.kept) == KEEP < loaded.description.vocabulary_size
    assert set(loaded.description.stops) <= set(loaded.kept.tolist())
    assert loaded.model.get_output_embeddings().weight.shape[0] == KEEP


@pytest.mark.parametrize(("noise", "width"), [(KEY, 8), (None, 0)])
async def test_it_drafts_kept_ids_only(pruned: DrafterClient, loaded: LoadedModel, noise, width) -> None:
    kept = set(loaded.kept.tolist())
    drawn = set()
    for epoch in range(1, 6):
        async with pruned.session(OpenDrafter(PROMPT, SamplingOptions(), noise, width)) as session:
            for draft_token in (await session.draft(replace(FIRST, epoch=epoch, count=16))).draft_tokens:
                drawn.add(draft_token.token)
                if draft_token.row is not None:
                    assert set(draft_token.row.ids.tolist()) <= kept
                    assert len(draft_token.row.ids) == min(width, KEEP)
                    assert draft_token.row.probabilities.sum() == 1
    assert drawn <= kept
    assert len(drawn) > 5
    assert max(drawn) >= KEEP  # not columns


async def test_a_row_is_the_full_ones_over_kept_ids(pruned: DrafterClient, drafter: DrafterClient, loaded: LoadedModel):
    opening = OpenDrafter(PROMPT, SamplingOptions(), KEY, WHOLE)
    cut, full = await first_row(pruned, opening), await first_row(drafter, opening)
    assert sorted(cut.ids.tolist()) == loaded.kept.tolist()
    masked_to_its_ids(cut, full)


async def test_columns_that_follow_the_text_have_the_rows_of_its_ids(drafter, following, following_model):
    """The row is the full one over the ids kept and those of prompt and output; columns are given up for newer ids."""
    text, kept = from_bytes("Größe: 123 %, quick".encode()), following_model.clocks.kept[:KEEP].copy()
    opening, ids = OpenDrafter(text, SamplingOptions(), KEY, WHOLE), following_model.tokenization.encode_prompt_letters
    newest = [*dict.fromkeys(one for one in reversed(ids(text)) if one not in kept)][:6]
    assert len(newest) == 6 < len({*ids(text)} - {*kept.tolist()})
    for _ in range(2):  # the second time the columns are there already
        cut, full = await first_row(following, opening), await first_row(drafter, opening)
        assert {*cut.ids.tolist()} == {*kept.tolist(), *newest}
        masked_to_its_ids(cut, full)
    assert {*(await first_row(following, replace(opening, prompt=PROMPT))).ids.tolist()} >= {*ids(PROMPT)}
    allowed = np.array([*kept[:3], *newest])
    assert {*(await first_row(following, replace(opening, allowed=allowed))).ids.tolist()} == {*kept[:3]}  # they stay


async def test_columns_that_follow_texts_have_no_scores_and_no_grammar_writes_them(following, following_model):
    async with following.session(OpenDrafter(PROMPT, SamplingOptions(), KEY, WHOLE)) as session:
        await session.draft(FIRST)
        with pytest.raises(ServiceError, match="vocab-follow"):
            await session.score(Score(1, 0, (from_bytes(b"a"),), 6))
    written, columns = following_model.grammars.letters, following_model.text_columns
    assert set(written[columns.first :]) == {NOTHING}


async def test_shared_tokens_that_are_kept(pruned: DrafterClient, loaded: LoadedModel) -> None:
    gone = np.setdiff1d(np.arange(loaded.description.vocabulary_size), loaded.kept)
    allowed = np.concatenate([loaded.kept[[3, 20, 40]], gone[:5]])
    draft = await drafted(pruned, OpenDrafter(PROMPT, SamplingOptions(), KEY, 8, allowed), count=6)
    for draft_token in draft.draft_tokens:
        assert set(draft_token.row.ids.tolist()) == set(loaded.kept[[3, 20, 40]].tolist())


async def test_where_no_shared_token_is_kept_it_stands_aside(pruned: DrafterClient, loaded: LoadedModel) -> None:
    gone = np.setdiff1d(np.arange(loaded.description.vocabulary_size), loaded.kept)
    for allowed, reason in ((gone[:5], "none of the shared tokens is kept"), (gone[:0], "share no token")):
        draft = await drafted(pruned, OpenDrafter(PROMPT, SamplingOptions(), KEY, 8, allowed), count=6)
        assert draft.draft_tokens == ()
        assert reason in draft.reason


async def test_scores_are_of_kept_ids_only(pruned: DrafterClient, pruned_model: RunningModel) -> None:
    vocabulary = pruned_model.tokenization.vocabulary
    letters = sorted({letter for text in vocabulary.letters for letter in text})
    kept = {vocabulary.letters[token][0] for token in pruned_model.clocks.kept}
    async with pruned.session(OpenDrafter(PROMPT, SamplingOptions(), None, 0)) as session:
        await session.draft(FIRST)
        scored = await session.score(Score(1, 0, tuple(map(Letters, letters)), 6))
    assert abs(scored.probabilities.sum() - 1) < 1e-6
    assert {letter for letter, score in zip(letters, scored.probabilities, strict=True) if score} == kept


def spread_out() -> Matrix:
    """Each shared token gives half of its mass to its own target token, the rest to the ones beside that."""
    shared = PAIR.shared_drafter_ids
    places = (PAIR.to_target_ids(shared)[:, None] + np.arange(SPREAD)) % PAIR.target.size
    weights = np.full(places.shape, 0.5 / (SPREAD - 1))
    weights[:, 0] = 0.5
    starts = np.arange(len(shared) + 1, dtype=np.int64) * SPREAD
    return Matrix(shared, starts, places.astype(np.int32).ravel(), weights.astype(np.float32).ravel())


SPREADING = Affinity.of(PAIR, spread_out(), TARGET_JSON, kind("llama2").json)
OPEN = OpenDrafter(PROMPT, SamplingOptions(), KEY, 16, PAIR.shared_drafter_ids, redistribute=SPREADING.target)
TARGET_NOISE = KeyedNoise.of(PAIR.target)


@pytest.fixture
async def spreading(drafter_model: RunningModel) -> AsyncIterator[DrafterClient]:
    async with drafting(DrafterService(drafter_model, SPREADING)) as client:
        yield client


async def test_rows_are_the_drafters_distribution_spread_over_target_tokens(spreading: DrafterClient) -> None:
    whole = await first_row(spreading, replace(OPEN, row_width=1 << 16))
    own = await first_row(spreading, replace(OPEN, redistribute="", row_width=1 << 16))
    expected = np.zeros(PAIR.target.size)
    for target, weight in zip(PAIR.to_target_ids(own.ids), own.probabilities, strict=True):
        for step in range(SPREAD):
            expected[(target + step) % PAIR.target.size] += weight * (0.5 if step == 0 else 0.5 / (SPREAD - 1))
    np.testing.assert_allclose(whole.probabilities, expected[whole.ids], atol=1e-6)
    narrow = await first_row(spreading, OPEN)
    assert (len(narrow.ids), narrow.probabilities.sum(), narrow.tail) == (16, 1.0, 0.0)
    kept = expected[narrow.ids]
    np.testing.assert_allclose(narrow.probabilities, kept / kept.sum(), atol=1e-6)
    assert kept.min() >= np.sort(expected)[-16] - 1e-6


@pytest.mark.parametrize("temperature", [0.0, 0.5])
async def test_the_temperature_comes_after_the_matrix(spreading: DrafterClient, temperature: float) -> None:
    """At temperature 0 the likeliest target token of the spread distribution, whatever the likeliest draft token is."""
    warm = replace(OPEN, row_width=1 << 16)
    spread = await first_row(spreading, warm)
    cooler = replace(warm, options=SamplingOptions(temperature))
    row = await first_row(spreading, cooler)
    if not temperature:
        assert (row.ids.tolist(), row.probabilities.tolist()) == ([spread.ids[spread.probabilities.argmax()]], [1.0])
        return
    wanted = dict(zip(spread.ids.tolist(), spread.probabilities ** (1 / temperature), strict=True))
    total = sum(wanted.values())
    expected = [wanted[token] / total for token in row.ids.tolist()]
    np.testing.assert_allclose(row.probabilities, expected, atol=1e-5)


async def test_after_a_target_token_the_text_goes_on_with_its_letters(spreading: DrafterClient) -> None:
    plain = np.array([t for t in PAIR.shared_drafter_ids if PAIR.drafter.letters[t].isalpha()])
    opening = replace(OPEN, allowed=plain)
    first, second = (await drafted(spreading, opening, count=2)).draft_tokens
    fresh = await first_row(spreading, opening, PAIR.target.letters[first.token])
    np.testing.assert_array_equal(second.row.ids, fresh.ids)
    np.testing.assert_allclose(second.row.probabilities, fresh.probabilities, atol=2e-6)


async def test_a_long_draft_of_target_tokens_is_cut_to_the_context(spreading: DrafterClient) -> None:
    plain = np.array([t for t in PAIR.shared_drafter_ids if len(PAIR.drafter.letters[t]) > 2])
    opening = replace(OPEN, prompt=Letters(" dog the" * 40), allowed=plain)
    one = await drafted(spreading, opening, count=60)
    assert (len(one.draft_tokens), one.reason) == (60, "")


async def test_a_token_that_the_drafter_cannot_read_is_left_out_of_what_it_reads(drafter_model: RunningModel) -> None:
    lonely = PAIR.target.nameless[0][0]  # a control symbol of the target's
    shared = PAIR.shared_drafter_ids
    starts, ids = np.arange(len(shared) + 1, dtype=np.int64), np.full(len(shared), lonely, dtype=np.int32)
    kernel = Matrix(shared, starts, ids, np.ones(len(shared), dtype=np.float32))
    affinity = Affinity.of(PAIR, kernel, TARGET_JSON, kind("llama2").json)
    async with drafting(DrafterService(drafter_model, affinity)) as client, client.session(OPEN) as session:
        one = await session.draft(Draft(1, 0, NOTHING, 4))
        assert [draft_token.token for draft_token in one.draft_tokens] == [lonely] * 4
        assert one.reason == ""


async def test_the_affinity_is_described_and_others_are_refused(spreading: DrafterClient, drafter: DrafterClient):
    assert (await spreading.describe()).affinity == SPREADING.target == tokenizer_digest(TARGET_JSON)
    assert (await drafter.describe()).affinity == ""
    with pytest.raises(ProtocolBroken, match="for a target with another tokenizer: make one with `crossdraft affin"):
        await drafted(spreading, replace(OPEN, redistribute="another"))
    with pytest.raises(ProtocolBroken, match="no affinity matrix: make one with `crossdraft affinity`"):
        await drafted(drafter, OPEN)


async def test_drafts_of_target_tokens_have_no_scores(spreading: DrafterClient) -> None:
    async with spreading.session(OPEN) as session:
        await session.draft(Draft(1, 0, NOTHING, 4))
        with pytest.raises(ProtocolBroken, match="open a session without redistribute"):
            await session.score(Score(1, 0, (Letters("a"),), 4))


@pytest.mark.parametrize("whose", Whose)
async def test_audited_draws_are_made_again_from_what_arrived(spreading, drafter_model, whose):
    target = whose is Whose.TARGET
    opening = replace(OPEN, audited=True, redistribute=SPREADING.target if target else "")
    noise = TARGET_NOISE if target else drafter_model.clocks.noise
    letters = PAIR.target.letters if target else PAIR.drafter.letters
    texts = set()
    async with spreading.session(opening) as session:
        for epoch in range(1, 5):
            one = await session.draft(Draft(epoch, 0, Letters(" a"), 4))
            key, offset = NoiseKey(KEY.seed, epoch), 2
            texts.add(tuple(draft_token.token for draft_token in one.draft_tokens))
            for draft_token in one.draft_tokens:
                assert draft_token.whose is whose
                assert fault_of_draw(draft_token, noise, key, offset) == ""
                offset += len(letters[draft_token.token])
    assert len(texts) > 2  # each epoch draws anew


def test_a_draw_that_is_not_its_rows_is_a_fault() -> None:
    row = Row(np.arange(20), np.full(20, 0.05))
    drawn = TARGET_NOISE.draw(row.ids, row.probabilities, KEY, 3)
    assert fault_of_draw(DraftToken(drawn, row), TARGET_NOISE, KEY, 3) == ""
    others = [fault_of_draw(DraftToken(token, row), TARGET_NOISE, KEY, 3) for token in range(20) if token != drawn]
    assert all("was not drawn from its row" in fault and f"gives id {drawn} there" in fault for fault in others)
    assert any(fault_of_draw(DraftToken(drawn, row), TARGET_NOISE, KEY, offset) for offset in range(4, 20))
    assert "without the row" in fault_of_draw(DraftToken(drawn), TARGET_NOISE, KEY, 3)
    assert "gives no id" in fault_of_draw(DraftToken(1, Row(row.ids, np.zeros(20), 1.0)), TARGET_NOISE, KEY, 3)


async def test_affinity_files_are_checked_before_serving(drafter_folder: Path, tmp_path: Path) -> None:
    model = ModelOptions(str(drafter_folder), cache_mib=1)
    good, other, broken = (tmp_path / name for name in ("good", "other", "broken"))
    save_affinity(SPREADING, good)
    save_affinity(replace(SPREADING, drafter="another"), other)
    broken.write_text("no affinity")
    for path, complaint in (
        (tmp_path / "nowhere", "nowhere cannot be read: No such file"),
        (broken, "broken is damaged or not an affinity file"),
        (other, "other: this affinity file was made for a drafter with another tokenizer"),
    ):
        with pytest.raises(ValueError, match=complaint):
            await drafter_server(replace(model, affinity=path), AT_ONCE)
    async with await drafter_server(replace(model, affinity=good), AT_ONCE) as it, DrafterClient(it.address) as one:
        assert (await one.describe()).affinity == SPREADING.target

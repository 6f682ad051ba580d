"""Drafts of the target's tokens through an affinity matrix (`rdk`), and audited draws."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from crossdraft.drafter.service import DrafterService, ServeDrafter, drafter_server
from crossdraft.engine.served_model import ModelOptions, RunningModel
from crossdraft.rpc.errors import ProtocolBroken
from crossdraft.rpc.frames import DRAFTER
from crossdraft.rpc.server import Server
from crossdraft.text.affinity import Affinity, Matrix, save_affinity
from crossdraft.text.letters import Letters, Side, from_bytes
from crossdraft.text.pairs import Pair
from crossdraft.text.vocabulary import tokenizer_digest
from crossdraft.types.messages import Draft, Drafted, NoiseKey, OpenDrafter, SamplingOptions, Score
from crossdraft.types.rows import DraftToken, Row, Whose
from crossdraft.verification.noise import KeyedNoise, fault_of_draw
from tests.rpc.sessions import DrafterClient
from tests.services.conftest import AT_ONCE
from tests.text.kinds import kind

PROMPT = from_bytes(b"The quick brown fox")
NOTHING = Letters("")
KEY = NoiseKey(77)
TARGET_JSON = kind("gpt2").json
PAIR = Pair(kind("gpt2").vocabulary(), kind("llama2").vocabulary(Side.DRAFTER))
SPREAD = 5  # target tokens that each shared token's mass goes to


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


async def served(model: RunningModel, affinity: Affinity) -> AsyncIterator[DrafterClient]:
    async with (
        Server(DRAFTER, DrafterService(model, affinity), AT_ONCE) as server,
        DrafterClient(server.address) as client,
    ):
        yield client


@pytest.fixture
async def spreading(drafter_model: RunningModel) -> AsyncIterator[DrafterClient]:
    async for client in served(drafter_model, SPREADING):
        yield client


async def drafted(client: DrafterClient, opening: OpenDrafter, text: Letters = NOTHING, count: int = 6) -> Drafted:
    async with client.session(opening) as session:
        return await session.draft(Draft(1, 0, text, count))


async def test_rows_are_the_drafters_distribution_spread_over_target_tokens(spreading: DrafterClient) -> None:
    whole = (await drafted(spreading, replace(OPEN, row_width=1 << 16), count=1)).draft_tokens[0].row
    own = (await drafted(spreading, replace(OPEN, redistribute="", row_width=1 << 16), count=1)).draft_tokens[0].row
    expected = np.zeros(PAIR.target.size)
    for target, weight in zip(PAIR.to_target_ids(own.ids), own.probabilities, strict=True):
        for step in range(SPREAD):
            expected[(target + step) % PAIR.target.size] += weight * (0.5 if step == 0 else 0.5 / (SPREAD - 1))
    np.testing.assert_allclose(whole.probabilities, expected[whole.ids], atol=1e-6)
    narrow = (await drafted(spreading, OPEN, count=1)).draft_tokens[0].row
    assert (len(narrow.ids), narrow.probabilities.sum(), narrow.tail) == (16, 1.0, 0.0)
    kept = expected[narrow.ids]
    np.testing.assert_allclose(narrow.probabilities, kept / kept.sum(), atol=1e-6)
    assert kept.min() >= np.sort(expected)[-16] - 1e-6


@pytest.mark.parametrize("temperature", [0.0, 0.5])
async def test_the_temperature_comes_after_the_matrix(spreading: DrafterClient, temperature: float) -> None:
    """At temperature 0 the likeliest target token of the spread distribution, whatever the likeliest draft token is."""
    warm = replace(OPEN, row_width=1 << 16)
    spread = (await drafted(spreading, warm, count=1)).draft_tokens[0].row
    cooler = replace(warm, options=SamplingOptions(temperature))
    row = (await drafted(spreading, cooler, count=1)).draft_tokens[0].row
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
    fresh = await drafted(spreading, opening, PAIR.target.letters[first.token], count=1)
    np.testing.assert_array_equal(second.row.ids, fresh.draft_tokens[0].row.ids)
    np.testing.assert_allclose(second.row.probabilities, fresh.draft_tokens[0].row.probabilities, atol=2e-6)


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
    async for client in served(drafter_model, affinity):
        async with client.session(OPEN) as session:
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
    noise = TARGET_NOISE if target else drafter_model.noise
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
    model = ModelOptions(str(drafter_folder), budget=1)
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
            await drafter_server(ServeDrafter(model, AT_ONCE, path))
    async with await drafter_server(ServeDrafter(model, AT_ONCE, good)) as server, DrafterClient(server.address) as one:
        assert (await one.describe()).affinity == SPREADING.target

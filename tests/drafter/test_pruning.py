"""A drafter with a cut head over loopback: it drafts kept ids only, and no output changes."""

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from crossdraft.client import SamplingOptions, Statistics, connect
from crossdraft.drafter.service import DrafterService
from crossdraft.engine.loader import LoadedModel, LoadOptions, Pruning, load_model
from crossdraft.engine.served_model import RunningModel
from crossdraft.rpc.errors import ServiceError
from crossdraft.rpc.frames import DRAFTER
from crossdraft.rpc.server import Server
from crossdraft.text.frequencies import count_frequencies
from crossdraft.text.letters import NOTHING, Letters, Side, from_bytes
from crossdraft.types.messages import Draft, NoiseKey, OpenDrafter, Score
from tests.rpc.sessions import DrafterClient
from tests.services.conftest import AT_ONCE
from tests.text.kinds import kind

KEEP = 60
PROMPT = from_bytes(b"The quick brown fox")
FIRST = Draft(1, 0, Letters(""), 6)
KEY = NoiseKey(77)
WHOLE = 4096  # a row that is not cut short


@pytest.fixture(scope="session")
def frequencies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    some, path = kind("llama2"), tmp_path_factory.mktemp("ranking") / "frequencies"
    text = "The quick brown fox jumps over the lazy dog while def main(argument): return argument + 1\n"
    count_frequencies(some.json, some.tokenization(Side.DRAFTER), [text]).write(path)
    return path


@pytest.fixture
def following_model(drafter_folder: Path, frequencies: Path) -> Iterator[RunningModel]:
    loaded = load_model(LoadOptions(str(drafter_folder), pruning=Pruning(KEEP, frequencies, follow=6)))
    model = RunningModel.of(loaded, Side.DRAFTER, 1)
    yield model
    model.close()


@pytest.fixture
async def following(following_model: RunningModel) -> AsyncIterator[DrafterClient]:
    async with (
        Server(DRAFTER, DrafterService(following_model), AT_ONCE) as server,
        DrafterClient(server.address) as found,
    ):
        yield found


@pytest.fixture(scope="session")
def loaded(drafter_folder: Path, frequencies: Path) -> LoadedModel:
    return load_model(LoadOptions(str(drafter_folder), pruning=Pruning(KEEP, frequencies)))


@pytest.fixture
def pruned_model(loaded: LoadedModel) -> Iterator[RunningModel]:
    model = RunningModel.of(loaded, Side.DRAFTER, 1)
    yield model
    model.close()


@pytest.fixture
async def pruned(pruned_model: RunningModel) -> AsyncIterator[DrafterClient]:
    async with Server(DRAFTER, DrafterService(pruned_model), AT_ONCE) as server, DrafterClient(server.address) as found:
        yield found


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
    rows = []
    for client in (pruned, drafter):
        async with client.session(OpenDrafter(PROMPT, SamplingOptions(), KEY, WHOLE)) as session:
            rows.append((await session.draft(FIRST)).draft_tokens[0].row)
    cut, full = rows
    assert sorted(cut.ids.tolist()) == loaded.kept.tolist()
    expected = full.probabilities_of(cut.ids) / full.probabilities_of(cut.ids).sum()
    np.testing.assert_allclose(cut.probabilities, expected, atol=1e-5)


async def test_columns_that_follow_the_text_have_the_rows_of_its_ids(drafter, following, following_model):
    """The row is the full one over the ids kept and those of prompt and output; columns are given up for newer ids."""
    text, kept = from_bytes("Größe: 123 %, quick".encode()), following_model.kept[:KEEP].copy()
    opening, ids = OpenDrafter(text, SamplingOptions(), KEY, WHOLE), following_model.tokenization.encode_prompt_letters
    newest = [*dict.fromkeys(one for one in reversed(ids(text)) if one not in kept)][:6]
    assert len(newest) == 6 < len({*ids(text)} - {*kept.tolist()})
    for _ in range(2):  # the second time the columns are there already
        rows = []
        for client in (following, drafter):
            async with client.session(opening) as session:
                rows.append((await session.draft(FIRST)).draft_tokens[0].row)
        cut, full = rows
        assert {*cut.ids.tolist()} == {*kept.tolist(), *newest}
        expected = full.probabilities_of(cut.ids) / full.probabilities_of(cut.ids).sum()
        np.testing.assert_allclose(cut.probabilities, expected, atol=1e-5)
    async with following.session(replace(opening, prompt=PROMPT)) as session:
        assert {*(await session.draft(FIRST)).draft_tokens[0].row.ids.tolist()} >= {*ids(PROMPT)}
    async with following.session(replace(opening, allowed=np.array([*kept[:3], *newest]))) as session:
        assert {*(await session.draft(FIRST)).draft_tokens[0].row.ids.tolist()} == {*kept[:3].tolist()}  # they stay


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
    async with pruned.session(OpenDrafter(PROMPT, SamplingOptions(), KEY, 8, allowed)) as session:
        drafted = await session.draft(FIRST)
    for draft_token in drafted.draft_tokens:
        assert set(draft_token.row.ids.tolist()) == set(loaded.kept[[3, 20, 40]].tolist())


async def test_where_no_shared_token_is_kept_it_stands_aside(pruned: DrafterClient, loaded: LoadedModel) -> None:
    gone = np.setdiff1d(np.arange(loaded.description.vocabulary_size), loaded.kept)
    for allowed, reason in ((gone[:5], "none of the shared tokens is kept"), (gone[:0], "share no token")):
        async with pruned.session(OpenDrafter(PROMPT, SamplingOptions(), KEY, 8, allowed)) as session:
            drafted = await session.draft(FIRST)
        assert drafted.draft_tokens == ()
        assert reason in drafted.reason


@pytest.mark.parametrize("cut", ["pruned", "following"])
@pytest.mark.parametrize(("method", "settings"), [("coupled", {"options": SamplingOptions(0)}), ("slem", {"seed": 5})])
async def test_outputs_are_those_of_no_drafter(target, pruned, following, method, settings, cut):
    client = {"pruned": pruned, "following": following}[cut]

    async def ids_of(drafter: str | None, **more: object) -> tuple[list[int], Statistics | None]:
        async with connect(target.address, drafter) as pipeline:
            generation = pipeline.generate("def main(argument):", max_tokens=12, **settings, **more)
            async for _ in generation:
                pass
        return generation.ids, generation.statistics

    # The seed's draws of `slem` are the target's own, with a drafter or without.
    plain, _ = await ids_of(None, **({"method": method} if "seed" in settings else {}))
    drafted, statistics = await ids_of(client.address, method=method, num_speculative_tokens=4, overlap="off")
    assert drafted == plain
    assert (statistics.drafter_lost, statistics.stood_aside) == ("", 0)
    assert statistics.draft_tokens >= 4


async def test_scores_are_of_kept_ids_only(pruned: DrafterClient, pruned_model: RunningModel) -> None:
    vocabulary = pruned_model.tokenization.vocabulary
    letters = sorted({letter for text in vocabulary.letters for letter in text})
    kept = {vocabulary.letters[token][0] for token in pruned_model.kept}
    async with pruned.session(OpenDrafter(PROMPT, SamplingOptions(), None, 0)) as session:
        await session.draft(FIRST)
        scored = await session.score(Score(1, 0, tuple(map(Letters, letters)), 6))
    assert abs(scored.probabilities.sum() - 1) < 1e-6
    assert {letter for letter, score in zip(letters, scored.probabilities, strict=True) if score} == kept

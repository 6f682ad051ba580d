"""The made-up language of benchmarks without models, and its drafter."""

import asyncio

import numpy as np
import pytest

from crossdraft.bench.made_up import DrafterSession, Guesser, Language, World, tokenization
from crossdraft.drafter.drafting import Epoch
from crossdraft.text.letters import NOTHING, Letters, Side
from crossdraft.text.pairs import Pair
from crossdraft.types.messages import Draft, Drafted, NoiseKey
from crossdraft.types.rows import DraftToken, Whose
from crossdraft.verification.chooser import RandomChooser
from crossdraft.verification.methods import method_named

SIZE = 3000


@pytest.fixture(scope="module")
def vocabularies() -> Pair:
    target, drafter = (tokenization(SIZE, side).vocabulary for side in Side)
    return Pair(target, drafter)


def test_made_up_tokenizers_write_their_own_tokens_and_share_some(vocabularies: Pair) -> None:
    tokens = tokenization(SIZE, Side.TARGET)
    text = Letters(" the tea is hot ")
    assert tokens.letters_of(tokens.encode_continuation(text)) == text
    assert vocabularies.target.size == vocabularies.drafter.size == len(set(vocabularies.target.letters)) == SIZE
    assert 0.5 < len(vocabularies.shared_drafter_ids) / SIZE < 0.95


def test_both_models_expect_the_same_text(vocabularies: Pair) -> None:
    language = Language(vocabularies, 0.5)
    text = Letters("once upon")
    expected = language.expected(text, 12)
    assert language.expected(Letters(text + expected[:5]), 7) == expected[5:]
    likely = language.target_row(text, 4, vocabularies.shared_drafter_ids[:0])
    assert expected.startswith(vocabularies.target.letters[likely.ids[0]])
    assert 0 < likely.tail < 1
    assert language.drafter_row(text, 4, shared=True, redistributed=False).whole


@pytest.mark.parametrize("name", ["coupled", "slem"])
async def test_a_branch_of_a_made_up_drafter_is_adopted(name: str) -> None:
    """Where rows are sent its draft tokens come again, else what follows them."""
    world = World.of(method_named(name), 2000, 0.0)
    guesser = Guesser(
        world.language, world.noises, world.method, 16, NoiseKey(0), RandomChooser(np.random.default_rng(0))
    )
    session = DrafterSession(guesser, 0.0)
    sent: list[Drafted] = []
    first = Epoch(Draft(1, 0, NOTHING, 4, chunk=1, branch_depth=2))
    session.begin(first)
    await asyncio.wait_for(session.draft(first, sent.append), 30)
    assert [len(one.draft_tokens) for one in sent] == [1, 1, 1, 1]
    branch = next(branch for one in sent for branch in one.branches)
    assert len(branch.tokens) == 2
    sent.clear()
    drafted = guesser.letters_of(DraftToken(branch.tokens[0], None, Whose.DRAFTER))
    second = Epoch(Draft(2, branch.offset, branch.letters, 3, adopt=branch.number))
    session.begin(second)
    await asyncio.wait_for(session.draft(second, sent.append), 30)
    draft_tokens = [draft_token.token for one in sent for draft_token in one.draft_tokens]
    if world.method.drafter_rows:
        assert (sent[0].first, draft_tokens[:2]) == (0, list(branch.tokens))
    else:
        assert (sent[0].first, len(draft_tokens)) == (2, 1)
    assert session.text.startswith(Letters(branch.letters + drafted), branch.offset)

"""Scores: against the enumeration of all tokenizings and of all drafts, against real drafts, and beside drafting."""

import tracemalloc
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from crossdraft.drafter import scoring
from crossdraft.drafter.scoring import Node, PrefixSums, SortedDistribution
from crossdraft.engine.sampling.distributions import Columns
from crossdraft.engine.served_model import RunningModel
from crossdraft.text.letters import NOTHING, Letters, from_bytes
from crossdraft.types.messages import Draft, NoiseKey, OpenDrafter, SamplingOptions, Score
from tests.engine.tiny import drafting_distributions
from tests.rpc.sessions import DrafterClient
from tests.tables import pseudo_distribution, toy_vocabulary

VOCABULARIES = {
    "nested": ("a", "b", "ab", "aba", "ba"),
    "letters": ("a", "b", "c"),
    "duplicates": ("a", "ab", "a", "b", "ab"),
    "with a control symbol": ("a", "\ue000", "ab", "b\ue000"),
    "one token": ("ab",),
}
ALPHABET = "abc\ue000"
PROMPT = from_bytes(b"The quick brown fox")
WARM = SamplingOptions(temperature=0.8, top_p=0.97)
FEW = ("t", "th", "the", "h", "he", "e", " ", " t")  # tokens that write each other's beginnings
TOKENS = 3


def sparse_distribution(path: tuple[int, ...], size: int) -> np.ndarray:
    """A distribution in which some tokens are impossible."""
    distribution = pseudo_distribution("prefixes", path, size).copy()
    distribution[np.flatnonzero(distribution < 0.5 / size)] = 0.0
    return distribution / distribution.sum()


def scored(vocabulary, strings, tokens):
    trie = vocabulary.trie
    sums = PrefixSums(strings, trie)
    level = [Node()]
    for left in range(tokens - 1, -1, -1):
        deeper = []
        for node in level:
            distribution = sparse_distribution(node.path, vocabulary.size)
            ids = np.flatnonzero(distribution)[::-1]
            deeper += sums.add(node, SortedDistribution.of(ids, distribution[ids], trie), left == 0)
        level = deeper
    assert not level
    return sums.probabilities


def enumerated(vocabulary, tokens):
    """Every text of `tokens` tokens with its probability."""
    texts = []
    for path in product(range(vocabulary.size), repeat=tokens):
        distributions = (sparse_distribution(path[:place], vocabulary.size)[token] for place, token in enumerate(path))
        texts.append((vocabulary.letters_of(path), float(np.prod(list(distributions)))))
    return texts


@given(
    name=st.sampled_from(sorted(VOCABULARIES)),
    tokens=st.integers(1, 4),
    strings=st.lists(st.text(ALPHABET, min_size=1, max_size=6).map(Letters), min_size=1, max_size=12),
)
def test_a_score_is_the_sum_over_all_texts_that_begin_so(name, tokens, strings):
    vocabulary = toy_vocabulary(VOCABULARIES[name])
    texts = enumerated(vocabulary, tokens)
    expected = [sum(weight for text, weight in texts if text.startswith(string)) for string in strings]
    np.testing.assert_allclose(scored(vocabulary, tuple(strings), tokens), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", sorted(VOCABULARIES))
def test_what_cannot_be_drafted_has_a_score_of_exactly_zero(name):
    vocabulary = toy_vocabulary(VOCABULARIES[name])
    assert scored(vocabulary, (Letters("x"), Letters("ax"), Letters("abx"), Letters("a" * 13)), 3).tolist() == [0.0] * 4


@pytest.fixture
def few(drafter_model: RunningModel) -> np.ndarray:
    ids = [token for text in FEW for token in drafter_model.tokenization.vocabulary.ids_of(Letters(text))]
    assert len(ids) >= len(FEW)  # bytes of the byte fallback repeat some letters
    return np.array(sorted(ids))


def enumerated_drafts(
    model: RunningModel, opening: OpenDrafter, head: tuple[int, ...], tokens: int
) -> list[tuple[Letters, float]]:
    """The text and the probability of every draft, from forwards of the bare model."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(tokens):
        with torch.inference_mode():
            ids = torch.tensor([[*head, *path] for path in found])
            logits = model.thread.engine.model(ids).logits[:, -1].float()
        allowed = None if opening.allowed is None else Columns.of(opening.allowed, logits.device)
        distributions = drafting_distributions(logits, opening.options, opening.row_width, allowed)
        found = {
            (*path, int(token)): weight * float(probability)
            for (path, weight), distribution in zip(found.items(), distributions, strict=True)
            for token, probability in zip(*distribution, strict=True)
        }
    return [(model.tokenization.letters_of(path), weight) for path, weight in found.items()]


def strings_up_to(length: int, alphabet: str = "the ") -> tuple[Letters, ...]:
    return tuple(Letters("".join(parts)) for size in range(1, length + 1) for parts in product(alphabet, repeat=size))


@pytest.mark.parametrize(
    ("row_width", "options"), [(0, SamplingOptions()), (4, WARM), (5, SamplingOptions(temperature=0))]
)
async def test_scores_are_sums_over_all_drafts(drafter, drafter_model, few, row_width, options):
    opening = OpenDrafter(PROMPT, options, None, row_width, few)
    head = drafter_model.tokenization.encode_prompt_letters(PROMPT)
    texts = enumerated_drafts(drafter_model, opening, head, TOKENS)
    strings = strings_up_to(4)
    async with drafter.session(opening) as session:
        await session.draft(Draft(1, 0, NOTHING, TOKENS))
        scored = await session.score(Score(1, 0, strings, TOKENS))
        shorter = await session.score(Score(1, 0, strings, TOKENS - 1))
    expected = [sum(weight for text, weight in texts if text.startswith(string)) for string in strings]
    np.testing.assert_allclose(scored.probabilities, expected, atol=2e-5)
    assert (shorter.probabilities <= scored.probabilities + 1e-9).all()
    assert (shorter.probabilities < scored.probabilities - 1e-3).any() or options.temperature == 0
    assert (scored.seconds > 0) == (options.temperature > 0)  # the one draft's own distributions are known already


@pytest.mark.parametrize("room", [20, TOKENS - 1])
async def test_however_small_the_trees_are_the_scores_are_the_same(drafter, few, monkeypatch, room):
    words = Letters(" dog the" * 3)
    opening = OpenDrafter(words, SamplingOptions(), None, 5, few)
    strings = strings_up_to(4)
    async with drafter.session(opening) as session:
        await session.draft(Draft(1, 0, NOTHING, TOKENS))
        expected = await session.score(Score(1, 0, strings, TOKENS))
    for name, value in (("STEP", 7), ("TREE_NODES", room), ("MOST_KEPT", 20), ("MOST_DRAWN", 0)):
        monkeypatch.setattr(scoring, name, value)
    async with drafter.session(opening) as session:
        await session.draft(Draft(1, 0, NOTHING, TOKENS))
        for _ in range(2):
            scored = await session.score(Score(1, 0, strings, TOKENS))
            np.testing.assert_allclose(scored.probabilities, expected.probabilities, atol=2e-6)


async def test_where_the_text_fills_the_context_there_is_room_for_scores_all_the_same(drafter, drafter_model, few):
    context = drafter_model.description.context
    prompt = Letters("\x01" * (context - TOKENS))  # a token each, and the begin symbol
    assert len(drafter_model.tokenization.encode_prompt_letters(prompt)) > context - TOKENS
    async with drafter.session(OpenDrafter(prompt, SamplingOptions(), None, 5, few)) as session:
        assert len((await session.draft(Draft(1, 0, NOTHING, TOKENS))).draft_tokens) == TOKENS
        scored = await session.score(Score(1, 0, strings_up_to(3), TOKENS))
    assert abs(scored.probabilities[:4].sum() - 1) < 1e-6


async def test_what_was_scored_is_not_evaluated_again(drafter: DrafterClient, drafter_model: RunningModel) -> None:
    asked = Score(1, 0, (Letters(" the"), Letters("abc")), TOKENS)
    async with drafter.session(OpenDrafter(PROMPT, WARM, None, 100)) as session:
        await session.draft(Draft(1, 0, NOTHING, TOKENS))
        first = await session.score(asked)
        fed = drafter_model.thread.engine.computed
        second = await session.score(asked)
        assert drafter_model.thread.engine.computed == fed
        assert (await session.score(Score(1, 0, (), TOKENS))).probabilities.shape == (0,)
    np.testing.assert_array_equal(first.probabilities, second.probabilities)


async def test_drafting_goes_on_after_a_score_as_without_one(drafter: DrafterClient, few: np.ndarray) -> None:
    opening = OpenDrafter(PROMPT, WARM, NoiseKey(5), 6, few)
    steps = [Draft(1, 0, NOTHING, 4), Draft(2, 1, Letters("he t"), 4), Draft(3, 4, NOTHING, 4)]
    async with drafter.session(opening) as plain, drafter.session(opening) as scoring_too:
        for step in steps:
            expected = await plain.draft(step)
            got = await scoring_too.draft(step)
            for one, other in zip(got.draft_tokens, expected.draft_tokens, strict=True):
                assert one.token == other.token
                np.testing.assert_allclose(one.row.probabilities, other.row.probabilities, atol=2e-6)
            offset = step.offset + len(step.letters)
            await scoring_too.score(Score(step.epoch, offset, strings_up_to(3), 4))


def test_a_long_string_takes_little_more_memory_than_its_letters() -> None:
    trie = toy_vocabulary(("a", "b")).trie
    tracemalloc.start()
    try:
        PrefixSums([Letters("a" * 65_536)], trie)
        assert tracemalloc.get_traced_memory()[1] < 2**24  # bytes; all its beginnings would be 2**32
    finally:
        tracemalloc.stop()

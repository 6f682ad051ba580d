"""Probabilities of a text's beginnings, against the enumeration of all its tokenizings."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossdraft.drafter.scoring import Node, PrefixSums, SortedDistribution, VocabularyIndex
from crossdraft.text.letters import Letters
from tests.tables import pseudo_distribution
from tests.vocabularies import toy_vocabulary

VOCABULARIES = {
    "nested": ("a", "b", "ab", "aba", "ba"),
    "letters": ("a", "b", "c"),
    "duplicates": ("a", "ab", "a", "b", "ab"),
    "with a control symbol": ("a", "\ue000", "ab", "b\ue000"),
    "one token": ("ab",),
}
ALPHABET = "abc\ue000"


def sparse_distribution(path: tuple[int, ...], size: int) -> np.ndarray:
    """A distribution in which some tokens are impossible."""
    distribution = pseudo_distribution("prefixes", path, size).copy()
    distribution[np.flatnonzero(distribution < 0.5 / size)] = 0.0
    return distribution / distribution.sum()


def scored(vocabulary, strings, tokens):
    index = VocabularyIndex(vocabulary)
    sums = PrefixSums(strings, index)
    level = [Node()]
    for left in range(tokens - 1, -1, -1):
        deeper = []
        for node in level:
            distribution = sparse_distribution(node.path, vocabulary.size)
            ids = np.flatnonzero(distribution)[::-1]
            deeper += sums.add(node, SortedDistribution.of(ids, distribution[ids], index), left == 0)
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


def test_strings_that_are_prefixes_of_one_another_and_repeat_are_told_apart():
    vocabulary = toy_vocabulary(("a", "b", "ab", "abb"))
    strings = tuple(map(Letters, ("abb", "a", "ab", "a", "abba", "b", "abb")))
    one_by_one = [scored(vocabulary, (string,), 4)[0] for string in strings]
    np.testing.assert_allclose(scored(vocabulary, strings, 4), one_by_one, rtol=0, atol=1e-15)

"""Made-up tokenizers and models of real size, for measurements without a model.

Tokens are strings of letters made by merges, as byte-level BPE makes them. Both models expect one continuation of any
text, a fixed function of its last letters and of how long it is, and give most of their probability to its tokens.
"""

import json
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from zlib import crc32

import numpy as np
from tokenizers import pre_tokenizers

from crossdraft.text.letters import Letters, Side
from crossdraft.text.pairing import Pair
from crossdraft.text.tokenization import Tokenization
from crossdraft.text.vocabulary import Vocabulary
from crossdraft.verification.rows import Ids, Probabilities, Row

SHARED_MERGES = 0.6  # of a vocabulary: the first merges of both are the same
LONGEST = 14  # letters of a token
EXPECTED = 0.8  # the probability of the tokens that the expected text begins with
DISAGREEMENT = 1.5  # gives an acceptance of 0.5 to 0.7
OTHERS = 1200  # other tokens that a law gives some probability
LETTERS = " etaoinshrdlucmfwypvbgkqjxz"
_CUMULATIVE = list(accumulate((6.0, *(1 / (place + 2) for place in range(26)))))
_SPACE = "Ġ"  # how byte-level BPE writes a space


def tokenizer_json(size: int, seed: int) -> str:
    """A byte-level BPE tokenizer with `size` ids; two seeds have the merges up to SHARED_MERGES in common."""
    vocabulary = {letter: place for place, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = []
    for left, right in _merges(size, seed):
        if len(vocabulary) == size:
            break
        if left + right not in vocabulary:
            vocabulary[left + right] = len(vocabulary)
            merges.append([left, right])
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    whole: dict[str, object] = {
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
    }
    whole |= {"decoder": byte_level, "model": {"type": "BPE", "vocab": vocabulary, "merges": merges}}
    return json.dumps(whole)


def _merges(size: int, seed: int) -> Iterator[tuple[str, str]]:
    """Pairs of pieces that exist already, the older ones more often; each new piece also after a space."""
    rng = np.random.default_rng(0)
    pieces, known = list(LETTERS[1:]), set(LETTERS[1:])
    common = True
    while True:
        if common and len(pieces) > SHARED_MERGES * size / 2:
            rng, common = np.random.default_rng(seed), False
        for first, second in rng.random((100, 2)).tolist():
            left, right = pieces[int(first**4 * len(pieces))], pieces[int(second**4 * len(pieces))]
            if len(left + right) < LONGEST and left + right not in known:
                pieces.append(left + right)
                known.add(left + right)
                yield left, right
                yield _SPACE, left + right


def tokenization(size: int, side: Side) -> Tokenization:
    """A made-up tokenizer with its letters; those of the two sides have some tokens in common."""
    text = tokenizer_json(size, seed=side.value)
    return Tokenization(text, Vocabulary.build(text, size, (), (), side))


@dataclass(frozen=True, eq=False)
class Language:
    """What both models expect, and how far they agree about the rest."""

    pair: Pair
    disagreement: float  # standard deviation of the logarithm of a drafter's probability about the target's

    def expected(self, text: Letters, count: int) -> Letters:
        """The next `count` letters."""
        last, length = text[-2:], len(text)
        for offset in range(length, length + count):
            chance = crc32(f"{last[-2:]}/{offset}".encode()) / 2**32
            last += LETTERS[bisect_right(_CUMULATIVE, chance * _CUMULATIVE[-1])]
        return Letters(last[min(2, length) :])

    def target_row(self, text: Letters, width: int, listed: Ids) -> Row:
        """The target's row after `text`: its most probable ids, those listed, and the rest as tail."""
        law = self._law(text, self.pair.target, drafted=False)
        return _cut(law, width, listed)

    def drafter_row(self, text: Letters, width: int, *, shared: bool, redistributed: bool) -> Row:
        """A row that the drafter draws from: whole, over its own ids, those of T∩D, or target ids."""
        vocabulary = self.pair.target if redistributed else self.pair.drafter
        ids, weights = self._law(text, vocabulary, drafted=True)
        if shared and not redistributed:
            known = self.pair.to_target_ids(ids) >= 0
            ids, weights = ids[known], weights[known]
        return Row.of(ids[:width], weights[:width])

    def _law(self, text: Letters, vocabulary: Vocabulary, *, drafted: bool) -> tuple[Ids, Probabilities]:
        """Ids by falling probability."""
        begins = self.expected(text, LONGEST)
        prefixes = [known[0] for end in range(LONGEST, 0, -1) if (known := vocabulary.ids_of(Letters(begins[:end])))]
        seed = crc32(f"{text[-8:]}/{len(text)}".encode())
        rng = np.random.default_rng((seed, drafted))
        shared = np.random.default_rng(seed).integers(len(self.pair.shared_drafter_ids), size=OTHERS)
        ids = self.pair.shared_drafter_ids[shared]
        ids = ids if vocabulary is self.pair.drafter else self.pair.to_target_ids(ids)
        ids[2::3] = rng.integers(vocabulary.size, size=len(ids[2::3]))  # a third of its own
        weights = np.append(0.35 ** np.arange(len(prefixes)), 1.0 / np.arange(4, 4 + OTHERS))
        weights[: len(prefixes)] *= EXPECTED / weights[: len(prefixes)].sum()
        weights[len(prefixes) :] *= (1 - EXPECTED) / weights[len(prefixes) :].sum()
        weights *= np.exp(self.disagreement * rng.standard_normal(len(weights))) if drafted else 1.0
        ids, first = np.unique(np.append(prefixes, ids).astype(np.int64), return_index=True)
        weights = weights[first] / weights[first].sum()
        order = np.argsort(-weights, kind="stable")
        return ids[order], weights[order]


def _cut(law: tuple[Ids, Probabilities], width: int, listed: Ids) -> Row:
    """The head, the listed ids that are not in it, and the tail."""
    whole = Row(*law)
    ids = np.concatenate([law[0][:width], np.setdiff1d(listed, law[0][:width])])
    probabilities = whole.probabilities_of(ids)
    return Row(ids, probabilities, 0.0 if width >= len(whole.ids) else max(0.0, 1.0 - float(probabilities.sum())))

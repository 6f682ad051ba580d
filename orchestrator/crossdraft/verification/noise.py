"""Keyed noise: what `seeded` draws with instead of a random generator.

The noise of a token is a pure function of (seed, choice, letter offset, letters, rank among the ids with the same
letters). Two vocabularies that share a string of letters therefore share its noise, and a repeated draw repeats.
"""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from crossdraft.text.letters import Letters
from crossdraft.verification.exchange import NoiseKey
from crossdraft.verification.rows import Ids, Probabilities

Words = NDArray[np.uint64]

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: steps of splitmix64 (Steele, Lea and Flood 2014)
FIRST, SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # its multipliers


class Tokens(Protocol):
    """What noise depends on: a `Vocabulary`, or as much of it as an `Affinity` has."""

    @property
    def letters(self) -> Sequence[Letters]:
        """Of each id."""

    def rank(self, token: int, /) -> int:
        """The place of an id among those with the same letters."""


class KeyedNoise:
    """The noise of one vocabulary: one hash of each id's letters and rank, mixed with the key when it is asked for."""

    def __init__(self, letters: Sequence[Letters], ranks: Sequence[int]) -> None:
        """`letters[i]` and `ranks[i]` are those of id i; the rank tells ids with the same letters apart.

        Raises:
            ValueError: the two differ in length.
        """
        if len(letters) != len(ranks):
            raise ValueError(f"{len(letters)} strings of letters but {len(ranks)} ranks")
        digests = b"".join(_digest(string, rank) for string, rank in zip(letters, ranks, strict=True))
        self._hashes: Words = np.frombuffer(digests, dtype="<u8").astype(np.uint64)

    @classmethod
    def of(cls, tokens: Tokens) -> Self:
        """That of all ids of a vocabulary; a tenth of a second for 128,000."""
        return cls(tokens.letters, [tokens.rank(token) for token in range(len(tokens.letters))])

    def __len__(self) -> int:
        return len(self._hashes)

    def exponentials(self, key: NoiseKey, offset: int, ids: Ids | None = None) -> Probabilities:
        """Exponential variates of mean 1, independent for each letters, rank and offset.

        Args:
            key: seed and choice.
            offset: letters since the start of the output.
            ids: the ids that are wanted, shape (n,); None: all.

        Returns:
            float64, shape (n,) or (V,); above 0 and at most 54 ln 2.
        """
        hashes = self._hashes if ids is None else self._hashes[ids]
        state = _state(key, offset)
        words = _mixed(_mixed(hashes + np.uint64(state)) ^ np.uint64(_mix(state ^ GOLDEN)))
        uniform = ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
        exponentials: Probabilities = -np.log(uniform)
        return exponentials

    def draw(self, ids: Ids, probabilities: Probabilities, key: NoiseKey, offset: int) -> int:
        """One of `ids`, each with its probability: the first to arrive in a race of exponential clocks (Gumbel-max).

        Args:
            ids: shape (n,), distinct.
            probabilities: shape (n,), not negative, any sum; an id of probability 0 is never drawn.
            key: seed and choice.
            offset: letters since the start of the output.

        Raises:
            ValueError: no probability is above 0.
        """
        possible = np.flatnonzero(probabilities > 0)
        if not len(possible):
            raise ValueError("no id has a probability above 0")
        arrivals = self.exponentials(key, offset, ids[possible]) / probabilities[possible]
        return int(ids[possible[np.argmin(arrivals)]])


def _digest(letters: Letters, rank: int) -> bytes:
    """Eight bytes for a token. The rank comes first, at a fixed length, so that no two tokens hash the same text."""
    return blake2b(rank.to_bytes(4, "little") + letters.encode(), digest_size=8).digest()


def _state(key: NoiseKey, offset: int) -> int:
    """Seed, choice and offset as one well mixed word; each is mixed in before the next is added."""
    state = 0
    for part in (key.seed, key.choice, offset):
        state = _mix((state + GOLDEN + part) & MASK)
    return state


def _mix(word: int) -> int:
    """The finalizer of splitmix64: a bijection of 64 bits."""
    word = ((word ^ (word >> 30)) * FIRST) & MASK
    word = ((word ^ (word >> 27)) * SECOND) & MASK
    return word ^ (word >> 31)


def _mixed(words: Words) -> Words:
    """The same for an array."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(FIRST)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(SECOND)
    return words ^ (words >> np.uint64(31))

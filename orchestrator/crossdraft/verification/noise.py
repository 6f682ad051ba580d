"""Keyed noise: what `seeded` draws with instead of a random generator.

The noise of a token is a pure function of (seed, choice, letter offset, letters, rank among the ids with the same
letters). Two vocabularies that share a string of letters therefore share its noise, and a repeated draw repeats.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from crossdraft.text.letters import Letters
from crossdraft.text.pairs import Pair
from crossdraft.types.messages import Drafted, NoiseKey
from crossdraft.types.rows import DraftToken, Ids, Probabilities, Whose
from crossdraft.verification.walk import draft_token_letters

Words = NDArray[np.int64]  # 64 bits each: the sign is one of them
MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: steps of splitmix64 (Steele, Lea and Flood 2014)
FIRST, SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # its multipliers

W = TypeVar("W")  # an array of int64 whose arithmetic wraps: numpy's, or a tensor of torch's


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
        self.hashes: Words = np.frombuffer(digests, dtype="<i8").astype(np.int64)  # of each id

    @classmethod
    def of(cls, tokens: Tokens) -> Self:
        """That of all ids of a vocabulary; a tenth of a second for 128,000."""
        return cls(tokens.letters, [tokens.rank(token) for token in range(len(tokens.letters))])

    def __len__(self) -> int:
        return len(self.hashes)

    def exponentials(self, key: NoiseKey, offset: int, ids: Ids | None = None) -> Probabilities:
        """Exponential variates of mean 1, independent for each letters, rank and offset.

        Args:
            key: seed and choice.
            offset: letters since the start of the output.
            ids: the ids that are wanted, shape (n,); None: all.

        Returns:
            float64, shape (n,) or (V,); above 0 and at most 54 ln 2.
        """
        hashes = self.hashes if ids is None else self.hashes[ids]
        uniform = (uniform_words(hashes, *moment(key, offset)).astype(np.float64) + 0.5) * 2.0**-53
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


def moment(key: NoiseKey, offset: int) -> tuple[int, int]:
    """Seed, choice and offset as the two words that hashes are mixed with; signed, 64 bits."""
    state = 0
    for part in (key.seed, key.choice, offset):  # each is mixed in before the next is added
        state = _mix((state + GOLDEN + part) & MASK)
    return _signed(state), _signed(_mix(state ^ GOLDEN))


def uniform_words(hashes: W, first: Any, second: Any) -> W:
    """Words of 53 bits, independent for each hash and each moment.

    Args:
        hashes: int64, any shape.
        first: with `second` the two words of a moment, or int64 of a shape that goes with that of `hashes`.
        second: alike.

    Returns:
        int64, 0 to 2^53 - 1; of the kind that `hashes` is: whoever draws on another device draws with the same words.
    """
    words: Any = hashes
    words = words + first
    _mix_all(words)
    words ^= second
    _mix_all(words)
    uniform: W = _shifted(words, 11)
    return uniform


def _digest(letters: Letters, rank: int) -> bytes:
    """Eight bytes for a token. The rank comes first, at a fixed length, so that no two tokens hash the same text."""
    return blake2b(rank.to_bytes(4, "little") + letters.encode(), digest_size=8).digest()


def _mix(word: int) -> int:
    """The finalizer of splitmix64: a bijection of 64 bits."""
    word = ((word ^ (word >> 30)) * FIRST) & MASK
    word = ((word ^ (word >> 27)) * SECOND) & MASK
    return word ^ (word >> 31)


def _mix_all(words: Any) -> None:
    """The same for an array, in its place: memory that is asked for anew costs more than the arithmetic."""
    words ^= _shifted(words, 30)
    words *= _signed(FIRST)
    words ^= _shifted(words, 27)
    words *= _signed(SECOND)
    words ^= _shifted(words, 31)


def _shifted(words: Any, places: int) -> Any:
    """To the right, with zeros for the sign."""
    shifted = words >> places
    shifted &= MASK >> places
    return shifted


def _signed(word: int) -> int:
    """The same 64 bits as a signed number."""
    return word - (1 << 64) if word >> 63 else word


# Audits: a drafter's draw with keyed noise, made again from the row that it says it drew from.


def fault_of_draw(draft_token: DraftToken, noise: KeyedNoise, key: NoiseKey, offset: int) -> str:
    """Why a draft token cannot have been drawn from its row, as a text; empty if it was.

    Rows travel as multiples of 2^-24, which float32 holds, so that the draw repeats bit by bit.

    Args:
        draft token: as it arrived; its ids must be in the vocabulary.
        noise: of the vocabulary whose ids it uses.
        key: what its draw is keyed by; in an audited session the choice is the epoch's number.
        offset: letters since the start of the output, up to where the draft token begins.
    """
    row = draft_token.row
    if row is None:
        return f"id {draft_token.token} at letter {offset} came without the row that it was drawn from"
    if not (row.probabilities > 0).any():
        return f"the row of id {draft_token.token} at letter {offset} gives no id"
    drawn = noise.draw(row.ids, row.probabilities, key, offset)
    if drawn == draft_token.token:
        return ""
    return f"id {draft_token.token} at letter {offset} was not drawn from its row, which gives id {drawn} there"


# Audits: every draw of a drafter is recomputed from the row that came with it.
#
# A drafter whose row is not the distribution that it drew from makes the output inexact, and nothing in the text shows
# it. With keyed noise a draw is a function of its row, so one wrong draw proves the fault. It finds mistakes, not
# malice: the drafter knows the noise.


@dataclass(frozen=True, eq=False)
class Audit:
    """What the drafter's draws are recomputed with."""

    key: NoiseKey
    each_epoch: bool  # the epoch's number takes the place of the key's choice: a new draft at the same place is new
    drafter: KeyedNoise  # of the drafter's ids
    target: KeyedNoise  # of the target's ids, for draft tokens that use them

    def fault_of(self, drafted: Drafted, offset: int, pair: Pair) -> str:
        """Which draw of a draft that begins at `offset` letters of output is not its row's; empty if none."""
        key = NoiseKey(self.key.seed, drafted.epoch) if self.each_epoch else self.key
        for draft_token in drafted.draft_tokens:
            noise = self.target if draft_token.whose is Whose.TARGET else self.drafter
            fault = fault_of_draw(draft_token, noise, key, offset)
            if fault:
                return fault
            offset += len(draft_token_letters(pair, draft_token))
        return ""

"""Keyed noise, which `seeded` draws with instead of a random generator, and audits of draws that were made with it.

The noise of a token is a pure function of (seed, choice, letter offset, letters, rank among the ids with the same
letters). Two vocabularies that share a string of letters therefore share its noise, and a repeated draw is the same: on
every host and device, since hashes are integers, and the logarithm is basic operations of float64 in a fixed order.
"""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from crossdraft.text.letters import Letters
from crossdraft.types.rows import DraftToken, Ids, NoiseKey, Probabilities

Words = NDArray[np.int64]  # 64 bits each: the sign is one of them
Unsigned = NDArray[np.uint64]  # the same bits
MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: steps of splitmix64 (Steele, Lea and Flood 2014)
FIRST, SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # its multipliers
ROOT_HALF = 0x3FE6A09E00000000  # the bits of a float64 just below the root of 1/2
LN2, LN2_REST = (6.93147180369123816490e-01, 1.90821492927058770002e-10)  # multiples of the first are exact
# Of log(1 + f) by s = f / (2 + f), in even powers of s (fdlibm's e_log.c), the last first.
ODD = 1.479819860511658591e-01, 1.818357216161805012e-01, 2.857142874366239149e-01, 6.666666666666735130e-01
EVEN = 1.531383769920937332e-01, 2.222219843214978396e-01, 3.999999999940941908e-01

W = TypeVar("W")  # an int64 array of numpy, or a tensor of torch: integer arithmetic wraps


class Tokens(Protocol):
    """The letters and ranks that noise depends on: a `Vocabulary` or an `Affinity`."""

    @property
    def letters(self) -> Sequence[Letters]:
        """The letters of each id."""

    def rank(self, token: int, /) -> int:
        """The index of an id among those with the same letters."""


class KeyedNoise:
    """The noise of one vocabulary: a hash of each id's letters and rank, mixed with key and offset at each draw."""

    def __init__(self, letters: Sequence[Letters], ranks: Sequence[int]) -> None:
        """`letters[i]` and `ranks[i]` are those of id i; the rank tells ids with the same letters apart.

        Raises ValueError: the two differ in length.
        """
        if len(letters) != len(ranks):
            raise ValueError(f"{len(letters)} strings of letters but {len(ranks)} ranks")
        # 8 bytes of each token. The rank comes first, with a fixed length: no two tokens hash the same bytes.
        hashed = (rank.to_bytes(4, "little") + string.encode() for string, rank in zip(letters, ranks, strict=True))
        digests = b"".join(blake2b(token, digest_size=8).digest() for token in hashed)
        self.hashes: Words = np.frombuffer(digests, dtype="<i8").astype(np.int64)  # of each id

    @classmethod
    def of(cls, tokens: Tokens) -> Self:
        """Of all ids of a vocabulary; takes a tenth of a second for 128,000."""
        return cls(tokens.letters, [tokens.rank(token) for token in range(len(tokens.letters))])

    def __len__(self) -> int:
        return len(self.hashes)

    def exponentials(self, key: NoiseKey, offset: int, ids: Ids | None = None) -> Probabilities:
        """Exponential variates of mean 1, independent for each letters, rank and offset.

        `key`: seed and choice. `offset`: letters since the start of the output. `ids`: shape (n,); None: all. Returns
        float64, shape (n,) or (V,); above 0 and at most 54 ln 2.
        """
        hashes = self.hashes if ids is None else self.hashes[ids]
        words = uniform_words(hashes, *moment(key, offset))
        found: Probabilities = exponentials_of(words, words.astype(np.float64))
        return found

    def draw(self, ids: Ids, probabilities: Probabilities, key: NoiseKey, offset: int) -> int:
        """Draws one of `ids` by probability: the smallest of exponential variates with these rates (Gumbel-max), the
        lower id where two are equal.

        Args:
            ids: shape (n,), distinct.
            probabilities: shape (n,), not negative, of any sum; an id of probability 0 is never drawn.
            key: seed and choice.
            offset: letters since the start of the output.

        Raises:
            ValueError: no probability is above 0.
        """
        possible = np.flatnonzero(probabilities > 0)
        if not len(possible):
            raise ValueError("no id has a probability above 0")
        arrivals = self.exponentials(key, offset, ids[possible]) / probabilities[possible]
        return int(ids[possible[arrivals == arrivals.min()]].min())


def moment(key: NoiseKey, offset: int) -> tuple[int, int]:
    """Key and offset hashed into the two signed 64-bit words that `uniform_words` mixes with the tokens' hashes."""
    state = 0
    for part in (key.seed, key.choice, offset):  # each is mixed in before the next is added
        state = _mix((state + GOLDEN + part) & MASK)
    return _signed(state), _signed(_mix(state ^ GOLDEN))


def beginnings(keys: Sequence[NoiseKey]) -> Words:
    """What is the same at all offsets of each key, for `moments`; int64 (n,)."""
    parts = np.array([(key.seed, key.choice) for key in keys], dtype=np.uint64).reshape(-1, 2)
    state = np.zeros(len(keys), dtype=np.int64)
    for part in parts.view(np.int64).T:
        state += part + _signed(GOLDEN)
        _mix_all(state)
    return state


def moments(beginnings: W, offsets: W) -> tuple[W, W]:
    """`moment` of several keys and offsets at once, int64 (n,) each; the same from numpy and torch."""
    first: Any = beginnings
    first = first + offsets
    first += _signed(GOLDEN)
    _mix_all(first)
    second = first ^ _signed(GOLDEN)
    _mix_all(second)
    return first, second


def exponentials_of(words: W, floats: Any) -> Any:
    """-log((words + 1/2) 2^-53), bit by bit the same from numpy and torch on any device: one operation after another.

    `words`: as `uniform_words` gives them. `floats`: the same numbers as float64.
    """
    floats = floats + 0.5
    bits: Any = floats.view(words.dtype)  # type: ignore[attr-defined]
    exponents = (bits - ROOT_HALF) >> 52
    f = (bits - exponents * (1 << 52)).view(floats.dtype) - 1.0  # of a number from the root of 1/2 to that of 2
    exponents = (exponents - 53) + f * 0.0  # as float64 in both libraries
    s = f / (f + 2.0)
    z = s * s
    w = z * z
    odd, even, half = w * ODD[0] + ODD[1], w * EVEN[0] + EVEN[1], f * f * 0.5
    odd = (odd * w + ODD[2]) * w + ODD[3]
    series = odd * z + (even * w + EVEN[2]) * w + half
    return (half - (series * s + exponents * LN2_REST) - f) - exponents * LN2


def uniform_words(hashes: W, first: Any, second: Any) -> W:
    """Uniform words of 53 bits, independent for each hash and each moment; the same from numpy and torch.

    `hashes`: int64, any shape. `first`: with `second` the words of `moment`, as numbers or int64 arrays that broadcast
    with `hashes`. `second`: see `first`. Returns int64 from 0 to 2^53 - 1, an array of the library of `hashes`.
    """
    words: Any = hashes
    words = words + first
    _mix_all(words)
    words ^= second
    _mix_all(words)
    uniform: W = _shifted(words, 11)
    return uniform


def fill_uniform_words(words: Unsigned, scratch: Unsigned, hashes: Unsigned, moments: Unsigned) -> None:
    """As `uniform_words`, for many moments, in memory that is there already.

    `words`: uint64 (n, m); becomes the words. `scratch`: the same shape; overwritten. `hashes`: the tokens' hashes,
    (m,) or (n, m). `moments`: (n, 2), as `moments` gives them.
    """
    np.add(hashes, moments[:, :1], out=words)
    _mix_into(words, scratch)
    np.bitwise_xor(words, moments[:, 1:], out=words)
    _mix_into(words, scratch)
    np.right_shift(words, np.uint64(11), out=words)


def _mix_into(words: Unsigned, scratch: Unsigned) -> None:
    """`_mix` for an array, in place."""
    for places, factor in ((30, FIRST), (27, SECOND), (31, 1)):
        np.right_shift(words, np.uint64(places), out=scratch)
        np.bitwise_xor(words, scratch, out=words)
        if factor != 1:
            np.multiply(words, np.uint64(factor), out=words)


def _mix(word: int) -> int:
    """The finalizer of splitmix64: a bijection of 64 bits."""
    word = ((word ^ (word >> 30)) * FIRST) & MASK
    word = ((word ^ (word >> 27)) * SECOND) & MASK
    return word ^ (word >> 31)


def _mix_all(words: Any) -> None:
    """The same for an array, in place: allocating costs more than the arithmetic."""
    words ^= _shifted(words, 30)
    words *= _signed(FIRST)
    words ^= _shifted(words, 27)
    words *= _signed(SECOND)
    words ^= _shifted(words, 31)


def _shifted(words: Any, places: int) -> Any:
    """Logical right shift."""
    shifted = words >> places
    shifted &= MASK >> places
    return shifted


def _signed(word: int) -> int:
    """The same 64 bits as a signed number."""
    return word - (1 << 64) if word >> 63 else word


# Audits: every draw of a drafter is recomputed from the row that came with it.
#
# A drafter whose row is not the distribution that it drew from makes the output inexact, and nothing in the text shows
# it. With keyed noise a draw is a function of its row, so one wrong draw proves the fault. This finds mistakes, not
# malice: the drafter knows the noise.


def fault_of_draw(draft_token: DraftToken, noise: KeyedNoise, key: NoiseKey, offset: int) -> str:
    """Why a draft token was not drawn from its row, as a text; empty if it was.

    Probabilities on the wire are multiples of 2^-24, exact in float32, so that the draw repeats bit by bit.

    Args:
        draft_token: as received; its ids are in the vocabulary.
        noise: of the vocabulary whose ids it uses.
        key: of its draw; in an audited session `choice` is the epoch's number.
        offset: letters from the start of the output to the draft token.
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

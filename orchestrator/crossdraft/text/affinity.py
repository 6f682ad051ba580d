"""Affinities: a kernel with the vocabularies that it is for, and their files."""

import json
import zipfile
import zlib
from dataclasses import dataclass, field
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crossdraft.text.kernels import FirstOrder, Ids, Kernel, Matrix, Probabilities
from crossdraft.text.letters import FIRST_CONTROL, Letters, Role, Side
from crossdraft.text.pairing import Pair
from crossdraft.text.vocabulary import tokenizer_digest

FORMAT = 1  # of the file; raised when its fields change
LARGEST_FILE = 1 << 28  # bytes
LARGEST_CONTENT = 1 << 30  # bytes of all arrays: several times those of the largest vocabularies
Arrays = dict[str, NDArray[Any]]  # by their names in the file

# What reading bytes that anything may be in can raise: RuntimeError if they are encrypted, packed in an unknown way or
# nested too deep, OverflowError and MemoryError for sizes that are not those of the content.
_DAMAGED = (
    *(ValueError, TypeError, LookupError, EOFError, RuntimeError, OverflowError, MemoryError),
    *(OSError, zipfile.BadZipFile, zlib.error),
)


class AffinityMismatch(ValueError):  # noqa: N818
    """The file is for other vocabularies, or damaged; the text says what to do."""


@dataclass(frozen=True, eq=False)
class Affinity:
    """A kernel with the vocabularies that it is for; enough for a drafter to draw target tokens."""

    target: str  # `tokenizer_digest` of the target's tokenizer.json
    drafter: str  # of the drafter's
    letters: tuple[Letters, ...]  # of the target's tokens, by id
    ranks: dict[int, int]  # `Vocabulary.rank` of the target's ids, only those above 0
    kernel: Kernel
    made: str = ""  # how, for people
    drafter_ids: Ids = field(init=False, repr=False)  # T∩D, ascending: what `redistribute` takes

    def __post_init__(self) -> None:
        self.kernel.check(len(self.letters))
        object.__setattr__(self, "drafter_ids", self.kernel.drafter_ids)

    @staticmethod
    def of(pair: Pair, kernel: Kernel, target_json: str, drafter_json: str, made: str = "") -> "Affinity":
        """The affinity of a pair, whose tokenizer.json texts are given.

        Raises:
            ValueError: the kernel is not a row-stochastic map of this pair.
        """
        vocabulary = pair.target
        ranks = {token: rank for token in range(vocabulary.size) if (rank := vocabulary.rank(token))}
        digests = tokenizer_digest(target_json), tokenizer_digest(drafter_json)
        return Affinity(*digests, vocabulary.letters, ranks, kernel, made)

    def check_drafter(self, tokenizer_json: str, size: int) -> None:
        """Raises AffinityMismatch if it was made for another drafter than that of this tokenizer and so many ids."""
        if tokenizer_digest(tokenizer_json) != self.drafter:
            raise AffinityMismatch(
                "this affinity file was made for a drafter with another tokenizer: make one for this drafter with "
                "`crossdraft affinity --target TARGET --drafter DRAFTER CORPUS -o FILE`"
            )
        if len(self.drafter_ids) and self.drafter_ids[-1] >= size:
            raise AffinityMismatch(
                f"this affinity file has draft token {self.drafter_ids[-1]}, and the drafter has {size}: make it again "
                "with `crossdraft affinity`"
            )

    def letters_of(self, target_id: int) -> Letters:
        """The letters of a target token; IndexError if there is no such id."""
        return self.letters[target_id]

    def rank(self, target_id: int) -> int:
        """Place of a target id among the ids with the same letters, as `Vocabulary.rank`."""
        return self.ranks.get(target_id, 0)

    def redistribute(self, ids: Ids, probabilities: Probabilities) -> tuple[Ids, Probabilities]:
        """Mᵀq′: the law over the target's tokens that a proposal of `rdk` is drawn from.

        Args:
            ids: shape (n,), draft tokens of T∩D.
            probabilities: float64, shape (n,), q′: they sum to one.

        Returns:
            Target ids, int64, shape (m,), ascending; their probabilities, float64, all above 0, summing to one.

        Raises:
            ValueError: an id is not in T∩D.
        """
        return self.kernel.redistribute(ids, probabilities)


def save_affinity(affinity: Affinity, path: Path) -> None:
    """Writes a file for `load_affinity`; OSError if that is not possible."""
    about = {"format": FORMAT, "target": affinity.target, "drafter": affinity.drafter, "made": affinity.made}
    text = [letters.encode() for letters in affinity.letters]
    arrays: Arrays = {
        "about": np.frombuffer(json.dumps(about).encode(), dtype=np.uint8),
        "letters": np.frombuffer(b"".join(text), dtype=np.uint8),
        "letter_ends": np.cumsum([len(part) for part in text], dtype=np.int64),
        "ranks": np.array(sorted(affinity.ranks.items()), dtype=np.int64).reshape(-1, 2),
        **_arrays_of(affinity.kernel),
    }
    with path.open("wb") as file:  # a name without .npz stays as it is
        np.savez_compressed(file, allow_pickle=False, **arrays)


def load_affinity(path: Path) -> Affinity:
    """Reads and checks a file of `save_affinity`.

    Raises:
        OSError: it cannot be read.
        AffinityMismatch: it is damaged or no affinity file; the text says what to do.
    """
    with path.open("rb") as file:
        content = file.read(LARGEST_FILE + 1)
    try:
        return _affinity(_unpacked(content))
    except _DAMAGED as error:
        raise AffinityMismatch(
            f"{path} is damaged or not an affinity file ({error}): make it again with `crossdraft affinity`"
        ) from error


def _arrays_of(kernel: Kernel) -> Arrays:
    match kernel:
        case Matrix():
            names = ["drafter_ids", "starts", "target_ids", "weights"]
        case FirstOrder():
            names = ["drafter_ids", "target_ids", "prior"]
        case _:
            raise TypeError(f"{type(kernel).__name__} has no form on disk")
    return {name: getattr(kernel, name) for name in names}


def _unpacked(content: bytes) -> Arrays:
    """The arrays of an archive; raises any of _DAMAGED. An array is never larger than what the archive has of it."""
    if len(content) > LARGEST_FILE:
        raise ValueError("it is too large")
    with zipfile.ZipFile(BytesIO(content)) as archive:
        if sum(member.file_size for member in archive.infolist()) > LARGEST_CONTENT:
            raise ValueError("its content is too large")
        return {name.removesuffix(".npy"): _array(archive.read(name)) for name in archive.namelist()}


def _array(raw: bytes) -> NDArray[Any]:
    stream = BytesIO(raw)
    if np.lib.format.read_magic(stream) != (1, 0):
        raise ValueError("an array has another format")
    shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
    return np.frombuffer(raw, dtype, offset=stream.tell()).reshape(shape)


def _affinity(arrays: Arrays) -> Affinity:
    about = json.loads(arrays["about"].tobytes())
    if about["format"] != FORMAT:
        raise ValueError(f"its format is {about['format']}, this version reads {FORMAT}")
    target, drafter, made = about["target"], about["drafter"], about["made"]
    if not (isinstance(target, str) and isinstance(drafter, str) and isinstance(made, str) and target and drafter):
        raise ValueError("it does not say which tokenizers it is for")
    letters = _letters(arrays)
    return Affinity(target, drafter, letters, _ranks(arrays["ranks"], len(letters)), _kernel(arrays), made)


def _letters(arrays: Arrays) -> tuple[Letters, ...]:
    raw, ends = _vector(arrays, "letters", np.uint8).tobytes(), _vector(arrays, "letter_ends", np.int64)
    bounds = [0, *ends.tolist()]
    if bounds[-1] != len(raw) or not all(start < end for start, end in pairwise(bounds)):
        raise ValueError("a token of the target has no letters")
    roles = {role.value for role in Role}
    for letter in set(raw.decode()):
        if not (ord(letter) < FIRST_CONTROL or ord(letter) in roles or ord(letter) >= Side.TARGET.value):
            raise ValueError(f"U+{ord(letter):04X} is no letter")
    return tuple(Letters(raw[start:end].decode()) for start, end in pairwise(bounds))


def _ranks(pairs: NDArray[Any], size: int) -> dict[int, int]:
    """A rank is above 0 and, as ids with the same letters are counted, below the number of ids."""
    if pairs.dtype != np.int64 or pairs.shape != (len(pairs), 2):
        raise ValueError("ranks is not a list of pairs of int64")
    if len(pairs) and not (pairs[:, 0].min() >= 0 and pairs[:, 1].min() > 0 and pairs.max() < size):
        raise ValueError("a rank is out of its range")
    return {int(token): int(rank) for token, rank in pairs}


def _kernel(arrays: Arrays) -> Kernel:
    drafter_ids = _vector(arrays, "drafter_ids", np.int64)
    target_ids = _vector(arrays, "target_ids", np.int32)
    if "prior" in arrays:
        return FirstOrder(drafter_ids, target_ids, _vector(arrays, "prior", np.float64))
    return Matrix(drafter_ids, _vector(arrays, "starts", np.int64), target_ids, _vector(arrays, "weights", np.float32))


def _vector(arrays: Arrays, name: str, dtype: type[np.generic]) -> NDArray[Any]:
    found = arrays[name]
    if found.ndim != 1 or found.dtype != dtype:
        raise ValueError(f"{name} is not a list of {np.dtype(dtype).name}")
    return found

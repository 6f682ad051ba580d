"""How often a corpus uses each id of a vocabulary, and files of it.

FR-Spec (arXiv 2502.14856), section 3.2: few ids make up most of a text, so a drafter's LM head can be pruned to them.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from crossdraft.text.letters import from_bytes
from crossdraft.text.tokenization import Tokenization
from crossdraft.text.vocabulary import tokenizer_digest

FORMAT = "crossdraft frequencies 2"


class FrequenciesError(ValueError):
    """A file of frequencies cannot be used; the text says what to do."""


@dataclass(frozen=True, eq=False)
class TokenFrequencies:
    """Occurrences of each id in a corpus, and whose ids they are."""

    tokenizer: str  # its `tokenizer_digest`
    counts: NDArray[np.int64]  # shape (V,), not negative, some above 0

    @property
    def tokens(self) -> int:
        return int(self.counts.sum())

    def most_frequent(self, count: int, size: int, always: Collection[int] = ()) -> NDArray[np.int64]:
        """The ids to keep, ascending, shape (count,): those of `always` first, of equally frequent ones the smaller.

        `size` is the length of the model's logits row; ids that were not counted have frequency zero. Raises
        FrequenciesError unless `count` is 1 to `size`.
        """
        if not 1 <= count <= size:
            allowed = f"between 1 and {size}, the size of the vocabulary"
            raise FrequenciesError(f"--vocab-keep must be {allowed}, got {count}")
        keys = np.zeros(size, dtype=np.int64)
        common = min(size, len(self.counts))
        keys[:common] = self.counts[:common]
        keys[list(always)] = np.iinfo(np.int64).max
        return np.sort(np.argsort(-keys, kind="stable")[:count])

    def covered(self, count: int) -> float:
        """Share of the counted tokens that the `count` most frequent ids make."""
        return float(np.sort(self.counts)[::-1][:count].sum() / self.tokens)

    def write(self, path: Path) -> None:
        """Writes the file; raises OSError."""
        path.write_bytes(save({"counts": self.counts}, {"format": FORMAT, "tokenizer": self.tokenizer}))


def count_frequencies(tokenizer_json: str, tokenization: Tokenization, texts: Iterable[str]) -> TokenFrequencies:
    """Counts the ids of texts, each tokenized as the middle of an output: no begin symbol, no prefix space.

    Raises ValueError: the tokenizer writes ids that the model's logits row does not have, or there is nothing to count.
    """
    size = tokenization.vocabulary.size
    counts = np.zeros(size, dtype=np.int64)
    for text in texts:
        ids = tokenization.encode_continuation(from_bytes(text.encode()))
        counts += np.bincount(np.array(ids, dtype=np.int64), minlength=size)
    if not counts.any():
        raise ValueError("the corpus makes no tokens")
    return TokenFrequencies(tokenizer_digest(tokenizer_json), counts)


def read_frequencies(path: Path, tokenizer_json: str, model: str) -> TokenFrequencies:
    """Reads a file of frequencies for this tokenizer.

    Raises FrequenciesError: there is no such file, it is damaged, or it was made with another tokenizer.
    """
    advice = f"make one with: crossdraft frequencies --model {model} CORPUS -o FILE"
    try:
        with safe_open(path, "numpy") as file:
            about, counts = file.metadata() or {}, file.get_tensor("counts")
    except OSError as error:
        raise FrequenciesError(f"cannot read the frequencies: {error}; {advice}") from error
    except (SafetensorError, TypeError) as error:
        raise FrequenciesError(f"{path} is damaged, or not a file of frequencies; {advice}") from error
    usable = counts.ndim == 1 and counts.dtype == np.int64 and counts.any() and (counts >= 0).all()
    if about.get("format") != FORMAT or not usable:
        raise FrequenciesError(f"{path} is damaged, or not a file of frequencies; {advice}")
    if about.get("tokenizer") != tokenizer_digest(tokenizer_json):
        raise FrequenciesError(f"the frequencies in {path} are those of another tokenizer; {advice}")
    return TokenFrequencies(about["tokenizer"], counts)

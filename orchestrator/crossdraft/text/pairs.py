"""The vocabularies of a target and a drafter, and which tokens they share."""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from crossdraft.text.letters import Ids, Letters
from crossdraft.text.vocabulary import Trie, Vocabulary

_NOT_SHARED = -1


@dataclass(frozen=True, eq=False)
class Pair:
    """The vocabularies of a target and of its drafter.

    A drafter token is shared if some target token has its letters. Control symbols are the same letter by
    role only, unless the whole vocabulary is the same.
    """

    target: Vocabulary
    drafter: Vocabulary
    same_vocabulary: bool = field(init=False)  # every id is the same token on both sides
    shared_drafter_ids: Ids = field(init=False, repr=False)  # shape (n,), ascending
    _target_ids: Ids = field(init=False, repr=False)  # shape (drafter.size,), -1 where not shared

    def __post_init__(self) -> None:
        same = _form(self.target) == _form(self.drafter)
        if same:
            ids = np.arange(self.drafter.size, dtype=np.int64)
        else:
            ids = np.array([_first_id(self.target, letters) for letters in self.drafter.letters], dtype=np.int64)
        ids.flags.writeable = False
        object.__setattr__(self, "same_vocabulary", same)
        object.__setattr__(self, "_target_ids", ids)
        object.__setattr__(self, "shared_drafter_ids", np.flatnonzero(ids != _NOT_SHARED).astype(np.int64))

    @cached_property
    def target_trie(self) -> Trie:
        return Trie(self.target)

    @cached_property
    def drafter_trie(self) -> Trie:
        return Trie(self.drafter)

    def sort(self) -> None:
        """Builds both tries now instead of at first use; large ones take tenths of a second."""
        _ = self.target_trie, self.drafter_trie

    @cached_property
    def one_to_one(self) -> bool:
        """Whether no two shared drafter tokens are the same target token."""
        found = self._target_ids[self.shared_drafter_ids]
        return len(np.unique(found)) == len(found)

    @cached_property
    def _names(self) -> Ids | None:
        """For each target id the first one with its letters, shape (target.size,); None: all letters differ."""
        if self.same_vocabulary:
            return None
        names = np.array([_first_id(self.target, letters) for letters in self.target.letters], dtype=np.int64)
        return None if np.array_equal(names, np.arange(len(names))) else names

    def target_id(self, drafter_id: int) -> int | None:
        """The target id of a drafter token, of several the first by rank; None if it is not shared."""
        found = int(self._target_ids[drafter_id])
        return None if found == _NOT_SHARED else found

    def to_target_ids(self, ids: Ids) -> Ids:
        """Target ids of drafter ids, in their shape; -1 where not shared."""
        return self._target_ids[ids]

    def names(self, ids: Ids) -> Ids:
        """For target ids, in their shape, the first id with the same letters, as in `to_target_ids`.

        In one and the same vocabulary each id stands for itself. Returns `ids` itself if this changes no id.
        """
        return ids if self._names is None else self._names[ids]


def _form(vocabulary: Vocabulary) -> tuple[tuple[tuple[int, str], ...], list[Letters]]:
    """Nameless ids and letters of a vocabulary; if these are equal, two vocabularies are the same."""
    letters = list(vocabulary.letters)
    for token, _ in vocabulary.nameless:
        letters[token] = Letters("")
    return vocabulary.nameless, letters


def _first_id(vocabulary: Vocabulary, letters: Letters) -> int:
    return next(iter(vocabulary.ids_of(letters)), _NOT_SHARED)

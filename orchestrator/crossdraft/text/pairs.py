"""The vocabularies of a target and a drafter, and which tokens they share."""

from dataclasses import dataclass, field
from functools import cached_property
from itertools import zip_longest

import numpy as np

from crossdraft.text.letters import AFTER_ALL, Ids, Letters
from crossdraft.text.vocabulary import Vocabulary

_NOT_SHARED = -1


@dataclass(frozen=True, eq=False)
class Pair:
    """The vocabularies of a target and of its drafter.

    A drafter token is shared if some target token has its letters. Control symbols are the same letter by
    role only, unless the whole vocabulary is the same: then every id that both have is shared, whatever its role.
    """

    target: Vocabulary
    drafter: Vocabulary
    # Every id that both have is the same token, and those that only one has are control symbols, such as padding rows.
    same_vocabulary: bool = field(init=False)
    shared_drafter_ids: Ids = field(init=False, repr=False)  # shape (n,), ascending
    _target_ids: Ids = field(init=False, repr=False)  # shape (drafter.size,), -1 where not shared

    def __post_init__(self) -> None:
        same = self.target is self.drafter or first_difference(self.target, self.drafter) is None
        if same:
            ids = np.arange(self.drafter.size, dtype=np.int64)
            ids[self.target.size :] = _NOT_SHARED
        else:
            ids = np.array([_first_id(self.target, letters) for letters in self.drafter.letters], dtype=np.int64)
        ids.flags.writeable = False
        object.__setattr__(self, "same_vocabulary", same)
        object.__setattr__(self, "_target_ids", ids)
        object.__setattr__(self, "shared_drafter_ids", np.flatnonzero(ids != _NOT_SHARED).astype(np.int64))

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
        found: int = self._target_ids.item(drafter_id)
        return None if found == _NOT_SHARED else found

    def to_target_ids(self, ids: Ids) -> Ids:
        """Target ids of drafter ids, in their shape; -1 where not shared."""
        return self._target_ids[ids]

    def names(self, ids: Ids) -> Ids:
        """For target ids, in their shape, the first id with the same letters, as in `to_target_ids`.

        In one and the same vocabulary each id stands for itself. Returns `ids` itself if this changes no id.
        """
        return ids if self._names is None else self._names[ids]


def first_difference(target: Vocabulary, drafter: Vocabulary) -> int | None:
    """The first id that is not the same token in both (`Pair.same_vocabulary`); None if there is none.

    Control symbols are compared by content, not by role; a row without content, mere padding, goes with any of them.
    """
    for token, (one, other) in enumerate(zip_longest(_forms(target), _forms(drafter), fillvalue=AFTER_ALL)):
        padding = AFTER_ALL in (one, other) and one[0] == other[0]
        if one != other and not padding:
            return token
    return None


def _forms(vocabulary: Vocabulary) -> list[str]:
    """Of each id its letters, or AFTER_ALL and the content of a control symbol."""
    forms: list[str] = list(vocabulary.letters)
    for token, content in (*vocabulary.nameless, *vocabulary.names.items()):
        forms[token] = AFTER_ALL + content
    return forms


def _first_id(vocabulary: Vocabulary, letters: Letters) -> int:
    return next(iter(vocabulary.ids_of(letters)), _NOT_SHARED)

"""Which of many texts begins as a new one does: a dict over their blocks, not a search through all of them. Pure."""

from collections.abc import Hashable, Sequence
from itertools import islice
from typing import Generic, TypeVar

BLOCK = 32  # ids
TRIED = 8  # owners of the same blocks, which differ in less than one more

Owner = TypeVar("Owner", bound=Hashable)


class Prefixes(Generic[Owner]):
    """The beginnings of texts, in whole blocks. A block's key is a hash of its ids and of the key before it."""

    def __init__(self) -> None:
        self._owners: dict[int, dict[Owner, None]] = {}  # latest last
        self._keys: dict[Owner, list[int]] = {}

    def note(self, owner: Owner, ids: Sequence[int], kept: int = 0) -> None:
        """What an owner's text is now; its first `kept` ids are what they were."""
        keys = self._keys.setdefault(owner, [])
        whole = len(ids) // BLOCK
        same = min(kept // BLOCK, len(keys))
        for key in keys[same:]:
            self._drop(key, owner)
        del keys[same:]
        for block in range(same, whole):
            keys.append(_key(keys[-1] if keys else 0, ids, block))
            self._owners.setdefault(keys[-1], {})[owner] = None

    def forget(self, owner: Owner) -> None:
        """An owner's text is no more."""
        for key in self._keys.pop(owner, ()):
            self._drop(key, owner)

    def longest(self, ids: Sequence[int]) -> list[Owner]:
        """The owners, by hashes, of the most first blocks of `ids`: the latest first and not more than TRIED."""
        found: dict[Owner, None] = {}
        key = 0
        for block in range(len(ids) // BLOCK):
            key = _key(key, ids, block)
            owners = self._owners.get(key)
            if owners is None:
                break
            found = owners
        return list(islice(reversed(found), TRIED))

    def _drop(self, key: int, owner: Owner) -> None:
        owners = self._owners[key]
        owners.pop(owner, None)
        if not owners:
            del self._owners[key]


def _key(before: int, ids: Sequence[int], block: int) -> int:
    return hash((before, *ids[block * BLOCK : (block + 1) * BLOCK]))

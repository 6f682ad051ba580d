"""A vocabulary as a trie: its tokens sorted by letters, so that all with a common prefix are adjacent."""

import os
import sys
import tempfile
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

import numpy as np

from crossdraft.text.letters import AFTER_ALL, END, Codes, Ids, Letters, Spelling, coding, spelled
from crossdraft.text.vocabulary import Vocabulary

_WORTH_KEEPING = 16_384  # tokens; smaller tries are built faster than they are read


class Trie:
    """All tokens of one vocabulary by their letters."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        letters = vocabulary.letters
        large = len(letters) >= _WORTH_KEEPING
        key = key_of(letters) if large else ""
        kept = load(key, len(letters)) if large else None
        order, codes = kept or _built(vocabulary)
        if large and kept is None:
            save(key, order, codes)
        order.flags.writeable = False
        self.order = order  # shape (V,), ids sorted by letters
        self.spelling = Spelling.read(codes)
        self._strings = [letters[token] for token in order.tolist()]
        self._vocabulary = vocabulary

    def span(self, prefix: Letters) -> tuple[int, int]:
        """The range in `order`, its begin and end, of the tokens that start with `prefix`."""
        first = bisect_left(self._strings, prefix)
        return first, bisect_left(self._strings, Letters(prefix + AFTER_ALL), first)

    def longest(self, text: Letters) -> Letters | None:
        """The letters of the longest token that `text` starts with, or None."""
        for length in range(min(self._vocabulary.longest, len(text)), 0, -1):
            if self._vocabulary.ids_of(Letters(text[:length])):
                return Letters(text[:length])
        return None

    def extensions(self, letters: Letters) -> tuple[Letters, ...]:
        """The minimal longer tokens: those that start with `letters` and with no other such token, in order."""
        found: list[Letters] = []
        place, end = self.span(letters)
        while place < end:
            string = self._strings[place]
            if string == letters:
                place += 1
            else:
                found.append(string)
                place = self.span(string)[1]
        return tuple(found)

    def extends(self, letters: Letters) -> bool:
        """Whether a longer token starts with `letters`."""
        first, end = self.span(letters)
        return first < end and self._strings[end - 1] != letters


def _built(vocabulary: Vocabulary) -> tuple[Ids, Codes]:
    letters = vocabulary.letters
    order = sorted(range(len(letters)), key=letters.__getitem__)
    return np.array(order, dtype=np.int64), spelled(letters)


# The arrays of large tries are cached on disk between runs. A file is named by the digest of all letters and their
# coding, and has a digest of its contents. A file that is damaged or belongs to another user is ignored; a folder that
# cannot be written costs only the time of building the trie.

_MAGIC = b"crossdraft trie 1\n"
_DIGEST = 16  # bytes
_NO_FOLDER = (OSError, RuntimeError)  # the latter if there is no home folder


def cache_folder() -> Path:
    """The platform's cache folder for crossdraft: below `XDG_CACHE_HOME` if that is an absolute path."""
    usual = {"darwin": "~/Library/Caches", "win32": os.environ.get("LOCALAPPDATA", "~/AppData/Local")}
    chosen = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not chosen.is_absolute():  # the XDG Base Directory Specification says to ignore relative ones
        chosen = Path(usual.get(sys.platform, "~/.cache")).expanduser()
    return chosen / "crossdraft"


def key_of(strings: Sequence[Letters]) -> str:
    """Hex digest of the letters of all ids, in order, and of their coding."""
    return blake2b(chr(END).join([coding(), *strings]).encode(), digest_size=_DIGEST).hexdigest()


def load(key: str, size: int) -> tuple[Ids, Codes] | None:
    """Order and codes of the vocabulary of this key and size; None if there is no valid file."""
    try:
        with _path(key).open("rb") as file:
            raw = file.read() if _own(file.fileno()) else b""
    except _NO_FOLDER:
        return None
    begin = len(_MAGIC) + _DIGEST
    if raw[:begin] != _MAGIC + _sum(key, raw[begin:]):
        return None
    order = np.frombuffer(raw, dtype="<u4", count=size, offset=begin).astype(np.int64)
    return order, np.frombuffer(raw, dtype="<u2", offset=begin + 4 * size).astype(np.uint16)


def save(key: str, order: Ids, codes: Codes) -> None:
    """Writes the file atomically, if it can be written."""
    contents = order.astype("<u4").tobytes() + codes.astype("<u2").tobytes()
    with suppress(*_NO_FOLDER):
        for folder in (cache_folder(), _path(key).parent):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=_path(key).parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(_MAGIC + _sum(key, contents) + contents)
            os.replace(name, _path(key))
        except OSError:
            os.unlink(name)


def _own(descriptor: int) -> bool:
    """Whether an open file belongs to this user: in a shared folder a digest proves nothing."""
    return not hasattr(os, "getuid") or os.fstat(descriptor).st_uid == os.getuid()


def _path(key: str) -> Path:
    return cache_folder() / "tries" / key


def _sum(key: str, contents: bytes) -> bytes:
    return blake2b(key.encode() + contents, digest_size=_DIGEST).digest()

"""A vocabulary as a trie: its strings in order, so that all tokens with a common prefix stand side by side."""

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

_WORTH_KEEPING = 16_384  # tokens; smaller tries are built in less time than a file takes


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
        self.order = order  # shape (V,), ids by letters
        self.spelling = Spelling.read(codes)
        self._strings = [letters[token] for token in order.tolist()]
        self._vocabulary = vocabulary

    def span(self, prefix: Letters) -> tuple[int, int]:
        """The places in `order`, first and behind the last, of the tokens that start with `prefix`."""
        first = bisect_left(self._strings, prefix)
        return first, bisect_left(self._strings, Letters(prefix + AFTER_ALL), first)

    def longest(self, text: Letters) -> Letters | None:
        """The letters of the longest token that `text` starts with; None if there is none."""
        for length in range(min(self._vocabulary.longest, len(text)), 0, -1):
            if self._vocabulary.ids_of(Letters(text[:length])):
                return Letters(text[:length])
        return None

    def extensions(self, letters: Letters) -> tuple[Letters, ...]:
        """The longer tokens that start with `letters` and with no shorter such token, in order."""
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


# The arrays of large tries, kept on disk between runs.
#
# A file is found by the digest of all letters and their coding and carries the digest of its contents; one that is
# damaged or that something or somebody else wrote is as good as none. A folder that cannot be written costs the time of
# building, nothing else.

_MAGIC = b"crossdraft trie 1\n"
_DIGEST = 16  # bytes
_NO_FOLDER = (OSError, RuntimeError)  # the latter if there is no home folder


def cache_folder() -> Path:
    """Where files that can be made again belong on this platform: `XDG_CACHE_HOME` if it is set and not relative."""
    usual = {"darwin": "~/Library/Caches", "win32": os.environ.get("LOCALAPPDATA", "~/AppData/Local")}
    chosen = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not chosen.is_absolute():  # which the XDG Base Directory Specification tells to ignore
        chosen = Path(usual.get(sys.platform, "~/.cache")).expanduser()
    return chosen / "crossdraft"


def key_of(strings: Sequence[Letters]) -> str:
    """Hex digest of the letters of all ids, in the order of the ids, and of their coding."""
    return blake2b(chr(END).join([coding(), *strings]).encode(), digest_size=_DIGEST).hexdigest()


def load(key: str, size: int) -> tuple[Ids, Codes] | None:
    """Order and codes of the vocabulary of this key and size; None if there is no sound file."""
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
    """Keeps them; a reader sees the whole file or none."""
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
    """Whether an open file belongs to the user: in a folder of many users a sum alone says nothing."""
    return not hasattr(os, "getuid") or os.fstat(descriptor).st_uid == os.getuid()


def _path(key: str) -> Path:
    return cache_folder() / "tries" / key


def _sum(key: str, contents: bytes) -> bytes:
    return blake2b(key.encode() + contents, digest_size=_DIGEST).digest()

"""Letters cut into what a tokenizer can read as text and what it cannot; letters shown as text."""

import codecs
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from crossdraft.text.letters import FIRST_CONTROL, Letters, from_bytes, is_plain, to_bytes

_BLANKS = frozenset(" \n\r\t")


@dataclass(frozen=True)
class Segment:
    """A run of letters. Whatever is next to it, a tokenizer reads it by itself."""

    letters: Letters  # never empty
    text: str | None  # the run as text; None: control symbols, or bytes that are written one by one
    unfinished: bool = False  # the letters may be the beginning of a character that is still growing


def segments_of(letters: Letters, unwritable: str = "") -> list[Segment]:
    """The segments in order; joined, their letters are the given ones.

    Args:
        letters: any letters.
        unwritable: characters that must be written byte by byte, as they would not come back as themselves.
    """
    if is_plain(letters):
        return list(_of_bytes(to_bytes(letters), unwritable))
    segments: list[Segment] = []
    for control, run in groupby(letters, key=lambda letter: ord(letter) >= FIRST_CONTROL):
        if segments and segments[-1].unfinished:  # nothing can finish it any more
            segments[-1] = Segment(segments[-1].letters, None)
        joined = Letters("".join(run))
        segments.extend([Segment(joined, None)] if control else _of_bytes(to_bytes(joined), unwritable))
    return segments


def _of_bytes(raw: bytes, unwritable: str) -> Iterator[Segment]:
    while raw:
        try:
            yield from _of_text(raw.decode(), unwritable)
            return
        except UnicodeDecodeError as error:
            yield from _of_text(raw[: error.start].decode(), unwritable)
            unfinished = error.end == len(raw) and error.reason == "unexpected end of data"
            yield Segment(from_bytes(raw[error.start : error.end]), None, unfinished)
            raw = raw[error.end :]


def _of_text(text: str, unwritable: str) -> Iterator[Segment]:
    if text and not unwritable:
        yield Segment(from_bytes(text.encode()), text)
        return
    for strange, run in groupby(text, key=unwritable.__contains__):
        joined = "".join(run)
        yield Segment(from_bytes(joined.encode()), None if strange else joined)


class LetterDecoder:
    """Shows letters as text while they arrive.

    What `feed` and a final `flush` return, joined, is `to_bytes(letters).decode("utf-8", "replace")`:
    control symbols are not shown, and an incomplete character is held back until it is whole or broken.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, letters: Letters) -> str:
        """The text that is complete with these letters and was not before."""
        return self._decoder.decode(to_bytes(letters))

    def flush(self) -> str:
        """What is still held back, as U+FFFD; the decoder can then be used anew."""
        return self._decoder.decode(b"", final=True)


def last_word_boundary(letters: Letters, before: int) -> int:
    """The latest word boundary at or before a letter offset; 0 if there is none.

    A boundary is an offset where a run of blanks (space, tab, line break) begins, and either side of a control symbol.
    """
    for offset in range(min(before, len(letters)), 0, -1):
        left = letters[offset - 1]
        right = letters[offset : offset + 1]
        if ord(left) >= FIRST_CONTROL or (right and ord(right) >= FIRST_CONTROL):
            return offset
        if right in _BLANKS and left not in _BLANKS:
            return offset
    return 0

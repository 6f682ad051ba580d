"""Text to ids and back, as a prompt and as the middle of an output."""

import codecs
import unicodedata
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from tokenizers import Encoding, Tokenizer

from crossdraft.text.letters import FIRST_CONTROL, Letters, Role, from_bytes, is_plain, to_bytes
from crossdraft.text.tokenizer_file import SPACE_MARK, Anatomy, anatomy_of, continuation_json
from crossdraft.text.vocabulary import Vocabulary


class NotExpressible(ValueError):  # noqa: N818
    """No token of this vocabulary can write these letters."""

    def __init__(self, letters: Letters) -> None:
        shown = ", ".join(
            f"byte 0x{ord(letter):02X}" if ord(letter) < FIRST_CONTROL else f"control symbol U+{ord(letter):X}"
            for letter in letters[:8]
        )
        super().__init__(f"the vocabulary has no token for {shown}{' and more' if len(letters) > 8 else ''}")
        self.letters = letters


def encode_beginning(encode: Callable[[Letters], tuple[int, ...]], letters: Letters) -> tuple[int, ...]:
    """The ids of letters up to the first one that `encode` raises NotExpressible for."""
    while letters:
        try:
            return encode(letters)
        except NotExpressible as missing:
            letters = Letters(letters[: max(0, letters.find(missing.letters[0]))])
    return ()


# Letters cut into what a tokenizer can read as text and what it cannot; letters shown as text.


@dataclass(frozen=True)
class Segment:
    """A run of letters. Whatever is next to it, a tokenizer reads it by itself."""

    letters: Letters  # never empty
    text: str | None  # the run as text; None: control symbols, or bytes that are written one by one
    unfinished: bool = False  # the letters may be the beginning of a character that is still growing


class Tokenization:
    """A tokenizer together with its vocabulary's letters."""

    def __init__(self, tokenizer_json: str, vocabulary: Vocabulary) -> None:
        anatomy = anatomy_of(tokenizer_json)
        self.vocabulary = vocabulary
        self.lossy = anatomy.lossy  # names of the parts that change text before it is tokenized
        self._prompt = Tokenizer.from_str(tokenizer_json)
        self._prompt.no_truncation()
        self._prompt.no_padding()
        self._continuation = Tokenizer.from_str(continuation_json(tokenizer_json))
        self._continuation.encode_special_tokens = True  # their names typed as text are text
        # a typed `▁` would come back as a space
        self._unwritable = SPACE_MARK if anatomy.space_mark else ""
        self._boundaries = Boundaries(anatomy, self._continuation, vocabulary)
        self._begin, self._prefix = self._opening()

    def _opening(self) -> tuple[tuple[int, ...], Letters]:
        """The ids that a prompt begins with, and the letters that are put before its first word."""
        bare = self._prompt.encode("a", add_special_tokens=False).ids
        full = self._prompt.encode("a").ids
        places = [at for at in range(len(full)) if full[at : at + len(bare)] == bare]
        opened = self.vocabulary.letters_of(bare)
        return tuple(full[: places[0]]) if places else (), Letters(" " if opened.startswith(" ") else "")

    def letters_of(self, ids: Iterable[int]) -> Letters:
        """The letters of a sequence of ids; IndexError for an id that is not in the vocabulary."""
        return self.vocabulary.letters_of(ids)

    def shown(self, ids: Sequence[int]) -> str:
        """The text that the tokenizer's own decoder makes of ids, special tokens and clean-up included."""
        return str(self._prompt.decode(list(ids), skip_special_tokens=False))

    def encode_prompt(self, text: str) -> tuple[int, ...]:
        """The ids of a prompt as the tokenizer writes it: with its special tokens, and names of them understood.

        Raises:
            ValueError: the tokenizer wrote an id that the model's logits row does not have.
        """
        return self._within(self._prompt.encode(text).ids)

    def encode_rendered(self, text: str) -> tuple[int, ...]:
        """The ids of a chat as its template writes it: names of special tokens are understood, none is added.

        Raises:
            ValueError: as `encode_prompt`.
        """
        return self._within(self._prompt.encode(text, add_special_tokens=False).ids)

    def prompt_letters(self, ids: Sequence[int]) -> Letters:
        """The letters of a prompt's ids, without what this tokenizer puts before every prompt."""
        if self._begin and tuple(ids[: len(self._begin)]) == self._begin:
            ids = ids[len(self._begin) :]
        return Letters(self.letters_of(ids).removeprefix(self._prefix))

    def encode_prompt_letters(self, letters: Letters) -> tuple[int, ...]:
        """The ids of a prompt given as letters of another vocabulary, or cut at its start.

        Begins as the tokenizer's prompts do, with its own begin symbol and a prefix space if the letters have
        none. What this vocabulary cannot write is left out: a prompt of a drafter need not be whole.
        """
        rest = letters.removeprefix(Role.BEGIN_OF_SEQUENCE.letter)
        if self._prefix and rest and is_plain(Letters(rest[0])) and not rest.startswith(self._prefix):
            rest = self._prefix + rest
        return (*self._begin, *self._encode(Letters(rest), leave_out=True))

    def encode_continuation(self, letters: Letters) -> tuple[int, ...]:
        """The ids of letters in the middle of an output.

        No prefix space and no special token is added, nothing is cleaned up. Bytes that are not UTF-8 become
        single-byte tokens. The letters of the ids are those given, unless the tokenizer is `lossy`.

        Raises:
            NotExpressible: a control symbol or a byte has no token here.
        """
        return self._encode(letters, leave_out=False)

    def stable_prefix(self, ids: Sequence[int]) -> int:
        """How many leading ids stay the same whatever is appended to the letters of `ids`.

        Of `ids` that are not this tokenizer's encoding of their letters, those count that the encoding of every
        longer text begins with. The answer may be smaller than it could be, never larger.
        """
        segments = [
            segment for segment in segments_of(self.letters_of(ids), self._unwritable) if not segment.unfinished
        ]
        growing = segments.pop().text if segments and segments[-1].text is not None else None
        settled = [token for segment in segments for token in self._segment(segment, leave_out=True)]
        if growing is not None:
            encoding = self._continuation.encode(growing, add_special_tokens=False)
            if self._writes(encoding.ids, growing):
                settled += encoding.ids[: self._boundaries.stable(growing, encoding)]
        return common_length(ids, settled)

    def _encode(self, letters: Letters, leave_out: bool) -> tuple[int, ...]:
        segments = segments_of(letters, self._unwritable)
        ids = tuple(token for segment in segments for token in self._segment(segment, leave_out))
        return self._within(ids)

    def _segment(self, segment: Segment, leave_out: bool) -> list[int]:
        if segment.text is None:
            return self._one_by_one(segment.letters, leave_out)
        return self._text(segment.text, leave_out)

    def _one_by_one(self, letters: Letters, leave_out: bool) -> list[int]:
        found = [self.vocabulary.ids_of(Letters(letter)) for letter in letters]
        missing = Letters("".join(letter for letter, ids in zip(letters, found, strict=True) if not ids))
        if missing and not leave_out:
            raise NotExpressible(missing)
        return [ids[0] for ids in found if ids]

    def _text(self, text: str, leave_out: bool) -> list[int]:
        encoding = self._continuation.encode(text, add_special_tokens=False)
        if self._writes(encoding.ids, text):
            return encoding.ids
        ids: list[int] = []
        done = 0
        for (start, end), tokens in _by_characters(encoding):
            ids += self._one_by_one(from_bytes(text[done:start].encode()), leave_out)
            ids += tokens if self._writes(tokens, text[start:end]) else self._piecemeal(text[start:end], leave_out)
            done = end
        return ids + self._one_by_one(from_bytes(text[done:].encode()), leave_out)

    def _piecemeal(self, text: str, leave_out: bool) -> list[int]:
        """A character byte by byte; more of them without what made the tokenizer take them for something else."""
        if len(text) == 1:
            return self._one_by_one(from_bytes(text.encode()), leave_out)
        return self._text(text[:1], leave_out) + self._text(text[1:], leave_out)

    def _writes(self, ids: Sequence[int], text: str) -> bool:
        """Whether these ids are the text, or what a lossy tokenizer makes of it, without control symbols."""
        letters = self.letters_of(self._within(ids))
        return is_plain(letters) if self.lossy else letters == from_bytes(text.encode())

    def _within(self, ids: Sequence[int]) -> tuple[int, ...]:
        size = self.vocabulary.size
        beyond = [token for token in ids if token >= size]
        if beyond:
            raise ValueError(
                f"the tokenizer wrote id {beyond[0]}, but the model's rows have {self.vocabulary.size} ids; "
                "use the tokenizer that belongs to the model"
            )
        return tuple(ids)


def _by_characters(encoding: Encoding) -> Iterator[tuple[tuple[int, int], list[int]]]:
    """Tokens with the range of the text that they write, those of one character together."""
    span, tokens = (0, 0), list[int]()
    for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
        if tokens and start >= span[1]:
            yield span, tokens
            tokens = []
        span = (span[0] if tokens else start, end)
        tokens = [*tokens, token]
    if tokens:
        yield span, tokens


# Which tokens of a growing text can no longer change.

_WINDOW = 32  # tokens that are encoded again to see what a longer text may do to them


class Boundaries:
    """Finds how far the encoding of a text is settled, by one of two arguments.

    Tokenizers that split into words: no pattern in use looks past a blank after a word, so that what lies before
    the blank is settled.

    BPE without words: take the encoding of any longer text. At most one of its tokens straddles the end of ours, and
    the tokens before it are the encoding of the text before it (a prefix of an encoding is an encoding). So what all
    encodings of text[:j] have in common, over every j where a longer token may begin, is settled.
    """

    def __init__(self, anatomy: Anatomy, tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
        self._anatomy = anatomy
        self._tokenizer = tokenizer
        self._added = sorted(added.content for added in anatomy.added if not added.special)
        self._sorted = sorted(letters for letters in set(vocabulary.letters) if is_plain(letters))
        self._longest = max((len(letters) for letters in self._sorted), default=0)

    def stable(self, text: str, encoding: Encoding) -> int:
        """How many leading tokens of the text's encoding stay whatever text is appended."""
        if self._anatomy.splits:
            return self._by_words(text, encoding)
        if self._anatomy.pairwise and not self._anatomy.lossy:
            return self._by_pairs(text, encoding)
        return 0

    def _by_words(self, text: str, encoding: Encoding) -> int:
        end = self._added_may_begin(text)
        words, offsets = encoding.word_ids, encoding.offsets
        for place in range(len(words) - 1, 0, -1):
            start = offsets[place][0]
            if words[place] != words[place - 1] and start <= end and _is_settled(text, start):
                return place
        return 0

    def _added_may_begin(self, text: str) -> int:
        """The first place where an added token may begin that the end of the text has not decided."""
        longest = max(map(len, self._added), default=0)
        for start in range(max(0, len(text) - longest), len(text)):
            if _some_begin_with(self._added, text[start:], longer=False):
                return start
        return len(text)

    def _by_pairs(self, text: str, encoding: Encoding) -> int:
        stable = len(encoding.ids)
        raw = from_bytes(text.encode())
        cuts = {
            len(from_bytes(text[:place].encode())): place
            for place in range(max(0, len(text) - self._longest), len(text))
        }
        for start in range(max(0, len(raw) - self._longest), len(raw)):
            if not _some_begin_with(self._sorted, raw[start:], longer=True):
                continue
            if start in cuts:
                stable = min(stable, self._agreement(text, encoding, cuts[start]))
            elif self._anatomy.byte_level:
                return 0  # a token may begin inside a character, where no text ends
        return stable

    def _agreement(self, text: str, encoding: Encoding, end: int) -> int:
        """How many leading tokens the encodings of text[:end] and of the text share.

        A sequence is an encoding if its neighbours are, two by two. So a window's encoding that begins with
        the window's own first token goes on from what is before the window; otherwise the window is widened.
        """
        ids, offsets = encoding.ids, encoding.offsets
        width = _WINDOW
        while True:
            first = max(0, len(ids) - width)
            while first and (offsets[first][0] < offsets[first - 1][1] or offsets[first][0] >= end):
                first -= 1
            again = self._tokenizer.encode(text[offsets[first][0] : end], add_special_tokens=False).ids
            if first == 0 or again[:1] == [ids[first]]:
                return first + common_length(again, ids[first:])
            width *= 2


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading elements are equal."""
    pairs = zip(one, other, strict=False)
    return next((place for place, (left, right) in enumerate(pairs) if left != right), min(len(one), len(other)))


def _some_begin_with(ordered: Sequence[str], beginning: str, longer: bool) -> bool:
    """Whether some string of a sorted list begins with this one, itself not counted if `longer`."""
    place = bisect_right(ordered, beginning)
    return (place < len(ordered) and ordered[place].startswith(beginning)) or (
        not longer and place > 0 and ordered[place - 1] == beginning
    )


def _is_settled(text: str, start: int) -> bool:
    """Whether a word that ends before `start` ends there in every longer text."""
    left, right = text[start - 1], text[start]
    if right.isspace():
        return not left.isspace()
    # an apostrophe may begin a contraction that belongs to the word
    return left.isalpha() and unicodedata.category(right)[0] in "PS" and right not in "'’"


_BLANKS = frozenset(" \n\r\t")


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

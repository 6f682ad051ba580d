"""Text to ids and back, as a prompt and as the middle of an output."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from tokenizers import Encoding, Tokenizer

from crossdraft.text.anatomy import SPACE_MARK, anatomy_of, continuation_json
from crossdraft.text.letters import FIRST_CONTROL, Letters, Role, from_bytes, is_plain
from crossdraft.text.segments import LetterDecoder, Segment, last_word_boundary, segments_of
from crossdraft.text.stability import Boundaries, common_length
from crossdraft.text.vocabulary import Vocabulary

__all__ = ["LetterDecoder", "NotExpressible", "Tokenization", "last_word_boundary"]


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

"""Text to token ids and back: as a prompt, and as text in the middle of an output."""

import codecs
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache

from tokenizers import Encoding, Tokenizer

from crossdraft.text.letters import FIRST_CONTROL, ControlRole, Letters, from_bytes, is_plain, to_bytes
from crossdraft.text.vocabulary import NESTED, SPACE_MARK, Part, Vocabulary, anatomy_of, components

SHORT = 32  # characters of a text whose ids are kept: drafts begin with the same few words again and again
KEPT = 1 << 14  # texts
SHRUNK = 4  # bytes of a text that a tokenizer which changes text may make one of


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
    """The ids of the longest prefix of the letters that `encode` raises no NotExpressible for."""
    while letters:
        try:
            return encode(letters)
        except NotExpressible as missing:
            letters = Letters(letters[: max(0, letters.find(missing.letters[0]))])
    return ()


@contextmanager
def _faults(of: str) -> Iterator[None]:
    """What the library raises as ValueError: bare Exceptions, and panics, which are none and would end far more than
    what they are about."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise ValueError(f"{of}{error}") from error
        raise


def read_tokenizer(tokenizer_json: str) -> Tokenizer:
    """Raises ValueError: it is damaged."""
    with _faults(of=""):
        return Tokenizer.from_str(tokenizer_json)


class Tokenization:
    """A tokenizer with the letters of its vocabulary.

    Raises ValueError: its decoder does not write the letters of one token after those of another, or an id that every
    prompt begins with is beyond the model's row of logits.
    """

    def __init__(self, tokenizer_json: str, vocabulary: Vocabulary) -> None:
        anatomy = anatomy_of(tokenizer_json)
        self.vocabulary = vocabulary
        self.lossy = anatomy.lossy  # names of the parts of the tokenizer that change text
        self._prompt = read_tokenizer(tokenizer_json)
        self._prompt.no_truncation()
        self._prompt.no_padding()
        self._continuation = read_tokenizer(continuation_json(tokenizer_json, vocabulary.size))
        self._continuation.encode_special_tokens = True  # names of special tokens in text are text
        # a `▁` in text would be decoded as a space
        self._unwritable = SPACE_MARK if anatomy.space_mark else ""
        self._unknown = anatomy.unknown
        self._known = lru_cache(KEPT)(self._text)
        named = max((len(added["content"].encode()) for added in anatomy.added), default=0)
        # Bytes of a text that one token may stand for: a special token stands for its name.
        self.longest = max(vocabulary.longest, named) * (SHRUNK if self.lossy else 1)
        self.begin, self._prefix = self._opening()  # ids that every prompt begins with
        self._check_decoder({token for token, _ in anatomy.pieces}.difference(added["id"] for added in anatomy.added))

    def _opening(self) -> tuple[tuple[int, ...], Letters]:
        """The ids that every prompt begins with, and the letters that are put before its first word."""
        bare, full = (self.encode_prompt("a", special) for special in (False, True))
        places = [at for at in range(len(full)) if full[at : at + len(bare)] == bare]
        opened = self.vocabulary.letters_of(bare)
        return full[: places[0]] if places else (), Letters(" " if opened.startswith(" ") else "")

    def _check_decoder(self, pieces: set[int]) -> None:
        """Outputs are shown letter by letter: what `decode` makes of a piece must not depend on those beside it."""
        letters = self.vocabulary.letters
        own = sorted(token for token in pieces.difference(self.vocabulary.fallback) if token < len(letters))
        read = {token: to_bytes(letters[token]).decode("utf-8", "replace") for token in own if is_plain(letters[token])}
        texts = {token: text for token, text in read.items() if "\ufffd" not in text}
        first = next(iter(texts), 0)
        begun = self.shown([first])
        if self.shown([first, *texts]) == begun + "".join(texts.values()):
            return
        wrong = next((token for token, text in texts.items() if self.shown([first, token]) != begun + text), first)
        decoder = "none" if self._prompt.decoder is None else type(self._prompt.decoder).__name__
        raise ValueError(
            f"a tokenizer whose decoder ({decoder}) does not join tokens as they are is not supported: "
            f"{begun!r} and {texts[wrong]!r} become {self.shown([first, wrong])!r}; "
            "use a byte-level or SentencePiece-like one"
        )

    def letters_of(self, ids: Iterable[int]) -> Letters:
        """The letters of a sequence of ids; IndexError for an id that is not in the vocabulary."""
        return self.vocabulary.letters_of(ids)

    def shown(self, ids: Sequence[int]) -> str:
        """The text of ids by the tokenizer's own decoder, with special tokens and clean-up."""
        return str(self._prompt.decode(list(ids), skip_special_tokens=False))

    def pieces(self, ids: Sequence[int]) -> tuple[str, ...]:
        """The tokens of ids as tokenizer.json spells them; empty where it has none."""
        return tuple(self._prompt.id_to_token(token) or "" for token in ids)

    def unknown(self, text: str) -> list[str]:
        """The parts of a prompt's text that its unknown token stands for."""
        found = self._read(self._prompt, text, special=False)
        tokens = zip(found.ids, found.offsets, strict=True)
        return [text[start:end] for token, (start, end) in tokens if token == self._unknown]

    def encode_prompt(self, text: str, special: bool = True, leave_out: bool = False) -> tuple[int, ...]:
        """The ids of a prompt, in which names of special tokens are understood.

        `special`: add the special tokens that every prompt begins with; a chat template writes them itself.
        `leave_out`: leave out ids beyond the model's row of logits. Raises ValueError: there is such an id, or the
        tokenizer cannot read the text.
        """
        ids, size = self._read(self._prompt, text, special).ids, self.vocabulary.size
        beyond = [token for token in ids if token >= size]
        if beyond and not leave_out:
            raise ValueError(
                f"the text has {self._prompt.id_to_token(beyond[0])!r}, which is id {beyond[0]} of the tokenizer, and "
                f"the model's rows have {size} ids: leave it out, or use the tokenizer that belongs to the model"
            )
        return tuple(token for token in ids if token < size) if beyond else tuple(ids)

    def _read(self, tokenizer: Tokenizer, text: str, special: bool) -> Encoding:
        with _faults("the tokenizer cannot read this text: "):  # perhaps it has not even an unknown token for it
            return tokenizer.encode(text, add_special_tokens=special)

    def prompt_letters(self, ids: Sequence[int]) -> Letters:
        """The letters of a prompt's ids, without those that this tokenizer puts before every prompt."""
        if self.begin and tuple(ids[: len(self.begin)]) == self.begin:
            ids = ids[len(self.begin) :]
        return Letters(self.letters_of(ids).removeprefix(self._prefix))

    def opening(self, ids: Sequence[int]) -> int:
        """How many letters of a prompt's ids this tokenizer has put before its text."""
        return len(self.letters_of(ids)) - len(self.prompt_letters(ids))

    def encode_prompt_letters(self, letters: Letters) -> tuple[int, ...]:
        """The ids of a prompt given as letters, of another vocabulary or cut at its start.

        This tokenizer's begin symbol and prefix space are added. Letters that the vocabulary cannot write are left out:
        a drafter's prompt need not be complete.
        """
        rest = letters.removeprefix(ControlRole.BEGIN_OF_SEQUENCE.letter)
        if self._prefix and rest and is_plain(Letters(rest[0])) and not rest.startswith(self._prefix):
            rest = self._prefix + rest
        return (*self.begin, *self.encode_continuation(Letters(rest), leave_out=True))

    def encode_continuation(self, letters: Letters, leave_out: bool = False) -> tuple[int, ...]:
        """The ids of letters in the middle of an output.

        No prefix space or special token is added, and nothing is cleaned up. Bytes that are not UTF-8 become
        single-byte tokens. Unless the tokenizer is `lossy`, the letters of the ids are those given.

        `letters`: any letters. `leave_out`: leave out what has no token here. Raises NotExpressible: a control symbol
        or a byte has no token here.
        """
        if len(letters) <= SHORT and letters.isascii() and not self._unwritable:  # nearly always
            return tuple(self._known(letters, leave_out))
        ids: list[int] = []
        for run, text in segments_of(letters, self._unwritable):
            if text is None:
                ids += self._one_by_one(run, leave_out)
            else:
                ids += self._known(text, leave_out) if len(text) <= SHORT else self._text(text, leave_out)
        return tuple(ids)

    def _one_by_one(self, letters: Letters, leave_out: bool) -> list[int]:
        found = [self.vocabulary.ids_of(Letters(letter)) for letter in letters]
        if not (leave_out or all(found)):
            raise NotExpressible(Letters("".join(one for one, ids in zip(letters, found, strict=True) if not ids)))
        return [ids[0] for ids in found if ids]

    def _text(self, text: str, leave_out: bool) -> tuple[int, ...]:
        try:
            encoding = self._read(self._continuation, text, special=False)
        except ValueError:
            return tuple(self._piecemeal(text, leave_out))
        if self._writes(encoding.ids, text):
            return tuple(encoding.ids)
        ids: list[int] = []
        done = 0
        for (start, end), tokens in _by_characters(encoding):
            ids += self._one_by_one(from_bytes(text[done:start].encode()), leave_out)
            ids += tokens if self._writes(tokens, text[start:end]) else self._piecemeal(text[start:end], leave_out)
            done = end
        return (*ids, *self._one_by_one(from_bytes(text[done:].encode()), leave_out))

    def _piecemeal(self, text: str, leave_out: bool) -> Sequence[int]:
        """A character byte by byte; of several each half by itself, so that they are not read as something else."""
        if len(text) == 1:
            return self._one_by_one(from_bytes(text.encode()), leave_out)
        half = len(text) // 2
        return self._text(text[:half], leave_out) + self._text(text[half:], leave_out)

    def _writes(self, ids: Sequence[int], text: str) -> bool:
        """Whether these ids have rows and the letters of the text; if lossy, rows and no control symbol."""
        if max(ids, default=0) >= self.vocabulary.size:
            return False
        letters = self.letters_of(ids)
        return is_plain(letters) if self.lossy else letters == from_bytes(text.encode())


def continuation_json(tokenizer_json: str, size: int) -> str:
    """The tokenizer.json that treats text as the middle of an output, for a model of so many ids.

    Without prefix space, special tokens, clean-up, truncation, padding or randomness; added tokens take no spaces.
    """
    whole: Part = json.loads(tokenizer_json)
    marked = any(part["type"] == "Metaspace" for part in components(whole.get("pre_tokenizer")))
    whole |= {"post_processor": None, "truncation": None, "padding": None}
    whole["normalizer"] = _without(whole.get("normalizer"), ("Prepend", "Strip"))
    # WhitespaceSplit before Metaspace throws away the very spaces that Metaspace would mark
    whole["pre_tokenizer"] = _without(whole.get("pre_tokenizer"), ("WhitespaceSplit",) if marked else ())
    for part in components(whole["pre_tokenizer"]):
        if part["type"] == "Metaspace":
            part["prepend_scheme"] = "never"
            part.pop("add_prefix_space", None)
        elif part["type"] == "ByteLevel":
            part["add_prefix_space"] = False
    whole["added_tokens"] = [added for added in whole["added_tokens"] or () if added["id"] < size]
    for added in whole["added_tokens"]:
        added |= {"lstrip": False, "rstrip": False}
    if "dropout" in whole["model"]:
        whole["model"]["dropout"] = None
    return json.dumps(whole, ensure_ascii=False)


def _without(part: Part | None, kinds: tuple[str, ...]) -> Part | None:
    if part is None or part["type"] in kinds:
        return None
    for key in NESTED:
        if key in part:
            kept = [_without(inner, kinds) for inner in part[key]]
            return {**part, key: [inner for inner in kept if inner is not None]}
    return part


def _by_characters(encoding: Encoding) -> Iterator[tuple[tuple[int, int], list[int]]]:
    """Tokens by the range of the text that they write, those that share a character together."""
    span, tokens = (0, 0), list[int]()
    for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
        if tokens and start >= span[1]:
            yield span, tokens
            tokens = []
        span = (span[0] if tokens else start, end)
        tokens = [*tokens, token]
    if tokens:
        yield span, tokens


# As much as there is up to a boundary: a control symbol on either side, the first blank of a run, or a letter after a
# single line break.
_TO_BOUNDARY = re.compile(
    r"(?s:.*)(?:(?<=[\u0100-\U0010ffff])|(?=[\u0100-\U0010ffff])|(?<=[^ \n\r\t])(?=[ \t])|(?<=[0-9A-Za-z])(?=[\n\r])"
    r"|(?<=[\n\r])(?<![ \n\r\t][\n\r])(?=[0-9A-Za-z]))"
)


_CONTROLS = re.compile("([\u0100-\U0010ffff]+)")


@cache
def _strange(unwritable: str) -> re.Pattern[str]:
    return re.compile(f"([\udc80-\udcff{re.escape(unwritable)}]+)")  # bytes that are not UTF-8 are decoded so


def segments_of(letters: Letters, unwritable: str = "") -> Iterator[tuple[Letters, str | None]]:
    """Cuts letters into runs that are tokenized by themselves, in order, none of them empty: with its text, or None,
    each run of control symbols, or of bytes to be written one by one, as they are not UTF-8, or characters in
    `unwritable`, whose tokens decode to others."""
    strange = _strange(unwritable)
    for place, run in enumerate(_CONTROLS.split(letters)):
        if place % 2:
            yield Letters(run), None
            continue
        for at, part in enumerate(strange.split(to_bytes(Letters(run)).decode(errors="surrogateescape"))):
            if part:
                yield from_bytes(part.encode(errors="surrogateescape")), None if at % 2 else part


class LetterDecoder:
    """Decodes letters to text while they arrive.

    The joined results of `feed` and a final `flush` are `to_bytes(letters).decode("utf-8", "replace")`: control symbols
    are left out, and an incomplete character is held back until it is complete or broken.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._holds = False  # an incomplete character

    def feed(self, letters: Letters) -> str:
        if letters.isascii() and not self._holds:  # nearly always
            return letters
        text = self._decoder.decode(to_bytes(letters))
        self._holds = bool(self.held)
        return text

    @property
    def held(self) -> Letters:
        """The bytes of an incomplete character that is held back."""
        return from_bytes(self._decoder.getstate()[0])

    def flush(self) -> str:
        """U+FFFD if an incomplete character is held back; the decoder can then be reused."""
        self._holds = False
        return self._decoder.decode(b"", final=True)


def last_word_boundary(letters: Letters, before: int, least: int = 0) -> int:
    """The latest word boundary at or before a letter offset; `least`, or the start, if there is none after that.

    A boundary is an offset where a run of blanks (space, tab, line break) begins, and either side of a control symbol.
    Many tokenizers join line breaks to punctuation around them: a letter after a single one begins another token.
    """
    least, last = max(0, least), min(before, len(letters))
    found = _TO_BOUNDARY.match(letters, least + 1, last + 1) if last > least else None
    return least if found is None else min(found.end(), last)  # the letter at `last` may be a control symbol

"""A model's vocabulary: the letters of each token id, as its tokenizer.json has them, and all tokens as a trie."""

import json
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np

from crossdraft.text.letters import AFTER_ALL, NAMELESS, ControlRole, Ids, Letters, Side, Spelling, from_bytes

# What a tokenizer.json says of its tokens' letters.

Part = dict[str, Any]  # one component as tokenizer.json has it; the format is another library's
SPACE_MARK = "▁"  # U+2581, how SentencePiece writes a space
BYTE_PIECES = {f"<0x{value:02X}>": value for value in range(256)}
NESTED = ("normalizers", "pretokenizers", "decoders", "processors")


class TokenizerNotSupported(ValueError):  # noqa: N818
    """Letters of this kind of tokenizer's tokens are not known; the text says why."""


@dataclass(frozen=True)
class Anatomy:
    """What a tokenizer.json consists of, as far as letters depend on it."""

    pieces: tuple[tuple[int, str], ...]  # the model's own vocabulary
    added: tuple[Part, ...]  # with an id, their content, and whether they are special
    unknown: int | None  # id that stands for what the model cannot write
    byte_level: bool  # pieces are written in the byte-level alphabet
    space_mark: bool  # `▁` in a piece is a space
    byte_fallback: bool  # pieces `<0x00>` to `<0xFF>` are bytes
    lossy: tuple[str, ...]  # names of the parts that change text before it is tokenized

    def is_byte_piece(self, piece: str) -> bool:
        return self.byte_fallback and piece in BYTE_PIECES

    def letters_of_piece(self, piece: str) -> Letters:
        """The letters that a piece of the model's vocabulary stands for."""
        if self.byte_level:
            if _ALPHABET.issuperset(piece):
                return Letters(piece.translate(BYTE_OF))
            return from_bytes(piece.encode())
        if self.is_byte_piece(piece):
            return Letters(chr(BYTE_PIECES[piece]))
        return from_bytes((piece.replace(SPACE_MARK, " ") if self.space_mark else piece).encode())


def components(part: Part | None) -> Iterator[Part]:
    """A part of tokenizer.json and everything nested in it, outermost first."""
    if part is None:
        return
    yield part
    for key in NESTED:
        for inner in part.get(key) or ():
            if isinstance(inner, dict):
                yield from components(inner)


def anatomy_of(tokenizer_json: str) -> Anatomy:
    """Reads a tokenizer.json. Raises TokenizerNotSupported: its tokens are not plain strings of letters."""
    whole: Part = json.loads(tokenizer_json)
    model: Part = whole["model"]
    _check(model)
    cutters, changers, undoers = (
        list(components(whole.get(name))) for name in ("pre_tokenizer", "normalizer", "decoder")
    )
    everything = [*cutters, *changers, *undoers]
    pieces, unknown = _pieces(model)
    return Anatomy(
        pieces=tuple(pieces.items()),
        added=tuple(whole["added_tokens"] or ()),
        unknown=unknown,
        byte_level=any(part["type"] == "ByteLevel" for part in everything),
        space_mark=any(_writes_space_mark(part) for part in everything),
        byte_fallback=bool(model.get("byte_fallback")) or any(part["type"] == "ByteFallback" for part in undoers),
        lossy=tuple(part["type"] for part in [*changers, *cutters] if _loses(part)),
    )


def _check(model: Part) -> None:
    kind = model.get("type", "BPE")  # without a type it is one of the three
    if kind not in ("BPE", "Unigram", "WordLevel"):
        raise TokenizerNotSupported(f"a {kind} tokenizer is not supported; use one with a BPE or Unigram model")
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name):
            raise TokenizerNotSupported(
                f"a tokenizer with {name} {model[name]!r} is not supported: its tokens are not plain text; "
                "use a byte-level or SentencePiece-like one"
            )


def _pieces(model: Part) -> tuple[dict[int, str], int | None]:
    """By id; and the id of the unknown one, if there is one."""
    vocabulary = model["vocab"]
    if isinstance(vocabulary, list):
        return {index: entry[0] for index, entry in enumerate(vocabulary)}, model.get("unk_id")
    return {index: piece for piece, index in vocabulary.items()}, vocabulary.get(model.get("unk_token"))


def _writes_space_mark(part: Part) -> bool:
    if part["type"] == "Metaspace":
        return True
    return bool(part["type"] == "Replace") and SPACE_MARK in (part["content"], part["pattern"].get("String"))


def _loses(part: Part) -> bool:
    """Whether two texts can become one in this part."""
    kind = part["type"]
    if kind == "Replace":
        return bool(part["pattern"].get("String") != " " or part["content"] != SPACE_MARK)
    if kind in ("Split", "Punctuation"):
        return str(part["behavior"]).lower() == "removed"
    return kind in _LOSSY


_LOSSY = {
    *("NFC", "NFD", "NFKC", "NFKD", "Nmt", "Lowercase", "Strip", "StripAccents", "Precompiled", "BertNormalizer"),
    *("Whitespace", "WhitespaceSplit", "BertPreTokenizer", "CharDelimiterSplit"),
}


def _byte_level_alphabet() -> dict[int, str]:
    """Code point of the alphabet's character -> the byte's letter.

    GPT-2's rule: printable Latin-1 stands for itself, the other bytes for U+0100 onwards, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [value for value in range(256) if value not in printable]
    return {value: chr(value) for value in printable} | {256 + place: chr(value) for place, value in enumerate(hidden)}


BYTE_OF = _byte_level_alphabet()
_ALPHABET = frozenset(map(chr, BYTE_OF))


# The vocabulary.


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The letters of every id of a model's row of logits.

    Several ids can have the same letters, such as the byte `<0x41>` and `A`. Their `rank` is their order by id, but
    tokens of a byte fallback come last, because a tokenizer writes them only if it has no other.
    """

    letters: tuple[Letters, ...]  # indexed by id; never an empty string
    controls: tuple[tuple[int, str], ...] = ()  # (id, role name) of the control symbols that have a role
    stops: frozenset[int] = frozenset()
    nameless: tuple[tuple[int, str], ...] = ()  # (id, content or "") of control symbols without a role
    fallback: frozenset[int] = frozenset()  # ids of byte-fallback tokens
    names: Mapping[int, str] = field(default_factory=dict)  # how the tokenizer writes its control symbols
    _ids: dict[Letters, tuple[int, ...]] = field(init=False, repr=False)
    _ranks: dict[int, int] = field(init=False, repr=False)  # only those above 0

    def __post_init__(self) -> None:
        grouped: dict[Letters, tuple[int, ...]] = {}
        usual = [token for token in range(len(self.letters)) if token not in self.fallback]
        for token in [*usual, *sorted(self.fallback)]:
            grouped[self.letters[token]] = (*grouped.get(self.letters[token], ()), token)
        ranks = {
            token: rank for tokens in grouped.values() if len(tokens) > 1 for rank, token in enumerate(tokens) if rank
        }
        object.__setattr__(self, "_ids", grouped)
        object.__setattr__(self, "_ranks", ranks)

    @staticmethod
    def build(
        tokenizer_json: str, size: int, controls: Sequence[tuple[int, str]], stops: Collection[int], side: Side
    ) -> "Vocabulary":
        """The vocabulary of a tokenizer.json, given as text.

        `size` is the length of the model's logits row: ids beyond the tokenizer's become control symbols, ids of the
        tokenizer at or above it are left out. `controls` have a `ControlRole`, by its name; `stops` end an output.

        Raises TokenizerNotSupported: its tokens are not plain strings of letters; ValueError: a control or stop id is
        not below `size`, a role name is unknown, or more than NAMELESS ids are neither text nor a control symbol with a
        role.
        """
        _check_ids(size, controls, stops)
        anatomy = anatomy_of(tokenizer_json)
        known = _plain_letters(anatomy)
        known.update((token, ControlRole[role].letter) for token, role in controls)
        _check_count(size, known)
        nameless = [token for token in range(size) if not known.get(token)]
        known.update((token, side.control(rank)) for rank, token in enumerate(nameless))
        contents = dict(anatomy.pieces) | {added["id"]: added["content"] for added in anatomy.added}
        bytes_only = {token for token, piece in anatomy.pieces if anatomy.is_byte_piece(piece) and token < size}
        return Vocabulary(
            letters=tuple(known[token] for token in range(size)),
            controls=tuple(sorted((int(token), role) for token, role in controls)),
            stops=frozenset(stops),
            nameless=tuple((token, contents.get(token, "")) for token in nameless),
            fallback=frozenset(bytes_only.difference(nameless, (token for token, _ in controls))),
            names={token: contents[token] for token in (*nameless, *dict(controls)) if token in contents},
        )

    @property
    def size(self) -> int:
        return len(self.letters)

    @cached_property
    def longest(self) -> int:
        return max(map(len, self.letters), default=0)

    @cached_property
    def trie(self) -> "Trie":
        """Its tokens by their letters; of a large one the first call takes tenths of a second."""
        return Trie(self)

    def ids_of(self, letters: Letters) -> tuple[int, ...]:
        """All ids with exactly these letters, by rank; empty if there is none."""
        return self._ids.get(letters, ())

    def rank(self, token: int) -> int:
        """Index of the id among the ids with the same letters."""
        return self._ranks.get(token, 0)

    def letters_of(self, ids: Iterable[int]) -> Letters:
        """The letters of a sequence of ids. Raises IndexError: an id is not below the vocabulary's size."""
        return Letters("".join(map(self.letters.__getitem__, ids)))


def _check_ids(size: int, controls: Sequence[tuple[int, str]], stops: Collection[int]) -> None:
    for token in [*dict(controls), *stops]:
        if not 0 <= token < size:
            what = f"control or stop id {token} is not an id of a vocabulary of {size}"
            raise ValueError(f"{what}; check the model's config")
    for token, role in controls:
        if role not in ControlRole.__members__:
            roles = ", ".join(ControlRole.__members__)
            raise ValueError(f"id {token} has the unknown role {role!r}; the roles are {roles}")


def _check_count(size: int, known: Mapping[int, Letters]) -> None:
    """Checked before any list of `size` items is made: `size` comes from a config that may be wrong."""
    nameless = size - sum(0 <= token < size and letters != "" for token, letters in known.items())
    if nameless > NAMELESS:
        raise ValueError(
            f"{nameless} of {size} ids have no text in tokenizer.json, and at most {NAMELESS} may; "
            "check the model's vocabulary_size, and that the tokenizer.json is this model's"
        )


def _plain_letters(anatomy: Anatomy) -> dict[int, Letters]:
    """Letters of all tokens that are text; special tokens and the unknown token are left out."""
    letters = {token: anatomy.letters_of_piece(piece) for token, piece in anatomy.pieces}
    for added in anatomy.added:
        if added["special"]:
            letters.pop(added["id"], None)
        else:  # byte-level tokenizers match it literally
            text = added["content"]
            letters[added["id"]] = from_bytes(text.encode()) if anatomy.byte_level else anatomy.letters_of_piece(text)
    if anatomy.unknown is not None:
        letters.pop(anatomy.unknown, None)
    return letters


def tokenizer_digest(tokenizer_json: str) -> str:
    """Hex digest of a tokenizer, by which files made for it (frequencies, affinity matrices) name it."""
    return blake2b(tokenizer_json.encode(), digest_size=16).hexdigest()


# A vocabulary as a trie: its tokens sorted by letters, so that all with a common prefix are adjacent.


class Trie:
    """All tokens of one vocabulary by their letters."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        letters = vocabulary.letters
        order = np.array(sorted(range(len(letters)), key=letters.__getitem__), dtype=np.int64)
        order.flags.writeable = False
        self.order = order  # shape (V,), ids sorted by letters
        self.spelling = Spelling.of(letters)
        self.vocabulary = vocabulary
        self._strings = [letters[token] for token in order.tolist()]

    @cached_property
    def places(self) -> Ids:
        """The place of each id in `order`, shape (V,)."""
        return np.argsort(self.order)

    def span(self, prefix: Letters) -> tuple[int, int]:
        """The range in `order`, its begin and end, of the tokens that start with `prefix`."""
        first = bisect_left(self._strings, prefix)
        return first, bisect_left(self._strings, Letters(prefix + AFTER_ALL), first)

    def longest(self, text: Letters) -> Letters | None:
        """The letters of the longest token that `text` starts with, or None."""
        for length in range(min(self.vocabulary.longest, len(text)), 0, -1):
            if self.vocabulary.ids_of(Letters(text[:length])):
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
        first, end = self.span(letters)
        return first < end and self._strings[end - 1] != letters

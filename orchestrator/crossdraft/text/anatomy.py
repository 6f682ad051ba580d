"""The parts of a tokenizer.json that decide what letters its tokens are."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from crossdraft.text.letters import Letters, from_bytes

Part = dict[str, Any]  # one component as tokenizer.json has it; the format is another library's

SPACE_MARK = "▁"  # U+2581, how SentencePiece writes a space
BYTE_PIECES = {f"<0x{value:02X}>": value for value in range(256)}
_NESTED = ("normalizers", "pretokenizers", "decoders", "processors")


class TokenizerNotSupported(ValueError):  # noqa: N818
    """Letters of this kind of tokenizer's tokens are not known; the text says why."""


@dataclass(frozen=True)
class AddedToken:
    """An entry of tokenizer.json's added_tokens."""

    id: int
    content: str
    special: bool


@dataclass(frozen=True)
class Anatomy:
    """What a tokenizer.json consists of, as far as letters depend on it."""

    pieces: tuple[tuple[int, str], ...]  # the model's own vocabulary
    added: tuple[AddedToken, ...]
    unknown: int | None  # id that stands for what the model cannot write
    byte_level: bool  # pieces are written in the byte-level alphabet
    space_mark: bool  # `▁` in a piece is a space
    byte_fallback: bool  # pieces `<0x00>` to `<0xFF>` are bytes
    lossy: tuple[str, ...]  # names of the parts that change text before it is tokenized
    splits: bool  # text is cut into words before the model sees it
    pairwise: bool  # BPE: a sequence is an encoding if every two neighbours are the encoding of their text

    def is_byte_piece(self, piece: str) -> bool:
        """Whether the piece is a byte of the byte fallback."""
        return self.byte_fallback and piece in BYTE_PIECES

    def letters_of_piece(self, piece: str) -> Letters:
        """The letters that a piece of the model's vocabulary stands for."""
        if self.byte_level:
            if _ALPHABET.issuperset(piece):
                return Letters(piece.translate(_BYTE_OF))
            return from_bytes(piece.encode())
        if self.is_byte_piece(piece):
            return Letters(chr(BYTE_PIECES[piece]))
        return from_bytes((piece.replace(SPACE_MARK, " ") if self.space_mark else piece).encode())

    def letters_of_added(self, content: str) -> Letters:
        """The letters of an added token that is ordinary text: byte-level tokenizers match it literally."""
        return from_bytes(content.encode()) if self.byte_level else self.letters_of_piece(content)


def components(part: Part | None) -> Iterator[Part]:
    """A part of tokenizer.json and everything nested in it, outermost first."""
    if part is None:
        return
    yield part
    for key in _NESTED:
        for inner in part.get(key) or ():
            if isinstance(inner, dict):
                yield from components(inner)


def anatomy_of(tokenizer_json: str) -> Anatomy:
    """Reads a tokenizer.json.

    Raises:
        TokenizerNotSupported: its tokens are not plain strings of letters.
    """
    whole: Part = json.loads(tokenizer_json)
    model: Part = whole["model"]
    _check(model)
    cutters = list(components(whole.get("pre_tokenizer")))
    changers = list(components(whole.get("normalizer")))
    undoers = list(components(whole.get("decoder")))
    everything = [*cutters, *changers, *undoers]
    pieces = _pieces(model)
    return Anatomy(
        pieces=tuple(pieces.items()),
        added=tuple(AddedToken(part["id"], part["content"], part["special"]) for part in whole["added_tokens"] or ()),
        unknown=_unknown(model, pieces),
        byte_level=any(part["type"] == "ByteLevel" for part in everything),
        space_mark=any(_writes_space_mark(part) for part in everything),
        byte_fallback=bool(model.get("byte_fallback")) or any(part["type"] == "ByteFallback" for part in undoers),
        lossy=tuple(part["type"] for part in [*changers, *cutters] if _loses(part)),
        splits=any(_cuts(part) for part in cutters if not (_on_space(part) and any(map(_writes_space_mark, changers)))),
        pairwise=_model_type(model) == "BPE" and not model.get("ignore_merges"),
    )


def _model_type(model: Part) -> str:
    if "type" in model:
        return str(model["type"])
    return "BPE" if "merges" in model else "Unigram" if isinstance(model["vocab"], list) else "WordLevel"


def _check(model: Part) -> None:
    kind = _model_type(model)
    if kind not in ("BPE", "Unigram", "WordLevel"):
        raise TokenizerNotSupported(f"a {kind} tokenizer is not supported; use one with a BPE or Unigram model")
    for field in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(field):
            raise TokenizerNotSupported(
                f"a tokenizer with {field} {model[field]!r} is not supported: its tokens are not plain text; "
                "use a byte-level or SentencePiece-like one"
            )


def _pieces(model: Part) -> dict[int, str]:
    vocabulary = model["vocab"]
    if isinstance(vocabulary, list):
        return {index: entry[0] for index, entry in enumerate(vocabulary)}
    return {index: piece for piece, index in vocabulary.items()}


def _unknown(model: Part, pieces: dict[int, str]) -> int | None:
    if isinstance(model["vocab"], list):
        return model.get("unk_id")
    name = model.get("unk_token")
    return next((index for index, piece in pieces.items() if piece == name), None)


def _writes_space_mark(part: Part) -> bool:
    if part["type"] == "Metaspace":
        return True
    return bool(part["type"] == "Replace") and SPACE_MARK in (part["content"], part["pattern"].get("String"))


def _loses(part: Part) -> bool:
    """Whether two texts can become one in this part."""
    kind = part["type"]
    if kind == "Replace":
        return bool(part["pattern"].get("String") != " " or part["content"] != SPACE_MARK)
    if kind in ("Whitespace", "WhitespaceSplit", "BertPreTokenizer", "CharDelimiterSplit"):
        return True
    if kind in ("Split", "Punctuation"):
        return str(part["behavior"]).lower() == "removed"
    return kind in _LOSSY


_LOSSY = frozenset(
    ("NFC", "NFD", "NFKC", "NFKD", "Nmt", "Lowercase", "Strip", "StripAccents", "Precompiled", "BertNormalizer")
)


def _cuts(part: Part) -> bool:
    if part["type"] == "Metaspace":
        return bool(part.get("split", True))
    if part["type"] == "ByteLevel":
        return bool(part.get("use_regex", True))
    return bool(part["type"] != "Sequence")


def _on_space(part: Part) -> bool:
    """A split at spaces, which finds none where the normalizer has replaced them."""
    return bool(part["type"] == "Split" and part["pattern"].get("String") == " ")


def _byte_level_alphabet() -> dict[int, str]:
    """Code point of the alphabet's character -> the byte's letter.

    GPT-2's rule: printable Latin-1 stands for itself, the other bytes for U+0100 onwards, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [value for value in range(256) if value not in printable]
    return {value: chr(value) for value in printable} | {256 + place: chr(value) for place, value in enumerate(hidden)}


_BYTE_OF = _byte_level_alphabet()
_ALPHABET = frozenset(map(chr, _BYTE_OF))


def continuation_json(tokenizer_json: str) -> str:
    """The tokenizer.json that treats text as the middle of an output.

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
    for added in whole["added_tokens"] or ():
        added |= {"lstrip": False, "rstrip": False}
    if "dropout" in whole["model"]:
        whole["model"]["dropout"] = None
    return json.dumps(whole, ensure_ascii=False)


def _without(part: Part | None, kinds: tuple[str, ...]) -> Part | None:
    if part is None or part["type"] in kinds:
        return None
    for key in _NESTED:
        if key in part:
            kept = [_without(inner, kinds) for inner in part[key]]
            return {**part, key: [inner for inner in kept if inner is not None]}
    return part

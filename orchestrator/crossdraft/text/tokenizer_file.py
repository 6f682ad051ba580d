"""The parts of a tokenizer.json that decide what letters its tokens are."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from tokenizers import Tokenizer

from crossdraft.text.chat_template import ChatTemplate
from crossdraft.text.letters import Letters, Role, from_bytes

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


# A tokenizer.json and the roles of its special tokens, from a folder or the Hugging Face hub.

END_OF_TURN_NAMES = frozenset(("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|eot|>"))
TEMPLATE_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_SENTENCEPIECE_FILES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
Find = Callable[[str], Path | None]  # file name -> where it is, None if there is no such file
Config = dict[str, Any]  # a JSON file of the model's, as it is


class TokenizerMissing(FileNotFoundError):  # noqa: N818
    """There is no tokenizer.json; the text says what to do."""


@dataclass(frozen=True)
class LoadedTokenizer:
    """What `Vocabulary.build` needs."""

    tokenizer_json: str
    controls: tuple[tuple[int, str], ...]  # (id, role name), by id
    stops: tuple[int, ...]  # ids that end an output, ascending
    vocabulary_size: int  # that config.json names, which the row's length is; else that of the tokenizer
    chat_template: ChatTemplate | None = None


def load_tokenizer_json(folder_or_hub_id: str) -> LoadedTokenizer:
    """Reads tokenizer.json, tokenizer_config.json, chat_template.jinja, generation_config.json and config.json.

    The end symbols are those of generation_config.json, else of config.json, else of tokenizer_config.json. A
    single one is END_OF_SEQUENCE; of several, those with a usual end-of-turn name are END_OF_TURN.

    Raises:
        TokenizerMissing: no tokenizer.json there, or the hub cannot be asked.
        ValueError: one of the files is damaged.
    """
    find = _in_folder(Path(folder_or_hub_id)) if Path(folder_or_hub_id).is_dir() else _on_hub(folder_or_hub_id)
    path = find("tokenizer.json")
    if path is None:
        raise TokenizerMissing(_missing(folder_or_hub_id, any(find(name) for name in _SENTENCEPIECE_FILES)))
    if "model" not in _read(path):
        raise ValueError(f"{path} is not a tokenizer: it has no model; write it again with save_pretrained")
    tokenizer_json = path.read_text(encoding="utf-8")
    tokenizer = _parsed(tokenizer_json, path)
    settings = _read(find("tokenizer_config.json"))
    config = _read(find("config.json"))
    ends = _ends(tokenizer, [_read(find("generation_config.json")), config], settings)
    begin = _id_of(tokenizer, settings.get("bos_token"))
    roles = dict.fromkeys([] if begin is None else [begin], Role.BEGIN_OF_SEQUENCE)
    roles |= {token: _end_role(tokenizer, token, len(ends)) for token in ends}
    controls = tuple((token, roles[token].name) for token in sorted(roles))
    chat_template = _chat_template(find("chat_template.jinja"), settings)
    return LoadedTokenizer(tokenizer_json, controls, tuple(sorted(ends)), _size(config, tokenizer), chat_template)


def _missing(source: str, sentencepiece: bool) -> str:
    if sentencepiece:
        return (
            f"{source} has a SentencePiece model but no tokenizer.json; convert it once: load it with transformers' "
            "AutoTokenizer and save_pretrained it into the model's folder"
        )
    return f"{source} has no tokenizer.json; give the folder or hub id of a model with a fast tokenizer"


def _in_folder(folder: Path) -> Find:
    return lambda name: path if (path := folder / name).is_file() else None


def _on_hub(hub_id: str) -> Find:
    def find(name: str) -> Path | None:
        try:
            return Path(hf_hub_download(hub_id, name))
        except LocalEntryNotFoundError as error:
            raise TokenizerMissing(
                f"{hub_id} is neither a folder nor in the local cache, and the hub cannot be reached; give a folder"
            ) from error
        except EntryNotFoundError:
            return None
        except HFValidationError as error:
            raise TokenizerMissing(f"{hub_id} is neither a folder nor a hub id such as owner/name") from error
        except HfHubHTTPError as error:
            raise TokenizerMissing(f"the hub gave no {name} of {hub_id}: {error}") from error

    return find


def _parsed(tokenizer_json: str, path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_str(tokenizer_json)
    except Exception as error:  # what the library raises for a damaged file is a bare Exception; it is passed on, named
        raise ValueError(f"{path} is not a tokenizer: {error}; write it again with save_pretrained") from error


def _read(path: Path | None) -> Config:
    if path is None:
        return {}
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # neither JSON nor UTF-8
        raise ValueError(f"{path} is damaged, it is not JSON: {error}") from error
    if not isinstance(read, dict):
        raise ValueError(f"{path} is damaged, it is not a JSON object")
    return read


def _chat_template(path: Path | None, settings: Config) -> ChatTemplate | None:
    """Its file's, else that of tokenizer_config.json; of several the one called default."""
    source = settings.get("chat_template")
    if path is not None:
        source = path.read_text(encoding="utf-8")
    if isinstance(source, list):
        source = next((one.get("template") for one in source if one.get("name") == "default"), None)
    named = ((name, _content(settings[name])) for name in TEMPLATE_TOKENS if settings.get(name))
    return ChatTemplate(source, tuple(sorted(named))) if source else None


def _size(config: Config, tokenizer: Tokenizer) -> int:
    # A model that also sees or hears keeps the settings of its text part apart.
    named = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    return named or 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())


def _ends(tokenizer: Tokenizer, configs: list[Config], settings: Config) -> list[int]:
    named = _id_of(tokenizer, settings.get("eos_token"))
    for config in configs:
        ids = config.get("eos_token_id")
        if ids is not None:
            return ids if isinstance(ids, list) else [ids]
    return [] if named is None else [named]


def _id_of(tokenizer: Tokenizer, token: str | Config | None) -> int | None:
    """The id of a token that a config names, if it names one."""
    return None if token is None else tokenizer.token_to_id(_content(token))


def _content(token: str | Config) -> str:
    """Of a token that is named by its content, or described with it."""
    return str(token["content"]) if isinstance(token, dict) else token


def _end_role(tokenizer: Tokenizer, token: int, ends: int) -> Role:
    ends_turn = ends > 1 and tokenizer.id_to_token(token) in END_OF_TURN_NAMES
    return Role.END_OF_TURN if ends_turn else Role.END_OF_SEQUENCE

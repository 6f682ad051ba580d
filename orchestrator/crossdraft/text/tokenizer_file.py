"""A tokenizer.json and the roles of its special tokens, from a folder, the Hugging Face hub, or a file by itself."""

import base64
import itertools
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from httpx2 import TransportError
from huggingface_hub import errors, get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache
from tokenizers import Tokenizer

from crossdraft.text.chat_template import ChatTemplate
from crossdraft.text.letters import ControlRole, Side
from crossdraft.text.tokenization import Tokenization, read_tokenizer
from crossdraft.text.vocabulary import BYTE_OF, Vocabulary

END_OF_TURN_NAMES = frozenset(("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|eot|>"))
OWN, NEUTRAL = "auto", "vllm"  # whose sampling settings are a model's defaults, as of vLLM's --generation-config
TEMPLATE_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
RANKS = ".tiktoken"  # the end of the name of a file of ranks
# How text is cut before it is merged, which a file of ranks does not say: as in tiktoken's cl100k and Llama 3.
CUTS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
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
    generation: Config = field(default_factory=dict)  # generation_config.json, if its sampling settings count

    def tokenization(self, side: Side, size: int | None = None) -> Tokenization:
        """For a model of `size` ids, by default of `vocabulary_size`; raises ValueError if it cannot be used."""
        size = self.vocabulary_size if size is None else size
        vocabulary = Vocabulary.build(self.tokenizer_json, size, self.controls, self.stops, side)
        return Tokenization(self.tokenizer_json, vocabulary)


def load_tokenizer_json(
    folder_or_hub_id: str, template: Path | None = None, generation_config: str = NEUTRAL
) -> LoadedTokenizer:
    """Reads tokenizer.json, tokenizer_config.json, chat_template.jinja, generation_config.json and config.json.

    `generation_config` is OWN, NEUTRAL, or the folder or hub id whose generation_config.json is read in place of the
    model's own.

    A file is a tokenizer by itself, without the others: a tokenizer.json of any name, or the ranks of tiktoken.

    The end symbols are those of all these files that the model has rows for. A single one is END_OF_SEQUENCE; of
    several, those with a usual end-of-turn name are END_OF_TURN. The chat template is `template`, if it is given.
    Raises TokenizerMissing: no tokenizer.json there, or the hub cannot be asked; ValueError: one of the files is
    damaged.
    """
    find = files_of(folder_or_hub_id)
    elsewhere = None if generation_config in (OWN, NEUTRAL) else files_of(generation_config)("generation_config.json")
    if elsewhere is None and generation_config not in (OWN, NEUTRAL):
        raise ValueError(f"{generation_config} has no generation_config.json: name another folder, {OWN} or {NEUTRAL}")
    tokenizer_json, tokenizer = _tokenizer(folder_or_hub_id, find)
    settings, config = _read(find("tokenizer_config.json")), _read(find("config.json"))
    generation = _read(elsewhere or find("generation_config.json"))
    text_part: Config = config.get("text_config") or {}  # a model that also sees or hears keeps these settings apart
    size = config.get("vocab_size") or text_part.get("vocab_size")
    size = size or 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())
    begins = _rows([_id_of(tokenizer, settings.get("bos_token"))], size)
    ends = _ends(tokenizer, (generation, config, text_part), settings, size)
    turns = {token for token in ends if len(ends) > 1 and tokenizer.id_to_token(token) in END_OF_TURN_NAMES}
    roles = dict.fromkeys(begins, ControlRole.BEGIN_OF_SEQUENCE)
    roles |= {token: ControlRole.END_OF_TURN if token in turns else ControlRole.END_OF_SEQUENCE for token in ends}
    controls = tuple((token, roles[token].name) for token in sorted(roles))
    chat_template = _chat_template(template or find("chat_template.jinja"), settings)
    settings_count = {} if generation_config == NEUTRAL else generation
    return LoadedTokenizer(tokenizer_json, controls, tuple(sorted(ends)), size, chat_template, settings_count)


def _tokenizer(source: str, find: Find) -> tuple[str, Tokenizer]:
    """The text of tokenizer.json, and what the library makes of it."""
    path = find("tokenizer.json")
    if path is None:
        what = f"{source} has no tokenizer.json; give the folder or hub id of a model with a fast tokenizer"
        if any(map(find, _SENTENCEPIECE_FILES)):
            what = f"{source} has a SentencePiece model but no tokenizer.json; convert it once: load it with "
            what += "transformers' AutoTokenizer and save_pretrained it into the model's folder"
        raise TokenizerMissing(what)
    if path.suffix != RANKS and "model" not in _read(path):
        raise ValueError(f"{path} is not a tokenizer: it has no model; write it again with save_pretrained")
    tokenizer_json = _of_ranks(path) if path.suffix == RANKS else path.read_text(encoding="utf-8")
    try:
        return tokenizer_json, read_tokenizer(tokenizer_json)
    except ValueError as error:
        raise ValueError(f"{path} is not a tokenizer: {error}; write it again with save_pretrained") from error


def files_of(folder_or_hub_id: str) -> Find:
    """What finds files of a model; it raises TokenizerMissing if it is no folder, and the hub does not know it."""
    folder, hub_id = Path(folder_or_hub_id), folder_or_hub_id
    if folder.is_file():
        return {"tokenizer.json": folder}.get
    if folder.is_dir():
        return lambda name: path if (path := folder / name).is_file() else None

    def cached(name: str) -> bool:
        return isinstance(try_to_load_from_cache(hub_id, name), str)

    def find(name: str) -> Path | None:
        try:
            if not cached(name):  # without a network the download would ask again and again, for half a minute
                with suppress(errors.HfHubHTTPError):
                    get_hf_file_metadata(hf_hub_url(hub_id, name))
            return Path(hf_hub_download(hub_id, name))
        except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, TransportError) as error:
            if cached("config.json"):
                return None  # the model is there, without such a file
            what = "is neither a folder nor in the local cache, and the hub cannot be reached"
            raise TokenizerMissing(f"{hub_id} {what}; give a folder, or mend the network") from error
        except errors.EntryNotFoundError:
            return None
        except errors.HFValidationError as error:
            raise TokenizerMissing(f"{hub_id} is neither a folder nor a hub id such as owner/name") from error
        except errors.HfHubHTTPError as error:
            raise TokenizerMissing(f"the hub gave no {name} of {hub_id}: {error}") from error

    return find


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
        source = next((named.get("template") for named in source if named.get("name") == "default"), None)
    named = ((name, _content(settings[name])) for name in TEMPLATE_TOKENS if settings.get(name))
    return ChatTemplate(source, tuple(sorted(named))) if source else None


def _ends(tokenizer: Tokenizer, configs: Sequence[Config], settings: Config, size: int) -> list[int]:
    """Those that any file names. Beside others an id that is text is none: it is the default of an architecture."""
    found: list[int] = []
    added = tokenizer.get_added_tokens_decoder()
    for config in configs:
        found += [token for token in _rows(config.get("eos_token_id"), size) if not found or token in added]
    return list(dict.fromkeys(found + _rows([_id_of(tokenizer, settings.get("eos_token"))], size)))


def _rows(ids: object, size: int) -> list[int]:
    """Those of an id, or of a list of them, that the model has rows for."""
    return [token for token in (ids if isinstance(ids, list) else [ids]) if type(token) is int and 0 <= token < size]


def _id_of(tokenizer: Tokenizer, token: str | Config | None) -> int | None:
    return None if token is None else tokenizer.token_to_id(_content(token))


def _content(token: str | Config) -> str:
    """Of a token that is named by its content, or described with it."""
    return str(token["content"]) if isinstance(token, dict) else token


# Ranks: a line for each token, its bytes in base64 and its id. The pair of neighbours is merged first whose union has
# the smallest.


def _of_ranks(path: Path) -> str:
    """A tokenizer.json without special tokens; raises ValueError."""
    try:
        lines = (line.split() for line in path.read_text(encoding="ascii").splitlines() if line)
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    except ValueError as error:
        raise ValueError(f"{path} is damaged: a line of ranks is a token in base64 and a number ({error})") from error
    if len(missing := {bytes([byte]) for byte in range(256)} - set(ranks)):
        raise ValueError(f"{path} is damaged: it has no token for {len(missing)} of the 256 bytes")
    spelled = {ord(letter): chr(point) for point, letter in BYTE_OF.items()}
    pieces = {token: "".join(spelled[byte] for byte in token) for token in ranks}
    halves = (_halves(token, ranks) for token in sorted(ranks, key=ranks.__getitem__) if len(token) > 1)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    cuts = {"type": "Split", "pattern": {"Regex": CUTS}, "behavior": "Isolated", "invert": False}
    model = {
        "type": "BPE",
        "vocab": {pieces[token]: rank for token, rank in ranks.items()},
        "merges": [[pieces[half] for half in both] for both in halves if len(both) == 2],
    }
    whole = {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [cuts, byte_level]}, "decoder": byte_level}
    return json.dumps({"version": "1.0", "added_tokens": [], **whole, "model": model})


def _halves(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """The two that a token is merged of; more, if tokens of smaller rank do not make it."""
    parts = [token[place : place + 1] for place in range(len(token))]
    while len(parts) > 2:
        unions = [ranks.get(part + other, len(ranks)) for part, other in itertools.pairwise(parts)]
        if (least := min(unions)) >= ranks[token]:
            break
        place = unions.index(least)
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return parts

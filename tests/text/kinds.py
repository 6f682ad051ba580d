"""Small tokenizers of every kind that is in use, trained on the spot."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from math import log
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from crossdraft.text.affinity import Columns, Matrix, Weights
from crossdraft.text.letters import Side
from crossdraft.text.pairs import Pair
from crossdraft.text.tokenization import Tokenization
from crossdraft.text.vocabulary import Vocabulary
from crossdraft.types.messages import Description

LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_WORDS = LLAMA3_WORDS.replace("{1,3}", "")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIX}|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK_WORDS = (  # one after another
    r"\p{N}{1,3}",
    r"[一-龥\u3040-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"""
    r""" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
)
BYTE_PIECES = [f"<0x{value:02X}>" for value in range(256)]
PADDING = 3  # ids of the logits row beyond the tokenizer's
TOOL = "<tool_call>"  # an added token that is ordinary text
CORPUS = [
    "The quick brown fox doesn't jump over the lazy dog, and the dog wouldn't mind it: it's asleep.",
    "def tokenize(text: str) -> list[int]:\n    return [int(part) for part in text.split()]\n\n\n",
    "    for index in range(1000, 20000):\n        print(f'{index:>8}  {index ** 2}')  # squares\n",
    "Größe, Übermut, naïveté, façade, señor; 你好世界。我们在说中文。 Привет, мир! こんにちは 🦄🚀",
    "A thousand and one nights, 1001 nights, in the end there was nothing there, then there was the other.",
    "You're here, they're there, we're\n \nwhere you're,\n \nthey're\n \nwhere we're.\n \n",
] * 4
# The 70 most frequent ones, in a fixed order: left to itself the trainer numbers them anew in each run.
CHARACTERS = sorted(
    character for character, _ in Counter(sorted("▁" + "".join(CORPUS).replace(" ", "▁"))).most_common(70)
)
Made = tuple[Tokenizer, str, str]  # and what begins and ends a text
MARKS = "<s>", "</s>"


@dataclass(frozen=True)
class Kind:
    """A tokenizer with its letters; the first special token has a role, the second none."""

    name: str
    json: str
    begin: str
    end: str
    nameless: str  # content of a special token without a role

    @property
    def size(self) -> int:
        return Tokenizer.from_str(self.json).get_vocab_size() + PADDING

    def id_of(self, content: str) -> int:
        found = Tokenizer.from_str(self.json).token_to_id(content)
        assert found is not None, content
        return found

    @property
    def controls(self) -> tuple[tuple[int, str], ...]:
        """A symbol that begins and ends a text is an end."""
        named = {self.id_of(self.begin): "BEGIN_OF_SEQUENCE"} | {self.id_of(self.end): "END_OF_SEQUENCE"}
        return tuple(named.items())

    def described(self, **changes: Any) -> Description:
        """As a service would describe it."""
        known = Description(self.name, self.json, self.controls, (), self.size, 128, self.name)
        return replace(known, **changes)

    @cache  # noqa: B019 - kinds live as long as the tests
    def vocabulary(self, side: Side = Side.TARGET) -> Vocabulary:
        return Vocabulary.build(self.json, self.size, self.controls, [self.id_of(self.end)], side)

    @cache  # noqa: B019
    def tokenization(self, side: Side = Side.TARGET) -> Tokenization:
        return Tokenization(self.json, self.vocabulary(side))


def _finished(name: str, tokenizer: Tokenizer, begin: str, end: str) -> Kind:
    nameless = "<|fill_in|>"
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in (begin, end, nameless)])
    tokenizer.add_tokens([AddedToken(TOOL, special=False, normalized=False), AddedToken("naïve", special=False)])
    return Kind(name, tokenizer.to_str(), begin, end, nameless)


def _begins(tokenizer: Tokenizer, begin: str) -> None:
    symbols = [(begin, tokenizer.token_to_id(begin))]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{begin} $A", special_tokens=symbols)


def _byte_level(before: pre_tokenizers.PreTokenizer, *special: str, size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = before
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    settings = {"vocab_size": size, "initial_alphabet": alphabet, "special_tokens": list(special)}
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(**settings, show_progress=False))
    return tokenizer


def _words(prefix: bool) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=prefix)


def _split(*patterns: str) -> pre_tokenizers.PreTokenizer:
    words = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def llama3() -> Made:
    tokenizer = _byte_level(_split(LLAMA3_WORDS), "<|begin_of_text|>", size=500)
    tokenizer.model.ignore_merges = True
    _begins(tokenizer, "<|begin_of_text|>")
    return tokenizer, "<|begin_of_text|>", "<|end_of_text|>"


def o200k() -> Made:
    """As gpt-oss has it: tiktoken's words are looked up before they are merged."""
    tokenizer = _byte_level(_split(O200K_WORDS), size=520)
    tokenizer.model.ignore_merges = True
    return tokenizer, "<|startoftext|>", "<|return|>"


def deepseek() -> Made:
    """Its names of special tokens have a `▁` that is no space, and a wide bar."""
    begin, end = (f"<\uff5c{what}▁of▁sentence\uff5c>" for what in ("begin", "end"))
    tokenizer = _byte_level(_split(*DEEPSEEK_WORDS), begin, size=490)
    _begins(tokenizer, begin)
    return tokenizer, begin, end


def neox() -> Made:
    """Added tokens of ordinary text are runs of blanks, and special ones take the blanks beside them."""
    tokenizer = _byte_level(_words(False), size=430)
    tokenizer.add_tokens([AddedToken(" " * length, special=False) for length in (2, 3, 4, 8)])
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True, rstrip=True)])
    tokenizer.add_tokens([AddedToken("<think>", special=False, lstrip=True, rstrip=True, normalized=False)])
    return tokenizer, "<|endoftext|>", "<|padding|>"


def _trained_sentencepiece(size: int) -> Any:
    """A BPE model over `▁` words with byte pieces, merging across nothing but words."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"▁+(?=▁)|▁?[^▁\n]+|▁|\n+"), behavior="isolated")
    settings = {"vocab_size": size, "initial_alphabet": CHARACTERS, "limit_alphabet": len(CHARACTERS)}
    settings |= {"special_tokens": ["<unk>", *MARKS, *BYTE_PIECES], "show_progress": False}
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(**settings))
    return json.loads(tokenizer.to_str())["model"]


def _sentencepiece(normalizer: normalizers.Normalizer, before: pre_tokenizers.PreTokenizer | None) -> Tokenizer:
    trained = _trained_sentencepiece(620)
    merges = [(left, right) for left, right in trained["merges"]]
    tokenizer = Tokenizer(models.BPE(trained["vocab"], merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizer
    if before is not None:
        tokenizer.pre_tokenizer = before
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken("<unk>", special=True, normalized=False)])
    _begins(tokenizer, "<s>")
    return tokenizer


def gemma() -> Made:
    tokenizer = _sentencepiece(normalizers.Replace(" ", "▁"), pre_tokenizers.Split(" ", "merged_with_previous"))
    tokenizer.add_tokens([AddedToken("▁▁", special=False, normalized=False), AddedToken("\n\n", special=False)])
    return tokenizer, *MARKS


def _metaspace(scheme: str) -> Made:
    """As transformers converts SentencePiece's BPE: whole texts, without a normalizer."""
    before = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    tokenizer = _sentencepiece(normalizers.Sequence([]), before)
    tokenizer.normalizer = None
    tokenizer.add_special_tokens([AddedToken("<|user|>", rstrip=True, normalized=False)])
    return tokenizer, *MARKS


def lowercase() -> Made:
    """Not injective: NFKC, then lowercase."""
    steps = [normalizers.NFKC(), normalizers.Lowercase(), normalizers.Replace(" ", "▁")]
    return _sentencepiece(normalizers.Sequence(steps), None), *MARKS


def composed() -> Made:
    """Byte-level with NFC, as Qwen's."""
    tokenizer = _byte_level(_split(QWEN_WORDS), size=420)
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer, "<|im_start|>", "<|im_end|>"


def _unigram(byte_fallback: bool, scheme: str = "always") -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    settings = {"vocab_size": 300, "special_tokens": ["<unk>", *MARKS], "unk_token": "<unk>"}
    tokenizer.train_from_iterator(CORPUS, trainers.UnigramTrainer(**settings, show_progress=False))
    whole = [piece for piece, _ in json.loads(tokenizer.to_str())["model"]["vocab"]]
    trained = [piece for piece in whole if "\n" not in piece]  # SentencePiece trains on lines
    # The trainer's own scores, and with them the order, differ a little from run to run; its pieces do not.
    text = "▁" + "".join(CORPUS).replace(" ", "▁")
    scored = [(piece, log(max(1, text.count(piece)) / len(text))) for piece in sorted(trained[3:])]
    pieces = [*((piece, 0.0) for piece in trained[:3]), *sorted(scored, key=lambda one: -one[1])]
    if byte_fallback:
        pieces[3:3] = [(piece, 0.0) for piece in BYTE_PIECES]
    tokenizer.model = models.Unigram(pieces, unk_id=0, byte_fallback=byte_fallback)
    tokenizer.decoder = decoders.Metaspace()
    _begins(tokenizer, "<s>")
    return tokenizer


def t5() -> Made:
    """Runs of blanks become one, and compatible characters one of them."""
    tokenizer = _unigram(byte_fallback=True)
    steps = [normalizers.Nmt(), normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    return tokenizer, *MARKS


SPACES = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
INJECTIVE: dict[str, Callable[[], Made]] = {
    "gpt2": lambda: (_byte_level(_words(False), size=450), "<|endoftext|>", "<|im_end|>"),
    "prefixed_gpt2": lambda: (_byte_level(_words(True), size=400), *MARKS),  # as some RoBERTa-like tokenizers are
    "llama3": llama3,
    "qwen": lambda: (_byte_level(_split(QWEN_WORDS), size=480), "<|im_start|>", "<|im_end|>"),
    "o200k": o200k,
    "deepseek": deepseek,
    "neox": neox,
    "llama2": lambda: (_sentencepiece(SPACES, None), *MARKS),
    "gemma": gemma,
    "mistral": lambda: _metaspace("first"),
    "legacy_mistral": lambda: _metaspace("always"),
    "unprefixed": lambda: _metaspace("never"),
    "unigram": lambda: (_unigram(byte_fallback=True), *MARKS),
    "unprefixed_unigram": lambda: (_unigram(byte_fallback=True, scheme="never"), *MARKS),
}
LOSSY: dict[str, Callable[[], Made]] = {"lowercase": lowercase, "composed": composed, "t5": t5}
# Without byte fallback: what is not in it cannot be written.
ALL = {**INJECTIVE, **LOSSY, "small_unigram": lambda: (_unigram(byte_fallback=False), *MARKS)}


@cache
def kind(name: str) -> Kind:
    """The kind of that name, trained once."""
    return _finished(name, *ALL[name]())


def identity(pair: Pair) -> Matrix:
    """The affinity matrix with which `rdk` is `tli`."""
    shared = pair.shared_drafter_ids
    targets = pair.to_target_ids(shared).astype(np.int32)
    return Matrix(shared, np.arange(len(shared) + 1, dtype=np.int64), targets, np.ones(len(shared), np.float32))


def affinity_row(matrix: Matrix, drafted: int) -> tuple[Columns, Weights]:
    """Target ids and weights of a draft token's row."""
    (place,) = np.flatnonzero(matrix.drafter_ids == drafted)
    part = slice(int(matrix.starts[place]), int(matrix.starts[place + 1]))
    return matrix.target_ids[part], matrix.weights[part]


CHANGED = (  # parts with which the library panics: when it reads the file, and when it reads a text
    {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
)
PANICS = [json.dumps(json.loads(kind("gpt2").json) | changed) for changed in CHANGED]

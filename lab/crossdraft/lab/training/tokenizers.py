"""The four tokenizers: byte-level BPE (two sizes, two split patterns), SentencePiece-like BPE, bytes."""

import json
from collections import Counter
from collections.abc import Callable, Iterable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SENTENCEPIECE_WORDS = r"▁+(?=▁)|▁?[\p{L}_]+|▁?\p{N}|▁?[^▁\n\p{L}\p{N}_]+|▁|\n+"
END_OF_TEXT = "<|endoftext|>"


def _special(*contents: str) -> list[AddedToken]:
    return [AddedToken(content, special=True, normalized=False) for content in contents]


def _byte_level(texts: Iterable[str], size: int, before: pre_tokenizers.PreTokenizer) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = before
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, special_tokens=_special(END_OF_TEXT), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT)


def byte_level(texts: Iterable[str], size: int) -> PreTrainedTokenizerFast:
    split = pre_tokenizers.Split(Regex(LLAMA3_PATTERN), behavior="isolated")
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return _byte_level(texts, size, pre_tokenizers.Sequence([split, bytes_only]))


def byte_level_small(texts: Iterable[str], size: int) -> PreTrainedTokenizerFast:
    return _byte_level(texts, size, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True))


def single_bytes(texts: Iterable[str], size: int) -> PreTrainedTokenizerFast:
    """The 256 bytes and an end of text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(_special(END_OF_TEXT))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT)


def sentencepiece(texts: Iterable[str], size: int) -> PreTrainedTokenizerFast:
    """SentencePiece-like BPE as Llama-2 has it: prepended space, `▁`, byte fallback."""
    fallback = [f"<0x{value:02X}>" for value in range(256)]
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Split(Regex(SENTENCEPIECE_WORDS), behavior="isolated")
    known = list(texts)
    alphabet = _most_frequent_characters(known, 160)
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=2,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        special_tokens=["<unk>", "<s>", "</s>", *fallback],
        show_progress=False,
    )
    trained.train_from_iterator(known, trainer)
    tokenizer = Tokenizer(_with_byte_fallback(trained))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(_special("<unk>", "<s>", "</s>"))
    begin = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", begin)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def _most_frequent_characters(texts: list[str], count: int) -> list[str]:
    """In a fixed order: left to itself the trainer numbers them anew in each run, and merges differ."""
    seen = Counter(character for text in texts for character in text.replace(" ", "▁"))
    return sorted(character for character, _ in sorted(seen.items(), key=lambda item: (-item[1], item[0]))[:count])


def _with_byte_fallback(trained: Tokenizer) -> models.BPE:
    described = json.loads(trained.to_str())["model"]
    merges = [(left, right) for left, right in described["merges"]]
    return models.BPE(described["vocab"], merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)


BUILDERS: dict[str, Callable[[Iterable[str], int], PreTrainedTokenizerFast]] = {
    "byte-level": byte_level,
    "byte-level-small": byte_level_small,
    "sentencepiece": sentencepiece,
    "bytes": single_bytes,
}

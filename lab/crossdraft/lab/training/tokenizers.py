"""The tokenizers that are made: byte-level BPE with Llama 3's pattern, and bytes. Models that begin with a bundled one
(`Recipe.begins_with`) keep its tokenizer: how those of drafters A and B were made is in the history."""

from collections.abc import Callable, Iterable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
END_OF_TEXT = "<|endoftext|>"
SPECIAL = AddedToken(END_OF_TEXT, special=True, normalized=False)
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
BYTES_ONLY = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def byte_level(texts: Iterable[str], size: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(LLAMA3_PATTERN), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, BYTES_ONLY])
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=ALPHABET, special_tokens=[SPECIAL], show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _finished(tokenizer)


def single_bytes(texts: Iterable[str], size: int) -> PreTrainedTokenizerFast:
    """The 256 bytes and an end of text."""
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(ALPHABET)}, merges=[]))
    tokenizer.pre_tokenizer = BYTES_ONLY
    tokenizer.add_special_tokens([SPECIAL])
    return _finished(tokenizer)


def _finished(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT)


BUILDERS: dict[str, Callable[[Iterable[str], int], PreTrainedTokenizerFast]] = {
    "byte-level": byte_level,
    "bytes": single_bytes,
}

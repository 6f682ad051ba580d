"""A model made for measurements, which costs next to nothing."""

from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from crossdraft.engine.loader import load_model


def write_free(folder: Path) -> None:
    """Writes a model that costs next to nothing: one layer of width 64 with random weights, over bytes.

    Its logits are far apart, so that it agrees with itself under a little noise. It samples printable ASCII only: its
    text is never cut inside of a character, with which a drafter could not go on.

    Raises:
        OSError: the folder cannot be written.
    """
    loaded = load_model("bundled:drafter-c", "float32")
    size = loaded.description.vocabulary_size
    texts = Tokenizer.from_str(loaded.description.tokenizer_json).decode_batch([[place] for place in range(size)])
    printable = [place for place, text in enumerate(texts) if text and text.isprintable() and text.isascii()]
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=()), torch.no_grad():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        # The first hidden dimension is nearly the same everywhere, and counts against what is not to be sampled.
        model.model.embed_tokens.weight[:, 0] = 0.2
        model.lm_head.weight.mul_(22)
        model.lm_head.weight[:, 0] = -10.0
        model.lm_head.weight[printable, 0] = 0.0
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(loaded.description.tokenizer_json, encoding="utf-8")

"""Models made for measurements: with a longer context than was trained, or one that costs next to nothing."""

import json
import shutil
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from crossdraft.engine.loader import load_model
from crossdraft.engine.names import INFLATED_PREFIX, ModelLoadError, source_of

CONFIGURATION = "config.json"
CONTEXT = "max_position_embeddings"
KEPT = ("*.json", "*.safetensors", "*.jinja")


def lengthened(name: str, context: int, folder: Path) -> str:
    """The name of the same model with a context of at least `context` tokens: its own, or a copy in `folder`.

    Its text after the trained context means little; rotary positions are defined for any length.

    Raises:
        ModelLoadError: there is no such model, or its positions are learnt.
    """
    if name.startswith(INFLATED_PREFIX):
        shape, _, original = name.removeprefix(INFLATED_PREFIX).partition(":")
        return f"{INFLATED_PREFIX}{shape}:{lengthened(original, context, folder)}"
    files = Path(source_of(name))
    if not (files / CONFIGURATION).is_file():
        raise ModelLoadError(f"the context of {name} cannot be lengthened: give a folder, or bundled:NAME")
    configuration = json.loads((files / CONFIGURATION).read_text(encoding="utf-8"))
    own = configuration.get(CONTEXT)
    if own is None or not {"rope_theta", "rope_parameters", "rope_scaling"} & configuration.keys():
        raise ModelLoadError(f"the context of {name} cannot be lengthened: its positions are not rotary")
    if own >= context:
        return name
    for pattern in KEPT:
        for file in files.glob(pattern):
            shutil.copyfile(file, folder / file.name)
    changed = json.dumps(configuration | {CONTEXT: context}, indent=2)
    (folder / CONFIGURATION).write_text(changed, encoding="utf-8")
    return str(folder)


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

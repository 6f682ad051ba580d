"""Models made for measurements: a longer context than was trained, or random weights in a given shape."""

import copy
import json
import shutil
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PretrainedConfig, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from crossdraft.engine.loader import load_model
from crossdraft.engine.names import ModelLoadError, source_of

CONFIGURATION = "config.json"
CONTEXT = "max_position_embeddings"
KEPT = ("*.json", "*.safetensors", "*.jinja")


def lengthened(name: str, context: int, folder: Path) -> str:
    """The name of the same model with a context of at least `context` tokens: its own, or a copy in `folder`.

    Its text after the trained context means little; rotary positions are defined for any length.

    Raises:
        ModelLoadError: there is no such model, or its positions are learnt.
    """
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


def write_random(name: str, folder: Path, seed: int = 0) -> None:
    """Writes a folder that can be served, with random weights in the shape of `name`.

    Args:
        name: a folder, a hub id, or `bundled:` and the name of a bundled model.
        folder: must be there.
        seed: of the weights.

    Raises:
        ModelLoadError: there is no such model.
        OSError: the folder cannot be written.
    """
    loaded = load_model(name, "float32")
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model = type(loaded.model)(copy.deepcopy(loaded.model.config))
    model.generation_config = copy.deepcopy(loaded.model.generation_config)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(loaded.description.tokenizer_json, encoding="utf-8")


SHAPES_CONTEXT = 512  # tokens; the real ones have more, which changes no time of a short text
_QWEN = Qwen2Config(
    vocab_size=151_936,
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    max_position_embeddings=SHAPES_CONTEXT,
    tie_word_embeddings=True,
)
# What EAGLE-2 drafts with for Llama-3-8B: one layer, and the target's head. Tied here, which halves the memory.
_EAGLE = LlamaConfig(
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_hidden_layers=1,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=SHAPES_CONTEXT,
    tie_word_embeddings=True,
)
_SHAPES: dict[str, tuple[type[PreTrainedModel], PretrainedConfig]] = {
    "qwen2.5-0.5b": (Qwen2ForCausalLM, _QWEN),
    "eagle-llama-3-8b": (LlamaForCausalLM, _EAGLE),
}


def random_model(shape: str, seed: int = 0) -> PreTrainedModel:
    """A model with random weights, float32, in evaluation mode.

    Raises:
        ModelLoadError: there is no such shape.
    """
    if shape not in _SHAPES:
        raise ModelLoadError(f"there is no shape {shape!r}: there are {', '.join(_SHAPES)}")
    kind, config = _SHAPES[shape]
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model: PreTrainedModel = kind(config).eval()
    return model

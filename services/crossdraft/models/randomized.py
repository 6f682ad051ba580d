"""A model that has learnt nothing: the shape and the tokenizer of another, with random weights."""

import copy
from pathlib import Path

import torch

from crossdraft.models.loading import load_model


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

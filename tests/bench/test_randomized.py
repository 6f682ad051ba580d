"""A model with random weights has another's tokenizer, and nothing of what it knows."""

from pathlib import Path

import torch

from crossdraft.bench.models import write_random
from crossdraft.engine.loader import load_model

NAME = "bundled:drafter-b"


def test_its_description_is_the_same_and_its_distributions_are_nearly_even(tmp_path: Path) -> None:
    write_random(NAME, tmp_path)
    known, random = load_model(NAME, "float32"), load_model(str(tmp_path))
    assert random.description.fingerprint == known.description.fingerprint
    assert random.description.stops == known.description.stops
    ids = torch.arange(10, 30)[None]
    with torch.inference_mode():
        largest = [loaded.model(ids).logits.softmax(-1).max() for loaded in (known, random)]
    assert largest[0] > 0.2 > 0.02 > largest[1]


def test_a_seed_gives_the_same_weights(tmp_path: Path) -> None:
    for folder, seed in (("a", 1), ("b", 1), ("c", 2)):
        (tmp_path / folder).mkdir()
        write_random(NAME, tmp_path / folder, seed)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c

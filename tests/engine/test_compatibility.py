"""Which models the engine refuses, and what it says then."""

from math import nan

import pytest
from transformers import BloomConfig, BloomForCausalLM, MambaConfig, MambaForCausalLM, MptConfig, MptForCausalLM

from crossdraft.engine.compatibility import UnsupportedModelError
from crossdraft.engine.engine import Engine
from tests.engine.tiny import seeded, tiny_llama


def test_models_whose_attention_is_not_given_by_mask_and_positions_are_refused() -> None:
    mpt = seeded(MptForCausalLM, MptConfig(d_model=48, n_heads=4, n_layers=2, vocab_size=97))
    with pytest.raises(UnsupportedModelError, match="does not go through the interface"):
        Engine(mpt, max_length=64)
    bloom = seeded(BloomForCausalLM, BloomConfig(hidden_size=48, n_layer=1, n_head=4, vocab_size=97))
    with pytest.raises(UnsupportedModelError, match="does not go through the interface"):
        Engine(bloom, max_length=64)
    mamba = seeded(MambaForCausalLM, MambaConfig(hidden_size=48, num_hidden_layers=1, vocab_size=97))
    with pytest.raises(UnsupportedModelError, match="does not keep keys and values"):
        Engine(mamba, max_length=64)
    with pytest.raises(ValueError, match="set --max-model-len"):
        Engine(mamba)


def test_rotary_positions_that_change_with_the_longest_text_are_refused_where_one_may_be_so_long() -> None:
    factors = {"short_factor": [1.0] * 6, "long_factor": [3.0] * 6, "original_max_position_embeddings": 32}
    long = tiny_llama(rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, **factors})
    with pytest.raises(UnsupportedModelError, match="set --max-model-len to 32 or less"):
        Engine(long)
    assert Engine(long, max_length=32).max_length == 32


def test_a_model_whose_weights_are_no_numbers_is_refused_for_that() -> None:
    broken = tiny_llama()
    broken.model.norm.weight.data[0] = nan
    with pytest.raises(UnsupportedModelError, match="its weights have NaN"):
        Engine(broken, max_length=64)

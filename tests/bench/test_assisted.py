"""transformers' assisted generation, and a model's distributions without services: what is compared with."""

import numpy as np
import pytest
import torch

from crossdraft.bench.acceptance import NextTokenDistributions
from crossdraft.bench.transformers_peer import AssistanceFailedError, AssistedGeneration
from tests.endtoend.reference import Reference

PROMPT = "for i in range("


def test_distributions_are_the_models_softmax() -> None:
    distributions, reference = NextTokenDistributions("bundled:target"), Reference("target")
    ids = reference.encode(PROMPT)
    distribution = distributions.after(ids)
    assert (distribution.shape, distribution.dtype) == ((distributions.description.vocabulary_size,), np.float64)
    assert distribution.sum() == pytest.approx(1)
    assert reference.tokenizer.decode([int(distribution.argmax())]) == "5"
    later = distributions.after([*ids, int(distribution.argmax())])
    assert abs(later - distribution).max() > 0.1


def test_continuations_are_target_ids_and_differ() -> None:
    torch.manual_seed(1)
    assisted = AssistedGeneration("bundled:target", "bundled:drafter-b")
    found = list(assisted.continuations(PROMPT, 20, 3, 2))
    assert all(1 <= len(ids) <= 3 for ids in found)
    assert max(map(len, found)) == 3
    assert all(0 <= token < 4096 for ids in found for token in ids)
    assert len(set(found)) > 5


def test_a_pair_that_transformers_cannot_do_is_an_error() -> None:
    with pytest.raises(AssistanceFailedError, match="transformers cannot generate with this pair"):
        list(AssistedGeneration("bundled:target", "bundled:drafter-c").continuations(PROMPT, 3, 3, 2))

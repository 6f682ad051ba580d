"""Heads that are cut: the logits that are left are the full model's."""

import numpy as np
import pytest
import torch
from torch import nn
from transformers import PhiConfig, PhiForCausalLM, PreTrainedModel

from crossdraft.engine.distributions import drafting_distributions
from crossdraft.engine.engine import Engine
from crossdraft.engine.loader import CannotPruneError, cut_head
from crossdraft.engine.requests import ForwardRequest as Request
from crossdraft.engine.served_model import RunningModel
from crossdraft.types.messages import SamplingOptions
from crossdraft.types.trees import ROOT, TokenTree
from tests.engine.tiny import CONTEXT, VOCABULARY, seeded, tiny_gpt2, tiny_llama, tiny_qwen2

KEPT = np.array([0, 1, 5, 17, 18, 60, 96])
WORK = Request("a", (1, 2, 3), TokenTree((5, 90, 6), (ROOT, 0, ROOT)))  # ids that are not kept can be read all the same


def tied_qwen2() -> PreTrainedModel:
    return tiny_qwen2(tie_word_embeddings=True)


def biased_phi() -> PreTrainedModel:
    sizes = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = seeded(PhiForCausalLM, PhiConfig(vocab_size=VOCABULARY, max_position_embeddings=CONTEXT, **sizes))
    nn.init.normal_(model.get_output_embeddings().bias, generator=torch.Generator().manual_seed(3))
    return model


@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2, tied_qwen2, biased_phi])
def test_logits_are_the_full_models_at_kept_ids(make) -> None:
    model = make()
    (full,) = Engine(model).forward([WORK])
    embeddings = model.get_input_embeddings().weight
    before = embeddings.clone()
    cut_head(model, KEPT)
    (cut,) = Engine(model).forward([WORK])  # which compares tree and paths, too
    assert cut.shape == (4, len(KEPT))
    torch.testing.assert_close(cut, full[:, KEPT], atol=1e-5, rtol=0)
    assert model.get_input_embeddings().weight is embeddings
    assert torch.equal(embeddings, before)


def test_softmax_is_over_the_kept_ids_only() -> None:
    model = tiny_llama()
    (full,) = Engine(model).forward([WORK])
    cut_head(model, KEPT)
    (cut,) = Engine(model).forward([WORK])
    expected = full[:, KEPT].double().softmax(-1)
    for (columns, weights), distribution in zip(
        drafting_distributions(cut, SamplingOptions(), 0), expected, strict=True
    ):
        assert weights.sum() == pytest.approx(1)
        np.testing.assert_allclose(weights, distribution[columns].numpy(), atol=1e-6)


def test_one_id_is_enough() -> None:
    model = tiny_gpt2()
    cut_head(model, KEPT[:1])
    (logits,) = Engine(model).forward([WORK])
    assert logits.shape == (4, 1)


class Doubled(nn.Linear):
    """A head that does more than multiply."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(inputs)


def test_heads_of_other_kinds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    model.set_output_embeddings(Doubled(48, VOCABULARY, bias=False))
    with pytest.raises(CannotPruneError, match="is a Doubled, and only a plain linear layer can be cut"):
        cut_head(model, KEPT)
    monkeypatch.setattr(type(model), "get_output_embeddings", lambda _: None)
    with pytest.raises(CannotPruneError, match="is missing"):
        cut_head(model, KEPT)


def test_columns_stand_for_kept_ids() -> None:
    whole = running(None)
    assert whole.columns(None) is None
    assert whole.columns(KEPT) is KEPT
    assert whole.ids(KEPT) is KEPT
    cut = running(KEPT)
    assert cut.columns(None) is None
    columns = cut.columns(np.array([60, 2, 5, 3]))
    assert columns.tolist() == [2, 5]
    assert cut.ids(columns).tolist() == [5, 60]
    assert cut.columns(np.array([2, 3])).tolist() == []


def running(kept: np.ndarray | None) -> RunningModel:
    """Without a model: only what maps columns to ids."""
    nothing = object()
    return RunningModel(nothing, nothing, nothing, nothing, kept)

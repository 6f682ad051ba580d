"""Noise on logits: a function of the tokens before, and normal."""

import numpy as np
import pytest
import torch
from scipy import stats

from crossdraft.engine.emulation import Noisy
from crossdraft.engine.engine import Engine
from crossdraft.engine.requests import ForwardRequest as Request
from crossdraft.engine.requests import ScheduledRequest as Scheduled
from crossdraft.types.trees import ROOT, TokenTree
from tests.engine.tiny import VOCABULARY, tiny_llama

MODEL = tiny_llama()
PROMPT = (5, 17, 3, 88)
TREE = TokenTree((1, 2, 3, 2), (ROOT, 0, ROOT, 2))
CPU = torch.device("cpu")


def noise(work: Request, columns: int = VOCABULARY, sigma: float = 2.0) -> np.ndarray:
    """What is added, shape (rows, columns)."""
    noisy = Noisy(sigma, columns, lambda shares: [torch.zeros(len(one.request.rows()), columns) for one in shares], CPU)
    return noisy([Scheduled(work, 100)])[0].numpy()


def test_a_node_has_the_noise_of_its_path_in_every_tree_session_and_object() -> None:
    found = noise(Request("a", PROMPT, TREE))
    for path, row in zip(TREE.paths(), found, strict=True):
        np.testing.assert_array_equal(noise(Request("b", (*PROMPT, *path)))[0], row)
    np.testing.assert_array_equal(noise(Request("a", PROMPT, TREE, wanted=(2, 4))), found[[2, 4]])
    assert len({tuple(row) for row in found}) == len(found)
    assert noise(Request("a", PROMPT, TREE, wanted=())).shape == (0, VOCABULARY)


def test_it_depends_on_the_latest_tokens_and_on_how_many_come_before() -> None:
    long = tuple(range(20))
    (row,) = noise(Request("a", long))
    np.testing.assert_array_equal(noise(Request("a", (90, *long[1:])))[0], row)
    assert noise(Request("a", (*long[:-1], 90)))[0].tolist() != row.tolist()
    assert noise(Request("a", long[1:]))[0].tolist() != row.tolist()


def test_it_is_normal_with_the_standard_deviation_that_was_asked_for() -> None:
    rows = np.stack([noise(Request("a", (token, token)), 4000, 1.5)[0] for token in range(20)])
    assert stats.kstest(rows.ravel() / 1.5, "norm").pvalue > 1e-4
    correlations = np.corrcoef(rows)[np.triu_indices(20, 1)]
    assert np.abs(correlations).max() < 0.1


def test_logits_of_a_model_and_noise_add_up() -> None:
    engine = Engine(MODEL)
    works = [Request("a", PROMPT, TREE), Request("b", PROMPT[:2])]
    noisy = Noisy(0.7, VOCABULARY, engine.step, CPU)([Scheduled(work, 100) for work in works])
    for work, logits, bare in zip(works, noisy, engine.forward(works), strict=True):
        np.testing.assert_allclose(logits - bare, noise(work, sigma=0.7), atol=1e-5)


def test_a_share_that_is_not_the_last_of_its_work_has_no_logits_and_no_noise() -> None:
    noisy = Noisy(0.7, VOCABULARY, Engine(MODEL).step, CPU)
    assert noisy([Scheduled(Request("a", PROMPT), 2)]) == [None]
    assert noisy([Scheduled(Request("a", PROMPT), 2)])[0].shape == (1, VOCABULARY)


@pytest.mark.parametrize("sigma", [-0.1, float("inf"), float("nan")])
def test_a_standard_deviation_that_is_none(sigma: float) -> None:
    with pytest.raises(ValueError, match="standard deviation of 0 or more"):
        Noisy(sigma, VOCABULARY, lambda _: [], CPU)

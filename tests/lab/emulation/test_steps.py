"""Emulated services: paced steps, by a clock that only their sleeping moves, and noise on logits."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from crossdraft.engine.engine import Engine
from crossdraft.engine.requests import ForwardRequest as Request
from crossdraft.lab.emulation.steps import Emulation, Noisy, Pace, Paced
from crossdraft.types.trees import ROOT, TokenTree
from tests.engine.tiny import VOCABULARY, tiny_llama

MODEL = tiny_llama()
PROMPT = (5, 17, 3, 88)
TREE = TokenTree((1, 2, 3), (ROOT, 0, ROOT))


class Slept:
    """A clock; a forward takes what the test says."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.times: list[float] = []
        self.clock = (lambda: self.seconds), self.sleep

    def sleep(self, seconds: float) -> None:
        self.times.append(round(seconds, 9))
        self.seconds += seconds


def paced_engine() -> tuple[Slept, Paced, Engine]:
    slept, engine = Slept(), Engine(MODEL)
    return slept, Paced(Pace(20, 0.5), engine.remaining, engine.step, *slept.clock), engine


def whole(*requests: Request) -> list[Request]:
    return [replace(request, tokens=100) for request in requests]


def test_what_a_step_feeds_counts_and_a_text_that_is_new_does_not() -> None:
    slept, paced, _ = paced_engine()
    paced(whole(Request("a", PROMPT, TREE)))
    paced(whole(Request("a", (*PROMPT, 1, 9), TREE)))  # 1 is in the cache
    paced(whole(Request("a", (*PROMPT, 1, 9, 9), TREE), Request("b", PROMPT * 3, TREE)))  # together
    paced(whole(Request("b", PROMPT * 3)))
    assert slept.times == [0.0215, 0.022, 0.0235, 0.0205]


def test_a_prompt_in_several_steps_costs_what_it_costs_in_one() -> None:
    slept, paced, _ = paced_engine()
    prompt = Request("a", PROMPT * 3, TREE)
    for tokens in (5, 5, 10):
        (logits,) = paced([replace(prompt, tokens=tokens)])
    assert logits is not None
    assert slept.times == [0.0215]
    paced(
        [Request("b", PROMPT[1:] * 9, tokens=3), *whole(Request("a", (*PROMPT * 3, 8)))]
    )  # beside one that is answered
    assert slept.times[1:] == [0.0205]


def test_a_text_that_was_lost_does_not_count_again() -> None:
    slept, paced, engine = paced_engine()
    paced(whole(Request("a", PROMPT * 3)))
    engine.close("a")
    paced(whole(Request("b", PROMPT[::-1] * 20)))
    paced(whole(Request("a", (*PROMPT * 3, 7, 8, 9))))
    assert slept.times == [0.02, 0.02, 0.0215]


def test_what_the_model_took_itself_is_not_slept_again() -> None:
    slept, engine = Slept(), Engine(MODEL)

    def slow(shares):
        slept.seconds += 0.015 if len(shares) == 1 else 0.03
        return engine.step(shares)

    paced = Paced(Pace(20, 0), engine.remaining, slow, *slept.clock)
    paced(whole(Request("a", PROMPT)))
    paced(whole(Request("a", PROMPT), Request("b", PROMPT)))
    assert slept.times == [0.005]


@pytest.mark.parametrize("text", ["", "20,x", "1,2,3", "-1,0", "0,nan"])
def test_a_pace_is_two_numbers_of_milliseconds(text: str) -> None:
    with pytest.raises(ValueError, match="two numbers of milliseconds"):
        Pace.parsed(text)
    assert str(Pace.parsed("20, 0.5")) == "20,0.5"


FORKED = TokenTree((1, 2, 3, 2), (ROOT, 0, ROOT, 2))
CPU = torch.device("cpu")


def noise(request: Request, columns: int = VOCABULARY, sigma: float = 2.0) -> np.ndarray:
    """What is added, shape (rows, columns)."""
    noisy = Noisy(sigma, columns, lambda shares: [torch.zeros(len(one.rows()), columns) for one in shares], CPU)
    return noisy([replace(request, tokens=100)])[0].numpy()


def test_a_node_has_the_noise_of_its_path_in_every_tree_session_and_object() -> None:
    found = noise(Request("a", PROMPT, FORKED))
    for path, row in zip(FORKED.paths(), found, strict=True):
        np.testing.assert_array_equal(noise(Request("b", (*PROMPT, *path)))[0], row)
    np.testing.assert_array_equal(noise(Request("a", PROMPT, FORKED, wanted=(2, 4))), found[[2, 4]])
    assert len({tuple(row) for row in found}) == len(found)
    assert noise(Request("a", PROMPT, FORKED, wanted=())).shape == (0, VOCABULARY)


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
    requests = [Request("a", PROMPT, FORKED), Request("b", PROMPT[:2])]
    noisy = Noisy(0.7, VOCABULARY, engine.step, CPU)([replace(request, tokens=100) for request in requests])
    for request, logits, bare in zip(requests, noisy, engine.forward(requests), strict=True):
        np.testing.assert_allclose(logits - bare, noise(request, sigma=0.7), atol=1e-5)
    unfinished = Noisy(0.7, VOCABULARY, Engine(MODEL).step, CPU)([replace(requests[0], tokens=2)])
    assert unfinished == [None]


@pytest.mark.parametrize("sigma", [-0.1, float("nan")])
def test_a_standard_deviation_that_is_none(sigma: float) -> None:
    with pytest.raises(ValueError, match="standard deviation of 0 or more"):
        Emulation(logit_noise=sigma)

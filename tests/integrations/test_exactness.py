"""The function that sampled requests rest on: told right from wrong, and mended."""

import logging
from types import SimpleNamespace

import pytest
import torch

from crossdraft.integrations.vllm.exactness import NAME, Sampling, ensure_exact, expand, is_right

CPU = torch.device("cpu")


def unwritten(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """As vLLM 0.32's CPU build does for floats: a converted copy is filled, and the output is not."""
    out = x.new_empty(num_tokens)
    copy = out.to(torch.int64)
    copy.copy_(expand(x.to(torch.int64), cu_num_tokens, num_tokens, replace_from, replace_to))
    return out


def unreplaced(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Greedy requests of a mixed batch would be divided by zero."""
    return expand(x, cu_num_tokens, num_tokens)


def rounded(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    return expand(x.to(torch.int64), cu_num_tokens, num_tokens, replace_from, replace_to).to(x.dtype)


def unwritten_integers(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Temperatures are right, and top-k is not."""
    found = expand(x, cu_num_tokens, num_tokens, replace_from, replace_to)
    return found if x.is_floating_point() else torch.zeros_like(found)


def test_it_expands() -> None:
    x, ends = torch.tensor([0.5, 0.0, 2.0, 3.0]), torch.tensor([2, 3, 3, 4], dtype=torch.int32)
    assert expand(x, ends, 4, 0, 1).tolist() == [0.5, 0.5, 1.0, 3.0]
    assert expand(torch.tensor([5, 6]), torch.tensor([1, 3]), 3).tolist() == [5, 6, 6]


def test_a_right_function_is_left_alone() -> None:
    def own(*given: object, **named: object) -> torch.Tensor:
        return expand(*given, **named)  # type: ignore[arg-type]

    module = SimpleNamespace(**{NAME: own})
    assert ensure_exact(module, CPU) is Sampling.RIGHT
    assert getattr(module, NAME) is own


@pytest.mark.parametrize("wrong", [unwritten, unreplaced, rounded, unwritten_integers])
def test_a_wrong_one_is_replaced_with_one_warning(wrong: object, caplog: pytest.LogCaptureFixture) -> None:
    module = SimpleNamespace(**{NAME: wrong})
    with caplog.at_level(logging.WARNING):
        assert ensure_exact(module, CPU) is Sampling.MENDED
        assert ensure_exact(module, CPU) is Sampling.RIGHT  # a second engine of the process
    assert is_right(getattr(module, NAME), CPU)
    assert len(caplog.records) == 1


def test_without_the_function_nothing_can_be_trusted() -> None:
    assert ensure_exact(SimpleNamespace(), CPU) is Sampling.BROKEN

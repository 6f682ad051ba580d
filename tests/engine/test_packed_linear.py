"""Packed linear layers give what plain ones give."""

import copy

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from crossdraft.engine.compilation import PackedLinear, pack, padded
from crossdraft.engine.engine import Engine
from crossdraft.engine.requests import ForwardRequest as Request
from crossdraft.types.trees import tree_of

REQUESTS = [Request("a", (5, 17, 3, 88), tree_of([(1, 2), (1, 3), (9,)], 9)), Request("b", (4,))]


def linears(model: nn.Module) -> set[type]:
    return {type(module) for module in model.modules() if isinstance(module, nn.Linear | PackedLinear)}


def test_a_packed_model_computes_the_same(llama: PreTrainedModel) -> None:
    plain, packed = Engine(copy.deepcopy(llama)), copy.deepcopy(llama)
    pack(packed)
    assert linears(packed) == {PackedLinear}
    for one, other in zip(Engine(packed).forward(REQUESTS), plain.forward(REQUESTS), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("rows", "bias"), [(0, True), (1, False), (9, True), (33, False), (70, True), (129, False)])
def test_any_number_of_rows(rows: int, bias: bool) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(rows)
        linear = nn.Linear(33, 50, bias)
    packed = PackedLinear(linear)
    assert torch.equal(packed.weight, linear.weight)  # routers read it
    found = packed(torch.ones(2, rows, 33).cumsum(1))
    torch.testing.assert_close(found, linear(torch.ones(2, rows, 33).cumsum(1)).detach(), atol=1e-4, rtol=1e-5)


def test_bfloat16_is_packed_where_the_processor_multiplies_it_and_float16_never(llama: PreTrainedModel) -> None:
    model = copy.deepcopy(llama).bfloat16()
    plain = Engine(copy.deepcopy(model)).forward(REQUESTS)
    pack(model)
    assert linears(model) == {PackedLinear if torch.ops.mkldnn._is_mkldnn_bf16_supported() else nn.Linear}
    for one, other in zip(Engine(model).forward(REQUESTS), plain, strict=True):
        torch.testing.assert_close(one, other, atol=0.05, rtol=0.05)
    half = copy.deepcopy(llama).half()
    pack(half)
    assert linears(half) == {nn.Linear}


def test_programs_are_made_for_few_numbers_of_rows() -> None:
    made = {rows: padded(rows) for rows in range(513)}
    assert all(rows <= filled <= 1.25 * rows for rows, filled in made.items())
    assert all(filled == rows for rows, filled in made.items() if rows <= 32)
    assert len(set(made.values())) < 60

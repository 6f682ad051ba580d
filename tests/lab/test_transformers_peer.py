"""transformers' assisted generation, which is compared with."""

import pytest
import torch
from transformers import PreTrainedModel

from crossdraft.cli.running import CommandFailed
from crossdraft.client import SamplingOptions
from crossdraft.engine.loader import LoadOptions, load_model
from crossdraft.lab.throughput import Theirs
from crossdraft.lab.transformers_peer import AssistedGeneration

PROMPTS = [(5, 6, 7, 8), (40, 41, 42), (9,) * 12]


@torch.inference_mode()
def greedy(model: PreTrainedModel, prompt: tuple[int, ...], tokens: int) -> tuple[int, ...]:
    """By whole forwards."""
    ids = list(prompt)
    for _ in range(tokens):
        ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return tuple(ids[len(prompt) :])


def test_assisted_generation_tells_when_tokens_came() -> None:
    pair = AssistedGeneration("bundled:target", "bundled:drafter-b")
    (made,) = pair.outputs([PROMPTS[0]], 6, 2, 0.0)
    assert made.ids == greedy(load_model(LoadOptions("bundled:target", "float32")).model, PROMPTS[0], 6)
    assert len(made.moments) == 6
    assert [made.asked, *made.moments] == sorted([made.asked, *made.moments])


def test_sampled_outputs_are_target_ids_and_differ() -> None:
    torch.manual_seed(1)
    pair = AssistedGeneration("bundled:target", "bundled:drafter-b")
    found = [one.ids for one in pair.outputs([PROMPTS[0]] * 8, 3, 2, 1.0)]
    assert {len(ids) for ids in found} == {3}
    assert all(0 <= token < 4096 for ids in found for token in ids)
    assert len(set(found)) > 2


async def test_what_transformers_cannot_do_is_said() -> None:
    pair = AssistedGeneration("bundled:target", "bundled:drafter-c")
    way = Theirs(pair, 1, bound=False, options=SamplingOptions(1.0))
    with pytest.raises(CommandFailed, match="transformers failed: "):
        await way.run([PROMPTS[0]], 3, 1, SamplingOptions(1.0))

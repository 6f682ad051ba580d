"""transformers' assisted generation, which is compared with."""

import torch
from transformers import PreTrainedModel

from crossdraft.bench.transformers_peer import AssistedGeneration, Question
from crossdraft.engine.loader import load_model

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
    (made,) = pair.answer(Question((PROMPTS[0],), 6, 2), 0.0).outputs
    assert made.ids == greedy(load_model("bundled:target", "float32").model, PROMPTS[0], 6)
    assert len(made.moments) == 6
    assert [made.asked, *made.moments] == sorted([made.asked, *made.moments])

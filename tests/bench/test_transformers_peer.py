"""transformers' own generation, which is compared with."""

import torch
from transformers import PreTrainedModel

from crossdraft.bench.transformers_peer import AssistedGeneration, Question, continuous_batching
from crossdraft.engine.loader import load_model

PROMPTS = [(5, 6, 7, 8), (40, 41, 42), (9,) * 12]


@torch.inference_mode()
def greedy(model: PreTrainedModel, prompt: tuple[int, ...], tokens: int) -> tuple[int, ...]:
    """By whole forwards."""
    ids = list(prompt)
    for _ in range(tokens):
        ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return tuple(ids[len(prompt) :])


def test_continuous_batching_makes_the_models_own_greedy_outputs() -> None:
    model = load_model("bundled:target", "float32").model
    with continuous_batching("bundled:target", 16) as answering:
        answer = answering(Question(tuple(PROMPTS), 5, at_once=2))
    found = answer.outputs
    assert [output.ids for output in found] == [greedy(model, prompt, 5) for prompt in PROMPTS]
    assert all(list(one.moments) == sorted(one.moments) and len(one.moments) == 5 for one in found)
    assert all(one.asked < one.moments[0] for one in found)
    # The third is asked for when one of the others has ended.
    assert found[2].asked >= min(found[0].moments[-1], found[1].moments[-1])
    assert answer.forwards >= 10


def test_assisted_generation_tells_when_tokens_came() -> None:
    pair = AssistedGeneration("bundled:target", "bundled:drafter-b")
    (made,) = pair.answer(Question((PROMPTS[0],), 6, 1, 2), 0.0).outputs
    assert made.ids == greedy(load_model("bundled:target", "float32").model, PROMPTS[0], 6)
    assert len(made.moments) == 6
    assert [made.asked, *made.moments] == sorted([made.asked, *made.moments])

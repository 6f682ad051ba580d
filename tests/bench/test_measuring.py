"""What measures engines and models for benchmarks."""

from types import SimpleNamespace

import pytest
import torch
from transformers import PreTrainedModel

from crossdraft.bench.commands import MemoryPlan
from crossdraft.bench.engine import Floor, Load, Memory, described, engine_times, floor_of
from crossdraft.bench.transformers_peer import AssistedGeneration, Batching, ContinuousBatching
from crossdraft.engine.engine import Engine
from crossdraft.engine.loader import load_model
from crossdraft.engine.names import NumberOutOfRangeError
from tests.engine.tiny import VOCABULARY, tiny_llama

FLOOR = Floor(1, 1.0)
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
    with ContinuousBatching("bundled:target", Batching(budget=16, max_batch_tokens=32)) as running:
        found = running.generate(PROMPTS, 5, at_once=2)
        assert [output.ids for output in found] == [greedy(model, prompt, 5) for prompt in PROMPTS]
        assert all(list(one.moments) == sorted(one.moments) and len(one.moments) == 5 for one in found)
        assert all(one.asked < one.moments[0] for one in found)
        # The third is asked for when one of the others has ended.
        assert found[2].asked >= min(found[0].moments[-1], found[1].moments[-1])
        assert running.forwards >= 10


def test_assisted_generation_tells_when_tokens_came() -> None:
    pair = AssistedGeneration("bundled:target", "bundled:drafter-b", threads=1)
    ids, moments = pair.timed(PROMPTS[0], 6, 2, 0.0)
    assert ids == greedy(load_model("bundled:target", "float32").model, PROMPTS[0], 6)
    assert len(moments) == 6
    assert list(moments) == sorted(moments)
    assert moments[0] > 0


def test_the_engine_and_a_bare_forward_are_timed_on_the_same_tokens() -> None:
    loads = [Load(1, 1), Load(3, 4)]
    times = engine_times(Engine(tiny_llama()), tiny_llama(), loads, context=9, turns=2, floor=FLOOR)
    assert [one.load for one in times] == loads
    for one in times:
        assert 0 < one.model < one.engine
        assert min(one.bare, one.alone, one.overhead) > 0
        assert one.difference < 1e-4


def test_times_of_another_model_are_seen_to_be_no_comparison() -> None:
    (time,) = engine_times(
        Engine(tiny_llama()), tiny_llama(rms_norm_eps=0.5), [Load(2, 2)], context=5, turns=1, floor=FLOOR
    )
    assert time.difference > 1e-2


def test_a_budget_that_holds_too_few_sessions_is_no_measurement() -> None:
    engine = Engine(tiny_llama(), 64, budget=1)
    with pytest.raises(NumberOutOfRangeError, match="raise it"):
        engine_times(engine, tiny_llama(), [Load(40, 1)], context=60, turns=1, floor=FLOOR)


def test_all_sessions_come_to_their_ends_within_the_slots() -> None:
    engine = Engine(tiny_llama(), 64, budget=1)
    memory = Memory(MemoryPlan(sessions=230, at_once=12, longest=64, steps=3, seed=1))
    samples = list(memory.samples(engine, lambda count=1, doing="": None))
    assert [sample.ended for sample in samples] == list(range(2, 231, 2))
    assert {sample.slots for sample in samples} == {engine.slots}
    assert 0 < max(sample.held for sample in samples) <= engine.slots
    assert (samples[-1].held, engine.sessions) == (0, 0)
    assert samples[0].loaded > 0


def test_a_pass_reads_all_weights_but_those_of_an_untied_embedding() -> None:
    untied, tied = tiny_llama(), tiny_llama(tie_word_embeddings=True)
    embedding = 4 * VOCABULARY * 48
    assert floor_of(untied, 1 << 16).weights == floor_of(tied, 1 << 16).weights
    assert floor_of(untied, 1 << 16).weights == 4 * sum(weight.numel() for weight in untied.parameters()) - embedding
    assert floor_of(untied, 1 << 16).seconds > 0


def test_a_device_is_told_with_the_versions_that_drive_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert described("cpu").startswith(f"cpu; torch {torch.__version__}")
    found = SimpleNamespace(name="A GPU", total_memory=3 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    assert described("cuda:0").startswith("A GPU, 3072 MiB; torch ")

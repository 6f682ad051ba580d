"""Real vLLM with a remote drafter: greedy texts are those without it, and samples have the target's distribution."""

import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from crossdraft.audit.statistics import LEAST, fit_of
from crossdraft.engine.names import BUNDLED
from crossdraft.types.rows import Probabilities
from tests.prompts import PROMPTS
from tests.vllm.conftest import Engine
from tests.vllm.fixed_drafter import DRAFTS

pytestmark = pytest.mark.timeout(3600)  # engines start in a minute each, and on a busy machine in several

TOKENS = 48  # of each output
AT_ONCE = (1, 4, 16)
TIE = 1e-3  # nats between the two likeliest tokens, within which sums in another order may change their order
SAMPLES = 12_000
FIRSTS = 3  # most frequent first tokens after which the second one is tested
LEVEL = 1e-4  # of each test
# Room for the outputs of a few requests only, so that others are preempted, and prompts read in pieces.
TIGHT = {
    "max_model_len": 512,
    "block_size": 32,
    "num_gpu_blocks_override": 20,
    "max_num_batched_tokens": 128,
    "max_num_seqs": 16,
    "enable_prefix_caching": True,
}


def greedy(at_once: int, likely: int | None = None) -> dict[str, Any]:
    sampling = {"temperature": 0.0, "max_tokens": TOKENS, "logprobs": likely}
    return {"prompts": [*PROMPTS[:15], PROMPTS[14]], "at_once": at_once, "sampling": sampling}


def differs(reference: dict[str, Any], found: dict[str, Any]) -> bool:
    """Whether an output differs where the target had a clear opinion."""
    pairs = zip(reference["ids"], found["ids"], reference["likely"], strict=False)
    for one, other, likely in pairs:
        if one != other:
            return bool(likely[0] - likely[1] > TIE)
    return len(reference["ids"]) != len(found["ids"])


def test_greedy_texts_are_those_without_a_drafter(engine: Engine, drafter: str) -> None:
    """At 1, 4 and 16 requests at once, with preemptions, prefix caching and prompts that are read in pieces."""
    plain = engine({}, speculative=None, engine={"max_model_len": 512}, runs=[greedy(1, likely=2)])
    config = {
        "method": "custom_class",
        "model": "crossdraft.integrations.vllm.RemoteDrafter",
        "num_speculative_tokens": 4,
    }
    drafted = engine(
        {"CROSSDRAFT_DRAFTER": drafter, "CROSSDRAFT_ALWAYS_DRAFT": "1"},
        speculative=config,
        engine=TIGHT,
        runs=[greedy(n) for n in AT_ONCE],
    )
    (reference,) = plain["runs"]
    wrong = [
        (at_once, place)
        for at_once, run in zip(AT_ONCE, drafted["runs"], strict=True)
        for place, (one, other) in enumerate(zip(reference, run, strict=True))
        if differs(one, other)
    ]
    assert wrong == []
    counts = drafted["counts"]
    assert counts["vllm:spec_decode_num_accepted_tokens"] > 0
    assert counts["vllm:num_preemptions"] > 0
    assert counts["vllm:prefix_cache_hits"] > 0


def law(prompt: str, after: tuple[int, ...] = ()) -> Probabilities:
    """The target's distribution of the next token, as transformers has it."""
    model = AutoModelForCausalLM.from_pretrained(BUNDLED / "target", dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(BUNDLED / "target")(prompt).input_ids
    with torch.inference_mode():
        logits = model(torch.tensor([[*ids, *after]])).logits[0, -1]
    return torch.softmax(logits.double(), dim=-1).numpy()


def p_value(tokens: list[int], expected: Probabilities) -> float:
    """Chi-square of tokens against a distribution."""
    fit = fit_of(Counter(tokens), expected)
    assert fit is not None
    return fit.p


def test_samples_have_the_targets_distribution(engine: Engine) -> None:
    """At temperature 1, with drafts that are right now and then, and none in a third of the steps."""
    prompt = "for i in range("
    first = law(prompt)
    second = {int(token): law(prompt, (int(token),)) for token in np.argsort(-first)[:FIRSTS]}
    likely = [int(row.argsort()[-rank]) for row in second.values() for rank in (1, 2)]
    config = {"method": "custom_class", "model": "fixed_drafter.FixedDrafter", "num_speculative_tokens": 2}
    work = {
        "prompts": [prompt],
        "at_once": 1,
        "sampling": {"temperature": 1.0, "max_tokens": 3, "n": SAMPLES, "ignore_eos": True},
    }
    environment = {
        "CROSSDRAFT_DRAFTER": "127.0.0.1:1",  # nobody is there, and nobody is asked
        DRAFTS: json.dumps([[token, likely[0]] for token in likely]),
    }
    found = engine(environment, speculative=config, engine={"max_model_len": 512}, runs=[work])
    outputs = [tuple(one["ids"]) for one in found["runs"][0]]
    assert len(outputs) == SAMPLES
    assert found["counts"]["vllm:spec_decode_num_draft_tokens"] > SAMPLES
    assert p_value([ids[0] for ids in outputs], first) > LEVEL
    after = Counter(ids[0] for ids in outputs)
    for token, expected in second.items():
        assert after[token] > 10 * LEAST
        assert p_value([ids[1] for ids in outputs if ids[0] == token], expected) > LEVEL

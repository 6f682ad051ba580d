"""Tiny random models, and how many examples of them are tried."""

import os
from collections.abc import Sequence
from typing import TypeVar

import torch
import transformers
from transformers import PreTrainedModel

from crossdraft.engine.device import fetched
from crossdraft.engine.sampling.distributions import Columns, History, LogitsProcessor, Nodes
from crossdraft.engine.sampling.sampler import Distribution, DistributionRequest, SamplerRequest
from crossdraft.types.messages import SamplingOptions

R = TypeVar("R")
VOCABULARY = 97
CONTEXT = 128
SIZES = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT}
DRAWS = {  # settings of drafts: each kind is drawn in a way of its own
    "likeliest": SamplingOptions(temperature=0),
    "truncated": SamplingOptions(0.8, top_k=20, min_p=0.01),
    "truncated twice": SamplingOptions(1.2, top_k=50, top_p=0.9),
    "whole": SamplingOptions(0.8),
    "nucleus": SamplingOptions(0.8, top_p=0.9),
}


def examples(usual: int, full: int) -> int:
    """How many random examples a test tries: more with `make test-full`."""
    return full if os.environ.get("CROSSDRAFT_FULL_TESTS") else usual


def nodes(
    logits: torch.Tensor, options: SamplingOptions, history: History | None = None, prompt: tuple[int, ...] = ()
) -> Nodes:
    """Rows of logits of a session of their own."""
    return Nodes(logits, LogitsProcessor(options, logits.shape[-1], logits.device, prompt), history)


def result(*requests: SamplerRequest[R]) -> Sequence[R]:
    """The results of sampler requests of one kind."""
    return fetched(requests[0].launch(requests))


def generated(model: PreTrainedModel, ids: Sequence[int], count: int) -> list[int]:
    """What transformers itself generates greedily."""
    given = torch.tensor([ids])
    settings = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
    with torch.inference_mode():
        return model.generate(given, attention_mask=torch.ones_like(given), **settings)[0, len(ids) :].tolist()


def drafting_distributions(
    logits: torch.Tensor, options: SamplingOptions, row_width: int, allowed: Columns | None = None
) -> Sequence[Distribution]:
    """What a drafter draws from."""
    request = DistributionRequest(logits, options, row_width, allowed)
    (found,) = result(request)
    return found


def tiny_llama(**changes: object) -> PreTrainedModel:
    config = transformers.LlamaConfig(**(SIZES | {"num_hidden_layers": 3} | changes))
    return seeded(transformers.LlamaForCausalLM, config)


def tiny_gpt2() -> PreTrainedModel:
    return seeded(
        transformers.GPT2LMHeadModel,
        transformers.GPT2Config(n_embd=48, n_layer=3, n_head=4, vocab_size=VOCABULARY, n_positions=CONTEXT),
    )


def tiny_qwen2(**changes: object) -> PreTrainedModel:
    config = transformers.Qwen2Config(**(SIZES | {"num_key_value_heads": 1} | changes))
    return seeded(transformers.Qwen2ForCausalLM, config)


def tiny_gemma2(**changes: object) -> PreTrainedModel:
    """Capped scores, heads wider than the model, and a scale of its own."""
    heads = {"head_dim": 16, "query_pre_attn_scalar": 9, "attn_logit_softcapping": 2.0}
    return seeded(transformers.Gemma2ForCausalLM, transformers.Gemma2Config(**(SIZES | heads | changes)))


def tiny_mistral(**changes: object) -> PreTrainedModel:
    return seeded(transformers.MistralForCausalLM, transformers.MistralConfig(**(SIZES | changes)))


def seeded(kind: type[PreTrainedModel], config: object) -> PreTrainedModel:
    """A model with random weights, larger than the default ones so that its logits differ clearly."""
    with torch.random.fork_rng():
        torch.manual_seed(11)
        model = kind(config).eval()
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.15)
    return model

"""From logits to laws: order and meaning are those of transformers.

Bias, repetition penalty, presence penalty (as vLLM has it), temperature, top_k, top_p, min_p, in float64. A row's law
is the same bit by bit whatever rows are beside it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from crossdraft.models.reading import joined
from crossdraft.models.transfers import sent
from crossdraft.verification.exchange import SamplingOptions
from crossdraft.verification.trees import Path

Logits = Tensor  # floating (n, V), for packages that must not import torch

NUCLEUS = 256  # most probable ids that top_p looks at first; seldom more are needed, and sorting all is slow


@dataclass(frozen=True)
class History:
    """The tokens before each row of logits; penalties count them."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]  # committed after the prompt
    paths: Sequence[Path]  # one a row: the tokens after the committed ones


@dataclass(frozen=True, eq=False)
class Nodes:
    """Nodes of a tree with what their laws are made of."""

    logits: Tensor  # floating (n, V), as the model gives them
    options: SamplingOptions
    history: History | None = None  # may be left out where there are no penalties


def law(logits: Tensor, options: SamplingOptions, history: History | None = None) -> Tensor:
    """The distribution that a token is drawn from, for each row.

    Args:
        logits: floating (n, V), as the model gives them.
        options: what is applied to them. Temperature 0 gives one-hot rows.
        history: what penalties count; may be left out where there are none.

    Returns:
        float64 (n, V), rows sum to one.

    Raises:
        ValueError: a biased id is outside the vocabulary, or a penalty lacks its history.
    """
    return laws([Nodes(logits, options, history)])


@torch.inference_mode()
def laws(parts: Sequence[Nodes]) -> Tensor:
    """As `law`, for nodes of several trees that have the same options."""
    return tempered(scores(parts), parts[0].options)


@torch.inference_mode()
def scores(parts: Sequence[Nodes]) -> Tensor:
    """Logits with biases and penalties, which nodes of several trees have alike: floating (n, V). Raises as `law`."""
    options = parts[0].options
    if options.repetition_penalty == 1 and options.presence_penalty == 0:
        return _biased(joined([part.logits for part in parts]), options)
    return joined([_penalised(_biased(part.logits.double(), options), options, part.history) for part in parts])


@torch.inference_mode()
def tempered(scores: Tensor, options: SamplingOptions) -> Tensor:
    """Laws without penalties and biases, of floating scores (n, V)."""
    if options.temperature == 0:
        best = scores.argmax(-1, keepdim=True)
        return torch.zeros_like(scores, dtype=torch.float64).scatter_(-1, best, 1.0)
    scores = scores.double()
    # The largest score is moved to zero first, so that a tiny temperature cannot overflow.
    scores = (scores - scores.amax(-1, keepdim=True)) / options.temperature
    if 0 < options.top_k < scores.shape[-1]:
        least = scores.topk(options.top_k).values[:, -1:]
        scores = scores.masked_fill(scores < least, -torch.inf)
    if options.top_p < 1:
        scores = _nucleus(scores, options.top_p)
    if options.min_p > 0:
        probabilities = scores.softmax(-1)
        scores = scores.masked_fill(probabilities < options.min_p * probabilities.amax(-1, keepdim=True), -torch.inf)
    return scores.softmax(-1)


def _biased(scores: Tensor, options: SamplingOptions) -> Tensor:
    if not options.logit_bias:
        return scores
    size = scores.shape[-1]
    bias = torch.zeros(size, dtype=torch.float64)
    for token, value in options.logit_bias:
        if not 0 <= token < size:
            raise ValueError(f"logit_bias names id {token}, and ids are 0 to {size - 1}")
        bias[token] += value
    return scores.double() + sent(bias, scores.device)


def _penalised(scores: Tensor, options: SamplingOptions, history: History | None) -> Tensor:
    """Both penalties; each counts a token at most once, on the node's own path."""
    if history is None:
        raise ValueError("penalties need the tokens before each row: pass their history")
    if options.repetition_penalty != 1:
        seen = _seen(scores, (*history.prompt, *history.output), history.paths)
        rate = options.repetition_penalty
        scores = torch.where(seen, torch.where(scores < 0, scores * rate, scores / rate), scores)
    if options.presence_penalty != 0:
        scores = scores - options.presence_penalty * _seen(scores, history.output, history.paths)
    return scores


def _seen(scores: Tensor, common: tuple[int, ...], paths: Sequence[Path]) -> Tensor:
    """Bool (n, V): whether a token is in `common` or in the row's path."""
    seen = torch.zeros(scores.shape, dtype=torch.bool)
    seen[:, list(common)] = True
    rows = [row for row, path in enumerate(paths) for _ in path]
    seen[rows, [token for path in paths for token in path]] = True
    return sent(seen, scores.device)


def _nucleus(scores: Tensor, top_p: float) -> Tensor:
    """Keeps the most probable ids whose predecessors hold less than `top_p`."""
    probabilities, width = scores.softmax(-1), NUCLEUS
    outside, held = _outside(probabilities, top_p, width)
    while width < scores.shape[-1]:
        width *= 8
        (short,) = (held < top_p).nonzero(as_tuple=True)  # rows that need more; the others stay as they are
        if not len(short):
            break
        outside[short], held[short] = _outside(probabilities[short], top_p, width)
    return scores.masked_fill_(outside, -torch.inf)


def _outside(probabilities: Tensor, top_p: float, width: int) -> tuple[Tensor, Tensor]:
    """Bool (n, V): what is not in the nucleus, as far as so many ids tell; (n,): what these hold."""
    ordered, order = probabilities.topk(min(width, probabilities.shape[-1]))
    sums = ordered.cumsum(-1)
    inside = sums - ordered < top_p
    inside[:, 0] = True
    outside = torch.ones_like(probabilities, dtype=torch.bool).scatter_(-1, order, ~inside)
    return outside, sums[:, -1]

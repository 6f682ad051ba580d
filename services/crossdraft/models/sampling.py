"""From logits to laws, and from laws to rows: order and meaning are those of transformers.

Bias, repetition penalty, presence penalty (as vLLM has it), temperature, top_k, top_p, min_p, in float64.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from crossdraft.verification.exchange import SamplingOptions
from crossdraft.verification.rows import Ids, Probabilities, Row
from crossdraft.verification.trees import Path

Logits = Tensor  # floating (n, V), for packages that must not import torch

GRID = 1 << 24  # a multiple of 1/GRID up to 1 is a float32
NUCLEUS = 256  # most probable ids that top_p looks at first; seldom more are needed, and sorting all is slow


@dataclass(frozen=True)
class History:
    """The tokens before each row of logits; penalties count them."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]  # committed after the prompt
    paths: Sequence[Path]  # one a row: the tokens after the committed ones


@dataclass(frozen=True, eq=False)
class Columns:
    """Some columns of logits, here and on the logits' device, so that no step has to copy them."""

    numbers: Ids  # int64 (m,)
    places: Tensor  # the same on the device

    @staticmethod
    def of(numbers: Ids, device: torch.device) -> "Columns":
        """Copies them once."""
        return Columns(numbers, torch.tensor(numbers, dtype=torch.int64, device=device))


@torch.inference_mode()
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
    scores = _penalised(_biased(logits.double(), options), options, history)
    if options.temperature == 0:
        return torch.zeros_like(scores).scatter_(-1, scores.argmax(-1, keepdim=True), 1.0)
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


@torch.inference_mode()
def to_rows(probabilities: Tensor, head: int, listed: Sequence[Ids] = ()) -> list[Row]:
    """Laws (n, V) as rows: the `head` most probable ids and those listed (none, or one array a row), the rest as tail.

    An id of probability zero is left out unless it is listed; a row that lists all others is whole. So is one where
    each of the others is zero as a float32, as rows travel: a tail would promise ids that never arrive.
    """
    top, ids = probabilities.topk(min(head, probabilities.shape[-1]))
    weights, heads = top.cpu().numpy(), ids.cpu().numpy()
    kept = (weights > 0).sum(-1).tolist()  # the largest come first
    heads_kept = [row[:count] for row, count in zip(heads, kept, strict=True)]
    wanted: Sequence[Iterable[int]] = listed if len(listed) else [()] * len(heads)
    extras = [_others(more, row) for more, row in zip(wanted, heads_kept, strict=True)]
    places = [place for place, extra in enumerate(extras) for _ in extra]
    more_weights = probabilities[places, [token for extra in extras for token in extra]].cpu().numpy()
    unlisted = probabilities.scatter(-1, ids, 0.0)
    unlisted[places, [token for extra in extras for token in extra]] = 0.0
    rows, at = [], 0
    for place, (count, extra, tail) in enumerate(zip(kept, extras, _tails(unlisted), strict=True)):
        values = np.concatenate([weights[place, :count], more_weights[at : at + len(extra)]])
        at += len(extra)
        rows.append(Row(np.concatenate([heads_kept[place], np.array(extra, dtype=np.int64)]), values, tail))
    return rows


@torch.inference_mode()
def drafting_laws(
    logits: Tensor, options: SamplingOptions, row_width: int, allowed: Columns | None = None
) -> list[tuple[Ids, Probabilities]]:
    """The laws that a drafter draws from, one of each row of logits: ids and probabilities, the largest first if cut.

    Mask, temperature, truncation, rounding, in this order; what is returned is what must be drawn from. Where rows
    travel the probabilities are multiples of 2^-24 that add up to exactly one: float32 holds them without loss, so
    that normalizing them again on the other side changes nothing.

    Args:
        logits: floating (n, V).
        options: the drafter's own; penalties and biases are not used.
        row_width: most probable ids that are kept; 0: all, without rounding.
        allowed: the only columns that may be drawn; None: all.

    Raises:
        ValueError: nothing is allowed.
    """
    if allowed is not None and not len(allowed.numbers):
        raise ValueError("no id is allowed: the two vocabularies share no token")
    scores = logits if allowed is None else logits[:, allowed.places]
    if options.temperature == 0:
        found = [(place, np.ones(1)) for place in scores.argmax(-1, keepdim=True).cpu().numpy()]
    elif row_width == 0:  # nothing is cut, and to order a whole vocabulary is slow
        found = [(np.flatnonzero(w > 0), w[w > 0]) for w in _bare(scores, options).cpu().numpy()]
    else:
        top, order = _largest(scores, options, min(row_width, scores.shape[-1]))
        weights = _on_grid(top)
        found = [(places[w > 0], w[w > 0]) for places, w in zip(order, weights, strict=True)]
    return found if allowed is None else [(allowed.numbers[places], w) for places, w in found]


@torch.inference_mode()
def best(logits: Tensor, count: int, allowed: Columns | None = None) -> Ids:
    """The columns of one row of logits (V,) that are the largest, at most `count`, the largest first."""
    scores = logits if allowed is None else logits[allowed.places]
    places: Ids = scores.topk(min(count, len(scores))).indices.cpu().numpy()
    return places if allowed is None else allowed.numbers[places]


def narrowed(ids: Ids, probabilities: Probabilities, row_width: int) -> tuple[Ids, Probabilities]:
    """A law over any ids cut and rounded as `drafting_laws` does it.

    Args:
        ids: shape (n,), distinct.
        probabilities: shape (n,), with a sum of one.
        row_width: most probable ids that are kept; 0: all, without rounding.
    """
    order = np.argsort(-probabilities, kind="stable")[: row_width or None]
    weights = probabilities[order]
    if row_width:
        weights = _on_grid(weights[None])[0]
    return ids[order][weights > 0], weights[weights > 0]


def _bare(scores: Tensor, options: SamplingOptions) -> Tensor:
    """Laws without penalties and biases."""
    return law(scores, SamplingOptions(options.temperature, options.top_k, options.top_p, options.min_p))


def _largest(scores: Tensor, options: SamplingOptions, count: int) -> tuple[Probabilities, Ids]:
    """The largest probabilities up to a factor, and their places, each (n, count) with the largest first."""
    if options.top_k or options.top_p < 1 or options.min_p:
        top, order = _bare(scores, options).topk(count)
        return top.cpu().numpy(), order.cpu().numpy()
    best_scores, order = scores.topk(count)  # what is left out needs no probabilities
    values: Probabilities = best_scores.double().cpu().numpy()
    return np.exp((values - values[:, :1]) / options.temperature), order.cpu().numpy()


def _biased(scores: Tensor, options: SamplingOptions) -> Tensor:
    if not options.logit_bias:
        return scores
    size = scores.shape[-1]
    bias = scores.new_zeros(size)
    for token, value in options.logit_bias:
        if not 0 <= token < size:
            raise ValueError(f"logit_bias names id {token}, and ids are 0 to {size - 1}")
        bias[token] += value
    return scores + bias


def _penalised(scores: Tensor, options: SamplingOptions, history: History | None) -> Tensor:
    """Both penalties; each counts a token at most once, on the node's own path."""
    if options.repetition_penalty == 1 and options.presence_penalty == 0:
        return scores
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
    return seen.to(scores.device)


def _nucleus(scores: Tensor, top_p: float) -> Tensor:
    """Keeps the most probable ids whose predecessors hold less than `top_p`."""
    probabilities, width = scores.softmax(-1), NUCLEUS
    ordered, order = probabilities.topk(min(width, scores.shape[-1]))
    while width < scores.shape[-1] and bool((ordered.sum(-1) < top_p).any()):
        width *= 8
        ordered, order = probabilities.topk(min(width, scores.shape[-1]))
    inside = ordered.cumsum(-1) - ordered < top_p
    inside[:, 0] = True
    outside = torch.ones_like(scores, dtype=torch.bool).scatter_(-1, order, ~inside)
    return scores.masked_fill(outside, -torch.inf)


def _others(listed: Iterable[int], head: Ids) -> list[int]:
    """The listed ids that are not in the head, each once."""
    known = set(head.tolist())
    return [token for token in dict.fromkeys(int(token) for token in listed) if token not in known]


def _tails(unlisted: Tensor) -> list[float]:
    """What the unlisted ids (n, V; listed ones zero) hold together. One minus the others would be mere rounding."""
    arrives = unlisted.amax(-1).float() > 0
    tails: list[float] = torch.where(arrives, unlisted.sum(-1), 0.0).tolist()
    return tails


def _on_grid(weights: Probabilities) -> Probabilities:
    """Weights (n, m), largest first, as multiples of 1/GRID that sum to one; the largest takes what rounding leaves."""
    steps = np.rint(weights / weights.sum(-1, keepdims=True) * GRID)
    steps[:, 0] += GRID - steps.sum(-1)
    gridded: Probabilities = steps / GRID
    return gridded

"""From laws to rows: what travels of a law, and what a drafter draws from."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from crossdraft.models.sampling import tempered
from crossdraft.models.transfers import sent
from crossdraft.verification.exchange import SamplingOptions
from crossdraft.verification.rows import NO_IDS, Ids, Probabilities, Row

GRID = 1 << 24  # a multiple of 1/GRID up to 1 is a float32
SPAN = 256  # ids whose probabilities are summed first when a tail is


@dataclass(frozen=True)
class Columns:
    """Some columns of logits, here and on the logits' device, so that no step has to copy them. Equal if the same."""

    numbers: Ids = field(compare=False)  # int64 (m,)
    places: Tensor = field(compare=False)  # the same on the device
    digest: bytes  # of the numbers

    @staticmethod
    def of(numbers: Ids, device: torch.device) -> "Columns":
        """Copies them once."""
        places = torch.tensor(numbers, dtype=torch.int64, device=device)
        return Columns(numbers, places, blake2b(numbers.astype("<i8").tobytes(), digest_size=16).digest())


@torch.inference_mode()
def to_rows(probabilities: Tensor, head: int, listed: Sequence[Ids] = ()) -> list[Row]:
    """Laws (n, V) as rows: the `head` most probable ids and those listed (none, or one array a row), the rest as tail.

    An id of probability zero is left out unless it is listed; a row that lists all others is whole. So is one where
    each of the others is zero as a float32, as rows travel: a tail would promise ids that never arrive.
    """
    top, ids = probabilities.topk(min(head, probabilities.shape[-1]))
    lengths = [len(more) for more in listed] or [0] * len(ids)
    wanted = np.concatenate([*listed, NO_IDS]).astype(np.int64)
    spots = np.stack([np.repeat(np.arange(len(lengths)), np.array(lengths, dtype=np.int64)), wanted])
    places = sent(torch.from_numpy(spots), probabilities.device)
    unlisted = torch.nn.functional.pad(probabilities, (0, -probabilities.shape[-1] % SPAN)).scatter_(-1, ids, 0.0)
    if len(wanted):
        unlisted[*places] = 0.0
    weights, heads, tails, extras = _fetched(top, ids, _tails(unlisted), probabilities[*places])
    rows, at, others_asked = [], 0, wanted.tolist()
    for head_ids, shares, tail, count in zip(heads.astype(np.int64), weights, tails, lengths, strict=True):
        kept = int((shares > 0).sum())  # the largest come first
        others = _others(others_asked[at : at + count], head_ids[:kept])
        values = np.concatenate([shares[:kept], extras[at : at + count][list(others.values())]])
        rows.append(Row(np.concatenate([head_ids[:kept], np.fromiter(others, dtype=np.int64)]), values, float(tail)))
        at += count
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
    scores = columns_of(logits, allowed)
    if options.temperature == 0:
        found = [(place, np.ones(1)) for place in scores.argmax(-1, keepdim=True).cpu().numpy()]
    elif row_width == 0:  # nothing is cut, and to order a whole vocabulary is slow
        found = [(np.flatnonzero(w > 0), w[w > 0]) for w in tempered(scores, options).cpu().numpy()]
    else:
        top, order = _largest(scores, options, min(row_width, scores.shape[-1]))
        weights = _on_grid(top)
        found = [(places[w > 0], w[w > 0]) for places, w in zip(order, weights, strict=True)]
    return found if allowed is None else [(allowed.numbers[places], w) for places, w in found]


def columns_of(logits: Tensor, allowed: Columns | None) -> Tensor:
    """The columns that may be drawn, of logits (n, V); raises ValueError if there are none."""
    if allowed is None:
        return logits
    if not len(allowed.numbers):
        raise ValueError("no id is allowed: the two vocabularies share no token")
    return logits[:, allowed.places]


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


def _largest(scores: Tensor, options: SamplingOptions, count: int) -> tuple[Probabilities, Ids]:
    """The largest probabilities up to a factor, and their places, each (n, count) with the largest first."""
    if options.top_k or options.top_p < 1 or options.min_p:
        values, order = _fetched(*tempered(scores, options).topk(count))
        return values, order.astype(np.int64)
    values, order = _fetched(*scores.topk(count))  # what is left out needs no probabilities
    return np.exp((values - values[:, :1]) / options.temperature), order.astype(np.int64)


def _fetched(*tensors: Tensor) -> list[Probabilities]:
    """Tensors in the host's memory, by one copy. As float64, which ids fit into."""
    flat: Probabilities = torch.cat([tensor.double().flatten() for tensor in tensors]).cpu().numpy()
    parts = np.split(flat, np.cumsum([tensor.numel() for tensor in tensors])[:-1])
    return [part.reshape(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def _others(listed: Sequence[int], head: Ids) -> dict[int, int]:
    """The listed ids that are not in the head, each with the place where it is listed first."""
    known = set(head.tolist())
    found: dict[int, int] = {}
    for place, token in enumerate(listed):
        if token not in known:
            found.setdefault(token, place)
    return found


def _tails(unlisted: Tensor) -> Tensor:
    """What the unlisted ids (n, V; listed ones zero) hold together. One minus the others would be mere rounding.

    Sums of sums: torch adds up the columns of a single row in another order than those of several.
    """
    sums = unlisted.unflatten(-1, (-1, SPAN)).sum(-1).sum(-1)
    return torch.where(unlisted.amax(-1).float() > 0, sums, 0.0)


def _on_grid(weights: Probabilities) -> Probabilities:
    """Weights (n, m), largest first, as multiples of 1/GRID that sum to one; the largest takes what rounding leaves."""
    steps = np.rint(weights / weights.sum(-1, keepdims=True) * GRID)
    steps[:, 0] += GRID - steps.sum(-1)
    gridded: Probabilities = steps / GRID
    return gridded

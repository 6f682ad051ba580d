"""From logits to distributions, as transformers and vLLM define them, then to what travels and is drawn from.

Bias and ids that may be drawn, penalties (presence and frequency as in vLLM), ids that may not be drawn yet or here,
temperature, min_p, top_k, top_p, in this order and in float64.
A row's distribution is bitwise the same whatever rows are computed beside it.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from crossdraft.engine.device import sent
from crossdraft.types.messages import SamplingOptions
from crossdraft.types.rows import NO_IDS, Ids, Probabilities, Row
from crossdraft.types.trees import Path

Logits = Tensor  # floating (n, V), for packages that must not import torch
GRID = 1 << 24  # a multiple of 1/GRID up to 1 is a float32
PART = 1 << 15  # ids that are read at once: the interpreter lock is held for 1 ms
SPAN = 256  # ids whose probabilities are summed first when a tail is
NOT_FINITE = "no id has a probability above 0: the model's logits are not finite"
NUCLEUS = 256  # most probable ids that top_p looks at first; seldom more are needed, and sorting all is slow


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors (n, V) one below the other."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


@dataclass(frozen=True)
class Columns:
    """Some columns of logits, on the host and on the logits' device, so that no step copies them. Equal if the same."""

    numbers: Ids = field(compare=False)  # int64 (m,)
    on_device: Tensor = field(compare=False)  # the same
    digest: bytes  # of the numbers

    @staticmethod
    def of(numbers: Ids, device: torch.device) -> "Columns":
        copied = torch.tensor(numbers, dtype=torch.int64, device=device)
        return Columns(numbers, copied, blake2b(numbers.astype("<i8").tobytes(), digest_size=16).digest())


@dataclass(frozen=True)
class History:
    """The tokens before each row of logits, for options that look back."""

    output: tuple[int, ...]  # committed after the prompt
    paths: Sequence[Path]  # one a row: the tokens after the committed ones


class LogitsProcessor:
    """What the options of a session do to its logits before temperature: biases, penalties and bans.

    Whatever grows with a request is made once, on the logits' device: making it takes as long as the options are large.

    Args:
        options: of the session.
        size: logits of a row.
        device: of the logits.
        prompt: ids, for the repetition penalty.

    Raises:
        ValueError: an id is outside the vocabulary.
    """

    def __init__(self, options: SamplingOptions, size: int, device: torch.device, prompt: tuple[int, ...] = ()) -> None:
        self.warping = options.of_drafter  # what follows; rows for which this is equal are computed together
        self.looks_back = options.looks_back
        self._rates = options.repetition_penalty, options.presence_penalty, options.frequency_penalty
        self._penalises = self._rates != (1, 0, 0)
        self._min_tokens = options.min_tokens
        self._prompt = sent(_ids("prompt", [*{*prompt}], size), device)
        self._ends = sent(_ids("end_ids", options.end_ids, size), device)
        biases: dict[int, float] = {}
        for token, bias in options.logit_bias:
            biases[token] = biases.get(token, 0.0) + bias
        self._biased = sent(_ids("logit_bias", [*biases], size), device)
        self._biases = sent(torch.tensor([*biases.values()], dtype=torch.float64), device)
        words: dict[int, list[Path]] = {}  # by the last id but one; -1: single ids
        for word in options.bad_word_ids:
            words.setdefault(word[-2] if len(word) > 1 else -1, []).append(word)
        single = [token for (token,) in words.pop(-1, ())]
        self._words, self._longest = words, max(map(len, options.bad_word_ids), default=0)
        self._refused: Tensor | None = None  # float16 (V,), added: minus infinity for ids that are never drawn
        if single or options.allowed_token_ids:
            rest = -torch.inf if options.allowed_token_ids else 0.0
            refused = torch.full((size,), rest, dtype=torch.float16)  # a mask of bool takes ten times as long to apply
            refused[_ids("allowed_token_ids", options.allowed_token_ids, size)] = 0.0
            refused[_ids("bad_word_ids", single, size)] = -torch.inf
            self._refused = sent(refused, device)

    @property
    def changes(self) -> bool:
        """Whether it changes any logits."""
        return self.looks_back or self._refused is not None or len(self._biased) > 0

    def scores(self, logits: Tensor, history: History | None) -> Tensor:
        """Changed logits (n, V); raises ValueError if the history is needed, and missing."""
        exact = self._penalises or len(self._biased)
        scores = logits.to(torch.float64 if exact else logits.dtype, copy=True)
        scores.index_add_(-1, self._biased, self._biases.to(scores.dtype).expand(len(scores), -1))
        if self.looks_back:
            if history is None:
                raise ValueError("these options look back at the tokens before each row: pass their history")
            if self._penalises:
                scores = self._penalised(scores, history)
            self._ban(scores, history)
        return scores if self._refused is None else scores.add_(self._refused)

    def _penalised(self, scores: Tensor, history: History) -> Tensor:
        """Penalties, each by the tokens on the row's own path."""
        counts, (rate, presence, frequency) = _counts(scores, history.output, history.paths), self._rates
        seen = counts > 0
        if rate != 1:
            before = seen.index_fill(1, self._prompt, True)
            scores = torch.where(before, torch.where(scores < 0, scores * rate, scores / rate), scores)
        return scores - presence * seen.to(scores.dtype) - frequency * counts

    def _ban(self, scores: Tensor, history: History) -> None:
        """In place: ids that end an output too early, and the last ones of bad words, each by the row's own path."""
        early = [row for row, one in enumerate(history.paths) if len(history.output) + len(one) < self._min_tokens]
        if early:
            scores[_indices(early, scores)[:, None], self._ends] = -torch.inf
        cells = [(row, last) for row, path in enumerate(history.paths) for last in self._banned(history.output, path)]
        if cells:
            rows, lasts = zip(*cells, strict=True)
            scores[_indices(rows, scores), _indices(lasts, scores)] = -torch.inf

    def _banned(self, output: tuple[int, ...], path: Path) -> Iterator[int]:
        """The last ids of the bad words whose others are the latest ones."""
        latest = (*output[-self._longest :], *path) if self._words else ()
        for word in self._words.get(latest[-1], ()) if latest else ():
            if latest[1 - len(word) :] == word[:-1]:
                yield word[-1]


def _ids(name: str, ids: Sequence[int], size: int) -> Tensor:
    """Int64 (n,), on the host; raises ValueError if one is not below the size."""
    parts = [np.fromiter(ids[begin : begin + PART], np.int64) for begin in range(0, len(ids), PART)]
    found = torch.from_numpy(np.concatenate([NO_IDS, *parts]))
    wrong = found[(found < 0) | (found >= size)]
    if len(wrong):
        raise ValueError(f"{name} names id {wrong[0]}, and ids are 0 to {size - 1}")
    return found


@dataclass(frozen=True, eq=False)
class Nodes:
    """Logits of nodes of a tree, and what turns them into distributions."""

    logits: Tensor  # floating (n, V), as the model gives them
    processor: LogitsProcessor
    history: History | None = None  # may be left out where the options do not look back


@torch.inference_mode()
def distributions(parts: Sequence[Nodes]) -> Tensor:
    """What a token is drawn from at nodes of several trees with one `warping`: float64 (n, V), rows sum to one.

    Raises:
        ValueError: the history is missing.
    """
    return tempered(scores(parts), parts[0].processor.warping)


@torch.inference_mode()
def scores(parts: Sequence[Nodes], logits: Tensor | None = None) -> Tensor:
    """Logits with biases, penalties and bans, for nodes of several trees: floating (n, V).

    `logits` are those of all parts, if they are joined already. Raises as `distributions`.
    """
    if not any(part.processor.changes for part in parts):
        return joined([part.logits for part in parts]) if logits is None else logits
    return joined([part.processor.scores(part.logits, part.history) for part in parts])


@torch.inference_mode()
def tempered(scores: Tensor, options: SamplingOptions) -> Tensor:
    """Temperature (0: one-hot rows), min_p, top_k and top_p of floating scores (n, V): float64 distributions.

    A row of scores that are not finite has no probability above 0: whoever draws from it raises ValueError.
    """
    if options.temperature == 0:
        return torch.zeros_like(scores, dtype=torch.float64).scatter_(-1, *greedy(scores))
    scores = scores.to(torch.float64, copy=True)
    # The largest score is moved to zero first, so that a tiny temperature cannot overflow.
    scores.sub_(scores.amax(-1, keepdim=True)).div_(options.temperature)
    if options.min_p > 0:
        scores.masked_fill_(scores < math.log(options.min_p), -torch.inf)
    if 0 < options.top_k < scores.shape[-1]:
        least = scores.topk(options.top_k).values[:, -1:]
        scores = scores.masked_fill(scores < least, -torch.inf)
    if options.top_p < 1:
        scores = _nucleus(scores, options.top_p)
    return scores.softmax(-1)


def greedy(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The best ids of floating scores (n, V), and their probabilities, 1, or 0 where scores are not finite; (n, 1)."""
    best = scores.max(-1, keepdim=True)
    return best.indices, best.values.isfinite().double()


def _counts(scores: Tensor, common: tuple[int, ...], paths: Sequence[Path]) -> Tensor:
    """How often each token is in `common` and in the row's path, of the kind and shape of scores (n, V)."""
    ids = _indices(common, scores)
    counts = scores.new_zeros(scores.shape[-1]).index_add_(0, ids, scores.new_ones(len(ids))).repeat(len(paths), 1)
    rows = _indices([row for row, path in enumerate(paths) for _ in path], scores)
    tokens = _indices([token for path in paths for token in path], scores)
    return counts.index_put_((rows, tokens), scores.new_ones(len(rows)), accumulate=True)


def _indices(values: Sequence[int], like: Tensor) -> Tensor:
    """Int64 (n,), on the device of another tensor."""
    return sent(torch.tensor(values, dtype=torch.int64), like.device)


def _nucleus(scores: Tensor, top_p: float) -> Tensor:
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
    """Bool (n, V): what is not in the nucleus, judged by the `width` most probable ids; (n,): what these hold."""
    ordered, order = probabilities.topk(min(width, probabilities.shape[-1]))
    sums = ordered.cumsum(-1)
    inside = sums - ordered < top_p
    inside[:, 0] = True
    outside = torch.ones_like(probabilities, dtype=torch.bool).scatter_(-1, order, ~inside)
    return outside, sums[:, -1]


@dataclass(frozen=True, eq=False)
class Likely:
    """The most probable ids of n nodes by the model itself, the most probable first."""

    ids: Ids  # int64 (n, m)
    log_probabilities: Probabilities  # (n, m), nats

    @staticmethod
    def of(log_probabilities: Tensor, count: int) -> "Likely":
        """At most so many of each row (n, V)."""
        values, ids = _fetched(*log_probabilities.topk(min(count, log_probabilities.shape[-1])))
        return Likely(ids.astype(np.int64), values)

    def pairs(self, begin: int = 0, end: int | None = None) -> Iterator[tuple[tuple[int, float], ...]]:
        for ids, values in zip(self.ids[begin:end].tolist(), self.log_probabilities[begin:end].tolist(), strict=True):
            yield tuple(zip(ids, values, strict=True))


@dataclass(frozen=True, eq=False)
class RowTable:
    """Rows of n nodes as columns: those of all rows follow each other, of each row the likeliest ids first."""

    bounds: Ids  # int64 (n + 1,): row i has the entries from bounds[i] to bounds[i + 1]
    ids: Ids  # int64 (entries,)
    probabilities: Probabilities  # (entries,)
    tails: Probabilities  # (n,)
    log_probabilities: Probabilities | None = None  # (entries,), nats, of the model itself, if they were asked for
    likely: Likely | None = None  # set with them

    def nodes(self, begin: int = 0, end: int | None = None) -> tuple[Row, ...]:
        tails = self.tails[begin:end].tolist()
        bounds = [*pairwise(self.bounds[begin : None if end is None else end + 1].tolist())]
        if self.log_probabilities is None or self.likely is None:
            return tuple(
                Row(self.ids[first:last], self.probabilities[first:last], tail)
                for tail, (first, last) in zip(tails, bounds, strict=True)
            )
        return tuple(
            Row(self.ids[first:last], self.probabilities[first:last], tail, self.log_probabilities[first:last], likely)
            for tail, (first, last), likely in zip(tails, bounds, self.likely.pairs(begin, end), strict=True)
        )

    @torch.inference_mode()
    def logged(self, logits: Tensor, likely: int | None) -> "RowTable":
        """With log-probabilities by the model's logits (n, V) and so many most probable ids; None: without."""
        if likely is None:
            return self
        rows = np.repeat(np.arange(len(self.tails)), np.diff(self.bounds))
        cells = sent(torch.from_numpy(np.stack([rows, self.ids])), logits.device)
        values = log_probabilities_of(logits)
        (own,) = _fetched(values[cells[0], cells[1]])
        return replace(self, log_probabilities=own, likely=Likely.of(values, likely))


def log_probabilities_of(logits: Tensor) -> Tensor:
    """The model's own, float32 (n, V): temperature 1, no penalties, no truncation."""
    return logits.float().log_softmax(-1)


@torch.inference_mode()
def row_table(probabilities: Tensor, head: int, listed: Sequence[Ids] = ()) -> RowTable:
    """Distributions (n, V) as rows: the `head` most probable ids and those listed (none, or one array a row), the rest
    as tail.

    An id of probability zero is left out unless it is listed. A row is whole if it lists all others, or if each of the
    others is zero as a float32, as rows travel: a tail would promise ids that never arrive.

    Raises:
        ValueError: a distribution has no probability above 0.
    """
    count, size = probabilities.shape
    top, ids = probabilities.topk(min(head, size))
    wanted = np.concatenate([*listed, NO_IDS]).astype(np.int64)
    cells = np.repeat(np.arange(len(listed)), [len(more) for more in listed]) * size + wanted
    cells = cells[np.sort(np.unique(cells, return_index=True)[1])]  # each id once in a row
    unlisted = torch.nn.functional.pad(probabilities, (0, -size % SPAN)).scatter_(-1, ids, 0.0)
    rows, columns = sent(torch.from_numpy(np.stack(np.divmod(cells, size))), probabilities.device)
    before, known = unlisted[rows, columns], probabilities[rows, columns]
    unlisted[rows, columns] = 0.0
    shares, heads, tails, beside, values = _fetched(top, ids, _tails(unlisted), before, known)
    inside = shares > 0
    extra = (beside > 0) | (values == 0)  # else it is in the head
    of = np.concatenate([np.nonzero(inside)[0], cells[extra] // size])
    order = np.argsort(of, kind="stable")
    bounds = np.searchsorted(of[order], np.arange(count + 1))
    entries = np.concatenate([heads[inside].astype(np.int64), cells[extra] % size])
    weights = np.concatenate([shares[inside], values[extra]])
    if not (np.bincount(of, weights, count) + tails > 0).all():
        raise ValueError(NOT_FINITE)
    return RowTable(bounds, entries[order], weights[order], tails)


@torch.inference_mode()
def drafting_distributions(
    logits: Tensor, options: SamplingOptions, row_width: int, allowed: Columns | None = None
) -> list[tuple[Ids, Probabilities]]:
    """The distributions that a drafter draws from, one of each row of logits: ids and probabilities, the largest first
    if cut.

    Mask, temperature, truncation, rounding, in this order; what is returned is what must be drawn from. Where rows
    travel the probabilities are multiples of 2^-24 that add up to exactly one: float32 holds them without loss, so
    that normalizing them again on the other side changes nothing.

    Args:
        logits: floating (n, V).
        options: the drafter's own; penalties and biases are not used.
        row_width: most probable ids that are kept; 0: all, without rounding.
        allowed: the only columns that may be drawn; None: all.

    Raises:
        ValueError: nothing is allowed, or logits are not finite.
    """
    scores = columns_of(logits, allowed)
    if options.temperature == 0:
        best, certain = _fetched(*greedy(scores))
        found = [(place.astype(np.int64)[one > 0], one[one > 0]) for place, one in zip(best, certain, strict=True)]
    elif row_width == 0:  # nothing is cut, and to order a whole vocabulary is slow
        found = [(np.flatnonzero(w > 0), w[w > 0]) for w in tempered(scores, options).cpu().numpy()]
    else:
        top, order = _largest(scores, options, min(row_width, scores.shape[-1]))
        weights = _on_grid(top)
        kept = (weights > 0).sum(-1).tolist()  # the largest come first
        found = [(places[:count], w[:count]) for places, w, count in zip(order, weights, kept, strict=True)]
    if not all(len(places) for places, _ in found):
        raise ValueError(NOT_FINITE)
    return found if allowed is None else [(allowed.numbers[places], w) for places, w in found]


def columns_of(logits: Tensor, allowed: Columns | None) -> Tensor:
    """The columns that may be drawn, of logits (n, V); raises ValueError if there are none."""
    if allowed is None:
        return logits
    if not len(allowed.numbers):
        raise ValueError("no id is allowed: the two vocabularies share no token")
    return logits[:, allowed.on_device]


def narrowed(ids: Ids, probabilities: Probabilities, row_width: int) -> tuple[Ids, Probabilities]:
    """A distribution over any ids cut and rounded as `drafting_distributions` does it.

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
    """Copies tensors to the host at once, as float64, which holds ids exactly."""
    flat: Probabilities = torch.cat([tensor.double().flatten() for tensor in tensors]).cpu().numpy()
    parts = np.split(flat, np.cumsum([tensor.numel() for tensor in tensors])[:-1])
    return [part.reshape(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def _tails(unlisted: Tensor) -> Tensor:
    """Total probability of the unlisted ids (n, V; listed ones zero). One minus the others would be mere rounding.

    Sums of sums, as torch adds the columns of a single row in another order than those of several.
    """
    sums = unlisted.unflatten(-1, (-1, SPAN)).sum(-1).sum(-1)
    return torch.where(unlisted.amax(-1).float() > 0, sums, 0.0)


def _on_grid(weights: Probabilities) -> Probabilities:
    """Weights (n, m), largest first, as multiples of 1/GRID that sum to one; the largest takes what rounding leaves."""
    steps = np.rint(weights / weights.sum(-1, keepdims=True) * GRID)
    steps[:, 0] += GRID - steps.sum(-1)
    gridded: Probabilities = steps / GRID
    return gridded

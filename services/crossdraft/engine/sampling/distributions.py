"""From logits to distributions, as transformers and vLLM define them, then to what travels and is drawn from.

A grammar's mask, bias and ids that may be drawn, penalties (presence and frequency as in vLLM), ids that may not be
drawn yet or here, temperature, min_p, top_k, top_p, in this order.
A row's distribution is bitwise the same whatever rows are computed beside it. Nothing here waits for the device.

Probabilities are float64, as a row's tail and the sums of a nucleus are less than what many float32 would lose: of all
ids where the whole distribution is wanted, or drawn from; of few ids where `top_k` says that these are all.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from hashlib import blake2b
from itertools import pairwise, repeat, starmap

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from crossdraft.engine.device import Fetching, sent
from crossdraft.text.grammar import Bits
from crossdraft.types import quick_dataclass
from crossdraft.types.messages import SamplingOptions
from crossdraft.types.rows import NO_IDS, Ids, Probabilities, Row
from crossdraft.types.trees import Path

Logits = Tensor  # floating (n, V), for packages that must not import torch
GRID = 1 << 24  # a multiple of 1/GRID up to 1 is a float32
PART = 1 << 15  # ids that are read at once: the interpreter lock is held for 1 ms
SPAN = 256  # ids whose probabilities are summed first when a tail is
NOT_FINITE = "no id has a probability above 0: the model's logits are not finite"
NUCLEUS = 256  # most probable ids that top_p looks at first on a CPU; seldom more are needed, and sorting all is slow
NARROW = 256  # ids to which `top_k` may narrow a distribution so that the others are not looked at again
LEAST_WIDTH = 32  # of such a distribution, so that few differ in it
# (256, 8): what is added to the logits of eight columns for each byte of a mask.
ADDED = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], 1, bitorder="little"), 0, -np.inf)
ADDED = ADDED.astype(np.float32)


class NothingLeftError(ValueError):
    """A grammar and options of a request leave no id that may be drawn."""


def nothing_left(logits: Tensor) -> ValueError:
    """Why a row has no id that can be drawn: its masked logits are not finite, or all ids are ruled out."""
    finite = bool((logits < torch.inf).all())  # not NaN, either
    return NothingLeftError("no id is left to draw") if finite else ValueError(NOT_FINITE)


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


def numbers_of(places: Probabilities | Ids, allowed: Columns | None) -> Ids:
    """The columns of logits that places among those that are allowed stand for."""
    found = places.astype(np.int64)
    return found if allowed is None else allowed.numbers[found]


@dataclass(frozen=True)
class History:
    """The tokens before each row of logits, for options that look back."""

    output: tuple[int, ...]  # committed after the prompt
    paths: Sequence[Path]  # one a row: the tokens after the committed ones


class LogitsProcessor:
    """What the options of a session do to its logits before temperature: biases, penalties and bans.

    Whatever grows with a request is made once, on the logits' device: making it takes as long as the options are large.
    The prompt is for the repetition penalty. Raises ValueError: an id is outside the vocabulary.
    """

    def __init__(self, options: SamplingOptions, size: int, device: torch.device, prompt: tuple[int, ...] = ()) -> None:
        self.warping = options.of_drafter  # what follows
        self.kind = Warping.kind(self.warping)  # rows for which this is equal are computed together
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
        self.changes = self.looks_back or self._refused is not None or bool(biases)  # whether it changes any logits

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
        early = [row for row, path in enumerate(history.paths) if len(history.output) + len(path) < self._min_tokens]
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


@quick_dataclass(frozen=True, eq=False)
class Nodes:
    """Logits of nodes of a tree, and what turns them into distributions."""

    logits: Tensor  # floating (n, V), as the model gives them
    processor: LogitsProcessor
    history: History | None = None  # may be left out where the options do not look back
    mask: Bits | None = None  # of the grammar, a row for each; None: there is none


def masked(logits: Tensor, mask: Bits) -> Tensor:
    """Logits (n, V) with those of columns that a grammar does not allow at minus infinity."""
    if logits.is_cpu:
        added = torch.from_numpy(ADDED.take(mask, 0))  # torch takes ten times as long for it
    else:
        added = _added(logits.device)[sent(torch.from_numpy(mask), logits.device).int()]
    return logits + added.flatten(1)[:, : logits.shape[1]]


@cache
def _added(device: torch.device) -> Tensor:
    return torch.from_numpy(ADDED).to(device)


def logits_of(parts: Sequence[Nodes]) -> Tensor:
    """The logits of several trees, masked by their grammars: floating (n, V)."""
    logits, width = joined([part.logits for part in parts]), parts[0].logits.shape[1]
    if all(part.mask is None for part in parts):
        return logits
    free = np.full((1, -(-width // 8)), 0xFF, dtype=np.uint8)
    masks = [free.repeat(len(part.logits), 0) if part.mask is None else part.mask for part in parts]
    return masked(logits, np.concatenate(masks))


@torch.inference_mode()
def distributions(parts: Sequence[Nodes], logits: Tensor | None = None) -> Tensor:
    """What a token is drawn from at nodes of several trees of one kind: float64 (n, V), rows sum to one.

    `logits` are `logits_of` all parts, if these are known already. Raises ValueError: the history is missing.
    """
    found = scores(parts, logits_of(parts) if logits is None else logits)
    sizes = [part.logits.shape[0] for part in parts]
    return tempered(found, Warping.of([part.processor.warping for part in parts], sizes, found.device))


@torch.inference_mode()
def scores(parts: Sequence[Nodes], logits: Tensor) -> Tensor:
    """The `logits_of` several trees with biases, penalties and bans: floating (n, V). Raises as `distributions`."""
    if not any(part.processor.changes for part in parts):
        return logits
    each = zip(parts, logits.split([len(part.logits) for part in parts]), strict=True)
    return joined([part.processor.scores(own, part.history) for part, own in each])


def width_of(options: SamplingOptions) -> int:
    """The best columns to which draws are narrowed, where others have no probability; 0: to none.

    Of those that are equal to the last one of `top_k` at least as many are kept as there are others.
    """
    narrow = 0 < options.top_k <= NARROW
    return max(LEAST_WIDTH, 1 << (2 * options.top_k - 1).bit_length()) if narrow else 0


@dataclass(frozen=True, eq=False)
class Warping:
    """What follows biases, penalties and bans, for rows of several sessions of one kind."""

    greedy: bool
    temperatures: Tensor  # float64 (n, 1)
    least: Tensor | None  # float64 (n, 1), logarithms of min_p; None: all rows are without
    top_k: Tensor | None  # int64 (n, 1), 0: all; None: likewise
    most: int  # of these
    top_p: Tensor | None  # float64 (n, 1); None: likewise
    width: int  # best columns that alone can be drawn, as `width_of`

    @staticmethod
    def kind(options: SamplingOptions) -> tuple[bool, int, bool]:
        """What must be equal in options of one `Warping`, which looks only at the first whether some apply."""
        if options.temperature == 0:
            return True, 0, False
        return False, width_of(options), options.top_p < 1

    @staticmethod
    def of(options: Sequence[SamplingOptions], sizes: Sequence[int], device: torch.device) -> "Warping":
        """The options of each session, and how many rows it has. Of greedy ones nothing is sent to the device."""
        if options[0].temperature == 0:
            return GREEDY
        numbers = torch.from_numpy(warping_table(options).repeat(sizes, 1)[..., None])
        temperatures, least, top_k, top_p = sent(numbers, device)
        most = max(own.top_k for own in options)
        return Warping(
            False,
            temperatures,
            least if any(own.min_p for own in options) else None,
            top_k.long() if most else None,
            most,
            top_p if options[0].top_p < 1 else None,
            width_of(options[0]),
        )


def warping_table(options: Sequence[SamplingOptions]) -> Probabilities:
    """The numbers of a `Warping`, (4, sessions): temperature, logarithm of min_p, top_k, and top_p, where 2 is all."""
    rows = (  # lists of numbers, as numpy takes ten times as long for tuples
        [own.temperature for own in options],
        [math.log(own.min_p) if own.min_p else -math.inf for own in options],
        [own.top_k for own in options],
        [own.top_p if own.top_p < 1 else 2.0 for own in options],  # above any sum, rounding included
    )
    return np.stack([np.array(row, dtype=np.float64) for row in rows])


GREEDY = Warping(True, torch.zeros(0, 1, dtype=torch.float64), None, None, 0, None, 0)


@torch.inference_mode()
def tempered(scores: Tensor, warping: Warping) -> Tensor:
    """Temperature (0: one-hot rows), min_p, top_k and top_p of floating scores (n, V): float64 distributions.

    A row of scores that are not finite has no probability above 0: whoever draws from it raises ValueError.
    """
    if warping.greedy:
        return torch.zeros_like(scores, dtype=torch.float64).scatter_(-1, *greedy(scores))
    scores = scores.to(torch.float64, copy=True)
    # The largest score is moved to zero first, so that a tiny temperature cannot overflow.
    scores.sub_(scores.amax(-1, keepdim=True)).div_(warping.temperatures)
    if warping.least is not None:
        scores.masked_fill_(scores < warping.least, -torch.inf)
    if warping.top_k is not None:
        best = scores.topk(min(warping.most, scores.shape[-1])).values
        places = (warping.top_k - 1).clamp(0, best.shape[-1] - 1)
        limited = (warping.top_k > 0) & (warping.top_k < scores.shape[-1])
        scores.masked_fill_(limited & (scores < best.gather(-1, places)), -torch.inf)
    if warping.top_p is not None:
        scores = _nucleus(scores, warping.top_p)
    return scores.softmax(-1)


def weights_of(scores: Tensor, warping: Warping) -> tuple[Tensor, Tensor | None]:
    """What may be drawn by scores (n, m): float64 probabilities (n, k), and their columns; None: of all, in order."""
    if warping.greedy:
        best, certain = greedy(scores)
        return certain, best
    best, places = scores.topk(min(warping.width, scores.shape[-1])) if warping.width else (scores, None)
    return tempered(best, warping), places


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


def _nucleus(scores: Tensor, top_p: Tensor) -> Tensor:
    probabilities = scores.softmax(-1)
    width = NUCLEUS if scores.is_cpu else scores.shape[-1]  # other devices cannot be asked whether that was enough
    outside, held = _outside(probabilities, top_p, width)
    while width < scores.shape[-1]:
        width *= 8
        (short,) = (held < top_p[:, 0]).nonzero(as_tuple=True)  # rows that need more; the others stay as they are
        if not len(short):
            break
        outside[short], held[short] = _outside(probabilities[short], top_p[short], width)
    return scores.masked_fill_(outside, -torch.inf)


def _outside(probabilities: Tensor, top_p: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Bool (n, V): what is not in the nucleus, judged by the `width` most probable ids; (n,): what these hold."""
    ordered, order = probabilities.topk(min(width, probabilities.shape[-1]))
    sums = ordered.cumsum(-1)
    inside = sums - ordered < top_p
    inside[:, 0].fill_(True)
    outside = torch.ones_like(probabilities, dtype=torch.bool).scatter_(-1, order, ~inside)
    return outside, sums[:, -1]


def likeliest(log_probabilities: Tensor, count: int | None) -> Sequence[Tensor]:
    """Of each row (n, V) the largest, so many at most, and their ids, (n, m) each; 0 or None: nothing."""
    return log_probabilities.topk(min(count, log_probabilities.shape[-1])) if count else ()


def likely_pairs(
    fetched: Sequence[Probabilities], begin: int, end: int | None
) -> Iterator[tuple[tuple[int, float], ...]]:
    """The most probable ids of some nodes, with log-probabilities, of what `likeliest` has found; else none of each."""
    if not fetched:
        yield from repeat(())
    for values, ids in zip(*(part[begin:end].tolist() for part in fetched), strict=True):
        yield tuple((int(token), value) for token, value in zip(ids, values, strict=True) if value > -math.inf)


@dataclass(frozen=True, eq=False)
class RowTable:
    """Rows of n nodes as columns: those of all rows follow each other, of each row the likeliest ids first."""

    bounds: Ids  # int64 (n + 1,): row i has the entries from bounds[i] to bounds[i + 1]
    ids: Ids  # int64 (entries,)
    probabilities: Probabilities  # (entries,)
    tails: Probabilities  # (n,)
    possible: NDArray[np.bool_]  # (n,): elsewhere nothing can be drawn, and all is tail
    log_probabilities: Probabilities | None = None  # (entries,), nats, of the model itself, if they were asked for
    likely: Sequence[Probabilities] = ()  # with them, if any were asked for: as of `likeliest`

    def nodes(self, begin: int = 0, end: int | None = None) -> tuple[Row, ...]:
        tails = self.tails[begin:end].tolist()
        bounds = pairwise(self.bounds[begin : None if end is None else end + 1].tolist())
        logs, pairs = self.log_probabilities, likely_pairs(self.likely, begin, end)
        return tuple(
            Row(self.ids[at], self.probabilities[at], tail, None if logs is None else logs[at], likely)
            for tail, at, likely in zip(tails, starmap(slice, bounds), pairs, strict=False)
        )


def log_probabilities_of(logits: Tensor) -> Tensor:
    """The model's own, float32 (n, V): temperature 1, no penalties, no truncation; with a grammar, by that."""
    return logits.float().log_softmax(-1)


def row_table(
    probabilities: Tensor, head: int, listed: Sequence[Ids] = (), logits: Tensor | None = None, likely: int = 0
) -> Fetching[RowTable]:
    """Distributions (n, V) as rows: the `head` most probable ids and those listed (none, or one array a row), the rest
    as tail.

    An id of probability zero is left out unless it is listed. A row is whole if it lists all others, or if each of the
    others is zero as a float32, as rows travel: a tail would promise ids that never arrive.

    With the model's logits (n, V) there are log-probabilities, and so many `likely` ids, in it, too.
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
    found = [top, ids, _tails(unlisted), before, known]
    if logits is not None:
        own = log_probabilities_of(logits)
        found += [own.gather(-1, ids), own[rows, columns], *likeliest(own, likely)]
    shares, heads, tails, beside, values, *logged = yield found
    inside = shares > 0
    extra = (beside > 0) | ~(values > 0)  # else it is in the head
    of = np.concatenate([np.nonzero(inside)[0], cells[extra] // size])
    order = np.argsort(of, kind="stable")
    bounds = np.searchsorted(of[order], np.arange(count + 1))
    entries = np.concatenate([heads[inside].astype(np.int64), cells[extra] % size])
    weights = np.nan_to_num(np.concatenate([shares[inside], values[extra]]))
    possible = np.bincount(of, weights, count) + tails > 0
    table = RowTable(bounds, entries[order], weights[order], np.where(possible, tails, 1.0), possible)
    if not logged:
        return table
    logs = np.concatenate([logged[0][inside], logged[1][extra]])[order]
    return replace(table, log_probabilities=np.where(np.isnan(logs), -np.inf, logs), likely=logged[2:])


def cut_rows(weights: Probabilities, columns: Ids) -> list[tuple[Ids, Probabilities]]:
    """Rows (n, m) without what has no probability; raises ValueError if nothing has."""
    kept = weights > 0
    if not kept.any(-1).all():
        raise ValueError(NOT_FINITE)
    return [(of[here], row[here]) for of, row, here in zip(columns, weights, kept, strict=True)]


@torch.inference_mode()
def cut_distributions(scores: Tensor, warping: Warping, row_width: int) -> tuple[Tensor, Tensor]:
    """What a drafter draws from where it is cut: float64 probabilities, the largest first, and columns, (n, m) each.

    Mask, temperature, truncation, rounding, in this order; what is returned is what must be drawn from. The
    probabilities are multiples of 2^-24 that add up to exactly one: float32 holds them without loss, so that
    normalizing them again on the other side changes nothing. Where logits are not finite all are 0.
    """
    if warping.greedy:
        best, certain = greedy(scores)
        return certain, best
    row_width = min(row_width, scores.shape[-1])
    if warping.top_p is not None and not warping.width:
        weights, columns = tempered(scores, warping).topk(row_width)
    else:  # what is left out needs no probabilities
        best, columns = scores.topk(max(row_width, min(warping.width, scores.shape[-1])))
        weights, columns = tempered(best, warping)[:, :row_width], columns[:, :row_width]
    # The largest takes what rounding leaves. The last of cumulative sums does not depend on other rows, as a sum may.
    steps = (weights / weights.cumsum(-1)[:, -1:] * GRID).round_()
    steps[:, 0] += GRID - steps.cumsum(-1)[:, -1]
    return (steps / GRID).nan_to_num_(0.0), columns


def columns_of(logits: Tensor, allowed: Columns | None) -> Tensor:
    """The columns that may be drawn, of logits (n, V); raises ValueError if there are none."""
    if allowed is None:
        return logits
    if not len(allowed.numbers):
        raise ValueError("no id is allowed: the two vocabularies share no token")
    return logits[:, allowed.on_device]


def narrowed(ids: Ids, probabilities: Probabilities, row_width: int) -> tuple[Ids, Probabilities]:
    """A distribution over any ids, (n,) each, cut and rounded as `cut_distributions` does it; width 0: left whole."""
    order = np.argsort(-probabilities, kind="stable")[: row_width or None]
    weights = probabilities[order]
    if row_width:  # the largest takes what rounding leaves
        steps = np.rint(weights / weights.sum() * GRID)
        steps[0] += GRID - steps.sum()
        weights = steps / GRID
    return ids[order][weights > 0], weights[weights > 0]


def _tails(unlisted: Tensor) -> Tensor:
    """Total probability of the unlisted ids (n, V; listed ones zero). One minus the others would be mere rounding.

    Sums of sums, as torch adds the columns of a single row in another order than those of several.
    """
    sums = unlisted.unflatten(-1, (-1, SPAN)).sum(-1).sum(-1)
    return torch.where(unlisted.amax(-1).float() > 0, sums, 0.0)

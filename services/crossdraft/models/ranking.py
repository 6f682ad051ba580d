"""What a drafter wants of the logits it holds: laws that are drawn from elsewhere, or draws from whole laws."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from crossdraft.models.clocks import Clocks
from crossdraft.models.drawing import Chance
from crossdraft.models.reading import R, Reading, joined, split
from crossdraft.models.rows import Columns, columns_of, drafting_laws
from crossdraft.models.sampling import tempered
from crossdraft.models.transfers import sent
from crossdraft.verification.exchange import SamplingOptions
from crossdraft.verification.rows import Ids, Probabilities

Law = tuple[Ids, Probabilities]  # ids, by falling probability where rows are cut, and their probabilities


@dataclass(frozen=True, eq=False)
class _OfLogits(Reading[R]):
    logits: Tensor

    @property
    def about(self) -> Tensor:
        """As in `Reading`."""
        return self.logits


@dataclass(frozen=True, eq=False)
class Laws(_OfLogits[tuple[Law, ...]]):
    """The law of each row, as in `drafting_laws`, whose arguments these are."""

    options: SamplingOptions
    row_width: int
    allowed: Columns | None = None

    @property
    def kind(self) -> Hashable:
        """As in `Reading`."""
        return self.options, self.row_width, self.allowed

    def together(self, readings: "Sequence[Laws]") -> list[tuple[Law, ...]]:
        """As in `Reading`."""
        logits = [reading.logits for reading in readings]
        return split(drafting_laws(joined(logits), self.options, self.row_width, self.allowed), list(map(len, logits)))


@dataclass(frozen=True, eq=False)
class Best(_OfLogits[tuple[list[int], ...]]):
    """The columns with the largest logits in each row, at most `count`, the largest first."""

    count: int
    allowed: Columns | None = None

    @property
    def kind(self) -> Hashable:
        """As in `Reading`."""
        return self.count, self.allowed

    @torch.inference_mode()
    def together(self, readings: "Sequence[Best]") -> list[tuple[list[int], ...]]:
        """As in `Reading`."""
        scores = columns_of(joined([reading.logits for reading in readings]), self.allowed)
        places = scores.topk(min(self.count, scores.shape[-1])).indices.cpu().numpy()
        found = places if self.allowed is None else self.allowed.numbers[places]
        return split(found.tolist(), [len(reading.logits) for reading in readings])


@dataclass(frozen=True, eq=False)
class Ranking(_OfLogits[tuple[list[int], ...]]):
    """The draw of each row from its whole law; in the first row also what was nearest to being drawn instead.

    Only columns leave the device, all at once.
    """

    options: SamplingOptions  # penalties and biases are not used
    clocks: Clocks
    chances: Sequence[Chance]  # of each row, all of one kind
    beside: int = 0  # columns besides the draw in the first row, the nearest first; fewer where there are fewer
    allowed: Columns | None = None  # the only columns that may be drawn; None: all

    @property
    def kind(self) -> Hashable:
        """As in `Reading`."""
        return self.options, self.clocks, type(self.chances[0]), self.beside, self.allowed

    @torch.inference_mode()
    def together(self, readings: "Sequence[Ranking]") -> list[tuple[list[int], ...]]:
        """As in `Reading`; a law without any probability (logits that are no numbers) is what has no answer."""
        sizes = [len(reading.logits) for reading in readings]
        scores = columns_of(joined([reading.logits for reading in readings]), self.allowed)
        drawn, distances, possible = self._drawn(scores, [chance for each in readings for chance in each.chances])
        places, certain = torch.stack([drawn, possible.long()]).tolist()
        if not all(certain):
            raise ValueError("no id has a probability above 0: the model's logits are not finite")
        found = [[place] for place in places]
        if self.beside:
            firsts = [sum(sizes[:place]) for place in range(len(sizes))]
            for first, others in zip(firsts, self._others(scores[firsts], distances[firsts]), strict=True):
                found[first] = list(dict.fromkeys([places[first], *others]))[: 1 + self.beside]
        if self.allowed is not None:
            found = [self.allowed.numbers[columns].tolist() for columns in found]
        return split(found, sizes)

    def _drawn(self, scores: Tensor, chances: list[Chance]) -> tuple[Tensor, Tensor, Tensor]:
        """Places, how far others were from being drawn (n, m), and whether what was drawn has a probability."""
        if self.options.temperature == 0:
            best = scores.argmax(-1)
            return best, -scores, torch.ones_like(best)
        law = tempered(scores, self.options)
        moments = [chance for chance in chances if not isinstance(chance, float)]
        if moments:
            distances = self.clocks.arrivals(law, moments, None if self.allowed is None else self.allowed.places)
            drawn = distances.argmin(-1)
        else:
            drawn, distances = _at(law, torch.tensor(chances, dtype=law.dtype)), -law.where(law > 0, -torch.inf)
        return drawn, distances, law.gather(-1, drawn[:, None])[:, 0] > 0

    def _others(self, scores: Tensor, distances: Tensor) -> list[list[int]]:
        """The nearest of each row, and if some of them cannot be drawn, those with the best scores after them."""
        count = min(1 + self.beside, scores.shape[-1])
        near, best = distances.topk(count, largest=False), scores.topk(count).indices
        found = torch.cat([near.indices, near.values.isinf(), best], -1).tolist()
        return [_completed(row[:count], row[count : 2 * count], row[2 * count :]) for row in found]


def _at(law: Tensor, chances: Tensor) -> Tensor:
    """Where the sums of each row (n, m) reach their part (n,) of the whole."""
    sums, chances = law.cumsum(-1), sent(chances, law.device)
    last = (sums < sums[:, -1:]).sum(-1)  # the last place that adds anything: not to be passed by rounding
    return torch.minimum(torch.searchsorted(sums, chances[:, None] * sums[:, -1:], right=True)[:, 0], last)


def _completed(near: list[int], impossible: list[int], best: list[int]) -> list[int]:
    possible = [place for place, never in zip(near, impossible, strict=True) if not never]
    return possible if len(possible) == len(near) else [*possible, *best]

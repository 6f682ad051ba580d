"""What a target's passes and runs want of the logits they hold: its own draws, or rows."""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from crossdraft.models.clocks import Clocks
from crossdraft.models.reading import Reading, joined, split
from crossdraft.models.rows import to_rows
from crossdraft.models.sampling import Nodes, laws, scores, tempered
from crossdraft.verification.exchange import NoiseKey, Sample
from crossdraft.verification.rows import NO_IDS, Ids, Row


@dataclass(frozen=True, eq=False)
class Sampling(Reading[tuple[Sample, ...]]):
    """The target's own keyed draw at each node. Only ids and log-probabilities leave the device, all at once."""

    nodes: Nodes
    clocks: Clocks
    key: NoiseKey
    offsets: Sequence[int]  # of each node, in letters since the start of the output
    likely: int = 0  # most probable ids that are told beside each draw, fewer where the model has fewer

    @property
    def about(self) -> Tensor:
        """As in `Reading`."""
        return self.nodes.logits

    @property
    def kind(self) -> Hashable:
        """As in `Reading`."""
        return self.nodes.options, self.clocks, self.likely

    @torch.inference_mode()
    def together(self, readings: "Sequence[Sampling]") -> list[tuple[Sample, ...]]:
        """As in `Reading`; a law without any probability (logits that are no numbers) is what has no answer."""
        drawn, shares = self._drawn(readings)
        told = joined([reading.nodes.logits for reading in readings]).float().log_softmax(-1)
        likely = told.topk(min(self.likely, told.shape[-1]))
        columns = (drawn, shares, told.gather(-1, drawn), likely.indices, likely.values)
        found = torch.cat([column.double() for column in columns], -1).tolist()
        return split(list(_samples(found)), [len(reading.offsets) for reading in readings])

    def _drawn(self, readings: "Sequence[Sampling]") -> tuple[Tensor, Tensor]:
        """Ids and their probabilities, each (n, 1)."""
        options, found = self.nodes.options, scores([reading.nodes for reading in readings])
        if options.temperature == 0:  # there is one id to draw
            best = found.max(-1, keepdim=True)
            return best.indices, torch.ones_like(best.values)
        moments = [(reading.key, offset) for reading in readings for offset in reading.offsets]
        law = tempered(found, options)
        drawn = self.clocks.arrivals(law, moments).argmin(-1, keepdim=True)
        return drawn, law.gather(-1, drawn)


def _samples(found: list[list[float]]) -> Iterator[Sample]:
    """From id, probability, log-probability, likely ids, their log-probabilities."""
    for token, share, log_probability, *likely in found:
        if not share > 0:
            raise ValueError("no id has a probability above 0: the model's logits are not finite")
        half = len(likely) // 2
        beside = zip(map(int, likely[:half]), likely[half:], strict=True)
        yield Sample(int(token), log_probability, tuple(beside))


@dataclass(frozen=True, eq=False)
class Rows(Reading[tuple[Row, ...]]):
    """The row of each node."""

    nodes: Nodes
    head: int  # as in `to_rows`
    listed: Sequence[Ids] = ()  # alike

    @property
    def about(self) -> Tensor:
        """As in `Reading`."""
        return self.nodes.logits

    @property
    def kind(self) -> Hashable:
        """As in `Reading`."""
        return self.nodes.options, self.head

    def together(self, readings: "Sequence[Rows]") -> list[tuple[Row, ...]]:
        """As in `Reading`."""
        listed = [ids for reading in readings for ids in reading.listed or [NO_IDS] * len(reading.nodes.logits)]
        rows = to_rows(laws([reading.nodes for reading in readings]), self.head, listed)
        return split(rows, [len(reading.nodes.logits) for reading in readings])

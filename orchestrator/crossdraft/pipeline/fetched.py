"""The rows and samples of the latest pass, by the ids committed since its root."""

from dataclasses import dataclass, field

import numpy as np

from crossdraft.pipeline.rules import IllegalEventError
from crossdraft.verification.exchange import Pass, PassDone, RowFetched, Sample
from crossdraft.verification.rows import Row
from crossdraft.verification.trees import Path
from crossdraft.verification.walk import NeedRow, NeedSample

SAME_LAW = 1e-3  # by which a head and its whole row may differ in sum; rows sum to one within a tenth of that


def answers(done: PassDone, sent: Pass, samples: bool) -> bool:
    """Whether this is the answer to that pass, by samples or by rows."""
    kind = Sample if samples else Row
    whole = done.number == sent.number and len(done.nodes) == 1 + len(sent.tree)
    return whole and all(isinstance(node, kind) for node in done.nodes)


@dataclass
class Fetched:
    """What one pass brought."""

    number: int = 0  # of the pass; 0 before the first
    since_root: list[int] = field(default_factory=list)  # ids committed since the pass's root
    _places: dict[Path, int] = field(default_factory=dict)
    _nodes: list[Row | Sample] = field(default_factory=list)

    @staticmethod
    def of(sent: Pass, done: PassDone) -> "Fetched":
        """The results of a pass, at its root."""
        places = {path: place for place, path in enumerate(sent.tree.paths())}
        return Fetched(sent.number, [], places, list(done.nodes))

    @property
    def node(self) -> int | None:
        """The node at the frontier; None if the pass did not guess it."""
        return self._places.get(tuple(self.since_root))

    def answer(self, need: NeedRow | NeedSample) -> Row | Sample | None:
        """What the walk needs at the frontier, if the pass brought it."""
        if self.node is None:
            return None
        found = self._nodes[self.node]
        if isinstance(need, NeedRow) and isinstance(found, Row):
            known = found.whole or (not need.whole and found.lists(need.listed))
            return found if known else None
        return found

    @property
    def sample(self) -> Sample | None:
        """The target's draw at the frontier, if it answers by draws."""
        found = None if self.node is None else self._nodes[self.node]
        return found if isinstance(found, Sample) else None

    def replace(self, fetched: RowFetched) -> None:
        """A whole row takes the place of its head.

        Raises:
            IllegalEventError: they are not the same law; nothing has changed.
        """
        head = self._nodes[fetched.node]
        if isinstance(head, Row) and _difference(head, fetched.row) > SAME_LAW:
            raise IllegalEventError(f"the whole row of node {fetched.node} is not that of the head sent before")
        self._nodes[fetched.node] = fetched.row


def _difference(head: Row, whole: Row) -> float:
    """The sum of the differences in probability, of each listed id and of the tail."""
    listed = whole.probabilities_of(head.ids)
    unlisted = whole.probabilities[head.places(whole.ids) < 0].sum()
    return float(np.abs(listed - head.probabilities).sum() + abs(unlisted - head.tail))

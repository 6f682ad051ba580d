"""The rows and samples that passes have brought, by the ids that lead to them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from crossdraft.pipeline.events import IllegalEventError, Lane
from crossdraft.verification.exchange import Pass, Sample
from crossdraft.verification.rows import Ids, Row
from crossdraft.verification.trees import Path
from crossdraft.verification.walk import NeedRow, NeedSample

SAME_LAW = 1e-3  # by which a head and its whole row may differ in sum; rows sum to one within a tenth of that


@dataclass(frozen=True, eq=False)
class Flight:
    """A pass that was sent. Of a run, `paths` is the one that it is at, and times count from its latest answer."""

    lane: Lane
    sent: Pass
    root: int  # tokens of output that were committed when it left
    paths: tuple[Path, ...]  # of what it answers, or answers next, from the root on
    tokens: int  # that it feeds: those committed since the lane's pass before, and the tree's
    left_at: float  # seconds
    idle: float  # seconds that the lane had stood idle
    proposals: int = 0  # known beyond the root
    drawn: int = 0  # tokens that its run has brought before
    ending: bool = False  # its run was told to end
    half: int = 0  # tokens of its run, of which half of what was asked for last has been drawn


@dataclass(frozen=True, eq=False)
class Held:
    """What is known after one path."""

    answer: Row | Sample
    lane: Lane  # whose pass it came from
    number: int  # of that pass
    node: int  # of that pass's tree
    extra: Ids | None = None  # ids that were asked for besides the head, if it is known that these were all


class Fetched:
    """Rows and samples at and after the frontier."""

    def __init__(self, ids: list[int], head: int) -> None:
        self._ids = ids  # of the output; grows elsewhere
        self._head = head  # ids of a row that come unasked
        self._base = 0  # tokens of output before the paths below
        self._held: dict[Path, Held] = {}

    @property
    def held(self) -> Held | None:
        """What is known at the frontier."""
        return self._held.get(tuple(self._ids[self._base :]))

    def knows(self, path: Path) -> bool:
        """Whether anything is known after this path from the frontier on."""
        return (*self._ids[self._base :], *path) in self._held

    def answer(self, need: NeedRow | NeedSample) -> Row | Sample | None:
        """What the walk needs at the frontier, if it is at hand: a row is no draw, and a draw no row.

        Of a row only the ids that may be used: its head, and those that the need lists. What else was listed depends
        on proposals that are not revealed.
        """
        held = self.held
        if held is None:
            return None
        row = held.answer
        if isinstance(row, Sample) or isinstance(need, NeedSample):
            return row if isinstance(row, Sample) and isinstance(need, NeedSample) else None
        if need.whole:
            return row if row.whole else None
        if not row.lists(need.listed):
            return None
        whole = held.extra is not None and np.array_equal(held.extra, need.listed)
        return row if whole else self._cut(row, need.listed)

    @property
    def row(self) -> Row | None:
        """The target's row at the frontier, if a pass brought one."""
        found = self.held.answer if self.held is not None else None
        return found if isinstance(found, Row) else None

    @property
    def log_probabilities(self) -> tuple[float | None, tuple[tuple[int, float], ...]]:
        """Of the target's draw at the frontier, in nats, and of the likeliest ids there; None if it made no draw."""
        found = self.held.answer if self.held is not None else None
        return (found.log_probability, found.likely) if isinstance(found, Sample) else (None, ())

    def add(self, flight: Flight, nodes: Sequence[Row | Sample]) -> None:
        """A pass has returned: what lies before its root is forgotten, if it is the farthest so far."""
        if flight.root > self._base:
            self._rebase(flight.root)
        passed = tuple(self._ids[flight.root : self._base])
        listed = flight.sent.listed or (None,) * len(nodes)
        answered = flight.sent.answered if flight.sent.run == 1 else (0,) * len(nodes)
        for path, node, answer, extra in zip(flight.paths, answered, nodes, listed, strict=True):
            if path[: len(passed)] == passed:
                held = Held(answer, flight.lane, flight.sent.number, node, extra)
                self._held[path[len(passed) :]] = held

    def complete(self, flight: Flight, node: int, row: Row) -> None:
        """A row that was asked for takes the place of what was known.

        Raises:
            IllegalEventError: they are not the same law; nothing has changed.
        """
        path = flight.paths[flight.sent.answered.index(node)]
        passed = tuple(self._ids[flight.root : self._base])
        place = path[len(passed) :]
        if path[: len(passed)] != passed or place not in self._held:
            return  # the output has taken another way
        before = self._held[place].answer
        if isinstance(before, Row) and _difference(before, row) > SAME_LAW:
            raise IllegalEventError(f"the row of node {node} is not that of the head sent before")
        self._held[place] = Held(row, flight.lane, flight.sent.number, node)

    def forget(self) -> None:
        """What is known at the frontier is not enough, and its pass is over: another pass must bring it."""
        self._held.pop(tuple(self._ids[self._base :]), None)

    def _rebase(self, base: int) -> None:
        passed = tuple(self._ids[self._base : base])
        kept = {path[len(passed) :]: held for path, held in self._held.items() if path[: len(passed)] == passed}
        self._held, self._base = kept, base

    def _cut(self, row: Row, listed: Ids) -> Row:
        """The head and the listed ids; the rest joins the tail."""
        if len(row.ids) <= self._head:
            return row
        kept = np.zeros(len(row.ids), dtype=np.bool_)
        # Of equal probabilities the first, as in every row: which ids are used must not depend on what else is listed.
        kept[np.argsort(-row.probabilities, kind="stable")[: self._head]] = True
        places = row.places(listed)
        kept[places[places >= 0]] = True
        if kept.all():
            return row
        return Row(row.ids[kept], row.probabilities[kept], row.tail + float(row.probabilities[~kept].sum()))


def _difference(head: Row, other: Row) -> float:
    """The sum of the differences in probability, of each id that the first lists, and of the rest."""
    places = other.places(head.ids)
    known = places >= 0
    listed = np.abs(other.probabilities[places[known]] - head.probabilities[known]).sum()
    rest = other.probabilities[head.places(other.ids) < 0].sum() + other.tail
    return float(listed + abs(rest - head.tail - head.probabilities[~known].sum()))

"""What a session's proposals are: the drafter's own tokens, or the target's through an affinity matrix (`rdk`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from crossdraft.drafter.context import Context
from crossdraft.drafter.prefixes import Index
from crossdraft.models.drawing import Draws
from crossdraft.models.ranking import Best, Law, Laws, Ranking
from crossdraft.models.reading import Asking
from crossdraft.models.rows import Columns, narrowed
from crossdraft.models.running import RunningModel
from crossdraft.models.sampling import Logits
from crossdraft.text.affinity import Affinity
from crossdraft.verification.exchange import OpenDrafter
from crossdraft.verification.noise import KeyedNoise
from crossdraft.verification.rows import Ids, Whose

NOTHING_SHARED = "the two vocabularies share no token"


@dataclass(frozen=True, eq=False)
class Guess:
    """A token that was drawn."""

    token: int
    others: list[int]  # what was nearest to being drawn, or is likeliest besides, as far as it was asked for
    law: Law | None = None  # that it was drawn from, if it is known here


@dataclass(frozen=True, eq=False)
class Equipment:
    """What all sessions of a drafter service share."""

    running: RunningModel
    affinity: Affinity | None = None  # for `rdk`: to the tokens of one target

    @cached_property
    def index(self) -> Index:
        """The drafter's tokens by their letters."""
        return Index(self.running.tokenization.vocabulary)

    @cached_property
    def target_noise(self) -> KeyedNoise:
        """The noise of the target that the affinity matrix is for."""
        assert self.affinity is not None
        return KeyedNoise.of(self.affinity)


class Proposing(Protocol):
    """One kind of proposals."""

    @property
    def whose(self) -> Whose:
        """Whose ids they use."""
        ...

    @property
    def noise(self) -> KeyedNoise:
        """Of the vocabulary whose ids they use."""
        ...

    @property
    def obstacle(self) -> str:
        """Why there is no token to propose; empty if there are any."""
        ...

    def laws(self, logits: Logits) -> Asking[list[Law]]:
        """The laws that are drawn from, one of each row of logits (n, V), exactly as they travel."""
        ...

    def guesses(self, logits: Logits, draws: Draws, offsets: Sequence[int], beside: int) -> Asking[list[Guess]]:
        """A draw from the law of each row of logits (n, V).

        Args:
            logits: what the laws are of.
            draws: where the draws come from.
            offsets: of each row, in letters since the start of the output.
            beside: ids besides the draw that are wanted of the first row, the best first; fewer where there are fewer.
        """
        ...

    def append(self, context: Context, token: int) -> None:
        """The text goes on with a token that was drawn; raises NotExpressible if the drafter cannot read it."""
        ...


class OwnTokens:
    """Proposals are tokens of the drafter's."""

    whose = Whose.DRAFTER

    def __init__(self, running: RunningModel, opening: OpenDrafter) -> None:
        self.noise = running.noise
        self.obstacle = _obstacle(running, opening.allowed)
        self._running = running
        self._opening = opening
        self._columns = _columns(running, opening.allowed)

    def laws(self, logits: Logits) -> Asking[list[Law]]:
        """As in `Proposing`."""
        return _own_laws(logits, self._running, self._columns, self._opening, self._opening.row_width)

    def guesses(self, logits: Logits, draws: Draws, offsets: Sequence[int], beside: int) -> Asking[list[Guess]]:
        """As in `Proposing`."""
        if self._opening.row_width == 0:  # no law travels: it stays where the logits are
            return self._ranked(logits, draws, offsets, beside)
        return self._drawn(logits, draws, offsets, beside)

    def _ranked(self, logits: Logits, draws: Draws, offsets: Sequence[int], beside: int) -> Asking[list[Guess]]:
        chances = [draws.chance(offset) for offset in offsets]
        asked = Ranking(logits, self._opening.options, self._running.clocks, chances, beside, self._columns)
        rows = yield from asked.found()
        return [Guess(drawn, others) for drawn, *others in map(self._ids, rows)]

    def _drawn(self, logits: Logits, draws: Draws, offsets: Sequence[int], beside: int) -> Asking[list[Guess]]:
        laws = yield from self.laws(logits)
        found = _guesses(laws, draws, offsets, beside)
        if len(found[0].others) < beside:  # at temperature 0 a law has one id
            (best,) = yield from Best(logits[:1], beside + 1, self._columns).found()
            found[0].others.extend(self._ids(best))
        return found

    def _ids(self, columns: list[int]) -> list[int]:
        found: list[int] = self._running.ids(np.array(columns, dtype=np.int64)).tolist()
        return found

    def append(self, context: Context, token: int) -> None:
        """As in `Proposing`."""
        context.append(token)


class TargetTokens:
    """Proposals are tokens of the target's, drawn from Mᵀq′ (RDK, Algorithm 1).

    q′ is the drafter's law over T∩D, with its temperature and truncations; Mᵀq′ is cut to the row's width and rounded.
    """

    whose = Whose.TARGET

    def __init__(self, equipment: Equipment, affinity: Affinity, opening: OpenDrafter) -> None:
        shared = affinity.drafter_ids
        allowed = shared if opening.allowed is None else np.intersect1d(shared, opening.allowed)
        self.noise = equipment.target_noise
        self.obstacle = _obstacle(equipment.running, allowed)
        self._running = equipment.running
        self._affinity = affinity
        self._opening = opening
        self._columns = _columns(equipment.running, allowed)

    def laws(self, logits: Logits) -> Asking[list[Law]]:
        """As in `Proposing`."""
        own = yield from _own_laws(logits, self._running, self._columns, self._opening, 0)
        return [narrowed(*self._affinity.redistribute(*law), self._opening.row_width) for law in own]

    def guesses(self, logits: Logits, draws: Draws, offsets: Sequence[int], beside: int) -> Asking[list[Guess]]:
        """As in `Proposing`."""
        laws = yield from self.laws(logits)
        return _guesses(laws, draws, offsets, beside)

    def append(self, context: Context, token: int) -> None:
        """As in `Proposing`."""
        context.write(self._affinity.letters_of(token))


def _obstacle(running: RunningModel, allowed: Ids | None) -> str:
    columns = running.columns(allowed)
    if columns is None or len(columns):
        return ""
    return "none of the shared tokens is kept" if allowed is not None and len(allowed) else NOTHING_SHARED


def _columns(running: RunningModel, allowed: Ids | None) -> Columns | None:
    columns = running.columns(allowed)
    return None if columns is None else Columns.of(columns, running.thread.engine.device)


def _own_laws(
    logits: Logits, running: RunningModel, columns: Columns | None, opening: OpenDrafter, row_width: int
) -> Asking[list[Law]]:
    laws = yield from Laws(logits, opening.options, row_width, columns).found()
    return [(running.ids(found), weights) for found, weights in laws]


def _guesses(laws: Sequence[Law], draws: Draws, offsets: Sequence[int], beside: int) -> list[Guess]:
    """Draws from laws that are known; only of the first more is wanted."""
    found: list[Guess] = []
    for law, offset in zip(laws, offsets, strict=True):
        token, *others = draws.ranked(*law, offset, 0 if found else beside)
        found.append(Guess(token, others, law))
    return found


def proposing(equipment: Equipment, opening: OpenDrafter) -> Proposing:
    """What a session proposes; `affinity` must be there if the opening asks for it."""
    if opening.redistribute:
        assert equipment.affinity is not None
        return TargetTokens(equipment, equipment.affinity, opening)
    return OwnTokens(equipment.running, opening)

"""What a session's proposals are: the drafter's own tokens, or the target's through an affinity matrix (`rdk`)."""

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from crossdraft.drafter.context import Context
from crossdraft.drafter.prefixes import Index
from crossdraft.models.running import RunningModel
from crossdraft.models.sampling import Columns, Logits, best, drafting_laws, narrowed
from crossdraft.text.affinity import Affinity
from crossdraft.verification.exchange import OpenDrafter
from crossdraft.verification.noise import KeyedNoise
from crossdraft.verification.rows import Ids, Probabilities, Whose

NOTHING_SHARED = "the two vocabularies share no token"

Law = tuple[Ids, Probabilities]  # ids, by falling probability where rows are cut, and their probabilities


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

    def laws(self, logits: Logits) -> list[Law]:
        """The laws that are drawn from, one of each row of logits (n, V), exactly as they travel."""
        ...

    def likeliest(self, logits: Logits, count: int) -> list[int]:
        """The ids that the model holds most probable among those allowed, best first, from one row of logits (V,)."""
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

    def laws(self, logits: Logits) -> list[Law]:
        """As in `Proposing`."""
        return _own_laws(logits, self._running, self._columns, self._opening, self._opening.row_width)

    def likeliest(self, logits: Logits, count: int) -> list[int]:
        """As in `Proposing`."""
        found: list[int] = self._running.ids(best(logits, count, self._columns)).tolist()
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

    def laws(self, logits: Logits) -> list[Law]:
        """As in `Proposing`."""
        own = _own_laws(logits, self._running, self._columns, self._opening, 0)
        return [narrowed(*self._affinity.redistribute(*law), self._opening.row_width) for law in own]

    def likeliest(self, logits: Logits, count: int) -> list[int]:
        """None: nothing is drafted beside the target's tokens."""
        return []

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
) -> list[Law]:
    laws = drafting_laws(logits, opening.options, row_width, columns)
    return [(running.ids(found), weights) for found, weights in laws]


def proposing(equipment: Equipment, opening: OpenDrafter) -> Proposing:
    """What a session proposes; `affinity` must be there if the opening asks for it."""
    if opening.redistribute:
        assert equipment.affinity is not None
        return TargetTokens(equipment, equipment.affinity, opening)
    return OwnTokens(equipment.running, opening)

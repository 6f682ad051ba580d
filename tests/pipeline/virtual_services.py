"""Services that take time, and the world that they are in.

The target's distribution has a favourite at each place; the drafter's is the target's with probability `acceptance`,
else something that the target never says, so that a draft token is accepted with just that probability.
"""

from dataclasses import dataclass, field
from itertools import count

import numpy as np

from crossdraft.text.letters import Letters
from crossdraft.types.messages import Advance, Branch, Draft, Drafted, Pass, PassDone, Sample
from crossdraft.types.rows import DraftToken, Row

SAID = "abcdefgh"  # what the target says
UNSAID = "ijklmnop"  # what only the drafter says
FAVOURITE = np.array([0.72, 0.16, 0.07, 0.03, 0.005, 0.005, 0.005, 0.005])


def distribution_at(place: int) -> np.ndarray:
    """The target's distribution over SAID after so many letters."""
    return np.roll(FAVOURITE, (place * 5 + place // 3) % len(SAID))


@dataclass(frozen=True)
class World:
    """How long things take, in seconds, and how good the drafter is."""

    acceptance: float
    token: float  # a drafter's step
    slope: float = 0.0  # ... more for each further token in the step, as a share
    base: float = 1.0  # a pass
    node: float = 0.03  # ... more for each node
    round_trip: float = 0.0  # to the drafter
    tokens: int = 2000
    seed: int = 0
    targets: int = 1


@dataclass
class VirtualDrafter:
    """Drafts one token a step, with branches in the same step; told of another epoch, it drops the old one."""

    world: World
    rng: np.random.Generator
    text: int = 0  # letters
    epoch: int = 0
    asked: int = 0
    made: int = 0
    draft: Draft | None = None
    numbers: "count[int]" = field(default_factory=lambda: count(1))
    growing: list[tuple[Branch, list[tuple[int, Row]], int]] = field(default_factory=list)
    kept: dict[int, tuple[int, list[tuple[int, Row]]]] = field(default_factory=dict)  # number -> end, draft tokens
    busy: bool = False
    held: list[DraftToken] = field(default_factory=list)  # that no reply has brought yet
    ripe: list[Branch] = field(default_factory=list)  # finished, likewise
    worked: float = 0.0  # seconds since the reply before

    def row(self, place: int) -> Row:
        said = distribution_at(place) * self.world.acceptance
        rest = np.full(len(UNSAID), (1 - self.world.acceptance) / len(UNSAID))
        values = np.concatenate([said, rest])
        return Row(np.flatnonzero(values), values[values > 0])

    def drawn(self, place: int) -> tuple[int, Row]:
        row = self.row(place)
        return int(self.rng.choice(row.ids, p=row.probabilities)), row

    def told(self, request: Draft | Advance) -> list[Drafted]:
        if isinstance(request, Advance):
            self.asked = request.count if request.epoch == self.epoch else self.asked
            return []
        self.draft, self.epoch, self.asked, self.made = request, request.epoch, request.count, 0
        self.text = request.offset + len(request.letters)
        kept = self.kept.get(request.adopt)
        self.growing, self.kept, self.held, self.ripe, self.worked = [], {}, [], [], 0.0
        if kept is None:
            return []
        self.text, self.made = kept[0], len(kept[1])
        return [Drafted(self.epoch, tuple(DraftToken(*one) for one in kept[1]), 0.0)]

    @property
    def works(self) -> bool:
        return self.made < self.asked or bool(self.growing)

    def cost(self) -> float:
        return self.world.token * (1 + self.world.slope * (len(self.growing)))

    def step(self) -> list[Drafted]:
        """One forward."""
        assert self.draft is not None
        self.worked += self.cost()
        growing = []
        for branch, made, end in self.growing:
            made.append(self.drawn(end))
            if len(made) == self.draft.branch_depth:
                done = Branch(branch.number, branch.offset, branch.letters, tuple(token for token, _ in made))
                self.kept[branch.number] = (end + 1, made)
                self.ripe.append(done)
            else:
                growing.append((branch, made, end + 1))
        self.growing = growing
        if self.made < self.asked:
            token, row = self.drawn(self.text)
            self.held.append(DraftToken(token, row))
            self._branch_off(token, row)
            self.text += 1
            self.made += 1
        return self._due(self.draft)

    def _due(self, draft: Draft) -> list[Drafted]:
        """A reply is due when it is full, or has all that is wanted."""
        sent = self.made - len(self.held)
        size = draft.first - sent if sent < draft.first else draft.chunk
        if len(self.held) < size and (self.made < self.asked or not (self.held or self.ripe)):
            return []
        reply = Drafted(self.epoch, tuple(self.held), self.worked, first=sent, branches=tuple(self.ripe))
        self.held, self.ripe, self.worked = [], [], 0.0
        return [reply]

    def _branch_off(self, token: int, row: Row) -> None:
        assert self.draft is not None
        if not self.draft.branch_depth:
            return
        others = [int(one) for one in row.ids[np.argsort(-row.probabilities)] if one != token]
        for other in others[: self.draft.branch_width]:
            letters = Letters((SAID + UNSAID)[other])
            self.growing.append((Branch(next(self.numbers), self.text, letters, ()), [], self.text + 1))


@dataclass
class VirtualTarget:
    """Answers passes in order."""

    world: World
    committed: int = 0
    places: tuple[int, ...] = ()

    def row(self, place: int) -> Row:
        return Row(np.arange(len(SAID)), distribution_at(place))

    def run(self, sent: Pass) -> tuple[PassDone, float]:
        self.committed += len(sent.committed)
        self.places = tuple(self.committed + len(path) for path in sent.tree.paths())
        seconds = self.world.base + self.world.node * len(sent.tree)
        answer = self.sample if sent.draws else self.row
        return PassDone(sent.number, tuple(answer(self.places[node]) for node in sent.answered), seconds), seconds

    def sample(self, place: int) -> Sample:
        row = self.row(place)
        rng = np.random.default_rng((self.world.seed, place))
        return Sample(int(rng.choice(row.ids, p=row.probabilities)), 0.0)

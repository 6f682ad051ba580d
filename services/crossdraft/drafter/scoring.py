"""Scores of one draft: its distribution is evaluated over trees of tokens, as far as strings may begin with their
letters.
"""

import asyncio
import time
from collections.abc import Hashable, Iterator, Sequence

from crossdraft.drafter.sampling import Equipment, Masses, Node, Proposing, Question
from crossdraft.engine.model_thread import ForwardResult, Job
from crossdraft.engine.requests import ForwardRequest
from crossdraft.engine.sampler import Distribution
from crossdraft.text.letters import Letters
from crossdraft.types.rows import Probabilities
from crossdraft.types.trees import ROOT, Path, TokenTree

STEP = 128  # nodes that are taken together
TREE = 512  # nodes of one tree: attention and the mask grow with it
KEPT = 1 << 20  # ids of all distributions that are kept for the next score: 16 MiB
DRAWN = 1 << 12  # ids of a distribution that is worth keeping while it is drawn from


class Scoring:
    """The probabilities of strings as the beginning of one draft.

    The sum runs over every way to write a beginning of a string in tokens. Their number grows exponentially with
    the strings' lengths in tokens; leaving any out would bias the scores, so none is, and the cost is time.
    """

    def __init__(self, equipment: Equipment, proposing: Proposing, session: Hashable, ids: Path) -> None:
        """`ids` is what the model was fed when the draft began."""
        self._equipment = equipment
        self._proposing = proposing
        self._session = session
        self._ids = ids
        self._drawn: dict[Path, Distribution] = {}
        self._distributions: dict[Path, Masses] = {}
        self._held = 0  # ids of those
        self._tree = _Growing(equipment.running.description.context - len(ids))

    def drawn(self, path: Path, distribution: Distribution) -> None:
        """The distribution that the draft itself used after its tokens `path`: then what it drew has a score
        above 0.
        """
        if len(distribution[0]) <= DRAWN:
            self._drawn[path] = distribution

    async def probabilities(self, strings: Sequence[Letters], tokens: int) -> tuple[Probabilities, float]:
        """Of each string that the text of the first `tokens` draft tokens begins with it; and the seconds in the
        model.
        """
        question = await asyncio.to_thread(self._question, strings)
        level, seconds = [Node()], 0.0
        for left in range(tokens - 1, -1, -1):
            deeper: list[Node] = []
            for at in range(0, len(level), STEP):
                nodes = level[at : at + STEP]
                distributions, spent = await self._evaluated([node.path for node in nodes])
                seconds += spent
                deeper += await asyncio.to_thread(self._added, question, nodes, distributions, left == 0)
            level = deeper
        return question.answer, seconds

    def _question(self, strings: Sequence[Letters]) -> Question:
        return Question(strings, self._equipment.index)  # the first one sorts the vocabulary

    async def _evaluated(self, paths: Sequence[Path]) -> tuple[dict[Path, Distribution], float]:
        """The distributions after paths, where they are not known yet."""
        known = {path: self._drawn[path] for path in paths if path in self._drawn and path not in self._distributions}
        missing = [path for path in paths if path not in self._distributions and path not in known]
        if not missing:
            return known, 0.0
        found, seconds = await self._equipment.running.thread.run(self._evaluate(missing))
        return known | found, seconds

    def _evaluate(self, paths: Sequence[Path]) -> Job[tuple[dict[Path, Distribution], float]]:
        """Runs in the model thread."""
        seconds = 0.0
        found: dict[Path, Distribution] = {}
        for group in self._tree.groups(paths):
            ordered = sorted(group, key=self._tree.row)
            wanted = tuple(self._tree.row(path) for path in ordered)
            answer: ForwardResult = yield ForwardRequest(self._session, self._ids, self._tree.tree, wanted)
            seconds += answer.seconds
            began = time.perf_counter()
            distributions = yield from self._proposing.distributions(answer.logits)
            found.update(zip(ordered, distributions, strict=True))
            seconds += time.perf_counter() - began
        return found, seconds

    def _added(
        self, question: Question, nodes: Sequence[Node], distributions: dict[Path, Distribution], last: bool
    ) -> list[Node]:
        deeper: list[Node] = []
        for node in nodes:
            masses = self._distributions.get(node.path)
            if masses is None:
                masses = Masses.of(*distributions[node.path], self._equipment.index)
                if self._held + len(masses.places) <= KEPT:
                    self._held += len(masses.places)
                    self._distributions[node.path] = masses
            deeper += question.add(node, masses, last)
        return deeper


class _Growing:
    """A tree that paths are added to, so that the engine feeds only what is new; begun anew when it is full."""

    def __init__(self, room: int) -> None:
        self._room = min(room, TREE)  # nodes
        self._clear()

    @property
    def tree(self) -> TokenTree:
        return TokenTree(tuple(self._tokens), tuple(self._parents))

    def row(self, path: Path) -> int:
        """The row of its logits."""
        return self._nodes[path] + 1

    def groups(self, paths: Sequence[Path]) -> Iterator[list[Path]]:
        """Adds paths; yields those that are in the tree together. One path alone is always added."""
        group: list[Path] = []
        for path in paths:
            if self._tokens and len(self._tokens) + self._lacks(path) > self._room:
                if group:
                    yield group
                group = []
                self._clear()
            self._add(path)
            group.append(path)
        yield group

    def _clear(self) -> None:
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._nodes: dict[Path, int] = {(): ROOT}

    def _lacks(self, path: Path) -> int:
        """How many nodes it would add."""
        return sum(path[:length] not in self._nodes for length in range(1, len(path) + 1))

    def _add(self, path: Path) -> None:
        for length in range(1, len(path) + 1):
            if path[:length] not in self._nodes:
                self._nodes[path[:length]] = len(self._tokens)
                self._parents.append(self._nodes[path[: length - 1]])
                self._tokens.append(path[length - 1])

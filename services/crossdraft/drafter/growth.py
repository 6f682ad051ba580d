"""An epoch's tokens as a tree that grows: what the engine is asked for, so that it is fed each token once."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from crossdraft.models.engine import Work
from crossdraft.verification.trees import ROOT, Path, TokenTree


@dataclass
class Tip:
    """The end of a line of tokens: a node of the tree, and the token after it that is not in the tree yet."""

    node: int = ROOT
    token: int | None = None  # None: the line ends with the node


class Growth:
    """Ids that every line begins with, then a tree: the draft, and its branches.

    The ids stay, and nodes are only added: then the engine feeds what is new. `replant` moves the root on.
    """

    def __init__(self, session: Hashable, root: Path) -> None:
        self._session = session
        self._root = root
        self._tokens: list[int] = []
        self._parents: list[int] = []

    @property
    def size(self) -> int:
        """Tokens that the model sees."""
        return len(self._root) + len(self._tokens)

    @property
    def nodes(self) -> int:
        """Of the tree."""
        return len(self._tokens)

    def work(self, tips: Sequence[Tip]) -> Work:
        """A request for the row after each tip, in their order; one that has no token of its own comes first."""
        for tip in tips:
            if tip.token is not None:
                self._tokens.append(tip.token)
                self._parents.append(tip.node)
                tip.node, tip.token = len(self._tokens) - 1, None
        tree = TokenTree(tuple(self._tokens), tuple(self._parents))
        return Work(self._session, self._root, tree, tuple(tip.node + 1 for tip in tips))

    def replant(self, node: int) -> dict[int, int]:
        """The root becomes a node; where the nodes that follow it, and it, are now. The others are forgotten."""
        places = {node: ROOT}
        tokens: list[int] = []
        parents: list[int] = []
        for place in range(node + 1, len(self._tokens)):
            if self._parents[place] in places:
                places[place] = len(tokens)
                tokens.append(self._tokens[place])
                parents.append(places[self._parents[place]])
        self._root += self._path(node)
        self._tokens, self._parents = tokens, parents
        return places

    def ancestor(self, node: int, steps: int) -> int:
        """The node so many steps before a node, at most the root."""
        while steps and node != ROOT:
            node, steps = self._parents[node], steps - 1
        return node

    def _path(self, node: int) -> Path:
        path: list[int] = []
        while node != ROOT:
            path.append(self._tokens[node])
            node = self._parents[node]
        return tuple(reversed(path))

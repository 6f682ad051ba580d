"""Token trees: the tokens that one forward of the target evaluates after the committed ones."""

from collections.abc import Iterable, Sequence
from dataclasses import field
from functools import lru_cache
from itertools import count
from operator import lt

from crossdraft.config import MOST_NODES as MOST_NODES
from crossdraft.types import quick_dataclass

ROOT = -1
Path = tuple[int, ...]  # target token ids after the committed ones
EXPANDED = (4, 10)  # nodes that a step of a draft tree expands, at least and at most: a quarter of all


def tree_width(nodes: int, depth: int) -> int:
    """Nodes that each of the `depth` steps of a draft tree of so many nodes expands."""
    least, most = EXPANDED
    return max(least, min(most, nodes // 4, MOST_NODES // depth))


@lru_cache
def chain_parents(nodes: int) -> tuple[int, ...]:
    """Of nodes that each follow the one before."""
    return tuple(range(ROOT, nodes - 1))


@quick_dataclass(frozen=True)
class TokenTree:
    """Nodes, parents before children. The root is no node: it is the end of the committed tokens.

    Raises ValueError: lengths differ, or a parent does not come before its child.
    """

    tokens: tuple[int, ...] = ()  # token id of each node, in the vocabulary of the model that evaluates it
    parents: tuple[int, ...] = ()  # index of each node's parent, or ROOT
    is_chain: bool = field(init=False, compare=False, repr=False)  # whether each node follows the one before

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.parents):
            raise ValueError(f"{len(self.tokens)} tokens but {len(self.parents)} parents")
        self.is_chain = self.parents == chain_parents(len(self.parents))  # type: ignore[misc]  # its only time
        if not self.is_chain and (min(self.parents) < ROOT or not all(map(lt, self.parents, count()))):
            wrong = next(node for node, parent in enumerate(self.parents) if not ROOT <= parent < node)
            raise ValueError(f"node {wrong} has parent {self.parents[wrong]}; parents must come first")

    @staticmethod
    def chain(tokens: Path) -> "TokenTree":
        """Each token follows the one before."""
        return TokenTree(tokens, chain_parents(len(tokens)))

    def __len__(self) -> int:
        return len(self.tokens)

    def paths(self) -> list[Path]:
        """The path to the root (empty), then to each node: the order of the rows of a pass."""
        if self.is_chain:
            return [self.tokens[:end] for end in range(1 + len(self.tokens))]
        known: list[Path] = [()]
        for token, parent in zip(self.tokens, self.parents, strict=True):
            known.append((*known[1 + parent], token))
        return known

    def ends(self, letters: Sequence[str]) -> list[int]:
        """How many letters the root's path has (none), then each node's; `letters` are those of each id."""
        ends = [0]
        for token, parent in zip(self.tokens, self.parents, strict=True):
            ends.append(ends[1 + parent] + len(letters[token]))
        return ends


def tree_of(paths: Iterable[Path], budget: int) -> TokenTree:
    """A tree of the paths with shared prefixes, at most `budget` nodes; earlier paths have precedence."""
    paths = list(dict.fromkeys(paths))
    if len(paths) == 1:
        return TokenTree.chain(paths[0][:budget])
    nodes: dict[tuple[int, int], int] = {}  # (parent, token) -> node
    tokens: list[int] = []
    parents: list[int] = []
    for path in paths:
        parent = ROOT
        for token in path:
            node = nodes.setdefault((parent, token), len(tokens))
            if node == len(tokens):
                if node >= budget:
                    break
                tokens.append(token)
                parents.append(parent)
            parent = node
    return TokenTree(tuple(tokens), tuple(parents))

"""The small tree of paths that one pass of the target evaluates."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

ROOT = -1
Path = tuple[int, ...]  # target token ids after the committed ones


@dataclass(frozen=True)
class TokenTree:
    """Nodes in an order where parents come first. The root (no node) is the frontier itself."""

    tokens: tuple[int, ...] = ()  # target (or, in the drafter, drafter) token ids, one a node
    parents: tuple[int, ...] = ()  # index of the parent node, ROOT for the root

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.parents):
            raise ValueError(f"{len(self.tokens)} tokens but {len(self.parents)} parents")
        for node, parent in enumerate(self.parents):
            if not ROOT <= parent < node:
                raise ValueError(f"node {node} has parent {parent}; parents must come first")

    def __len__(self) -> int:
        return len(self.tokens)

    def paths(self) -> Iterator[Path]:
        """The path of the root, then of each node; their order is the order of a pass's rows."""
        known: list[Path] = []
        yield ()
        for token, parent in zip(self.tokens, self.parents, strict=True):
            known.append((*(known[parent] if parent != ROOT else ()), token))
            yield known[-1]


def tree_of(paths: Iterable[Path], budget: int) -> TokenTree:
    """Paths as a tree that shares prefixes, at most `budget` nodes; earlier paths come first."""
    nodes: dict[tuple[int, int], int] = {}  # (parent, token) -> node
    tokens: list[int] = []
    parents: list[int] = []
    for path in paths:
        parent = ROOT
        for token in path:
            if (parent, token) not in nodes:
                if len(tokens) >= budget:
                    break
                nodes[parent, token] = len(tokens)
                tokens.append(token)
                parents.append(parent)
            parent = nodes[parent, token]
    return TokenTree(tuple(tokens), tuple(parents))

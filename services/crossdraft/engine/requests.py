"""Forward requests, and which input tokens they need beyond what is cached of their sessions. Pure, no torch."""

from bisect import bisect_left
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from crossdraft.types.trees import ROOT, TokenTree

NO_TREE = TokenTree()


class ContextOverflowError(ValueError):
    """A context and its tree are longer than a session may be."""


@dataclass(frozen=True)
class ForwardRequest:
    """Asks for logits after the committed tokens of a session and after nodes of a token tree."""

    session: Hashable
    context: tuple[int, ...]  # all committed token ids, prompt included, at least one
    tree: TokenTree = NO_TREE
    wanted: tuple[int, ...] | None = None  # rows of logits, ascending: 0 is the root, i + 1 node i; None: all

    def rows(self) -> Sequence[int]:
        """The rows of logits asked for."""
        return range(1 + len(self.tree)) if self.wanted is None else self.wanted

    def check(self, cached: tuple[int, ...], max_length: int, vocabulary_size: int) -> None:
        """Refuses what cannot be computed; of the context only what follows the `cached` ids is looked at.

        Raises:
            ContextOverflowError: context and tree are longer than `max_length`.
            ValueError: no committed token, an id outside the vocabulary, or a row that does not exist.
        """
        nodes = len(self.tree)
        size = len(self.context) + nodes
        if size > max_length:
            raise ContextOverflowError(f"{size} tokens (tree of {nodes} included) exceed {max_length}")
        if not self.context:
            raise ValueError("the context needs at least one token (a BOS where there is no prompt)")
        known = len(cached) if self.context[: len(cached)] == cached else 0
        fresh = (0, *self.context[known:], *self.tree.tokens)
        largest, smallest = max(fresh), min(fresh)
        if smallest < 0 or largest >= vocabulary_size:
            raise ValueError(f"ids must be 0 to {vocabulary_size - 1}, got {smallest if smallest < 0 else largest}")
        rows = self.wanted
        if rows and (rows[0] < 0 or rows[-1] > nodes or any(row >= after for row, after in pairwise(rows))):
            raise ValueError(f"wanted rows must ascend within 0 to {nodes}, got {rows}")


@dataclass(frozen=True)
class ScheduledRequest:
    """A request in one step, with the number of tokens that the step may compute for it."""

    request: ForwardRequest
    tokens: int  # at least 1; the last committed token and the tree are never divided, even if they are more


@dataclass(frozen=True)
class CachedTokens:
    """Whose keys and values an extent holds: committed ids in order, then the nodes of a tree, in order."""

    ids: tuple[int, ...] = ()
    tree: TokenTree = NO_TREE


@dataclass(frozen=True, eq=False)
class InputTokens:
    """Tokens that a forward computes for one request; lists have one entry a token."""

    tokens: list[int]
    positions: list[int]  # in the token's own path
    slots: list[int]  # where its key and value go, counted from the extent's first slot, ascending
    wanted: list[bool]  # whether the logits after it are asked for
    committed: int  # length of the context: node i of the tree has slot committed + i
    tree: TokenTree
    moves: tuple[int, ...] = ()  # slots of cached nodes that are kept; first they move to `move_start` and on
    move_start: int = 0

    def __len__(self) -> int:
        return len(self.tokens)

    def scheduled(self, limit: int) -> int:
        """How many of the tokens a step with a limit computes: part of the text, or everything.

        The last committed token and the tree go together, however many they are: the logits asked for follow them.
        """
        text = max(0, self.committed - 1 - self.slots[0]) if self.slots else 0
        return min(limit, text) if limit < len(self) and text else len(self)

    def first(self, count: int) -> "InputTokens":
        """The first `count` tokens."""
        if count == len(self):
            return self
        lists = (self.tokens[:count], self.positions[:count], self.slots[:count], self.wanted[:count])
        return replace(self, tokens=lists[0], positions=lists[1], slots=lists[2], wanted=lists[3])

    def visible(self, used: int) -> NDArray[np.bool_]:
        """Which of the first `used` slots each token attends to, shape (tokens, used).

        Committed tokens see all slots up to their own; a node sees the committed ones, its ancestors and itself.
        """
        slots = np.array(self.slots)[:, None]
        seen: NDArray[np.bool_] = np.arange(used) <= slots
        if self.tree.parents != tuple(range(ROOT, len(self.tree) - 1)):
            nodes = np.flatnonzero(slots[:, 0] >= self.committed)
            within = max(0, used - self.committed)
            lines = _ancestry(self.tree, (slots[nodes, 0] - self.committed).tolist())[:, :within]
            seen[nodes, self.committed : self.committed + lines.shape[1]] = lines
        return seen


def plan_inputs(cached: CachedTokens, request: ForwardRequest) -> InputTokens:
    """The tokens to compute for `request`, given what is cached of its session."""
    context, tree = request.context, request.tree
    kept = common_prefix(cached.ids, context)
    branch = _emitted(cached.tree, context[kept:]) if kept == len(cached.ids) else ()
    root = branch[-1] if branch else ROOT
    complete = kept == len(cached.ids) and kept + len(branch) == len(context)
    shared = _shared(cached.tree, tree, root) if complete else ()
    kept_nodes = (*branch, *shared)
    rows = set(request.rows())
    start = min(kept + len(branch), len(context) - (0 in rows))
    nodes = sorted({*range(len(shared), len(tree)), *(row - 1 for row in rows if row)})
    size = len(context)
    return InputTokens(
        tokens=[*context[start:], *(tree.tokens[node] for node in nodes)],
        positions=[*range(start, size), *(size + depth for depth in _depths(tree, nodes))],
        slots=[*range(start, size), *(size + node for node in nodes)],
        wanted=[*(slot == size - 1 and 0 in rows for slot in range(start, size)), *(n + 1 in rows for n in nodes)],
        committed=size,
        tree=tree,
        moves=tuple(kept + node for node in kept_nodes) if kept_nodes != tuple(range(len(kept_nodes))) else (),
        move_start=kept,
    )


def common_prefix(cached: tuple[int, ...], context: tuple[int, ...]) -> int:
    """Length of the common prefix: one comparison in the usual case, all of `cached`, else bisection."""
    if context[: len(cached)] == cached:
        return len(cached)
    sizes = range(1, min(len(cached), len(context)) + 1)
    return bisect_left(sizes, True, key=lambda size: cached[:size] != context[:size])


def _emitted(tree: TokenTree, tokens: tuple[int, ...]) -> tuple[int, ...]:
    """Nodes of the tree on the path that `tokens` follow: those that were committed since."""
    path: list[int] = []
    parent = ROOT
    for token in tokens:
        children = (n for n in range(parent + 1, len(tree)) if tree.parents[n] == parent and tree.tokens[n] == token)
        child = next(children, None)
        if child is None:
            break
        path.append(child)
        parent = child
    return tuple(path)


def _shared(old: TokenTree, new: TokenTree, root: int) -> tuple[int, ...]:
    """The nodes of the old tree, below its node `root`, that equal the new tree's first nodes, as many as there are."""
    size = len(old)
    if root == ROOT and new.tokens[:size] == old.tokens and new.parents[:size] == old.parents:
        return tuple(range(size))  # the usual case: nodes were added
    known = {(parent, token): node for node, (parent, token) in enumerate(zip(old.parents, old.tokens, strict=True))}
    found: list[int] = []
    for parent, token in zip(new.parents, new.tokens, strict=True):
        node = known.get((root if parent == ROOT else found[parent], token))
        if node is None:
            break
        found.append(node)
    return tuple(found)


def _depths(tree: TokenTree, nodes: Sequence[int]) -> list[int]:
    """Depths of ascending nodes; 0 directly follows the committed tokens."""
    known = {ROOT: -1}
    depths: list[int] = []
    for node in nodes:
        line = []
        at = node
        while at not in known:
            line.append(at)
            at = tree.parents[at]
        for depth, one in enumerate(reversed(line), known[at] + 1):
            known[one] = depth
        depths.append(known[node])
    return depths


def _ancestry(tree: TokenTree, nodes: Sequence[int]) -> NDArray[np.bool_]:
    """Shape (len(nodes), len(tree)): whether a column's node is the row's node or one of its ancestors."""
    lines = np.zeros((len(nodes), len(tree)), dtype=np.bool_)
    rows = {node: row for row, node in enumerate(nodes)}
    for row, node in enumerate(nodes):
        at = node
        while at != ROOT:
            lines[row, at] = True
            at = tree.parents[at]
            if (above := rows.get(at, row)) < row:  # its line is known
                lines[row] |= lines[above]
                break
    return lines

"""What a request makes the model see: the tokens that its session does not hold yet. No torch."""

from bisect import bisect_left
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from crossdraft.types.trees import ROOT, TokenTree

NO_TREE = TokenTree()


@dataclass(frozen=True)
class Work:
    """One request to the engine: logits after the committed tokens and after the nodes of a tree."""

    session: Hashable
    context: tuple[int, ...]  # all committed token ids, prompt included, at least one
    tree: TokenTree = NO_TREE
    wanted: tuple[int, ...] | None = None  # rows asked for, ascending: 0 is the root, i + 1 node i; None: all

    def rows(self) -> Sequence[int]:
        """The rows asked for."""
        return range(1 + len(self.tree)) if self.wanted is None else self.wanted


@dataclass(frozen=True)
class Share:
    """What one step takes of a work."""

    work: Work
    tokens: int  # the most that it is fed, at least 1; its last committed token and its tree go together, in any case


@dataclass(frozen=True)
class Held:
    """What an extent holds: committed ids at their own places, then the nodes of a tree, in order."""

    ids: tuple[int, ...] = ()
    tree: TokenTree = NO_TREE


@dataclass(frozen=True, eq=False)
class Feed:
    """Tokens to feed, by place in the extent; all lists have one entry a token."""

    tokens: list[int]
    positions: list[int]  # of the token in its own path
    places: list[int]  # ascending
    wanted: list[bool]  # whether the logits after it are asked for
    committed: int  # the tree's node i is at place committed + i
    tree: TokenTree
    moves: tuple[int, ...]  # places of held nodes, first the emitted ones; they move to `move_start` and on
    move_start: int


def plan(held: Held, work: Work) -> Feed:
    """What `work` has to feed, given what its session holds. Pure."""
    context, tree = work.context, work.tree
    kept = common(held.ids, context)
    branch = _emitted(held.tree, context[kept:]) if kept == len(held.ids) else ()
    root = branch[-1] if branch else ROOT
    shared = _shared(held.tree, tree, root) if kept + len(branch) == len(context) and kept == len(held.ids) else ()
    kept_nodes = (*branch, *shared)
    asked = set(work.rows())
    start = min(kept + len(branch), len(context) - (0 in asked))
    fed = sorted({*range(len(shared), len(tree)), *(row - 1 for row in asked if row)})
    size = len(context)
    return Feed(
        tokens=[*context[start:], *(tree.tokens[node] for node in fed)],
        positions=[*range(start, size), *(size + depth for depth in _depths(tree, fed))],
        places=[*range(start, size), *(size + node for node in fed)],
        wanted=[*(place == size - 1 and 0 in asked for place in range(start, size)), *(n + 1 in asked for n in fed)],
        committed=size,
        tree=tree,
        moves=tuple(kept + node for node in kept_nodes) if kept_nodes != tuple(range(len(kept_nodes))) else (),
        move_start=kept,
    )


def portion(feed: Feed, tokens: int) -> int:
    """How many tokens of a feed to feed now, at most so many: some of the text, or all of the feed.

    The last token of the text and the tree go together, however many they are: what is asked for is after them.
    """
    text = max(0, feed.committed - 1 - feed.places[0]) if feed.places else 0
    return min(tokens, text) if tokens < len(feed.tokens) and text else len(feed.tokens)


def visible(feed: Feed, end: int, used: int) -> NDArray[np.bool_]:
    """Which of the first `used` places the first `end` tokens of a feed see, shape (end, used).

    Committed tokens see the places up to their own; a node sees those committed, its ancestors and itself.
    """
    places = np.array(feed.places[:end])[:, None]
    seen: NDArray[np.bool_] = np.arange(used) <= places
    if feed.tree.parents != tuple(range(ROOT, len(feed.tree) - 1)):
        nodes = np.flatnonzero(places[:, 0] >= feed.committed)
        lines = _lineage(feed.tree, (places[nodes, 0] - feed.committed).tolist())[:, : max(0, used - feed.committed)]
        seen[nodes, feed.committed : feed.committed + lines.shape[1]] = lines
    return seen


def common(held: tuple[int, ...], context: tuple[int, ...]) -> int:
    """Length of the common prefix; the usual case, all of `held`, is one comparison, else they are few (bisection)."""
    if context[: len(held)] == held:
        return len(held)
    sizes = range(1, min(len(held), len(context)) + 1)
    return bisect_left(sizes, True, key=lambda size: held[:size] != context[:size])


def _emitted(tree: TokenTree, tokens: tuple[int, ...]) -> tuple[int, ...]:
    """Nodes of the tree that turned out to be committed: the path that `tokens` follows."""
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
    """The nodes of the old tree that are the new one's first, as many as there are; new ones follow old node `root`."""
    size = len(old)
    if root == ROOT and new.tokens[:size] == old.tokens and new.parents[:size] == old.parents:
        return tuple(range(size))  # the usual case: nodes were added
    places = {(parent, token): node for node, (parent, token) in enumerate(zip(old.parents, old.tokens, strict=True))}
    found: list[int] = []
    for parent, token in zip(new.parents, new.tokens, strict=True):
        place = places.get((root if parent == ROOT else found[parent], token))
        if place is None:
            break
        found.append(place)
    return tuple(found)


def _depths(tree: TokenTree, nodes: Sequence[int]) -> list[int]:
    """Depths of ascending nodes; 0 follows the committed tokens at once."""
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


def _lineage(tree: TokenTree, nodes: Sequence[int]) -> NDArray[np.bool_]:
    """Shape (len(nodes), len(tree)): whether a column's node is an ancestor of the row's node, or the node itself."""
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


# Whether a request is one that a model can answer. No torch.


class ContextOverflowError(ValueError):
    """A context and its tree are longer than a session may be."""


def check_work(work: Work, held: tuple[int, ...], max_length: int, vocabulary_size: int) -> None:
    """Refuses what cannot be answered; of the context only what is not `held` already is looked at.

    Raises:
        ContextOverflowError: context and tree are longer than `max_length`.
        ValueError: no committed token, an id outside the vocabulary, or a row that does not exist.
    """
    nodes = len(work.tree)
    size = len(work.context) + nodes
    if size > max_length:
        raise ContextOverflowError(f"{size} tokens (tree of {nodes} included) exceed {max_length}")
    if not work.context:
        raise ValueError("the context needs at least one token (a BOS where there is no prompt)")
    fresh = (0, *work.context[len(held) if work.context[: len(held)] == held else 0 :], *work.tree.tokens)
    largest, smallest = max(fresh), min(fresh)
    if smallest < 0 or largest >= vocabulary_size:
        raise ValueError(f"ids must be 0 to {vocabulary_size - 1}, got {smallest if smallest < 0 else largest}")
    rows = work.wanted
    if rows and (rows[0] < 0 or rows[-1] > nodes or any(row >= after for row, after in pairwise(rows))):
        raise ValueError(f"wanted rows must ascend within 0 to {nodes}, got {rows}")

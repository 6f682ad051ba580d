"""Forward requests, and which input tokens they need beyond what is cached of their sessions. Pure, no torch."""

from bisect import bisect_left
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from crossdraft.types import quick_dataclass
from crossdraft.types.trees import ROOT, TokenTree

NO_TREE = TokenTree()


class ContextOverflowError(ValueError):
    """A context and its tree are longer than a session may be."""


@dataclass(eq=False)
class ForwardRequest:
    """Asks for logits after the committed tokens of a session and after nodes of a token tree.

    The fields up to `grown_from` never change; those after it the model thread, its scheduler and its engine write.
    """

    session: Hashable
    context: tuple[int, ...]  # all committed token ids, prompt included, at least one
    tree: TokenTree = NO_TREE
    wanted: tuple[int, ...] | None = None  # rows of logits, ascending: 0 is the root, i + 1 node i; None: all
    more: int = 0  # nodes that may follow without another request, and have slots
    hidden: bool = False  # the engine notes what its head has read for each of these rows
    grown_from: tuple[int, ...] | None = None  # a tuple that the context was made of by appending, if one is known
    asked: float = 0.0  # when, in seconds of the thread's clock
    back: bool = True  # the session was away before it
    began: float | None = None  # when its first step did
    due: int = 0  # tokens still to be computed
    tokens: int = 0  # that a step may compute; the last committed token and the tree are not divided, even if more
    planned: "tuple[CachedTokens, InputTokens] | None" = field(default=None, init=False)  # where this is cached

    @property
    def size(self) -> int:
        """Tokens for which there must be slots."""
        return len(self.context) + len(self.tree.tokens) + self.more

    def rows(self) -> Sequence[int]:
        return range(1 + len(self.tree)) if self.wanted is None else self.wanted

    def after(self, tokens: Sequence[int]) -> "ForwardRequest":
        """Asks for the row after some of these `more` nodes, which follow the last row that is asked for now."""
        grown = self.grown(tokens)
        return ForwardRequest(self.session, self.context, grown, (len(grown.tokens),), max(0, self.more - len(tokens)))

    def grown(self, tokens: Sequence[int]) -> TokenTree:
        """The tree with them, at least one."""
        tree, first = self.tree, len(self.tree.tokens)
        parent = (first if self.wanted is None else self.wanted[-1]) - 1
        if tree.is_chain and parent == first - 1:
            return TokenTree.chain((*tree.tokens, *tokens))
        return TokenTree((*tree.tokens, *tokens), (*tree.parents, parent, *range(first, first + len(tokens) - 1)))

    def check(self, max_length: int) -> None:
        """Refuses sizes and rows that cannot be computed. Raises ContextOverflowError: context and tree are longer than
        `max_length`; ValueError: no committed token, or a row that does not exist."""
        nodes = len(self.tree.tokens)
        if self.size > max_length:
            raise ContextOverflowError(f"{self.size} tokens (tree of {nodes + self.more} included) exceed {max_length}")
        if not self.context:
            raise ValueError("the context needs at least one token (a BOS where there is no prompt)")
        rows = self.wanted
        ascend = not rows or len(rows) == 1 or all(row < after for row, after in pairwise(rows))
        if rows and (rows[0] < 0 or rows[-1] > nodes or not ascend):
            raise ValueError(f"wanted rows must ascend within 0 to {nodes}, got {rows}")


@quick_dataclass(frozen=True)
class CachedTokens:
    """Whose keys and values an extent holds: committed ids in order, then the nodes of a tree, in order."""

    ids: tuple[int, ...] = ()
    tree: TokenTree = NO_TREE
    least: int = 0  # ids that a text shares with these, or none of them is of use: layers with a window lack the first


NOTHING_CACHED = CachedTokens()


@dataclass(frozen=True, order=True)
class Extent:
    """Consecutive slots."""

    start: int  # first slot, a multiple of the size
    size: int  # slots
    base: int = field(default=0, compare=False)  # place of the token in the first slot: what is before it is gone

    @property
    def end(self) -> int:
        return self.start + self.size

    @property
    def origin(self) -> int:
        """The slot where place 0 would be."""
        return self.start - self.base


@dataclass(eq=False)
class InputTokens:
    """Tokens that a forward computes for one request; the first three have one entry a token.

    A *place* counts what a session has cached, from its first committed token on: the nodes of its tree follow.
    """

    tokens: list[int]
    positions: Sequence[int]  # in the token's own path
    places: Sequence[int]  # where its key and value go, ascending
    wanted: Sequence[int]  # indices of the tokens whose logits are asked for, ascending
    committed: int  # length of the context: node i of the tree has place committed + i
    tree: TokenTree
    moves: tuple[int, ...] = ()  # places of cached nodes that are kept; first they move to `move_start` and on
    move_start: int = 0
    extents: Sequence[Extent] = ()  # of its session, in each pool; set by the step that computes it

    @property
    def count(self) -> int:
        return len(self.tokens)

    def used(self, pool: int = 0) -> int:
        """Slots of an extent up to the last token's own."""
        return self.places[-1] + 1 - self.extents[pool].base

    @property
    def depths(self) -> Sequence[int]:
        """Of each node of the tree; 0 directly follows the committed tokens."""
        nodes = range(len(self.tree.tokens))
        return nodes if self.tree.is_chain else _depths(self.tree, nodes)

    def limited(self, limit: int) -> "InputTokens":
        """What a step with a limit of tokens computes: part of the text, or everything.

        The last committed token and the tree go together, however many they are: the logits asked for follow them.
        """
        count = min(limit, self.committed - 1 - self.places[0]) if limit < len(self.tokens) else 0
        if count <= 0:
            return self
        lists = (self.tokens[:count], self.positions[:count], self.places[:count])
        wanted = self.wanted[: bisect_left(self.wanted, count)]
        return replace(self, tokens=lists[0], positions=lists[1], places=lists[2], wanted=wanted)


def plan_inputs(cached: CachedTokens, request: ForwardRequest) -> InputTokens:
    """The tokens to compute for `request`, given what is cached of its session."""
    context, tree = request.context, request.tree
    kept = len(cached.ids) if request.grown_from is cached.ids else common_prefix(cached.ids, context)
    kept = kept if kept >= cached.least else 0
    branch: list[int] = []
    shared: Sequence[int] = ()
    if kept == len(cached.ids) and cached.tree.tokens:
        branch = emitted(cached.tree, context[kept:])
        if kept + len(branch) == len(context):
            shared = _shared(cached.tree, tree, branch[-1] if branch else ROOT)
    size, root, count = len(context), request.wanted is None or 0 in request.wanted, len(tree.tokens)
    start = min(kept + len(branch), size - root)
    nodes: Sequence[int] = range(count)
    places: Sequence[int]
    wanted: Sequence[int] = range(size - root - start, size - start + count)
    if request.wanted is not None and count:
        nodes = sorted({*range(len(shared), len(nodes)), *(row - 1 for row in request.wanted if row)})
        indices = {node: index for index, node in enumerate(nodes, size - start)}
        wanted = [indices[row - 1] if row else size - 1 - start for row in request.wanted]
    kept_nodes = [*branch, *shared] if branch else [*shared]
    moves = () if kept_nodes == [*range(len(kept_nodes))] else tuple([kept + node for node in kept_nodes])
    if len(nodes) == count:
        tokens, places = [*context[start:], *tree.tokens], range(start, size + count)
    else:
        tokens = [*context[start:], *map(tree.tokens.__getitem__, nodes)]
        places = [*range(start, size), *map(size.__add__, nodes)]
    positions = places
    if not tree.is_chain:
        positions = [*range(start, size), *map(size.__add__, _depths(tree, nodes))]
    return InputTokens(tokens, positions, places, wanted, size, tree, moves, kept)


def common_prefix(cached: tuple[int, ...], context: tuple[int, ...]) -> int:
    """Length of the common prefix: one comparison in the usual case, all of `cached`, or few, as the newest differ."""
    if cached is context or context[: len(cached)] == cached:
        return len(cached)
    most, step = min(len(cached), len(context)), 1
    while (least := max(0, most - step)) and cached[:least] != context[:least]:
        step *= 2
    sizes = range(least + 1, most + 1)
    return least + bisect_left(sizes, True, key=lambda size: cached[least:size] != context[least:size])


def emitted(tree: TokenTree, tokens: tuple[int, ...]) -> list[int]:
    """Nodes of the tree on the path that `tokens` follow: those that were committed since."""
    if tree.is_chain:
        return [*range(common_prefix(tree.tokens, tokens))]
    path, known, node = list[int](), _children(tree), ROOT
    for token in tokens:
        if (node := known.get((node, token), ROOT)) == ROOT:
            break
        path.append(node)
    return path


def _children(tree: TokenTree) -> dict[tuple[int, int], int]:
    """The nodes by their parents and tokens, the first where several are alike."""
    edges = zip(tree.parents, tree.tokens, strict=True)
    return {edge: node for node, edge in reversed([*enumerate(edges)])}


def _shared(old: TokenTree, new: TokenTree, root: int) -> Sequence[int]:
    """The nodes of the old tree, below its node `root`, that equal the new tree's first nodes, as many as there are."""
    if not new.tokens:
        return ()
    if old.is_chain and new.is_chain:
        return range(root + 1, root + 1 + common_prefix(old.tokens[root + 1 :], new.tokens))
    size = len(old.tokens)
    if root == ROOT and new.tokens[:size] == old.tokens and new.parents[:size] == old.parents:
        return range(size)  # nodes were added
    known, found = _children(old), list[int]()
    for parent, token in zip(new.parents, new.tokens, strict=True):
        node = known.get((root if parent == ROOT else found[parent], token))
        if node is None:
            break
        found.append(node)
    return found


def _depths(tree: TokenTree, nodes: Sequence[int]) -> list[int]:
    """Depths of nodes; 0 directly follows the committed tokens."""
    depths: list[int] = []
    for parent in tree.parents:
        depths.append(0 if parent == ROOT else depths[parent] + 1)
    return [depths[node] for node in nodes]

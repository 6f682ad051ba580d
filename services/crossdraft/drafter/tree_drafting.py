"""One epoch's draft as a tree: the likeliest continuations of the text (as EAGLE-2, arXiv 2406.16858).

A node's weight is the product of the weights of the tokens on its path, which the drafter takes for the probability
that the target reaches it. Each step is one forward that expands the heaviest nodes together with the tip of the draft,
which is the heaviest child of each node from the root on. The engine may make all of them without the host; what it has
found is then looked at here, step by step. Steps end where the target hardly reaches what would be expanded. The
heaviest nodes of all are sent: the draft, and for each other leaf the path to it, as a branch. Which these are, and how
long the draft is, depends on the drafter's own draws: a tree is only for methods whose output does not depend on what
is drafted.
"""

from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import exp, inf

from crossdraft.drafter.conversation import DraftProgress
from crossdraft.drafter.drafting import DraftTree, OpenBranch, SessionState, Tip
from crossdraft.engine.model_thread import ForwardResult, Job
from crossdraft.engine.sampling.sampler import TopRow
from crossdraft.text.letters import Letters, is_plain
from crossdraft.types.messages import Drafted
from crossdraft.types.rows import DraftToken
from crossdraft.types.trees import ROOT, tree_width


@dataclass(frozen=True)
class TreeShape:
    """How large a tree grows."""

    nodes: int  # that are sent, the draft's included
    depth: int  # tokens of the longest path
    least: float = 0.0  # probability of reaching a node that is to be expanded, with which the tree grows further

    @property
    def width(self) -> int:
        """Nodes that a step expands."""
        return tree_width(self.nodes, self.depth)

    @property
    def room(self) -> int:
        """Tokens that the model must hold besides the text."""
        return 1 + self.width * (self.depth - 1)


@dataclass(eq=False)
class Node:
    """A token that may follow its parent's; the root has none."""

    parent: "Node | None"
    token: int
    cost: float  # minus the logarithm of its weight
    end: int  # letters since the start of the output
    depth: int
    tip: Tip  # its place in what the model is fed, once it is
    place: int = ROOT  # of its row among those that the engine has found

    def __lt__(self, other: "Node") -> bool:
        return self.cost < other.cost

    def path(self, beginning: "set[Node]") -> list["Node"]:
        """The nodes that lead to it from the first one on that is not one of these."""
        path = [self]
        while (parent := path[-1].parent) is not None and parent not in beginning:
            path.append(parent)
        return path[::-1]


class TreeDrafting:
    """An epoch under way, with a tree instead of a chain. The state's context is the text that it begins with."""

    def __init__(self, state: SessionState, epoch: DraftProgress, shape: TreeShape) -> None:
        self._state = state
        self._epoch = epoch
        self._shape = shape
        self._fed = DraftTree(state, state.context.ids)
        self._draft = [Node(None, -1, 0.0, state.context.offset, 0, Tip())]  # the root, then the draft's nodes
        self._unexpanded: list[Node] = []  # a heap of the others
        self._rows: dict[tuple[int, int], TopRow] = {}  # that the engine has, by place of the parent and token
        self._others: list[Node] = []  # the heaviest that are not the draft's, as many as are sent, the heaviest first

    def run(self, send: Callable[[Drafted], None], asked: float) -> Job[None]:
        """Grows the tree, a step for each token of the draft, and sends it; asked again, says that this is all."""
        self._epoch.resume(asked)
        if self._others:
            send(self._epoch.last("a tree is drafted once"))
            return
        for _ in range(self._shape.depth):
            if self._epoch.over:
                return
            nodes = [self._draft[-1], *self._heaviest(self._shape.width - 1)]
            if sum(exp(-node.cost) for node in nodes) < self._shape.least:
                break
            rows = [self._rows.get((ROOT if one.parent is None else one.parent.place, one.token)) for one in nodes]
            if rows[0] is None:
                rows = yield from self._forward(nodes)
            for node, row in zip(nodes, rows, strict=True):
                if row is not None:  # else the engine has rounded costs otherwise, and expanded another node
                    self._fed.grow(node.tip)
                    node.place = row.place
                    self._expand(node, row.likeliest)
        self._finish()
        for reply in self._epoch.due():
            send(reply)
        if self._epoch.wanted:
            send(self._epoch.last("a further draft token is unlikely to hold"))

    def _forward(self, nodes: Sequence[Node]) -> Job[list[TopRow | None]]:
        """The rows of nodes by a forward; after the first one the engine may go on."""
        source, context, shape = self._state.source, self._state.context, self._shape
        masks = source.masks(context.letters(0, context.offset), map(self._letters, nodes))
        first, forward = nodes[0] is self._draft[0], self._fed.work([node.tip for node in nodes])
        if first and not source.masking:
            forward = replace(forward, more=shape.room - 1)
        answer: ForwardResult = yield forward
        self._epoch.waited(answer.queued)
        asked = source.masked(answer.logits, masks), [node.end for node in nodes], shape.width
        rows = yield from source.likeliest(*asked, forward if first else None, shape.nodes - shape.depth)
        if first:
            self._rows = {(row.parent, row.token): row for row in rows[1:]}
        return [*rows[: len(nodes)]]

    def _letters(self, node: Node) -> Letters:
        """Of the path from the root to a node."""
        path = [] if node is self._draft[0] else node.path({self._draft[0]})
        return self._state.vocabulary.letters_of(one.token for one in path)

    def _heaviest(self, count: int) -> Iterator[Node]:
        """The heaviest nodes besides the draft's tip that are not expanded yet, if what follows them may be sent; a
        leaf of full depth never is."""
        while count and self._unexpanded and self._unexpanded[0].cost < self._most:
            count -= 1
            yield heappop(self._unexpanded)

    @property
    def _most(self) -> float:
        """A node of this cost, and so all that follow it, will not be sent: enough others are known."""
        return self._others[-1].cost if len(self._others) == self._shape.nodes - self._shape.depth else inf

    def _expand(self, node: Node, likeliest: Iterable[tuple[int, float]]) -> None:
        """Gives a node its children. The draft goes on with the heaviest, whatever it is, branches with text only."""
        letters = self._state.vocabulary.letters
        drafts = node is self._draft[-1]
        known: set[Letters] = set()  # ids with the same letters are one continuation
        for place, (token, more) in enumerate(likeliest):
            cost, own = node.cost + more, drafts and not place
            if not own and cost >= self._most:
                return
            if letters[token] in known:
                continue
            known.add(letters[token])
            end, tip = node.end + len(letters[token]), Tip(node.tip.node, token)
            child = Node(node, token, cost, end, node.depth + 1, tip)
            if own:
                self._draft.append(child)
            elif is_plain(letters[token]):
                insort(self._others, child)
                del self._others[self._shape.nodes - self._shape.depth :]
                if child.depth < self._shape.depth:
                    heappush(self._unexpanded, child)

    def _finish(self) -> None:
        """The draft and the leaves of the heaviest nodes beside it become the reply."""
        state, draft = self._state, set(self._draft)
        tokens = [node.token for node in self._draft[1:]]
        state.context.append(*tokens)
        self._epoch.add(*[DraftToken(token, None, state.source.whose) for token in tokens])
        inner = {node.parent for node in self._others}
        for leaf in self._others:
            if leaf not in inner:
                self._epoch.add_branch(state.branches.add(self._branch(*leaf.path(draft))))

    def _branch(self, key: Node, *rest: Node) -> OpenBranch:
        """The path from where the draft is left to a leaf."""
        assert key.parent is not None
        letters = self._state.vocabulary.letters[key.token]
        branch = OpenBranch(key.parent.end, key.token, letters, key.tip)
        branch.draft_tokens += [DraftToken(node.token) for node in rest]
        branch.end = rest[-1].end if rest else key.end
        return branch

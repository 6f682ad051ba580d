"""One epoch's drafting in the model thread: the draft, and branches for draft tokens that may be refused.

A *branch* is a prepared continuation: what is drafted in case that a draft token is refused. It begins with a *key*, a
token that was likely at that draft token's place but was not drawn. Which tokens are likely is known from the drafter's
rows and noise alone, and the branch's own draft tokens are drawn like any others, so that preparing them changes no
distribution. Keys are text: after a control symbol there is little to continue.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import islice

from crossdraft.drafter.context import Context, NoRoomError
from crossdraft.drafter.conversation import DraftProgress
from crossdraft.drafter.sampling import DrawSource
from crossdraft.drafter.scoring import Scoring
from crossdraft.engine.model_thread import ForwardResult, Job
from crossdraft.engine.requests import NO_TREE, ForwardRequest
from crossdraft.engine.sampling.distributions import Logits
from crossdraft.engine.sampling.sampler import Draw, SamplerSteps
from crossdraft.rpc.errors import ProtocolBroken
from crossdraft.text.grammar import Bits
from crossdraft.text.letters import Letters, is_plain
from crossdraft.text.vocabulary import Vocabulary
from crossdraft.types.messages import MOST_DRAFT_TOKENS, Branch, Draft, Drafted
from crossdraft.types.rows import DraftToken, Row, Whose
from crossdraft.types.trees import ROOT, Path, TokenTree

SPARE_CANDIDATES = 3  # beyond the branches of a draft token, for candidates that cannot be keys
TREE_NODES = 128  # of one tree, about: each costs some microseconds a step


@dataclass(frozen=True)
class BranchShape:
    """How many branches, and how long."""

    depth: int  # draft tokens of each; 0: there are none
    width: int  # branches for each draft token

    @property
    def candidates(self) -> int:
        """Ids that may be keys, of which the best `width` are taken."""
        return self.width + SPARE_CANDIDATES if self.depth else 0

    @cached_property
    def cluster(self) -> int:
        """Nodes of one draft token and its branches."""
        return 1 + self.width * self.depth

    @property
    def min_kept(self) -> int:
        """Draft tokens whose branches may be unfinished, and one."""
        return self.depth + 2

    @cached_property
    def kept(self) -> int:
        """Newest draft tokens that stay in the tree, with their branches, when it has grown too large."""
        return max(self.min_kept, TREE_NODES // (2 * self.cluster))

    @cached_property
    def room(self) -> int:
        """Tokens that the model must hold besides the text."""
        return self.min_kept * self.cluster if self.depth else 0

    def fits(self, capacity: int) -> bool:
        """Whether a quarter of a context of `capacity` tokens is left for text."""
        return 4 * self.room <= 3 * capacity


NO_BRANCHES = BranchShape(0, 1)


@dataclass
class Tip:
    """The end of a path in the tree: a node, and the token after it that is not in the tree yet."""

    node: int = ROOT
    token: int | None = None  # None: the path ends with the node


@dataclass
class OpenBranch:
    """A branch: where it begins, and how far it has come."""

    offset: int  # letters since the start of the output: where the draft token that it replaces begins
    key: int  # the drafter's id
    letters: Letters  # of the key
    tip: Tip
    end: int = field(init=False)  # letters since the start of the output: where it has come to
    draft_tokens: list[DraftToken] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.end = self.offset + len(self.letters)


class FinishedBranches:
    """The finished branches of a session's latest epoch, by their numbers."""

    def __init__(self) -> None:
        self._number = 0
        self._branches: dict[int, OpenBranch] = {}

    def add(self, branch: OpenBranch) -> Branch:
        """A branch that has all its draft tokens; returns it as it is sent."""
        self._number += 1
        self._branches[self._number] = branch
        tokens = tuple(draft_token.token for draft_token in branch.draft_tokens)
        return Branch(self._number, branch.offset, branch.letters, tokens)

    def release(self, frontier: int) -> None:
        """The output has at least so many letters: forgets the oldest branches, which end before that."""
        while self._branches and next(iter(self._branches.values())).end < frontier:
            del self._branches[next(iter(self._branches))]

    def adopt(self, request: Draft, context: Context) -> OpenBranch | None:
        """The branch that a new epoch begins with, if it adopts one; all are forgotten. Raises ProtocolBroken: there is
        no such branch (any more), or the epoch's text is not that of the branch."""
        adopted = self._branches.get(request.adopt)
        self._branches = {}
        if not request.adopt:
            return None
        if adopted is None:
            raise ProtocolBroken(f"branch {request.adopt} is not one of the latest epoch's")
        first = min(adopted.offset, request.offset)
        if context.letters(first, adopted.offset) + adopted.letters != (
            context.letters(first, request.offset) + request.letters
        ):
            raise ProtocolBroken(f"branch {request.adopt} does not begin with the text of epoch {request.epoch}")
        return adopted


def branch_keys(candidates: Iterable[int], drawn: int, vocabulary: Vocabulary) -> Iterator[int]:
    """The candidates, most likely first, that are text and differ in their letters from those before and from what was
    drawn."""
    known = {vocabulary.letters[drawn]}
    for token in candidates:
        letters = vocabulary.letters[token]
        if letters not in known and is_plain(letters):
            known.add(letters)
            yield token


class DraftTree:
    """Ids that every path begins with, then a tree: the draft, and its branches.

    The ids stay, and nodes are only added, so that the engine feeds each token once. `move_root` forgets old nodes.
    """

    def __init__(self, session: Hashable, root: Path) -> None:
        self._session = session
        self._root = root
        self._tokens: list[int] = []
        self._parents: list[int] = []

    @property
    def size(self) -> int:
        return len(self._root) + len(self._tokens)

    @property
    def nodes(self) -> int:
        return len(self._tokens)

    def work(self, tips: Sequence[Tip], more: int = 0) -> ForwardRequest:
        """Adds the tips' tokens; a request for the row after each tip, in their order, and so many `more` tokens after
        it. A tip without a token of its own comes first."""
        for tip in tips:
            self.grow(tip)
        tree = TokenTree(tuple(self._tokens), tuple(self._parents)) if self._tokens else NO_TREE
        return ForwardRequest(self._session, self._root, tree, tuple([tip.node + 1 for tip in tips]), more)

    def grow(self, tip: Tip) -> None:
        if tip.token is not None:
            self._tokens.append(tip.token)
            self._parents.append(tip.node)
            tip.node, tip.token = len(self._tokens) - 1, None

    def follow(self, tip: Tip, tokens: Sequence[int]) -> None:
        """The path of a tip without a token of its own goes on with these, at least one; the last is not fed yet."""
        *fed, tip.token = tokens
        if fed:
            first = len(self._tokens)
            self._tokens += fed
            self._parents += (tip.node, *range(first, len(self._tokens) - 1))
            tip.node = len(self._tokens) - 1

    def move_root(self, node: int) -> dict[int, int]:
        """Makes a node the root and forgets what does not follow it; returns the new number of each node that stays."""
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


_without_row = lru_cache(1 << 14)(DraftToken)  # of which a draft of many outputs makes hundreds


@dataclass(frozen=True, eq=False)
class SessionState:
    """What all epochs of a session draft with; the engine's name for the session."""

    context: Context
    source: DrawSource
    vocabulary: Vocabulary  # the drafter's
    rows: bool  # whether draft tokens are sent with their rows
    branches: FinishedBranches


class Drafting:
    """An epoch under way: the draft as the context's newest tokens, and branches beside it.

    The context stays, and what is drafted is a tree after it: each step is one forward over the newest tokens of the
    draft and of all unfinished branches. Tokens of the target's change how the text before them is tokenized: then the
    context is fed anew for each. The state's context is the text that the epoch begins with, and `scoring` gets the
    distributions of the draft.
    """

    def __init__(self, state: SessionState, epoch: DraftProgress, shape: BranchShape, scoring: Scoring) -> None:
        self._state = state
        self._epoch = epoch
        self._shape = shape
        self._scoring = scoring
        self._open_branches: list[OpenBranch] = []
        self._drafted: list[int] = []  # tokens of the draft that may be scored
        # Where the newest draft tokens begin, in letters of output. As the client asks for at most MOST_DRAFT_TOKENS
        # beyond what it has verified, it has verified all before the first of these.
        self._begins: deque[int] = deque(maxlen=1 + MOST_DRAFT_TOKENS)
        self._obstacle = ""  # why the text cannot go on
        self._new_tree(scoring.ids)

    def adopt(self, branch: OpenBranch) -> None:
        """The draft begins with a branch that follows the context's text."""
        for draft_token in branch.draft_tokens:
            self._state.context.append(draft_token.token)
            self._drafted.append(draft_token.token)
            if self._state.rows:
                self._epoch.add(draft_token)
            else:
                self._epoch.sent += 1
        self._new_tree(self._state.context.ids)

    def run(self, send: Callable[[Drafted], None], asked: float) -> Job[None]:
        """Drafts until all that is wanted is sent and every branch is finished, or the epoch is over.

        What is wanted may grow while this runs. When drafting cannot go on, the last reply says why.
        """
        self._epoch.resume(asked)
        self._send(send)
        try:
            while not self._epoch.over and (self._drafts or self._open_branches):
                self._make_room()
                if (steps := self._steps()) > 1:
                    yield from self._draft_path(steps)
                    self._send(send)
                    continue
                due, drafts = list(self._open_branches), self._drafts
                tips = [*([self._tip] if drafts else ()), *(branch.tip for branch in due)]
                masks = self._masks(due, drafts)
                answer: ForwardResult = yield self._tree.work(tips)
                self._epoch.waited(answer.queued)
                yield from self._take(self._state.source.masked(answer.logits, masks), due, drafts)
                self._send(send)
        except NoRoomError as error:
            # This depends on what was drawn, but everything drawn is sent, and the rest is missed only after that.
            self._obstacle = str(error)
            self._send(send)
        if self._obstacle and self._epoch.wanted:
            send(self._epoch.last(self._obstacle))

    def _steps(self) -> int:
        """Steps up to the next reply in which nothing but the draft is made, and there is room for all."""
        if self._shape.depth or self._open_branches or not self._state.source.has_paths:
            return 1
        room = min(self._state.context.capacity - self._tree.size, 2 * self._shape.kept - self._tree.nodes)
        return min(self._epoch.lacking, room)

    def _draft_path(self, steps: int) -> Job[None]:
        """The draft's next tokens."""
        state, forward = self._state, self._tree.work([self._tip], steps - 1)
        found, queued = yield from state.source.path(forward, state.context.offset)
        self._epoch.waited(queued)
        if not self._epoch.over:
            tokens = [draw.token for draw in found]
            self._note(found)
            self._epoch.add(*map(self._draft_token, found))
            self._tree.follow(self._tip, tokens)
            state.context.append(*tokens)

    @property
    def _drafts(self) -> bool:
        return self._epoch.made < self._epoch.count and not self._obstacle

    def _new_tree(self, ids: Path) -> None:
        """What is fed from now on begins with the whole text."""
        self._tree = DraftTree(self._state, ids)
        self._tip = Tip()

    def _make_room(self) -> None:
        """For one more step. Raises NoRoomError."""
        context, shape = self._state.context, self._shape
        cut = context.fit(1 + shape.room)
        if cut or self._state.source.whose is Whose.TARGET:
            self._open_branches.clear()  # after a cut, the text that they follow is no longer fed
            self._new_tree(context.ids)
        elif self._tree.nodes >= 2 * shape.kept * shape.cluster:
            self._move_root(shape.kept)
        elif self._tree.size + shape.cluster > context.capacity:
            self._move_root(shape.min_kept)

    def _move_root(self, kept: int) -> None:
        """The tree begins `kept` draft tokens before the newest: the unfinished branches begin after that."""
        moved = self._tree.move_root(self._tree.ancestor(self._tip.node, kept))
        for tip in (self._tip, *(branch.tip for branch in self._open_branches)):
            tip.node = moved[tip.node]

    def _masks(self, due: Sequence[OpenBranch], drafts: bool) -> "Future[Bits] | None":
        """By the grammar, for a step's rows in their order."""
        source, context, letters = self._state.source, self._state.context, self._state.vocabulary.letters_of
        if not source.masking:
            return None
        first = min([context.offset, *(branch.offset for branch in due)])
        paths = [context.letters(first, context.offset)] if drafts else []
        for branch in due:
            drafted = letters(token.token for token in branch.draft_tokens)
            paths.append(Letters(context.letters(first, branch.offset) + branch.letters + drafted))
        return source.masks(context.letters(0, first), paths)

    def _take(self, logits: Logits, due: list[OpenBranch], drafts: bool) -> SamplerSteps[None]:
        """A step's rows: the draft's if it takes part, then those of the branches that are due."""
        if self._epoch.over or not logits.shape[0]:  # since the step began; a cut has left nothing to draft
            return
        offsets = [*([self._state.context.offset] if drafts else ()), *(branch.end for branch in due)]
        besides = self._shape.candidates if drafts else 0
        draws = iter((yield from self._state.source.draw(logits, offsets, besides)))
        if drafts:
            draw = next(draws)
            self._extend_draft(draw)
            self._state.source.append(self._state.context, draw.token)
        for branch, draw in zip(due, draws, strict=True):
            self._extend_branch(branch, draw)
        self._open_branches = [branch for branch in self._open_branches if len(branch.draft_tokens) < self._shape.depth]

    def _extend_draft(self, draw: Draw) -> None:
        """The next token of the draft, and the branches beside it; the context does not have it yet."""
        self._note([draw])
        if self._shape.depth:
            self._begin_branches(draw)
        self._epoch.add(self._draft_token(draw))
        self._tip.token = draw.token

    def _note(self, draws: Sequence[Draw]) -> None:
        """For scores: what the next tokens of the draft were drawn from, where rows are sent."""
        left = MOST_DRAFT_TOKENS - len(self._drafted) if self._state.rows else 0
        for token, distribution, _ in draws[:left]:
            if distribution is not None:
                self._scoring.drawn(tuple(self._drafted), distribution)
            self._drafted.append(token)

    def _begin_branches(self, draw: Draw) -> None:
        state, offset = self._state, self._state.context.offset
        self._begins.append(offset)
        if len(self._begins) > MOST_DRAFT_TOKENS:
            state.branches.release(self._begins[0])
        for key in islice(branch_keys(draw.others, draw.token, state.vocabulary), self._shape.width):
            self._open_branches.append(OpenBranch(offset, key, state.vocabulary.letters[key], Tip(self._tip.node, key)))

    def _extend_branch(self, branch: OpenBranch, draw: Draw) -> None:
        branch.end += len(self._state.vocabulary.letters[draw.token])
        branch.tip.token = draw.token
        branch.draft_tokens.append(self._draft_token(draw))
        if len(branch.draft_tokens) == self._shape.depth:
            self._epoch.add_branch(self._state.branches.add(branch))

    def _draft_token(self, draw: Draw) -> DraftToken:
        if not self._state.rows or draw.distribution is None:
            return _without_row(draw.token, None, self._state.source.whose)
        return DraftToken(draw.token, Row(*draw.distribution), self._state.source.whose)

    def _send(self, send: Callable[[Drafted], None]) -> None:
        for reply in self._epoch.due():
            send(reply)

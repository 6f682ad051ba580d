"""One epoch's drafting, all of it in the model thread: a job that steps, and what each step makes."""

import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from crossdraft.drafter.context import Context, NoRoomError
from crossdraft.drafter.sampling import Guess, Proposing
from crossdraft.drafter.scoring import Scoring
from crossdraft.engine.distributions import Logits
from crossdraft.engine.model_thread import ForwardResult, Job
from crossdraft.engine.requests import ForwardRequest
from crossdraft.engine.sampler import Draws, SamplerSteps
from crossdraft.rpc.errors import ProtocolBroken
from crossdraft.text.letters import Letters, is_plain
from crossdraft.text.tokenization import NotExpressible
from crossdraft.text.vocabulary import Vocabulary
from crossdraft.types.messages import MOST_DRAFT_TOKENS, Advance, Branch, Draft, Drafted, Score
from crossdraft.types.rows import DraftToken, Row
from crossdraft.types.trees import ROOT, Path, TokenTree

# An epoch's tokens as a tree that grows: what the engine is asked for, so that it is fed each token once.


@dataclass
class Tip:
    """The end of a line of tokens: a node of the tree, and the token after it that is not in the tree yet."""

    node: int = ROOT
    token: int | None = None  # None: the line ends with the node


# Prepared continuations: what an epoch drafts besides, in case that one of its draft tokens is refused.
#
# A branch begins with a *key*, a token that was likely at a draft token's place but was not drawn. Which ids are
# likely is known from the drafter's rows and noise alone, and the branch's own draft tokens are drawn like any others,
# so that preparing them changes no distribution. Keys are text: after a control symbol there is little to continue.


@dataclass
class Growing:
    """A branch: where it begins, and how far it has come."""

    offset: int  # letters since the start of the output: where the draft token that it replaces begins
    key: int  # the drafter's id
    letters: Letters  # of the key
    tip: Tip
    end: int = field(init=False)  # letters since the start of the output: where it has come to
    draft_tokens: list[DraftToken] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.end = self.offset + len(self.letters)


class Prepared:
    """The finished branches of a session's latest epoch, by their numbers."""

    def __init__(self) -> None:
        self._number = 0
        self._branches: dict[int, Growing] = {}

    def finish(self, growing: Growing) -> Branch:
        """A branch that has its draft tokens, as it is sent."""
        self._number += 1
        self._branches[self._number] = growing
        tokens = tuple(draft_token.token for draft_token in growing.draft_tokens)
        return Branch(self._number, growing.offset, growing.letters, tokens)

    def release(self, frontier: int) -> None:
        """The output has at least so many letters: the oldest branches that say fewer can never go on from it."""
        while self._branches and next(iter(self._branches.values())).end < frontier:
            del self._branches[next(iter(self._branches))]

    def begin(self, request: Draft, context: Context) -> Growing | None:
        """A new epoch begins: the branch that it adopts, if any; all are forgotten.

        Raises:
            ProtocolBroken: there is no such branch (any more), or the text is not its.
        """
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


@dataclass(frozen=True, eq=False)
class Means:
    """What a session drafts with."""

    session: Hashable  # the engine's name for it
    context: Context
    proposing: Proposing
    vocabulary: Vocabulary  # the drafter's
    rows: bool  # whether draft tokens are sent with their rows
    prepared: Prepared


@dataclass(frozen=True)
class Shape:
    """How many branches, and how long."""

    depth: int  # draft tokens of each; 0: there are none
    width: int  # branches for each draft token

    @property
    def candidates(self) -> int:
        """Ids that may be keys; all of them are looked at for the best `width`."""
        return self.width + SPARE if self.depth else 0

    @property
    def cluster(self) -> int:
        """Nodes of one draft token and its branches."""
        return 1 + self.width * self.depth

    @property
    def least(self) -> int:
        """Draft tokens whose branches may be unfinished, and one."""
        return self.depth + 2

    @property
    def kept(self) -> int:
        """Newest draft tokens that stay in the tree, with their branches, when it has grown too large."""
        return max(self.least, TREE // (2 * self.cluster))

    @property
    def room(self) -> int:
        """Tokens that the model must see besides the text."""
        return self.least * self.cluster if self.depth else 0

    def fits(self, capacity: int) -> bool:
        """Whether a quarter of a context of `capacity` tokens is left for text."""
        return 4 * self.room <= 3 * capacity


# The epochs of a session: which one is drafted, and how far. Rules only, no I/O.


class Epoch:
    """One draft: what was asked for, and how far it has come.

    The event loop and the thread that drafts share it without a lock: each attribute is written by one of them.
    """

    def __init__(self, request: Draft) -> None:
        self.request = request
        self.count = request.count  # draft tokens wanted so far; written by the event loop
        self.asked = request.count  # the same without MOST_UNREAD; likewise
        self.over = False  # a newer epoch has begun: nothing more is to be done; written by the event loop
        self.sent = 0  # draft tokens that the other side has, adopted ones included; written by who drafts
        self.aside = False  # the drafter stands aside: no more will come; written by who drafts

    @property
    def number(self) -> int:
        """As the other side counts."""
        return self.request.epoch

    @property
    def start(self) -> int:
        """Letters since the start of the output, where the draft begins."""
        return self.request.offset + len(self.request.letters)

    @property
    def wanted(self) -> bool:
        """Whether draft tokens are to be sent that are not yet."""
        return self.sent < self.count and not (self.over or self.aside)

    def allow(self, read: int) -> bool:
        """The client has read so many draft tokens; whether more are wanted now than before."""
        before = self.count
        self.count = max(before, min(self.asked, read + MOST_UNREAD))
        return self.count > before


class Drafting:
    """An epoch under way: the draft as the context's newest tokens, and branches beside it.

    Without branches the context is fed token by token. With them it stays, and what is drafted is a tree after it:
    each step is one forward over the newest tokens of the draft and of all unfinished branches.
    """

    def __init__(self, means: Means, epoch: Epoch, shape: Shape, draws: Draws, scoring: Scoring) -> None:
        """`means.context` is the text that the epoch begins with."""
        self._means = means
        self._epoch = epoch
        self._shape = shape
        self._draws = draws
        self._scoring = scoring
        self._packing = Packing(epoch)
        self._growing: list[Growing] = []
        self._drafted: list[int] = []  # tokens of the draft that may be scored
        # Where the newest draft tokens begin, in letters of output. As no window is wider, the first has been reached.
        self._begins: deque[int] = deque(maxlen=1 + MOST_DRAFT_TOKENS)
        self._obstacle = ""  # why the text cannot go on
        self._plant()

    def adopt(self, branch: Growing) -> None:
        """The draft begins with a branch that follows the context's text."""
        for draft_token in branch.draft_tokens:
            self._means.context.append(draft_token.token)
            self._drafted.append(draft_token.token)
            if self._means.rows:
                self._packing.propose(draft_token)
            else:
                self._epoch.sent += 1
        self._plant()

    def run(self, send: Callable[[Drafted], None]) -> Job[None]:
        """Drafts until all that is wanted is sent and every branch is finished, or the epoch is over.

        What is wanted may grow while this runs. When drafting cannot go on, the last reply says why.
        """
        self._packing.resume()
        self._send(send)
        try:
            while not self._epoch.over and (self._drafts or self._growing):
                self._make_room()
                tips = [*([self._tip] if self._drafts else ()), *(growing.tip for growing in self._growing)]
                due, drafts = list(self._growing), self._drafts
                answer: ForwardResult = yield self._growth.work(tips)
                self._packing.waited(answer.queued)
                yield from self._take(answer.logits, due, drafts)
                self._send(send)
        except (NotExpressible, NoRoomError) as error:
            # Decided by what is drawn, but all of it is sent: nobody misses the rest before it is revealed.
            self._obstacle = str(error)
            self._send(send)
        if self._obstacle and self._epoch.wanted:
            send(self._packing.last(self._obstacle))

    @property
    def _drafts(self) -> bool:
        return self._packing.made < self._epoch.count and not self._obstacle

    def _plant(self) -> None:
        """What is fed from now on begins with the whole text."""
        self._growth = Growth(self._means.session, self._means.context.ids)
        self._tip = Tip()

    def _make_room(self) -> None:
        """For one more step. Raises NoRoomError."""
        context, shape = self._means.context, self._shape
        cut = context.fit(1 + shape.room)
        if cut or not shape.depth:
            self._growing.clear()  # after a cut: their beginnings are not fed any more
            self._plant()
        elif self._growth.nodes >= 2 * shape.kept * shape.cluster:
            self._replant(shape.kept)
        elif self._growth.size + shape.cluster > context.capacity:
            self._replant(shape.least)

    def _replant(self, kept: int) -> None:
        """The tree begins that many draft tokens before the newest: those of unfinished branches are among them."""
        moved = self._growth.replant(self._growth.ancestor(self._tip.node, kept))
        for tip in (self._tip, *(growing.tip for growing in self._growing)):
            tip.node = moved[tip.node]

    def _take(self, logits: Logits, due: list[Growing], drafts: bool) -> SamplerSteps[None]:
        """A step's rows: the draft's if it takes part, then those of the branches that are due."""
        if self._epoch.over:  # since the step began
            return
        if not len(logits):  # a cut has left nothing to draft
            return
        offsets = [*([self._means.context.offset] if drafts else ()), *(growing.end for growing in due)]
        beside = self._shape.candidates if drafts else 0
        guesses = iter((yield from self._means.proposing.guesses(logits, self._draws, offsets, beside)))
        if drafts:
            self._propose(next(guesses))
        for growing, guess in zip(due, guesses, strict=True):
            self._go_on(growing, guess)
        self._growing = [growing for growing in self._growing if len(growing.draft_tokens) < self._shape.depth]

    def _propose(self, guess: Guess) -> None:
        """The next draft token of the draft, and the branches beside it."""
        context, shape = self._means.context, self._shape
        drawn = guess.token
        if len(self._drafted) < MOST_DRAFT_TOKENS:
            if guess.distribution is not None:
                self._scoring.drawn(tuple(self._drafted), guess.distribution)
            self._drafted.append(drawn)
        if shape.depth:
            self._begins.append(context.offset)
            if len(self._begins) > MOST_DRAFT_TOKENS:
                self._means.prepared.release(self._begins[0])
            for key in islice(keys(guess.others, drawn, self._means.vocabulary), shape.width):
                letters = self._means.vocabulary.letters[key]
                self._growing.append(Growing(context.offset, key, letters, Tip(self._tip.node, key)))
        self._packing.propose(self._draft_token(guess))
        self._tip.token = drawn
        self._means.proposing.append(context, drawn)

    def _go_on(self, growing: Growing, guess: Guess) -> None:
        """The next draft token of a branch."""
        growing.end += len(self._means.vocabulary.letters[guess.token])
        growing.tip.token = guess.token
        growing.draft_tokens.append(self._draft_token(guess))
        if len(growing.draft_tokens) == self._shape.depth:
            self._packing.prepare(self._means.prepared.finish(growing))

    def _draft_token(self, guess: Guess) -> DraftToken:
        row = Row(*guess.distribution) if self._means.rows and guess.distribution is not None else None
        return DraftToken(guess.token, row, self._means.proposing.whose)

    def _send(self, send: Callable[[Drafted], None]) -> None:
        for reply in self._packing.due():
            send(reply)


SPARE = 3  # candidates beyond a draft token's branches, for those that cannot be keys
TREE = 128  # nodes of one tree, about: each costs some microseconds a step


def keys(candidates: Iterable[int], drawn: int, vocabulary: Vocabulary) -> Iterator[int]:
    """Those candidates, the most likely first, that are text, and each another than those before and what was drawn."""
    known = {vocabulary.letters[drawn]}
    for token in candidates:
        letters = vocabulary.letters[token]
        if letters not in known and is_plain(letters):
            known.add(letters)
            yield token


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

    def work(self, tips: Sequence[Tip]) -> ForwardRequest:
        """A request for the row after each tip, in their order; one that has no token of its own comes first."""
        for tip in tips:
            if tip.token is not None:
                self._tokens.append(tip.token)
                self._parents.append(tip.node)
                tip.node, tip.token = len(self._tokens) - 1, None
        tree = TokenTree(tuple(self._tokens), tuple(self._parents))
        return ForwardRequest(self._session, self._root, tree, tuple(tip.node + 1 for tip in tips))

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


# That are drafted ahead of what the client has read, so that one that never reads does not fill the memory. The window
# of one that reads, MOST_DRAFT_TOKENS from what was revealed, never reaches so far.
MOST_UNREAD = 2 * MOST_DRAFT_TOKENS


class Epochs:
    """The latest epoch of a session. All its methods raise ProtocolBroken and change nothing for what cannot be."""

    def __init__(self) -> None:
        self._latest: Epoch | None = None
        self._read = 0  # draft tokens of the latest epoch that the client has read

    @property
    def number(self) -> int:
        """Of the latest epoch; -1 before the first."""
        return self._latest.number if self._latest is not None else -1

    def begin(self, request: Draft) -> Epoch:
        """A new epoch; the one before is over."""
        if request.epoch < self.number:
            raise ProtocolBroken(f"epoch {request.epoch} is over; the latest is {self.number}")
        if request.epoch == self.number:
            raise ProtocolBroken(f"epoch {request.epoch} has begun already; an Advance asks for more of it")
        if self._latest is not None:
            self._latest.over = True
        self._latest, self._read = Epoch(request), 0
        return self._latest

    def advance(self, request: Advance) -> Epoch | None:
        """The epoch of which more is wanted now; None if it is over, as the two messages have crossed, or if what was
        drafted before must be read first."""
        if request.epoch < self.number:
            return None
        if self._latest is None or request.epoch > self.number:
            raise ProtocolBroken(f"epoch {request.epoch} has not begun; a Draft begins it")
        asked = self._latest.asked
        if not asked <= request.count <= asked + MOST_DRAFT_TOKENS:
            raise ProtocolBroken(
                f"epoch {request.epoch} may advance from {asked} draft tokens to at most {asked + MOST_DRAFT_TOKENS}, "
                f"not to {request.count}"
            )
        self._latest.asked = request.count
        return self._latest if self._latest.allow(self._read) else None

    @property
    def held(self) -> bool:
        """Whether more is to be drafted once the client has read what there is."""
        epoch = self._latest
        return epoch is not None and epoch.asked > epoch.count and not (epoch.over or epoch.aside)

    def read(self, reply: Drafted) -> Epoch | None:
        """The client has read a reply. The epoch of which more is wanted now, if there is one."""
        if self._latest is None or reply.epoch != self.number:
            return None
        self._read = reply.first + len(reply.draft_tokens)
        return self._latest if self._latest.allow(self._read) else None

    def scored(self, request: Score) -> Epoch:
        """The epoch whose draft is to be scored."""
        if self._latest is not None and request.epoch != self.number:
            raise ProtocolBroken(f"epoch {request.epoch} cannot be scored; the latest is {self.number}")
        if self._latest is None or request.offset != self._latest.start:
            raise ProtocolBroken(f"no draft of epoch {request.epoch} began at letter {request.offset}")
        if request.tokens > self._latest.count:
            raise ProtocolBroken(
                f"a score of {request.tokens} draft tokens was asked for, and the draft was of {self._latest.count}"
            )
        return self._latest

    def close(self) -> None:
        """Nothing more is wanted."""
        if self._latest is not None:
            self._latest.over = True


# What an epoch makes, as replies of several draft tokens each. No I/O.


class Packing:
    """Draft tokens and branches that are not sent yet.

    When a reply is due depends on numbers of draft tokens only, never on what was drawn (the release rule): it is when
    a reply is full, or all that are wanted are there. Branches that are finished go with the next reply, or alone
    once all draft tokens are sent. So a branch never arrives before the draft token that it replaces.
    """

    def __init__(self, epoch: Epoch) -> None:
        self._epoch = epoch
        self._draft_tokens: list[DraftToken] = []
        self._branches: list[Branch] = []
        self._since = self._queued = 0.0
        self.resume()

    @property
    def made(self) -> int:
        """Draft tokens of the epoch so far, sent or not."""
        return self._epoch.sent + len(self._draft_tokens)

    def resume(self) -> None:
        """Time counts from now on: nothing was drafted before."""
        self._since = time.perf_counter()
        self._queued = 0.0

    def waited(self, seconds: float) -> None:
        """Of the time since, so many seconds were spent waiting for the model: the next reply tells them apart."""
        self._queued += seconds

    def propose(self, draft_token: DraftToken) -> None:
        """One more draft token."""
        self._draft_tokens.append(draft_token)

    def prepare(self, branch: Branch) -> None:
        """A branch that is finished."""
        self._branches.append(branch)

    def due(self) -> Iterator[Drafted]:
        """The replies that are to be sent now."""
        epoch, request = self._epoch, self._epoch.request
        while True:
            size = request.first - epoch.sent if epoch.sent < request.first else request.chunk
            left = max(0, epoch.count - epoch.sent)
            ready = min(len(self._draft_tokens), left)
            if ready >= size or (ready == left and (ready or self._branches)):
                yield self._reply(min(ready, size), "")
            else:
                return

    def last(self, reason: str) -> Drafted:
        """The epoch's last reply: all that is left, and why no more will come."""
        self._epoch.aside = True
        return self._reply(len(self._draft_tokens), reason)

    def _reply(self, size: int, reason: str) -> Drafted:
        epoch, now = self._epoch, time.perf_counter()
        taken, branches, first = tuple(self._draft_tokens[:size]), tuple(self._branches), epoch.sent
        del self._draft_tokens[:size]
        self._branches.clear()
        epoch.sent += size
        queued, self._queued = self._queued, 0.0
        seconds, self._since = max(0.0, now - self._since - queued), now
        return Drafted(epoch.number, taken, seconds, reason, first, branches, queued)

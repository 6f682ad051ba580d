"""One epoch's drafting, all of it in the model thread: a job that steps, and what each step makes."""

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from itertools import islice

from crossdraft.drafter.branching import Growing, Prepared, Shape, keys
from crossdraft.drafter.context import Context, NoRoomError
from crossdraft.drafter.epochs import Epoch
from crossdraft.drafter.growth import Growth, Tip
from crossdraft.drafter.packing import Packing
from crossdraft.drafter.proposing import Guess, Proposing
from crossdraft.drafter.scoring import Scoring
from crossdraft.models.drawing import Draws
from crossdraft.models.reading import Asking
from crossdraft.models.sampling import Logits
from crossdraft.models.worker import Answer, Job
from crossdraft.text.tokenization import NotExpressible
from crossdraft.text.vocabulary import Vocabulary
from crossdraft.verification.exchange import MOST_PROPOSALS, Drafted
from crossdraft.verification.rows import Proposal, Row


@dataclass(frozen=True, eq=False)
class Means:
    """What a session drafts with."""

    session: Hashable  # the engine's name for it
    context: Context
    proposing: Proposing
    vocabulary: Vocabulary  # the drafter's
    rows: bool  # whether proposals are sent with their rows
    prepared: Prepared


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
        # Where the newest proposals begin, in letters of output. As no window is wider, the first has been reached.
        self._begins: deque[int] = deque(maxlen=1 + MOST_PROPOSALS)
        self._obstacle = ""  # why the text cannot go on
        self._plant()

    def adopt(self, branch: Growing) -> None:
        """The draft begins with a branch that follows the context's text."""
        for proposal in branch.proposals:
            self._means.context.append(proposal.token)
            self._drafted.append(proposal.token)
            if self._means.rows:
                self._packing.propose(proposal)
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
                answer: Answer = yield self._growth.work(tips)
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
        """The tree begins that many proposals before the newest: those of unfinished branches are among them."""
        moved = self._growth.replant(self._growth.ancestor(self._tip.node, kept))
        for tip in (self._tip, *(growing.tip for growing in self._growing)):
            tip.node = moved[tip.node]

    def _take(self, logits: Logits, due: list[Growing], drafts: bool) -> Asking[None]:
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
        self._growing = [growing for growing in self._growing if len(growing.proposals) < self._shape.depth]

    def _propose(self, guess: Guess) -> None:
        """The next proposal of the draft, and the branches beside it."""
        context, shape = self._means.context, self._shape
        drawn = guess.token
        if len(self._drafted) < MOST_PROPOSALS:
            if guess.law is not None:
                self._scoring.drawn(tuple(self._drafted), guess.law)
            self._drafted.append(drawn)
        if shape.depth:
            self._begins.append(context.offset)
            if len(self._begins) > MOST_PROPOSALS:
                self._means.prepared.release(self._begins[0])
            for key in islice(keys(guess.others, drawn, self._means.vocabulary), shape.width):
                letters = self._means.vocabulary.letters[key]
                self._growing.append(Growing(context.offset, key, letters, Tip(self._tip.node, key)))
        self._packing.propose(self._proposal(guess))
        self._tip.token = drawn
        self._means.proposing.append(context, drawn)

    def _go_on(self, growing: Growing, guess: Guess) -> None:
        """The next proposal of a branch."""
        growing.end += len(self._means.vocabulary.letters[guess.token])
        growing.tip.token = guess.token
        growing.proposals.append(self._proposal(guess))
        if len(growing.proposals) == self._shape.depth:
            self._packing.prepare(self._means.prepared.finish(growing))

    def _proposal(self, guess: Guess) -> Proposal:
        row = Row(*guess.law) if self._means.rows and guess.law is not None else None
        return Proposal(guess.token, row, self._means.proposing.whose)

    def _send(self, send: Callable[[Drafted], None]) -> None:
        for reply in self._packing.due():
            send(reply)

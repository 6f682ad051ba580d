"""A session among toys that answer when they are told to: whoever holds the strings decides what happens next."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from crossdraft.pipeline.events import (
    Close,
    Command,
    Emitted,
    Event,
    Expired,
    Finished,
    Lane,
    Lost,
    Open,
    Ready,
    Replied,
    Reply,
    Request,
    Send,
    SetTimer,
    Timer,
)
from crossdraft.pipeline.session import Session
from crossdraft.text.letters import NOTHING, Letters
from crossdraft.verification.exchange import (
    Advance,
    Branch,
    Draft,
    Drafted,
    FetchRow,
    OpenTarget,
    Pass,
    PassDone,
    RunTo,
    Sample,
    Score,
)
from crossdraft.verification.rows import Proposal, Whose
from tests.fakes import ToyDrafter, ToyTarget

GONE = OSError("gone")


@dataclass
class TargetLane:
    """A toy target's session: requests are answered in order, a run token by token."""

    toy: ToyTarget
    asked: list[Pass | FetchRow] = field(default_factory=list)
    told: tuple[int, ...] = ()  # ids of output
    drawn: tuple[int, ...] = ()  # in the run that is under way
    most: int | None = None  # tokens of that run, if it was told so since

    def take(self, request: Request) -> None:
        if isinstance(request, RunTo):
            assert any(isinstance(one, Pass) and one.number == request.number for one in self.asked)
            self.most = request.tokens
            return
        assert isinstance(request, Pass | FetchRow), request
        self.asked.append(request)
        self.told += request.committed if isinstance(request, Pass) else ()

    @property
    def owes(self) -> bool:
        return bool(self.asked)

    def reply(self) -> Reply:
        request = self.asked[0]
        if isinstance(request, Pass) and request.run > 1:
            return self._draw(request)
        self.asked.pop(0)
        return self.toy.run(request) if isinstance(request, Pass) else self.toy.fetch(request)

    def _draw(self, request: Pass) -> PassDone:
        assert request.draws
        assert not request.tree.tokens
        done = self.toy.draw(self.drawn, request.number) if self.drawn else self.toy.run(request)
        (sample,) = done.nodes
        assert isinstance(sample, Sample)
        first = len(self.drawn)
        self.drawn = (*self.drawn, sample.token)
        more = len(self.drawn) < (request.run if self.most is None else self.most)
        if not more:
            self.asked.pop(0)
            self.drawn, self.most = (), None
        return replace(done, more=more, first=first)


@dataclass
class Prepared:
    """A branch as its drafter keeps it."""

    text: Letters  # what it goes on from, since the start of the output
    proposals: list[Proposal]


@dataclass
class DrafterLane:
    """A toy drafter's session, which streams: a chunk of proposals a reply, each drawn when it is sent."""

    toy: ToyDrafter
    rows: bool  # proposals carry them, those of an adopted branch too
    draft: Draft | None = None
    begin: Letters = NOTHING  # of the epoch: what it takes for the output
    wanted: int = 0
    sent: int = 0
    scores: list[Score] = field(default_factory=list)
    prepared: dict[int, Prepared] = field(default_factory=dict)  # the latest epoch's branches
    branches: int = 0  # of all epochs
    again: list[Proposal] = field(default_factory=list)  # of an adopted branch, with rows

    def take(self, request: Request) -> None:
        match request:
            case Draft():
                self._begin(request)
            case Advance(epoch, count):
                assert self.draft is not None
                assert epoch == self.draft.epoch
                assert count > self.wanted
                self.wanted = count
            case Score():
                self.scores.append(request)
            case _:
                raise AssertionError(request)

    def _begin(self, draft: Draft) -> None:
        assert self.draft is None or draft.epoch > self.draft.epoch
        assert draft.offset <= len(self.toy.text), "it is told of text that it does not know"
        self.toy.text = Letters(self.toy.text[: draft.offset] + draft.letters)
        self.begin = self.toy.text
        self.draft, self.wanted, self.sent, self.scores, self.again = draft, draft.count, 0, [], []
        prepared, self.prepared = self.prepared, {}
        if draft.adopt:
            branch = prepared[draft.adopt]
            assert branch.text == self.toy.text, "a branch goes on from another text"
            self.again = list(branch.proposals) if self.rows else []
            self.sent = 0 if self.rows else len(branch.proposals)
            if not self.rows:
                self.toy.text = Letters(self.toy.text + "".join(map(self.toy.spelled, branch.proposals)))

    @property
    def owes(self) -> bool:
        return bool(self.scores) or (self.draft is not None and self.sent < self.wanted)

    def reply(self) -> Reply:
        if self.scores:
            return self.toy.score(self.scores.pop(0))
        assert self.draft is not None
        first, draft = self.sent, self.draft
        proposals: list[Proposal] = []
        branches: list[Branch] = []
        size = draft.first - first if first < draft.first else draft.chunk
        while self.sent < self.wanted and len(proposals) < size:
            before = self.toy.text
            proposals.append(self._next())
            branches += self._branches(before, proposals[-1], draft)
            self.sent += 1
        return Drafted(draft.epoch, tuple(proposals), 0.0, first=first, branches=tuple(branches))

    def _next(self) -> Proposal:
        if not self.again:
            proposal = self.toy.propose()
            return proposal if self.rows else replace(proposal, row=None)
        proposal = self.again.pop(0)
        self.toy.text = Letters(self.toy.text + self.toy.spelled(proposal))
        return proposal

    def _branches(self, before: Letters, proposal: Proposal, draft: Draft) -> list[Branch]:
        """What it would go on with, had one of the likeliest others been drawn after `before`."""
        if not draft.branch_depth or proposal.whose is Whose.TARGET:
            return []
        toy = copy.copy(self.toy)
        law = toy.law(before)
        order = sorted(range(len(law.ids)), key=lambda place: -law.probabilities[place])
        likely = dict.fromkeys(toy.letters[int(law.ids[place])] for place in order)
        others = [letters for letters in likely if letters != toy.spelled(proposal)]
        found = []
        for letters in others[: draft.branch_width]:
            text = toy.text = Letters(before + letters)
            ahead = [toy.propose() for _ in range(draft.branch_depth)]
            self.branches += 1
            self.prepared[self.branches] = Prepared(text, ahead)
            found.append(Branch(self.branches, len(before), letters, tuple(one.token for one in ahead)))
        return found


class Stage:
    """Carries out a session's commands, and brings it what its services have to say, one thing at a time."""

    def __init__(
        self,
        session: Session,
        target: ToyTarget,
        drafter: Callable[[], ToyDrafter],
        rows: bool,
        committed: tuple[tuple[int, ...], Letters] = ((), NOTHING),  # in an earlier session
    ) -> None:
        self.session = session
        self.now = 0.0  # seconds
        self.out: list[Emitted | Finished] = []
        self.opening: dict[Lane, bool] = {}  # whether it is a target's
        self.targets: dict[Lane, TargetLane] = {}
        self.drafters: dict[Lane, DrafterLane] = {}
        self.timers: dict[Timer, SetTimer] = {}
        self.requests: list[Request] = []  # that were sent
        self._target, self._drafter, self._rows = target, drafter, rows
        self._committed = committed

    def replace_toys(self, target: ToyTarget, drafter: Callable[[], ToyDrafter]) -> None:
        """Other services, before the start."""
        self._target, self._drafter = target, drafter

    def start(self) -> None:
        self.carry_out(self.session.start(self.now))

    def tell(self, event: Event, after: float = 1.0) -> list[Command]:
        """An event happens, so many seconds later."""
        self.now += after
        commands = self.session.handle(event, self.now)
        self.carry_out(commands)
        return commands

    @property
    def finished(self) -> Finished | None:
        return self.out[-1] if self.out and isinstance(self.out[-1], Finished) else None

    @property
    def emitted(self) -> list[Emitted]:
        return [one for one in self.out if isinstance(one, Emitted)]

    @property
    def text(self) -> Letters:
        """The output so far, with what was committed before."""
        return Letters(self._committed[1] + "".join(one.letters for one in self.emitted))

    def carry_out(self, commands: list[Command]) -> None:
        for command in commands:
            assert self.finished is None, "a command after the end"
            match command:
                case Open(lane, request):
                    self.opening[lane] = isinstance(request, OpenTarget)
                case Send(lane, request):
                    self.requests.append(request)
                    (self.targets.get(lane) or self.drafters[lane]).take(request)
                    if isinstance(request, Draft):
                        assert self.text.startswith(self.drafters[lane].begin), "it is told of another output"
                    if isinstance(request, Pass):
                        assert self.targets[lane].told == (*self._committed[0], *(one.token for one in self.emitted))
                case Close(lane):
                    self.opening.pop(lane, None)
                    del self.drafters[lane]
                case SetTimer(timer):
                    self.timers[timer] = command
                case Emitted() | Finished():
                    assert isinstance(command, Finished) or command.offset == len(self.text)
                    self.out.append(command)

    def open(self, lane: Lane) -> None:
        if self.opening.pop(lane):
            self.targets[lane] = TargetLane(self._target.reopened())
        else:
            self.drafters[lane] = DrafterLane(self._drafter(), self._rows)
        self.tell(Ready(lane))

    def reply(self, lane: Lane) -> list[Command]:
        """The next thing that a lane owes."""
        return self.tell(Replied(lane, (self.targets.get(lane) or self.drafters[lane]).reply()))

    def lose(self, lane: Lane, elsewhere: bool = True) -> None:
        for known in (self.opening, self.targets, self.drafters):
            known.pop(lane, None)
        self.tell(Lost(lane, GONE, elsewhere))

    def expire(self, timer: Timer) -> None:
        known = self.timers.pop(timer)
        self.tell(Expired(timer, known.number), known.seconds)

    @property
    def owing(self) -> list[Lane]:
        """Lanes that have something to say, in the order of their opening."""
        return [lane for lane, known in {**self.targets, **self.drafters}.items() if known.owes]

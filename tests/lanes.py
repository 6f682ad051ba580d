"""Sessions of toys, as services keep them: what they were asked for, and the next thing that they have to say."""

import copy
from dataclasses import dataclass, field, replace

from crossdraft.session.events import Reply, Request
from crossdraft.text.letters import NOTHING, Letters
from crossdraft.types.messages import Advance, Branch, Draft, Drafted, FetchRow, Pass, PassDone, RunTo, Sample, Score
from crossdraft.types.rows import DraftToken, Whose
from tests.fakes import ToyDrafter, ToyTarget


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
    draft_tokens: list[DraftToken]


@dataclass
class DrafterLane:
    """A toy drafter's session, which streams: a chunk of draft tokens a reply, each drawn when it is sent."""

    toy: ToyDrafter
    rows: bool  # draft tokens carry them, those of an adopted branch too
    draft: Draft | None = None
    begin: Letters = NOTHING  # of the epoch: what it takes for the output
    wanted: int = 0
    sent: int = 0
    scores: list[Score] = field(default_factory=list)
    prepared: dict[int, Prepared] = field(default_factory=dict)  # the latest epoch's branches
    branches: int = 0  # of all epochs
    again: list[DraftToken] = field(default_factory=list)  # of an adopted branch, with rows

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
            self.again = list(branch.draft_tokens) if self.rows else []
            self.sent = 0 if self.rows else len(branch.draft_tokens)
            if not self.rows:
                self.toy.text = Letters(self.toy.text + "".join(map(self.toy.spelled, branch.draft_tokens)))

    @property
    def owes(self) -> bool:
        return bool(self.scores) or (self.draft is not None and self.sent < self.wanted)

    def reply(self) -> Reply:
        if self.scores:
            return self.toy.score(self.scores.pop(0))
        assert self.draft is not None
        first, draft = self.sent, self.draft
        draft_tokens: list[DraftToken] = []
        branches: list[Branch] = []
        size = draft.first - first if first < draft.first else draft.chunk
        while self.sent < self.wanted and len(draft_tokens) < size:
            before = self.toy.text
            draft_tokens.append(self._next())
            branches += self._branches(before, draft_tokens[-1], draft)
            self.sent += 1
        return Drafted(draft.epoch, tuple(draft_tokens), 0.0, first=first, branches=tuple(branches))

    def _next(self) -> DraftToken:
        if not self.again:
            draft_token = self.toy.propose()
            return draft_token if self.rows else replace(draft_token, row=None)
        draft_token = self.again.pop(0)
        self.toy.text = Letters(self.toy.text + self.toy.spelled(draft_token))
        return draft_token

    def _branches(self, before: Letters, draft_token: DraftToken, draft: Draft) -> list[Branch]:
        """What it would go on with, had one of the likeliest others been drawn after `before`."""
        if not draft.branch_depth or draft_token.whose is Whose.TARGET:
            return []
        toy = copy.copy(self.toy)
        distribution = toy.distribution(before)
        order = sorted(range(len(distribution.ids)), key=lambda place: -distribution.probabilities[place])
        likely = dict.fromkeys(toy.letters[int(distribution.ids[place])] for place in order)
        others = [letters for letters in likely if letters != toy.spelled(draft_token)]
        found = []
        for letters in others[: draft.branch_width]:
            text = toy.text = Letters(before + letters)
            ahead = [toy.propose() for _ in range(draft.branch_depth)]
            self.branches += 1
            self.prepared[self.branches] = Prepared(text, ahead)
            found.append(Branch(self.branches, len(before), letters, tuple(one.token for one in ahead)))
        return found

"""What a session does whenever something has happened: walk on, keep the target busy, keep the drafter drafting."""

from crossdraft.pipeline.assignment import Assignment
from crossdraft.pipeline.drafting import Drafting, of_branch
from crossdraft.pipeline.epoch import Epoch
from crossdraft.pipeline.events import Command, Counts, Emitted, Finished, Reason
from crossdraft.pipeline.fetched import Fetched
from crossdraft.pipeline.governing import PLAIN, Choice, StallSeen
from crossdraft.pipeline.output import Output
from crossdraft.pipeline.passing import Passing
from crossdraft.pipeline.reporting import Reporting
from crossdraft.pipeline.stalling import Stalling
from crossdraft.pipeline.targets import Targets
from crossdraft.text.letters import Letters
from crossdraft.verification import matching
from crossdraft.verification.exchange import Sample
from crossdraft.verification.walk import Emit, Ground, Kind, NeedPrefix, NeedProposal, NeedRow, NeedSample, Refused


class Decoding:
    """The output, the running epoch and the walk over it."""

    def __init__(self, assignment: Assignment, targets: Targets, drafting: Drafting) -> None:
        self.counts = Counts()
        self.finished: Finished | None = None
        self.output = Output(assignment)
        self.fetched = Fetched(self.output.ids, assignment.open_target.head)
        self.epoch = Epoch(0, PLAIN, assignment.pair, 0, 0)
        self._given = assignment
        self._method = assignment.method
        self._targets = targets
        self._drafting = drafting
        self._passing = Passing(assignment, targets, drafting.branches, self.counts)
        self._reporting = Reporting(assignment.governor, self.counts)
        self._stalling = Stalling()
        self._next: Choice | None = None  # how the next epoch is run, if a run that is under way is the last
        self._now = 0.0  # seconds

    def go_on(self, now: float) -> list[Command]:
        """Do all that can be done now."""
        self._now = now
        commands: list[Command] = []
        if self._method.samples and self.epoch.contradicts(self.output.text):
            commands += self.next_epoch(now)  # the output does not depend on the draft: its end need not be revealed
        commands += self._walk()
        if self.finished is not None:
            return commands
        self._reporting.progress(self.epoch, self.output.text, now)
        self.epoch.release(len(self.output.text))
        self._drafting.branches.release(len(self.output.text))
        return commands + self._run_on() + self._pass() + self._advance()

    @property
    def interruptible(self) -> bool:
        """Whether an epoch without a drafter may end now: what was drawn already must not be drawn again."""
        judging = self.epoch.begun and isinstance(self.epoch.step, NeedRow | NeedSample) and self.epoch.step.judging
        return not (self.epoch.choice.drafts or judging or self._targets.running)

    def next_epoch(self, now: float) -> list[Command]:
        """The running epoch is over: choose how to go on, tell the drafter what was committed."""
        self._now = now
        self._reporting.progress(self.epoch, self.output.text, now)
        self._reporting.over(self.epoch, self.output.text)
        given, text = self._given, self.output.text
        choice = self._choose()
        branches, samples = self._drafting.branches, self._method.samples
        branch = self._reporting.continued(branches, self.epoch, text, samples, now) if choice.drafts else None
        start = len(text) if branch is None else branch.offset + len(branch.letters)
        self.epoch = epoch = Epoch(self.epoch.number + 1, choice, given.pair, start, len(text))
        self.counts.epochs += 1
        if branch is not None and self._method.drafter_rows:
            epoch.promised = of_branch(branch)
        elif branch is not None:
            epoch.extend(of_branch(branch))
        self._begin_walk(whole=not (choice.drafts and self._method.whole_draft))
        if not choice.drafts:
            self._drafting.end_epoch()
            return []
        self.counts.rewinds += 1
        return self._drafting.begin(epoch, text, branch, now)

    def reconsider(self, now: float) -> list[Command]:
        """A drafter has come: a run that is under way ends if it is to draft."""
        self._now = now
        if not self._targets.running or self._next is not None:
            return []
        choice = self._choose()
        if not choice.drafts:
            return []
        self._next = choice
        return self._targets.end_runs()

    def heard(self) -> None:
        """The drafter has said something."""
        self._stalling.impatient = False

    def listed_late(self, first: int) -> list[Command]:
        """Proposals from place `first` on came after a pass had left: it is asked for their probabilities as well."""
        return self._passing.complete(self.epoch, self.output, first)

    def expired(self, number: int, now: float) -> None:
        """A stall has lasted long enough."""
        waited = self._stalling.expired(number, now)
        if waited is not None:
            self._given.governor.observe(StallSeen(waited), now)
            self.counts.stalls += 1

    def end(self, reason: Reason, error: BaseException | None = None) -> Finished:
        """Nothing more will be emitted."""
        self._reporting.progress(self.epoch, self.output.text, self._now)
        self._reporting.over(self.epoch, self.output.text)
        self.finished = Finished(reason, self.counts, error)
        return self.finished

    def _choose(self) -> Choice:
        """How the next epoch is run, unless that has been decided already."""
        chosen, self._next = self._next, None
        usable = self._drafting.ready and self.output.left > 1
        return (chosen or self._given.governor.choose(self._now)) if usable else PLAIN

    def _run_on(self) -> list[Command]:
        """When half of a run is drawn it is decided what comes after it: if more of the same, the target goes on
        without waiting for the round trip of another pass."""
        flight = self._targets.halfway
        if flight is None or self._next is not None or self.output.left <= flight.sent.run - flight.drawn:
            return []
        choice = self._choose()
        if choice.drafts:
            self._next = choice
            return []
        return [self._passing.extend(flight, choice.run, self.output)]

    def _walk(self) -> list[Command]:
        """Go on with what is at hand, until something is missing."""
        commands: list[Command] = []
        if not self.epoch.begun and not self._drafting.due:
            self._begin_walk(whole=True)
        while self.finished is None and self.epoch.begun:
            epoch = self.epoch
            match epoch.step:
                case NeedProposal():
                    if epoch.exhausted:
                        commands += self._advance()  # what the window allows is due, not used up
                    if not self._reveal():
                        return commands
                case Emit(token, kind):
                    commands += self._emit(token, kind)
                    epoch.answer(None)
                case Refused():
                    commands += self.next_epoch(self._now)
                case NeedPrefix() as need:
                    if self._drafting.told_epoch:
                        return commands + self._drafting.score(need, self.epoch.start, self._now)
                    commands += self.next_epoch(self._now)  # only the drafter knows
                case NeedSample() if self.fetched.row is not None:
                    self._begin_walk(whole=True)  # a row that was meant for a draft serves as well
                case NeedRow() | NeedSample() as need:
                    if not self._answer(need):
                        if not self._over(need):
                            return commands + self._passing.fetch(need, self.fetched)
                        commands += self.next_epoch(self._now)
        return commands

    def _begin_walk(self, whole: bool) -> None:
        """The walk sets out: at once, or where it must know how many proposals there are, once it does.

        Where nothing is drafted nothing is judged: the target draws by itself and no row travels, unless one is at
        hand, or a first drafter may open at any moment.
        """
        if not whole:
            return
        given, epoch, text = self._given, self.epoch, self.output.text
        alone = not epoch.choice.drafts and self.fetched.row is None and not self._drafting.hoped_for
        draws = self._method.samples or alone
        ahead = Letters(text[epoch.start :])
        ground = Ground(given.pair, given.chooser, len(text), ahead, given.encode, len(epoch.proposals))
        epoch.begin(matching.walk(ground) if draws else self._method.walk(ground), draws)

    def _reveal(self) -> bool:
        """Give the walk the next proposal, or none: it settles. False: it has to wait for one."""
        epoch = self.epoch
        if not epoch.exhausted:
            self._stalling.over()
            epoch.answer(epoch.take())
            return True
        waits = self._drafting.due and not self._method.samples
        # With no row at the frontier there is nothing to settle with: a pass is needed first.
        if waits and (self.fetched.held is None or not self._hurried):
            return False
        self._reporting.progress(epoch, self.output.text, self._now)
        epoch.settled = True
        epoch.answer(None)
        return True

    @property
    def _hurried(self) -> bool:
        """Whether the target is not to wait for proposals."""
        return self._stalling.impatient or self.epoch.choice.patience == 0

    def _answer(self, need: NeedRow | NeedSample) -> bool:
        """Answer the walk with what is at hand; False if it is not."""
        answer = self.fetched.answer(need)
        if answer is None:
            return False
        self.epoch.answer(answer.token if isinstance(answer, Sample) else answer)
        return True

    def _over(self, need: NeedRow | NeedSample) -> bool:
        """Whether the epoch is used up. Never where a proposal is being judged (the look-ahead trap: an epoch that
        ended at a row miss would make the output depend on letters that are not revealed yet)."""
        moved = len(self.output.text) > self.epoch.began
        used_up = self.epoch.exhausted and not self._drafting.due
        return used_up and moved and not need.judging and self.fetched.held is None and not self._targets.running

    def _emit(self, token: int, kind: Kind) -> list[Command]:
        log_probability, likely = self.fetched.log_probabilities
        offset = len(self.output.text)
        ending = self.output.commit(token)
        self.counts.tokens += 1
        self.counts.kinds[kind] += 1
        letters, kept = self._given.pair.target.letters[token], ending.kept if ending else None
        emitted = Emitted(token, letters, kind, offset, self.epoch.number, log_probability, kept, likely)
        return [emitted] if ending is None else [emitted, self.end(ending.reason)]

    def _pass(self) -> list[Command]:
        """A pass, if the walk lacks a row and the target need not wait for proposals."""
        lane = self._targets.free
        if lane is None:
            return []
        if self.fetched.held is not None or self._targets.due((), self.output.ids):
            waits = self.epoch.begun and isinstance(self.epoch.step, NeedProposal) and not self._targets.flights
            if waits:
                return self._stalling.begin(self.epoch.choice.patience, self._now)
            return self._passing.speculate(lane, self.epoch, self.output, self.fetched, self._now)
        few = not self.epoch.begun or self.epoch.beyond(len(self.output.text)) < self.epoch.choice.wait
        if few and self._drafting.due and not self._hurried:
            return self._stalling.begin(self.epoch.choice.patience, self._now)
        self._stalling.over()
        return [self._passing.send(lane, self.epoch, self.output, self._now)]

    def _advance(self) -> list[Command]:
        """The drafter's window begins at the frontier."""
        choice, epoch = self.epoch.choice, self.epoch
        if not (choice.drafts and choice.overlap and self._drafting.received):
            return []
        return self._drafting.advance(epoch.passed(len(self.output.text)) + choice.window, choice.chunk, self._now)

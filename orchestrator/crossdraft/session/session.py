"""The session's state machine: events in, commands out, no I/O.

Whatever happens, three things are done then: the walk goes on with what is at hand, a free target gets a pass if the
walk lacks a row, and the drafter's window moves on. A lock-step round is the choice that drafts K, waits for all of
them, and begins another epoch when they are used up.
"""

from itertools import count

from crossdraft.session.assignment import Assignment
from crossdraft.session.draft_side import Branches, Drafting, Epoch, Verdict, of_branch
from crossdraft.session.events import (
    Cancelled,
    Command,
    Emitted,
    Event,
    Expired,
    Finished,
    IllegalEventError,
    Lane,
    Lost,
    Ready,
    Reason,
    Replied,
    Reply,
    Send,
    SetTimer,
    Timer,
)
from crossdraft.session.output import Output
from crossdraft.session.rules import State, fault_of, outdated
from crossdraft.session.target_side import Fetched, Flight, TargetLane, Targets
from crossdraft.speculation.choice import (
    PLAIN,
    BranchSeen,
    Choice,
    Controller,
    DrafterSeen,
    Judged,
    PassSeen,
    StallSeen,
    Told,
)
from crossdraft.text.letters import Letters
from crossdraft.types.messages import Branch, Drafted, PassDone, RowFetched, Sample, Scored
from crossdraft.types.statistics import Counts, Kind
from crossdraft.types.trees import TokenTree
from crossdraft.verification import matching
from crossdraft.verification.planning import Plan, Planner
from crossdraft.verification.walk import Emit, Ground, NeedDraftToken, NeedPrefix, NeedRow, NeedSample, Refused


class Session:
    """One request: from the prompt to its last token."""

    def __init__(self, assignment: Assignment) -> None:
        self.state = State.NEW
        self._given = assignment
        lanes = count(1)
        self._targets = Targets(assignment, lanes)
        self._drafting = Drafting(assignment, lanes)
        self._decoding = Decoding(assignment, self._targets, self._drafting)
        self._error: BaseException | None = None  # why the last target was lost

    @property
    def counts(self) -> Counts:
        """What has been done so far."""
        return self._decoding.counts

    def start(self, now: float) -> list[Command]:
        """Begin; `now` in seconds of a clock that never goes back. An output that had ended before ends at once.

        Raises:
            IllegalEventError: it has begun already.
        """
        if self.state is not State.NEW:
            raise IllegalEventError("the session has begun already")
        ended = self._decoding.output.ended
        if ended is not None:
            self.state = State.DONE
            return [self._decoding.end(ended.reason)]
        self.state = State.OPENING
        return [*self._targets.open(), *self._drafting.open(), *self._targets.set_timer()]

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take one event, which happened at `now`; returns what is to be done, in order.

        Raises:
            IllegalEventError: the rules do not allow it; nothing has changed.
        """
        if outdated(event, self.state, self._targets, self._drafting):
            return []
        fault = fault_of(event, self.state, self._targets, self._drafting)
        if fault:
            raise IllegalEventError(fault)
        commands = self._take(event, now)
        if self.state is State.OPENING and self._may_begin():
            self.state = State.RUNNING
            commands += self._decoding.next_epoch(now)
        if self.state is State.RUNNING and self._decoding.finished is None:
            commands += self._decoding.go_on(now)
        if self._decoding.finished is not None:
            self.state = State.DONE
        return commands

    def _may_begin(self) -> bool:
        """Whether the first pass can leave: a drafter is waited for only where rounds are to be compared."""
        drafter = self._drafting.ready or not self._drafting.hoped_for or not self._given.controller.waits_for_drafter
        return self._targets.ready and drafter

    def _take(self, event: Event, now: float) -> list[Command]:
        match event:
            case Ready(lane):
                return self._opened(lane, now)
            case Replied(lane, reply):
                return self._replied(lane, reply, now)
            case Lost(lane, error, elsewhere):
                return self._lost(lane, error, elsewhere, now)
            case Expired(timer, number):
                return self._expired(timer, number, now)
            case Told():
                self._given.controller.observe(event, now)
                return []
            case Cancelled():
                return [self._decoding.end(Reason.CANCELLED)]

    def _opened(self, lane: Lane, now: float) -> list[Command]:
        if lane in self._targets.lanes:
            self._targets.opened(lane, now)
            return []
        self._drafting.opened()
        self._given.controller.observe(DrafterSeen(True), now)
        if self.state is State.RUNNING and self._decoding.interruptible:
            return self._decoding.next_epoch(now)
        return self._decoding.reconsider(now)

    def _replied(self, lane: Lane, reply: Reply, now: float) -> list[Command]:
        match reply:
            case PassDone():
                self._passed(lane, reply, now)
            case RowFetched(_, node, row):
                latest = self._targets.lanes[lane].latest
                assert latest is not None
                self._decoding.fetched.complete(latest, node, row)
                self._targets.fetched(lane, node)
            case Drafted():
                return self._drafted(reply, now)
            case Scored():
                fault = self._drafting.scored(reply, now)
                if fault:
                    return self._drafter_lost(fault, self._drafting.give_up(fault), now)
                self.counts.drafter_seconds += reply.seconds
                self.counts.scores += len(reply.probabilities)
                self._decoding.epoch.answer(reply.probabilities)
        return []

    def _passed(self, lane: Lane, done: PassDone, now: float) -> None:
        flight = self._targets.returned(lane, done, now)
        self._decoding.fetched.add(flight, done.nodes)
        self.counts.target_seconds += done.seconds
        if flight.sent.run > 1:
            self.counts.passes += len(done.nodes) - (not flight.drawn)  # the first was counted when it was asked for
        if flight.sent.number > 1 or flight.drawn:  # a lane's first forward reads the prompt as well
            self._given.controller.observe(pass_seen(flight, done, now), now)

    def _drafted(self, drafted: Drafted, now: float) -> list[Command]:
        drafting, decoding, counts = self._drafting, self._decoding, self.counts
        first = drafting.received
        if drafted.first != first:  # it came twice, which says nothing new
            return []
        fault = drafting.fault_of(drafted, decoding.epoch.choice)
        if fault:
            return self._drafter_lost(fault, drafting.give_up(fault), now)
        seen = drafting.take(drafted, decoding.epoch, now)
        self._given.controller.observe(seen, now)
        decoding.heard()
        counts.drafter_seconds += drafted.seconds
        counts.draft_tokens += len(drafted.draft_tokens)
        counts.audited += len(drafted.draft_tokens) if self._given.audit else 0
        counts.stood_aside += bool(drafted.reason)
        counts.branches += len(drafted.branches)
        counts.branch_tokens += seen.branch_tokens
        return decoding.listed_late(first)

    def _lost(self, lane: Lane, error: BaseException, elsewhere: bool, now: float) -> list[Command]:
        if lane not in self._targets.lanes:
            if self._drafting.ready:
                return self._drafter_lost(str(error), self._drafting.lost(again=elsewhere), now)
            return self._drafter_missing(str(error), self._drafting.lost(again=elsewhere), now)
        self.counts.targets_lost += 1
        self._error = error
        commands = self._targets.lost(lane, now) if elsewhere else self._targets.drop(lane)
        return [self._decoding.end(Reason.FAILED, error)] if commands is None else commands

    def _drafter_lost(self, reason: str, commands: list[Command], now: float) -> list[Command]:
        """The session goes on without it: what it proposed so far counts, what it owes does not."""
        self.counts.drafter_lost = reason
        self.counts.drafters_lost += 1
        self._given.controller.observe(DrafterSeen(False), now)
        return commands

    def _drafter_missing(self, reason: str, commands: list[Command], now: float) -> list[Command]:
        """None could be opened: nothing was lost by that."""
        if not self.counts.drafters_lost:
            self.counts.drafter_lost = f"no drafter: {reason}"
        self._given.controller.observe(DrafterSeen(False), now)
        return commands

    def _expired(self, timer: Timer, number: int, now: float) -> list[Command]:
        match timer:
            case Timer.STALL:
                self._decoding.expired(number, now)
            case Timer.DRAFTER:
                over, commands = self._drafting.expired(number, now)
                if not over:
                    return commands
                reason = f"no answer within {self._given.draft_seconds:g} s"
                return self._drafter_lost(reason, self._drafting.give_up(reason), now)
            case Timer.TARGET:
                if self._targets.expired(number):
                    error = self._error or TimeoutError(f"no target within {self._given.target_seconds:g} s")
                    return [self._decoding.end(Reason.FAILED, error)]
        return []


# What a session does whenever something has happened: walk on, keep the target busy, keep the drafter drafting.


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
        self._reporting = Reporting(assignment.controller, self.counts)
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
        """Draft tokens from place `first` on came after a pass had left: it is asked for their probabilities as
        well.
        """
        return self._passing.complete(self.epoch, self.output, first)

    def expired(self, number: int, now: float) -> None:
        """A stall has lasted long enough."""
        waited = self._stalling.expired(number, now)
        if waited is not None:
            self._given.controller.observe(StallSeen(waited), now)
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
        return (chosen or self._given.controller.choose(self._now)) if usable else PLAIN

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
                case NeedDraftToken():
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
        """The walk sets out: at once, or where it must know how many draft tokens there are, once it does.

        Where nothing is drafted nothing is judged: the target draws by itself and no row travels, unless one is at
        hand, or a first drafter may open at any moment.
        """
        if not whole:
            return
        given, epoch, text = self._given, self.epoch, self.output.text
        alone = not epoch.choice.drafts and self.fetched.row is None and not self._drafting.hoped_for
        draws = self._method.samples or alone
        ahead = Letters(text[epoch.start :])
        ground = Ground(given.pair, given.chooser, len(text), ahead, given.encode, len(epoch.draft_tokens))
        epoch.begin(matching.walk(ground) if draws else self._method.walk(ground), draws)

    def _reveal(self) -> bool:
        """Give the walk the next draft token, or none: it settles. False: it has to wait for one."""
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
        """Whether the target is not to wait for draft tokens."""
        return self._stalling.impatient or self.epoch.choice.patience == 0

    def _answer(self, need: NeedRow | NeedSample) -> bool:
        """Answer the walk with what is at hand; False if it is not."""
        answer = self.fetched.answer(need)
        if answer is None:
            return False
        self.epoch.answer(answer.token if isinstance(answer, Sample) else answer)
        return True

    def _over(self, need: NeedRow | NeedSample) -> bool:
        """Whether the epoch is used up. Never where a draft token is being judged (the look-ahead trap: an epoch that
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
        """A pass, if the walk lacks a row and the target need not wait for draft tokens."""
        lane = self._targets.free
        if lane is None:
            return []
        if self.fetched.held is not None or self._targets.due((), self.output.ids):
            waits = self.epoch.begun and isinstance(self.epoch.step, NeedDraftToken) and not self._targets.flights
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


# Passes: what each covers, and what is asked of one that has left already.

NOTHING_GUESSED = Plan(TokenTree(), ())


class Passing:
    """Plans passes over the draft as far as it is known, and sends them."""

    def __init__(self, assignment: Assignment, targets: Targets, branches: Branches, counts: Counts) -> None:
        given = assignment
        self._given = given
        self._targets = targets
        self._branches = branches
        self._counts = counts
        self._planner = Planner(given.pair, given.method, given.encode, given.tree_budget, given.paths)
        self._letters = given.pair.target.letters

    def send(self, lane: TargetLane, epoch: Epoch, output: Output, now: float) -> Send:
        """A pass at the frontier."""
        frontier = len(output.text)
        if epoch.alone:
            return self._run(lane, epoch, output, now)
        plan = self._plan(epoch, output)
        self._counts.passes += 1
        self._counts.row_misses += frontier < epoch.reach
        epoch.reach = max(epoch.reach, frontier + self._length(plan.tree))
        return self._targets.send(lane, plan, None, output.ids, epoch.beyond(frontier), epoch.draws, now)

    def _run(self, lane: TargetLane, epoch: Epoch, output: Output, now: float) -> Send:
        """Tokens of the target's own; further forwards are counted as they are told of."""
        epoch.reach = max(epoch.reach, len(output.text))
        run = min(epoch.choice.run, output.left)
        self._counts.passes += 1
        self._counts.runs += run > 1
        return self._targets.send(lane, NOTHING_GUESSED, None, output.ids, 0, True, now, run)

    def extend(self, flight: Flight, tokens: int, output: Output) -> Send:
        """A run goes on, up to where the output ends."""
        due = flight.sent.run - flight.drawn
        return self._targets.extend(flight, min(tokens, output.left - due))

    def speculate(self, lane: TargetLane, epoch: Epoch, output: Output, fetched: Fetched, now: float) -> list[Command]:
        """A pass over later draft tokens, on a target that is free while others work on earlier ones."""
        if not epoch.choice.speculate or not self._targets.flights:
            return []
        if lane.owed:
            return []  # another pass would take away the row that the walk waits for
        if epoch.beyond(epoch.reach) < max(1, epoch.choice.wait):
            return []  # a target that left with less could not take the next ones along
        plan = self._plan(epoch, output)
        wanted = tuple(
            node
            for node, path in enumerate(plan.tree.paths())
            if not fetched.knows(path) and not self._targets.due(path, output.ids)
        )
        if not wanted:
            return []
        self._counts.passes += 1
        self._counts.speculated += 1
        epoch.reach = max(epoch.reach, len(output.text) + self._length(plan.tree))
        beyond = epoch.beyond(len(output.text))
        return [self._targets.send(lane, plan, wanted, output.ids, beyond, epoch.draws, now)]

    def complete(self, epoch: Epoch, output: Output, first: int) -> list[Command]:
        """Draft tokens from place `first` on begin where passes under way do not list what they can be: ask for it."""
        method, options = self._given.method, self._given.open_target.options
        if method.samples or method.whole_draft or options.temperature == 0:
            return []
        commands: list[Command] = []
        skip = len(output.text) - epoch.start - epoch.begin_of(first)
        for flight in self._targets.flights:
            if flight.root != len(output.ids):
                continue
            listed = self._planner.listed(flight.sent.tree, epoch.guessed(first), skip)
            for node in flight.sent.answered:
                if len(listed[node]):
                    fetch = self._targets.fetch(flight.lane, flight.sent.number, node, listed[node]) or []
                    self._counts.rows_completed += len(fetch)
                    commands += fetch
        return commands

    def fetch(self, need: NeedRow | NeedSample, fetched: Fetched) -> list[Command]:
        """A row at hand lacks what is needed: its pass is asked for it, or if that is over, another pass will be."""
        held = fetched.held
        if held is None or isinstance(need, NeedSample):
            return []  # a pass will bring it
        fetch = self._targets.fetch(held.lane, held.number, held.node, None if need.whole else need.listed)
        if fetch is None:
            fetched.forget()
            return []
        self._counts.rows_fetched += need.whole and bool(fetch)
        self._counts.rows_completed += not need.whole and bool(fetch)
        return fetch

    def _plan(self, epoch: Epoch, output: Output) -> Plan:
        frontier = len(output.text)
        others = self._branches.texts(epoch, frontier) if self._given.paths > len(self._given.method.guesses) else ()
        first = epoch.passed(frontier)
        skip = frontier - epoch.start - epoch.begin_of(first)
        return self._planner.plan(epoch.guessed(first), skip, output.room, others)

    def _length(self, tree: TokenTree) -> int:
        """Letters of the longest path."""
        ends = [0]
        for token, parent in zip(tree.tokens, tree.parents, strict=True):
            ends.append(ends[1 + parent] + len(self._letters[token]))
        return max(ends)


# A target that stands idle for draft tokens, and for how long.


class Stalling:
    """Whether the target waits for draft tokens, and whether it has waited long enough."""

    def __init__(self) -> None:
        self.impatient = False  # a stall has run out, and the drafter has said nothing since
        self._number = 0  # of the latest stall's timer
        self._since: float | None = None  # seconds

    def begin(self, patience: float, now: float) -> list[Command]:
        """It stands idle from now on, for so many seconds; where it does already nothing changes."""
        if self._since is not None:
            return []
        self._since = now
        self._number += 1
        return [SetTimer(Timer.STALL, self._number, patience)]

    def over(self) -> None:
        """It goes on."""
        self._since = None

    def expired(self, number: int, now: float) -> float | None:
        """How long the stall of this timer has lasted; None if it is over."""
        if number != self._number or self._since is None:
            return None
        waited, self._since, self.impatient = now - self._since, None, True
        return waited


# How drafts fare: told to the controller as it shows, and counted when an epoch is over.


def pass_seen(flight: Flight, done: PassDone, now: float) -> PassSeen:
    """What the controller is told of a pass that is back, or of tokens of a run."""
    own = 1 + len(flight.sent.tree)
    others = (max(0, done.fed - own) if done.fed else done.shared - 1) if done.shared > 1 else 0
    return PassSeen(
        flight.tokens,
        now - flight.left_at,
        done.seconds,
        flight.idle,
        flight.draft_tokens,
        done.queued,
        done.forwards,
        not flight.drawn,
        done.shared,
        others,
    )


class Reporting:
    """What the controller knows of the running epoch so far."""

    def __init__(self, controller: Controller, counts: Counts) -> None:
        self._controller = controller
        self._counts = counts
        self._verdict = Verdict()
        self._tokens = 0
        self._bonus = 0

    def progress(self, epoch: Epoch, text: Letters, now: float) -> None:
        """Tell how far the draft has held since the last time, if anything is new."""
        before, tokens, settled = self._verdict, self._tokens, self._bonus
        verdict = self._remember(epoch.verdict(text))
        if verdict == before and tokens == self._tokens:
            return
        accepted, refused = verdict.accepted - before.accepted, verdict.refused and not before.refused
        emitted, bonus = self._tokens - tokens, self._bonus - settled
        self._controller.observe(Judged(before.accepted, accepted, refused, emitted, bonus, epoch.settled), now)
        epoch.settled = epoch.settled and not accepted

    def over(self, epoch: Epoch, text: Letters) -> None:
        """The epoch is over: count it, and begin anew."""
        verdict = epoch.verdict(text)
        self._counts.round(len(epoch.draft_tokens), verdict.accepted, verdict.refused)
        self._remember(Verdict())

    def continued(self, branches: Branches, epoch: Epoch, text: Letters, samples: bool, now: float) -> Branch | None:
        """The prepared continuation that goes on from here, if the draft was refused and one does; counted and told."""
        if not len(branches) or not epoch.verdict(text).refused:
            return None
        branch = branches.match(epoch, text, samples)
        self._counts.branches_tried += 1
        self._counts.branches_hit += branch is not None
        self._controller.observe(BranchSeen(branch is not None), now)
        return branch

    def _remember(self, verdict: Verdict) -> Verdict:
        self._verdict = verdict
        self._tokens, self._bonus = self._counts.tokens, self._counts.kinds[Kind.BONUS]
        return verdict

"""The session's state machine: events in, commands out, no I/O. Its rules are those of `session.rules`.

A lock-step round is the choice that drafts K tokens, waits for all of them and begins another epoch when they are used
up.
"""

from collections import Counter
from dataclasses import replace
from itertools import count
from typing import NamedTuple

from crossdraft.session import events
from crossdraft.session.assignment import Assignment
from crossdraft.session.drafter_side import DrafterSide, of_branch
from crossdraft.session.epoch import UNJUDGED, Epoch, Verdict
from crossdraft.session.output import Output
from crossdraft.session.rules import State, admits
from crossdraft.session.target_side import TargetLane, TargetSide
from crossdraft.speculation.choice import ASIDE, PLAIN, Choice, Decision, Judged, Lifecycle, Observation
from crossdraft.text.letters import Letters
from crossdraft.types import quick_dataclass
from crossdraft.types.messages import Branch, Drafted, PassDone, RowFetched, Sample, Scored
from crossdraft.types.statistics import Counts, Kind
from crossdraft.verification import matching
from crossdraft.verification.walk import Emit, Ground, NeedDraftToken, NeedPrefix, NeedRow, NeedSample, Refused

NOT_YET = replace(PLAIN, reason="the drafter has not opened yet")
NOT_WANTED = replace(PLAIN, reason="plain decoding: no draft token raises the speed")
LAST_TOKEN = replace(PLAIN, reason="one token is left")
LATE = "no draft token came in time"
MAX_DECISIONS = 10_000  # that are kept for an explanation


class Told(NamedTuple):
    """What the controller was told of drafts."""

    verdict: Verdict = UNJUDGED  # of the running epoch
    tokens: int = 0  # of the session's output
    undrafted: int = 0  # of these, as in `Session`


@quick_dataclass(frozen=True)
class Stall:
    """Waiting for draft tokens, the target idle."""

    number: int = 0  # of the latest timer
    since: float | None = None  # seconds; None: it does not stand idle
    over: bool = False  # patience has ended, and the drafter has said nothing since: the target waits no more


class Session:
    """One request, from the prompt to its last token."""

    def __init__(self, assignment: Assignment) -> None:
        self.state = State.NEW
        self.counts = Counts()  # what has been done so far
        self.decisions: list[Decision] = []  # how the epochs were run, if the assignment has `explain`
        self.output = Output(assignment)
        self.epoch = Epoch(0, PLAIN, assignment.pair, 0, 0)
        lanes = count(1)
        self.drafter = DrafterSide(assignment, lanes)
        self.target = TargetSide(assignment, lanes, self.output, self.drafter.branches, self.counts)
        self._given = assignment
        self._now = 0.0  # seconds
        self._began: float | None = None  # seconds: when the first epoch did
        self._error: BaseException | None = None  # why the last target was lost
        self._next: Choice | None = None  # how the next epoch is run, if that is decided before the running one ends
        self._stall = Stall()
        self._told = Told()
        self._rounds: Counter[tuple[int, int, bool]] = Counter()  # how many had so many draft tokens, and this verdict
        self._undrafted = 0  # tokens that no draft brought: the target's own, and those of other branches of a tree
        self._no_draft = ""  # why there is no draft token yet

    def start(self, now: float) -> list[events.Command]:
        """Begin at `now`, in seconds of a clock that never goes back. An output that had ended before ends at once.

        Raises IllegalEventError: it has begun already.
        """
        if self.state is not State.NEW:
            raise events.IllegalEventError("the session has begun already")
        self._now = now
        if (ended := self.output.ended) is not None:
            return [self._end(ended.reason)]
        self.state = State.OPENING
        self._observe(Lifecycle.STARTED)
        return [*self.target.open(), *self._open_drafter(), *self.target.set_timer()]

    def handle(self, event: events.Event, now: float) -> list[events.Command]:
        """Take one event, which happened at `now`; returns what is to be done, in order.

        Raises IllegalEventError: the rules do not allow it; nothing has changed.
        """
        if not admits(event, self.state, self._lane_of(event)):
            return []
        self._now = now
        commands = self._take(event)
        if self.state is State.OPENING and self._may_begin():
            self.state = State.RUNNING
            commands += self._next_epoch() if self.output.left > 0 else [self._end(events.Reason.LENGTH)]
        if self.state is State.RUNNING:
            commands += self._go_on()
        return commands

    def _lane_of(self, event: events.Event) -> TargetLane | DrafterSide | None:
        """Where it happened; None: on no lane, or on one that is over."""
        if (lane := getattr(event, "lane", None)) is None:
            return None
        return self.target.lanes.get(lane) or (self.drafter if lane == self.drafter.lane else None)

    def _may_begin(self) -> bool:
        """Whether the prompt has been scored, if it must be, and the first pass can leave.

        Only a controller that compares lock-step rounds waits for a drafter.
        """
        drafter = self.drafter.ready or not self.drafter.hoped_for or not self._given.controller.waits_for_drafter
        return self.target.ready and not self.target.unscored and drafter

    def _observe(self, seen: Observation) -> None:
        self._given.controller.observe(seen, self._now)

    # Events.

    def _take(self, event: events.Event) -> list[events.Command]:
        if isinstance(event, events.Replied):
            return self._replied(event.lane, event.reply)
        match event:
            case events.Ready(lane):
                return self.target.opened(lane) if lane in self.target.lanes else self._drafter_opened()
            case events.Lost():
                return self._lost(event)
            case events.Expired(events.Timer.STALL, self._stall.number) if self._stall.since is not None:
                self._stall = Stall(self._stall.number, over=True)
                self.counts.add(stalls=1)
            case events.Expired(events.Timer.DRAFTER, number):
                overdue, commands = self.drafter.expired(number, self._now)
                why = f"no answer within {self._given.draft_seconds:g} s"
                return self._give_up_drafter(why) if overdue else commands
            case events.Expired(events.Timer.TARGET, number) if self.target.expired(number):
                error = self._error or TimeoutError(f"no target within {self._given.target_seconds:g} s")
                return [self._end(events.Reason.FAILED, error)]
            case events.Cancelled():
                return [self._end(events.Reason.CANCELLED)]
        return []

    def _drafter_opened(self) -> list[events.Command]:
        self.drafter.opened()
        self._observe(Lifecycle.DRAFTER_CAME)
        return self._next_epoch() if self.state is State.RUNNING and self.interruptible else []

    def _replied(self, lane: events.Lane, reply: events.Reply) -> list[events.Command]:
        if isinstance(reply, PassDone):
            self._passed(lane, reply)
        elif isinstance(reply, Drafted):
            return self._drafted(reply)
        elif isinstance(reply, Scored):
            return self._scored(reply)
        elif isinstance(reply, RowFetched):
            self.target.lanes[lane].fetched(reply)
        else:
            self.target.scored(lane, reply)
            self.counts.add(target_seconds=reply.seconds)
            return [reply]
        return []

    def _passed(self, lane: events.Lane, done: PassDone) -> None:
        flight = self.target.returned(lane, done)
        more = done.forwards - (not flight.drawn) if flight.sent.run > 1 else 0  # the first was counted before
        self.counts.add(target_seconds=done.seconds, passes=more)
        if flight.sent.number > 1 or flight.drawn:  # a lane's first forward reads the prompt as well
            self._observe(flight.seen(done))

    def _drafted(self, drafted: Drafted) -> list[events.Command]:
        drafter, first, count = self.drafter, self.drafter.ledger.received, len(drafted.draft_tokens)
        if drafted.first != first:  # a duplicate
            return []
        if fault := drafter.fault_of(drafted, self.epoch.choice):
            return self._give_up_drafter(fault)
        seen = drafter.take(drafted, self.epoch, self._now)
        if drafted.reason and not drafter.ledger.received:
            self._explain_aside(drafted.reason)
        self._observe(seen)
        if self._stall.over:
            self._stall = Stall(self._stall.number, self._stall.since)
        self.counts.add(drafter_seconds=drafted.seconds, draft_tokens=count)
        if self._given.audit is not None:
            self.counts.add(audited=count)
        if branches := drafted.branches:
            self.counts.add(branches=len(branches), branch_tokens=sum(len(branch.tokens) for branch in branches))
        told = drafter.ledger.received and self.epoch.choice.least_likely  # to stop where a step is not worth it
        if drafted.reason and not told:
            self.counts.add(stood_aside=1)
            self.counts.note(undrafted=drafted.reason)
        return self.target.fetch_late(self.epoch, first)

    def _scored(self, scored: Scored) -> list[events.Command]:
        if fault := self.drafter.scored(scored, self._now):
            return self._give_up_drafter(fault)
        self.counts.add(drafter_seconds=scored.seconds, scores=len(scored.probabilities))
        self.epoch.answer(scored.probabilities)
        return []

    def _lost(self, lost: events.Lost) -> list[events.Command]:
        if lost.lane not in self.target.lanes:
            opened, reason = self.drafter.ready, str(lost.error)
            commands = self.drafter.lost(reason, again=lost.elsewhere)
            self._without_drafter(reason if opened else self.drafter.fault, opened)
            return commands
        target, self._error = self.target, lost.error
        self.counts.add(targets_lost=target.lanes[lost.lane].ready)  # one that never opened is no loss of one
        replaced = target.lost(lost.lane, self._now) if lost.elsewhere else target.drop(lost.lane)
        return [self._end(events.Reason.FAILED, lost.error)] if replaced is None else replaced

    def _give_up_drafter(self, fault: str) -> list[events.Command]:
        self._without_drafter(fault)
        return self.drafter.give_up(fault)

    def _without_drafter(self, why: str, opened: bool = True) -> None:
        """The session goes on: what the drafter has sent still counts. One that never opened is no loss of one."""
        self.counts.add(drafters_lost=opened)
        if opened or not self.counts.drafters_lost:
            self.counts.note(drafter_lost=why)
        self._observe(Lifecycle.DRAFTER_WENT)

    # Epochs.

    @property
    def interruptible(self) -> bool:
        """Whether an epoch without a drafter may end now: what was drawn already must not be drawn again."""
        return not (self.epoch.choice.drafts or self.epoch.judging or self.target.runs)

    def _next_epoch(self) -> list[events.Command]:
        """End the running epoch: choose how to go on, and tell the drafter what was committed."""
        self._report_end()
        text, drafter = self.output.text, self.drafter
        choice = self._choose()
        branch = self._continuation() if choice.drafts and not choice.tree_nodes else None
        start = len(text) if branch is None else branch.offset + len(branch.letters)
        number, tokens = self.epoch.number + 1, self.counts.tokens
        self.epoch = epoch = Epoch(number, choice, self._given.pair, start, len(text), tokens)
        self.counts.add(epochs=1, rewinds=choice.drafts)
        self._explain(choice)
        if branch is not None:
            (epoch.promise if self._given.method.drafter_rows else epoch.extend)(of_branch(branch))
        if not (choice.drafts and self._given.method.whole_draft):
            self._begin_walk()
        if choice is not LAST_TOKEN or not self._no_draft:
            self._no_draft = LATE if choice.drafts else choice.reason
        if not choice.drafts:
            return [*drafter.stop(self._now), *self._open_drafter()]
        return drafter.begin(epoch, text, branch, self._now, self.target.hidden())

    def _choose(self) -> Choice:
        """How the next epoch is run, unless that has been decided already."""
        chosen, self._next = self._next, None
        if not self.drafter.ready:
            if self.drafter.unopened and not self._given.controller.wants_drafter(self._now):
                return NOT_WANTED
            wanted = self.drafter.unopened or self.drafter.hoped_for
            return NOT_YET if wanted else replace(PLAIN, reason=self.drafter.fault)
        if self.output.left <= 1:
            return LAST_TOKEN
        return chosen or self._given.controller.choose(self._now)

    @property
    def _reviewable(self) -> bool:
        """Whether the controller is to decide now how a long epoch goes on.

        Only where the epoch could end without a trace: the target has nothing for it, and all that was revealed of the
        draft is in the output. What is hidden then is dropped unseen.
        """
        epoch, target = self.epoch, self.target
        if self.counts.tokens - epoch.reviewed < epoch.choice.review_after or not self.drafter.ready:
            return False
        if target.flights or not self._bare:
            return False
        if isinstance(epoch.waits_for, NeedDraftToken):
            return epoch.start + epoch.letters_before(epoch.revealed) <= len(self.output.text)
        return isinstance(epoch.waits_for, NeedRow | NeedSample) and not epoch.waits_for.judging

    def _review(self) -> list[events.Command]:
        """Go on with the epoch as the controller says, or end it."""
        self._report()
        choice = self._given.controller.review(self._now)
        if not (choice.drafts and choice.overlap):
            self._next = choice
            return self._next_epoch()
        self.epoch.review(choice, self.counts.tokens)
        self._explain(choice)
        return []

    def _explain(self, choice: Choice) -> None:
        """Keep how an epoch is run, if that is to be explained; the last ones of very many together."""
        if not self._given.request.explain:
            return
        self._began = self._now if self._began is None else self._began
        latest = self.decisions[-1] if self.decisions else None
        if latest is not None and (latest.choice == choice or len(self.decisions) == MAX_DECISIONS):
            self.decisions[-1] = replace(latest, epochs=latest.epochs + 1)
        else:
            self.decisions.append(Decision(self._now - self._began, 1, choice))

    def _explain_aside(self, why: str) -> None:
        """Of the epoch that is explained last: its draft is empty, and why."""
        if self.decisions:
            latest = self.decisions.pop()
            if latest.epochs > 1:
                self.decisions.append(replace(latest, epochs=latest.epochs - 1))
            self._explain(replace(latest.choice, reason=ASIDE.format(why)))

    def _continuation(self) -> Branch | None:
        """The branch that continues the output, if the draft was refused and there is one."""
        branches, text = self.drafter.branches, self.output.text
        if not len(branches) or not self.epoch.verdict(text).refused:
            return None
        branch = branches.match(self.epoch, text, self._given.method.samples)
        self.counts.add(branches_tried=1, branches_hit=branch is not None)
        return branch

    def _open_drafter(self) -> list[events.Command]:
        """Open the first one once the controller wants it: what is never drafted costs a drafter nothing."""
        if not self.drafter.unopened or not self._given.controller.wants_drafter(self._now):
            return []
        return self.drafter.open()

    def _go_on_with_run(self) -> list[events.Command]:
        """While the target draws by itself: end that as soon as the next epoch is to draft; else, when half of the run
        is drawn, let the target go on without the round trip of another pass."""
        run = next((run for run in self.target.runs if not run.ending), None)
        if run is None:
            return []
        if self._next is not None:  # a run that replaces the one that was to end
            return self.target.end_runs()
        ends_soon = run.drawn >= run.half and self.output.left > run.left
        there = self.drafter.ready or self.drafter.unopened
        if not ends_soon and not (there and self._given.controller.wants_drafter(self._now)):
            return []
        choice = self._choose()
        if choice.drafts:
            self._next = choice
            return self.target.end_runs()
        opening = self._open_drafter()
        return [self.target.extend_run(run, choice.run), *opening] if ends_soon else opening

    def _end(self, reason: events.Reason, error: BaseException | None = None) -> events.Finished:
        """Nothing more will be emitted."""
        self._report_end()
        for (proposed, accepted, refused), number in self._rounds.items():
            self.counts.rounds(proposed, accepted, refused, number)
        self._observe(Lifecycle.ENDED)
        if not (self.counts.draft_tokens or self.counts.undrafted or self.counts.drafter_lost):
            self.counts.note(undrafted=self._no_draft)
        self.state = State.DONE
        return events.Finished(reason, self.counts, error)

    def abandon(self) -> None:
        """Nobody drives it any more: unless it is over, its controller counts it among the outputs no longer."""
        if self.state is not State.DONE:
            self._observe(Lifecycle.ENDED)

    # What is done after every event.

    def _go_on(self) -> list[events.Command]:
        commands, before = list[events.Command](), self.output.text
        if self._given.method.samples and self.epoch.contradicts(before):
            commands += self._next_epoch()  # the output does not depend on the draft: its end need not be revealed
        commands += self._walk()
        if self.state is not State.RUNNING:
            return commands
        self._report()
        if not self.epoch.choice.drafts:  # else there are no runs
            commands += self._go_on_with_run()
        if self.output.text is not before:
            self.epoch.release(len(self.output.text))
            self.drafter.branches.release(len(self.output.text))
        commands += self._pass()
        return commands + self._advance() if self.epoch.choice.overlap else commands

    def _walk(self) -> list[events.Command]:
        """Go on with what is at hand, until something is missing."""
        commands: list[events.Command] = []
        if self.epoch.waits_for is None and not self.drafter.due:
            self._begin_walk()
        while self.state is State.RUNNING and (step := (epoch := self.epoch).waits_for) is not None:
            if epoch.choice.review_after and self._reviewable:
                commands += self._review()
                continue
            match step:
                case Emit() as emit:
                    foreseen = emit.kind is Kind.CORRECTED and epoch.choice.tree_nodes and self._guessed(emit.token)
                    commands += self._emit(emit.token, Kind.ACCEPTED if foreseen else emit.kind)
                    epoch.answer(None)
                case NeedSample() as need:
                    held = self.target.answers.held
                    if held is None:
                        if not self._over(need):
                            return commands  # a pass will bring it
                        commands += self._next_epoch()
                    elif isinstance(held.answer, Sample):
                        epoch.answer(held.answer.token)
                    else:
                        self._begin_walk()  # a row that was meant for a draft serves as well
                case NeedDraftToken():
                    if not epoch.exhausted and (not step.path or self.target.answers.covers(step.path)):
                        self._end_stall()
                        epoch.reveal()
                    elif step.path:
                        epoch.answer(None)
                    else:
                        more, waits = self._without_draft_token()
                        commands += more
                        if waits:
                            return commands
                case Refused():
                    commands += self._emit_known() if self._given.method.samples else []
                    commands += self._next_epoch() if self.state is State.RUNNING else []
                case NeedPrefix() as need:
                    if self.drafter.ready and self.drafter.ledger.wanted:  # one opened since was told of no epoch
                        return commands + self.drafter.score(need, epoch.start, self._now)
                    commands += self._next_epoch()  # only the drafter knows
                case NeedRow() as need:
                    if not self._answer(need):
                        if not self._over(need):
                            return commands + self.target.fetch_needed(need)
                        commands += self._next_epoch()
        return commands

    def _without_draft_token(self) -> tuple[list[events.Command], bool]:
        """None is left to be revealed: let the walk go on without; and whether it has to wait for the next one."""
        commands = self._advance()  # what max_draft_tokens allows is due, not used up
        # With no row at the frontier there is nothing to settle with: a pass is needed first.
        hurried = self._hurried and self.target.answers.held is not None
        if not self.drafter.due or self._given.method.samples or hurried:
            self._report()
            self.epoch.settle()
            return commands, False
        if self.epoch.outrun and self._bare:
            return commands + self._next_epoch(), False
        return commands, True

    def _begin_walk(self) -> None:
        """Start the epoch's walk.

        Where nothing is drafted nothing is judged: the target draws by itself and no row travels, unless a row is at
        hand already, or a first drafter may open at any moment.
        """
        given, epoch, text = self._given, self.epoch, self.output.text
        held = self.target.answers.held
        no_row = held is None or isinstance(held.answer, Sample)
        alone = not epoch.choice.drafts and no_row and not self.drafter.hoped_for
        draws = self._given.method.samples or alone
        ahead = Letters(text[epoch.start :])
        band, drafted = given.request.alignment_band, len(epoch.draft_tokens)
        ground = Ground(given.pair, given.chooser, len(text), ahead, given.encode, band, drafted)
        undrafted = draws and not epoch.choice.drafts
        epoch.begin(matching.drawn() if undrafted else self._given.method.walk(ground), draws)

    def _emit_known(self) -> list[events.Command]:
        """What the target has drawn beyond a refusal, along another branch of the tree: it is output in any case."""
        commands: list[events.Command] = []
        while self.state is State.RUNNING and (sample := self.target.answers.sample) is not None:
            guessed = self._guessed(sample.token)
            self._undrafted += guessed
            commands += self._emit(sample.token, Kind.ACCEPTED if guessed else Kind.BONUS)
        return commands

    def _guessed(self, token: int) -> bool:
        """Whether the pass has looked beyond this token at the frontier."""
        return self.target.answers.after((token,)) is not None

    @property
    def _hurried(self) -> bool:
        """Whether the target is not to wait for draft tokens."""
        return self._stall.over or self.epoch.choice.patience == 0

    def _answer(self, need: NeedRow) -> bool:
        """Answer the walk with the row that is at hand; False if it is not."""
        beyond = need.known and not self.epoch.choice.tree_nodes  # only the pass of a tree brings what is known beyond
        row = None if beyond else self.target.answers.answer(need)
        if row is None and not need.known:
            return False
        self.epoch.answer(row)
        return True

    def _over(self, need: NeedRow | NeedSample) -> bool:
        """Whether the epoch is used up, or its draft so late that it is of no use.

        Never where a draft token is being judged (the look-ahead trap: an epoch that ended at a row miss would make the
        output depend on letters that are not revealed yet).
        """
        epoch = self.epoch
        moved = len(self.output.text) > epoch.began
        used_up = moved and epoch.exhausted and (epoch.outrun or not self.drafter.due)
        return used_up and not need.judging and self._bare

    @property
    def _bare(self) -> bool:
        """Whether the target has nothing for this epoch, neither at hand nor under way."""
        return self.target.answers.held is None and not self.target.runs

    def _emit(self, token: int, kind: Kind) -> list[events.Command]:
        log_probability, likely = self.target.answers.log_probabilities(token)
        offset = len(self.output.text)
        ending = self.output.commit(token)
        self.counts.emit(kind)
        self._undrafted += kind is Kind.BONUS
        letters, kept = self._given.pair.target.letters[token], ending.kept if ending else None
        emitted = events.Emitted(token, letters, kind, offset, self.epoch.number, log_probability, kept, likely)
        return [emitted] if ending is None else [emitted, self._end(ending.reason)]

    def _pass(self) -> list[events.Command]:
        """Send a pass, if the walk lacks a row and the target need not wait for draft tokens."""
        lane, epoch = self.target.free, self.epoch
        if lane is None:
            return []
        path = epoch.waits_for.path if isinstance(epoch.waits_for, NeedRow) else ()  # where the walk needs a row
        if self.target.answers.after(path) is not None or self.target.due(path):
            if isinstance(epoch.waits_for, NeedDraftToken) and not self.target.flights:
                return self._wait()
            return self.target.send_ahead(lane, epoch)
        few = epoch.waits_for is None or epoch.beyond(len(self.output.text)) < epoch.choice.min_draft_tokens
        if few and self.drafter.due and not self._hurried:
            return self._wait()
        self._end_stall()
        return [self.target.send_pass(lane, epoch)]

    def _advance(self) -> list[events.Command]:
        """Ask for draft tokens up to the choice's max_draft_tokens beyond the frontier."""
        choice, epoch = self.epoch.choice, self.epoch
        if not (choice.drafts and choice.overlap and self.drafter.ledger.received):
            return []
        return self.drafter.advance(
            epoch.passed(len(self.output.text)) + choice.max_draft_tokens, choice.chunk, self._now
        )

    # A stall: the target stands idle for draft tokens.

    def _wait(self) -> list[events.Command]:
        """The target stands idle from now on, at most for the choice's patience."""
        if self._stall.since is not None:
            return []
        self._stall = Stall(self._stall.number + 1, self._now, self._stall.over)
        return [events.SetTimer(events.Timer.STALL, self._stall.number, self.epoch.choice.patience)]

    def _end_stall(self) -> None:
        if self._stall.since is not None:
            self._stall = Stall(self._stall.number, over=self._stall.over)

    # What the controller is told of drafts.

    def _report(self) -> Verdict:
        """Tell the controller how far the draft has held since the last time, if anything is new."""
        before, verdict = self._told, self.epoch.verdict(self.output.text)
        held, tokens = before.verdict, self.counts.tokens
        if tokens == before.tokens and (verdict is held or verdict == held):
            return verdict
        self._told = Told(verdict, tokens, self._undrafted)
        accepted, refused = verdict.accepted - held.accepted, verdict.refused and not held.refused
        settled = self._undrafted - before.undrafted if self.epoch.choice.drafts else 0
        self._observe(Judged(accepted, refused, tokens - before.tokens, settled))
        return verdict

    def _report_end(self) -> None:
        """Likewise; and count the epoch, which is over: the next one begins without a verdict."""
        verdict = self._report()
        self._rounds[len(self.epoch.draft_tokens), *verdict] += 1
        self._told = Told(UNJUDGED, self.counts.tokens, self._undrafted)

"""Passes: what each covers, and what is asked of one that has left already."""

from crossdraft.pipeline.assignment import Assignment
from crossdraft.pipeline.branches import Branches
from crossdraft.pipeline.epoch import Epoch
from crossdraft.pipeline.events import Command, Counts, Send
from crossdraft.pipeline.fetched import Fetched, Flight
from crossdraft.pipeline.output import Output
from crossdraft.pipeline.targets import TargetLane, Targets
from crossdraft.verification.planning import Plan, Planner
from crossdraft.verification.trees import TokenTree
from crossdraft.verification.walk import NeedRow, NeedSample

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
        """A pass over later proposals, on a target that is free while others work on earlier ones."""
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
        """Proposals from place `first` on begin where passes under way do not list what they can be: ask for it."""
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

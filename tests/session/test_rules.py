"""Which event is legal when; and random lives of sessions: services are late, repeat themselves, lie, fall silent and
come back. Whatever they do, what was emitted stays, and the end comes."""

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossdraft import client, session
from crossdraft.session import events
from crossdraft.session.rules import TRANSITIONS, LaneState, State, TargetState
from crossdraft.session.session import Session
from crossdraft.speculation.choice import LONG_RUN, PLAIN, Choice
from crossdraft.text.letters import Letters
from crossdraft.types.messages import Branch, Drafted, PassDone, PromptScored, RowFetched, Scored, ScorePrompt
from crossdraft.types.rows import DraftToken, Row
from crossdraft.verification.chooser import RandomChooser
from crossdraft.verification.methods import COUPLED, COUPLED_SHARED, RDK, SLEM, SLRS, TLI, UNION, Method
from tests.clock import GONE, Stage
from tests.conftest import FULL
from tests.ports import LETTERS, assignment, toys
from tests.session import sessions
from tests.tables import ToyTarget, autoregressive_distribution, pair_of
from tests.verification.toys import Turns, drafter_of, row_of

MOST_STEPS = 2000
NAN = Row(np.array([0, 1]), np.array([np.nan, np.nan]))


def lies(reply: Drafted, size: int) -> Iterator[Drafted]:
    """Replies that an honest drafter would not send in place of this one."""
    last = reply.draft_tokens[-1:] or (DraftToken(0, Row.certain(0)),)
    number = max((branch.number for branch in reply.branches), default=10**6)
    for wrong in (
        DraftToken(size, Row.certain(size)),
        DraftToken(-1, Row.certain(0)),
        DraftToken(0, NAN),
        DraftToken(0),
        DraftToken(0, Row.certain(1)),
        DraftToken(0, Row(np.array([0, size]), np.array([0.5, 0.5]))),
    ):
        yield replace(reply, draft_tokens=(*reply.draft_tokens[:-1], wrong))
    yield replace(reply, draft_tokens=reply.draft_tokens + last * 70)
    yield replace(reply, epoch=reply.epoch + 1)
    yield replace(reply, first=reply.first + 1)
    yield replace(reply, draft_tokens=(), branches=())
    for branch in (
        Branch(0, 0, Letters("a"), (0,)),
        Branch(number, 0, Letters(""), (0,)),
        Branch(number, 0, Letters("a"), (size,)),
        Branch(number, 0, Letters("a"), (0,) * 60),
        Branch(number, 10**6, Letters("a"), ()),
        Branch(number, -3, Letters("a"), ()),
    ):
        yield replace(reply, branches=(*reply.branches, branch))


class Interleaving:
    """One session's life among such services."""

    def __init__(self, stage: Stage, numbers: list[int], size: int) -> None:
        self.stage = stage
        self.illegal = 0
        self._numbers = numbers
        self._size = size  # of the drafter's vocabulary
        self._said: list[events.Event] = []  # replies so far

    def run(self, mute: bool) -> None:
        """Through all numbers, then fairly to the end; `mute`: but no drafter says a word any more."""
        stage = self.stage
        stage.start()
        while self._numbers and stage.finished is None:
            self._step(self._next())
            self._check()
        for _ in range(MOST_STEPS):
            if stage.finished is not None:
                return
            self._go_on(mute)
            self._check()
        raise AssertionError("the session does not end")

    def _next(self) -> int:
        return self._numbers.pop() if self._numbers else 0

    def _check(self) -> None:
        """Something is under way, or a timer is set."""
        stage = self.stage
        under_way = stage.opening or any(lane.owes for lane in stage.targets.values())
        assert stage.finished is not None or under_way or stage.timers, "a wait without a deadline"

    def _go_on(self, mute: bool) -> None:
        stage = self.stage
        owing = [lane for lane in stage.owing if lane in stage.targets or not mute]
        if stage.opening:
            stage.open(next(iter(stage.opening)))
        elif owing:
            self._reply(self._pick(owing))
        else:
            stage.expire(min(stage.timers, key=lambda timer: stage.timers[timer].seconds))

    def _step(self, number: int) -> None:
        often = [self._say] * 12 + [self._open] * 4 + [self._expire] * 2 + [self._old_timer] + [self._repeat] * 2
        acts = (*often, self._lie, self._strange, self._lose, self._lose_rarely, self._cancel)
        acts[number % len(acts)]()

    def _pick(self, things: Sequence[Any]) -> Any:
        return things[self._next() % len(things)] if things else None

    def _say(self) -> None:
        if lane := self._pick(self.stage.owing):
            self._reply(lane)

    def _reply(self, lane: events.Lane) -> None:
        stage = self.stage
        reply = (stage.targets.get(lane) or stage.drafters[lane]).reply()
        self._said.append(events.Replied(lane, reply))
        stage.tell(events.Replied(lane, reply))

    def _open(self) -> None:
        if lane := self._pick([*self.stage.opening]):
            self.stage.open(lane)

    def _expire(self) -> None:
        timer = self._pick([*self.stage.timers])
        if timer and (timer is not events.Timer.TARGET or self._next() % 32 == 31):  # that may end the session
            self.stage.expire(timer)

    def _old_timer(self) -> None:
        for timer in events.Timer:
            latest = self.stage.timers.get(timer)
            self._perhaps(events.Expired(timer, latest.number - 1 if latest else self._next() % 3))

    def _repeat(self) -> None:
        """Something that was said already."""
        if self._said:
            self._perhaps(self._said[-1 - self._next() % min(4, len(self._said))])

    def _lie(self) -> None:
        stage = self.stage
        lane = self._pick([lane for lane in stage.owing if lane in stage.drafters])
        if not lane:
            return
        said = stage.drafters[lane].reply()
        if isinstance(said, Drafted):
            self._perhaps(events.Replied(lane, self._pick([*lies(said, self._size)])))
            if lane in stage.drafters:  # what it should have said never comes: it is taken for lost
                stage.lose(lane)
        else:
            stage.tell(events.Replied(lane, said))

    def _strange(self) -> None:
        """What nobody asked for."""
        whole = Row(np.array([0, 1]), np.array([0.5, 0.5]))
        of_target = PassDone(10**6, (), 0.0), RowFetched(10**6, 0, whole)
        of_drafter = Drafted(10**6, (), 0.0), Drafted(0, (), 0.0), Scored(10**6, np.array([0.5]), 0.0)
        reply = self._pick([*of_target, *of_drafter])
        for lane in (*self.stage.targets, *self.stage.drafters, 10**6):
            self._perhaps(events.Replied(lane, reply))
        for lane in (*self.stage.targets, *self.stage.drafters):
            self._perhaps(events.Ready(lane))

    def _lose(self) -> None:
        self._lose_one(*self.stage.opening, *self.stage.drafters)

    def _lose_rarely(self) -> None:
        self._lose_one(*self.stage.targets)

    def _lose_one(self, *lanes: events.Lane) -> None:
        if lane := self._pick(lanes):
            self.stage.lose(lane)

    def _cancel(self) -> None:
        if self._next() % 16 == 15:
            self.stage.tell(events.Cancelled())

    def _perhaps(self, event: events.Event) -> None:
        """An event that may be illegal: then it changes nothing."""
        before = sessions.snapshot(self.stage.session)
        try:
            self.stage.tell(event)
        except events.IllegalEventError:
            self.illegal += 1
            assert sessions.snapshot(self.stage.session) == before


EXAMPLES = 10_000 if FULL else 150
LENGTH = 16  # tokens
PAIR = pair_of(LETTERS, ("a", "b", "ba"))
WINDOWS = st.integers(1, 5)
CHOICES = st.one_of(
    st.builds(lambda run: replace(PLAIN, run=run), st.sampled_from([1, 2, 3, 5, LONG_RUN])),  # short ones go on
    st.builds(lambda k: Choice(k, k, overlap=False), WINDOWS),
    st.builds(
        lambda window, wait, **more: Choice(window, min(window, wait), **more),
        WINDOWS,
        st.integers(0, 2),
        patience=st.sampled_from([0.0, 0.5, 30.0]),
        branch_depth=st.integers(0, 2),
        branch_width=st.integers(1, 2),
        chunk=st.integers(1, 3),
        speculate=st.booleans(),
        review_after=st.integers(0, 3),
    ),
)
LOCK_STEP = st.builds(lambda k: Choice(k, k, overlap=False), WINDOWS)
TREES = st.builds(
    lambda k, nodes, least: Choice(k, k, overlap=False, tree_nodes=k + nodes, least_likely=least),
    WINDOWS,
    st.integers(1, 8),
    st.sampled_from([0.0, 0.5]),
)
METHODS = st.sampled_from([SLEM, TLI, COUPLED, COUPLED_SHARED, UNION, RDK, SLRS])
NUMBERS, SEEDS = st.lists(st.integers(0, 2**12), max_size=150), st.integers(0, 2**32)


def life(
    method: Method, choices: list[Choice], numbers: list[int], targets: int, temperature: float, seed: int
) -> Interleaving:
    chooser = RandomChooser(np.random.default_rng(seed))
    controller = Turns(tuple(choices), not choices[0].overlap, unwanted=seed % 3, interrupts=seed % 2 > 0)
    asked = {"max_tokens": LENGTH, "targets": targets}
    plan = assignment(method, pair=PAIR, chooser=chooser, controller=controller, **asked)
    plan = replace(plan, open_target=replace(plan.open_target, head=1))
    target, drafter = ToyTarget(len(LETTERS), 1, chooser, temperature), partial(drafter_of, method, PAIR, chooser)
    stage = Stage(sessions.Followed(plan), target, drafter, method.drafter_rows)
    return Interleaving(stage, numbers, PAIR.drafter.size)


@settings(max_examples=EXAMPLES)
@given(METHODS, st.data(), NUMBERS, st.integers(1, 2), st.sampled_from([0.0, 1.0]), st.booleans(), SEEDS)
def test_whatever_happens_the_output_is_whole(method, data, numbers, targets, temperature, mute, seed):
    kinds = LOCK_STEP if method.whole_draft else st.one_of(CHOICES, TREES) if method.samples else CHOICES
    choices = data.draw(st.lists(kinds, min_size=1, max_size=4))
    lived = life(method, choices, numbers, targets, temperature, seed)
    lived.run(mute)
    stage = lived.stage
    finish, tokens = stage.finished, tuple(one.token for one in stage.emitted)
    assert finish.counts.tokens == len(tokens)
    assert len(tokens) == finish.counts.accepted + finish.counts.corrected + finish.counts.bonus
    if finish.reason is events.Reason.LENGTH:
        assert len(tokens) == LENGTH
    else:
        assert finish.reason in (events.Reason.CANCELLED, events.Reason.FAILED)
    if temperature == 0:
        (wanted,) = autoregressive_distribution(ToyTarget(len(LETTERS), 99, temperature=0), frozenset(), LENGTH)
        assert tokens == wanted[: len(tokens)]


def test_some_of_what_services_say_is_illegal() -> None:
    """Else the test above would not say that it changes nothing."""
    numbers = [int(number) for number in np.random.default_rng(1).integers(0, 2**12, 400)]
    illegal = 0
    for place in range(20):
        lived = life(COUPLED, [Choice(3, 1)], numbers[place : place + 100], 1, 1.0, place)
        lived.run(mute=False)
        illegal += lived.illegal
    assert illegal > 20


WAITING: dict[str, tuple[Callable[[], Session], set[str]]] = {
    "new": (lambda: Session(assignment()), set()),
    "opening": (sessions.started, {"target ready", "drafter ready"}),
    "drafting": (lambda: sessions.drafting()[0], {"draft_tokens"}),
    "passing": (lambda: sessions.passing()[0], {"pass", "draft_tokens"}),
    "fetching": (sessions.fetching, {"row", "draft_tokens"}),
    "scoring": (lambda: sessions.scoring()[0], {"scores"}),
}
OUTDATED: dict[str, events.Event] = {  # they change nothing
    "a lane that is unknown": events.Ready(99),
    "draft tokens of an older epoch": events.Replied(sessions.DRAFTER, Drafted(0, (), 0.0)),
    "scores of an older epoch": events.Replied(sessions.DRAFTER, Scored(0, np.array([0.5]), 0.0)),
    **{f"a past timer of the {timer.name}": events.Expired(timer, 0) for timer in events.Timer},
}
ALWAYS: dict[str, events.Event] = OUTDATED | {  # once it has begun
    "a lost target": events.Lost(sessions.TARGET, GONE),
    "a lost drafter": events.Lost(sessions.DRAFTER, GONE),
    "a stall": events.Expired(events.Timer.STALL, 1),
    "a late drafter": events.Expired(events.Timer.DRAFTER, 1),
    "no target": events.Expired(events.Timer.TARGET, 1),
    "cancelled": events.Cancelled(),
}


def possible() -> dict[str, events.Event]:
    """Those that are legal in one state or the other, and those that never are."""
    three = tuple(DraftToken(0, Row.certain(0)) for _ in range(3))
    nodes, other = toys()[0].run(sessions.passing()[1]).nodes, row_of([0, 1, 2], [0.9, 0.05, 0.05])
    rows = (sessions.WHOLE,) * len(nodes)
    return {
        "target ready": events.Ready(sessions.TARGET),
        "drafter ready": events.Ready(sessions.DRAFTER),
        "draft_tokens": events.Replied(sessions.DRAFTER, Drafted(1, three, 0.0)),
        "pass": events.Replied(sessions.TARGET, PassDone(1, nodes, 0.0)),
        "row": events.Replied(sessions.TARGET, RowFetched(1, 0, sessions.WHOLE)),
        "scores": events.Replied(sessions.DRAFTER, Scored(1, np.array([0.5]), 0.0)),
        "a pass that was not asked for": events.Replied(sessions.TARGET, PassDone(2, nodes, 0.0)),
        "a pass without its nodes": events.Replied(sessions.TARGET, PassDone(1, (), 0.0)),
        "rows where samples were asked for": events.Replied(sessions.TARGET, PassDone(1, rows, 0.0)),
        "a row of a later pass": events.Replied(sessions.TARGET, RowFetched(2, 0, sessions.WHOLE)),
        "a row that is not that of its head": events.Replied(sessions.TARGET, RowFetched(1, 0, other)),
        "a row of another node": events.Replied(sessions.TARGET, RowFetched(1, 5, sessions.WHOLE)),
        "draft tokens out of order": events.Replied(sessions.DRAFTER, Drafted(1, three, 0.0, first=7)),
        "draft tokens of a later epoch": events.Replied(sessions.DRAFTER, Drafted(9, three, 0.0)),
        "scores of a later epoch": events.Replied(sessions.DRAFTER, Scored(9, np.array([0.5]), 0.0)),
        "a target that proposes": events.Replied(sessions.TARGET, Drafted(1, three, 0.0)),
        "a drafter that passes": events.Replied(sessions.DRAFTER, PassDone(1, nodes, 0.0)),
    }


@pytest.mark.parametrize("name", possible())
@pytest.mark.parametrize("state", WAITING)
def test_what_was_not_asked_for_is_illegal_and_changes_nothing(state: str, name: str) -> None:
    make, legal = WAITING[state]
    session, twin = make(), make()
    event = possible()[name]
    if name in legal:
        session.handle(event, 1.0)
        return
    before = sessions.snapshot(session)
    why = "not that of the head" if (state, name) == ("fetching", "a row that is not that of its head") else None
    with pytest.raises(events.IllegalEventError, match=why):
        session.handle(event, 1.0)
    assert sessions.snapshot(session) == before == sessions.snapshot(twin)


@pytest.mark.parametrize("name", ALWAYS)
@pytest.mark.parametrize("state", WAITING)
def test_losses_timers_and_what_is_outdated_are_always_legal(state: str, name: str) -> None:
    make, _ = WAITING[state]
    session = make()
    if state == "new":
        with pytest.raises(events.IllegalEventError):
            session.handle(ALWAYS[name], 1.0)
    elif name in OUTDATED:
        before = sessions.snapshot(session)
        assert (session.handle(ALWAYS[name], session._now), sessions.snapshot(session)) == ([], before)
    else:
        session.handle(ALWAYS[name], 1.0)


def test_after_the_end_everything_is_ignored() -> None:
    session, _ = sessions.passing()
    assert isinstance(session.handle(events.Cancelled(), 1.0)[0], events.Finished)
    assert session.state is State.DONE
    late = [*possible().values(), *ALWAYS.values()]
    assert [session.handle(event, 1.0) for event in late] == [[]] * len(late)


def test_lanes_go_through_their_states_as_the_table_says_and_use_all_of_it() -> None:
    """In random lives, whose sessions check it (`Followed`)."""
    used: set[tuple[LaneState, type]] = set()
    choices = [Choice(3, 1, chunk=2), replace(PLAIN, run=3), Choice(2, 0, patience=0.0)]
    for seed, method in enumerate((SLEM, TLI, SLRS) * 12):
        numbers = [int(number) for number in np.random.default_rng(seed).integers(0, 2**12, 80)]
        rounds = [Choice(3, 3, overlap=False)] if method.whole_draft else choices
        lived = life(method, rounds, numbers, 1 + seed % 2, 1.0, seed)
        lived.run(mute=False)
        used |= lived.stage.session.used
    every = {(state, kind) for state, kinds in TRANSITIONS.items() for kind in kinds}
    assert every - used == {(TargetState.IDLE, ScorePrompt), (TargetState.SCORING, PromptScored)}


@pytest.mark.parametrize("module", [session, client], ids=lambda module: module.__name__)
def test_nobody_writes_another_objects_fields(module: ModuleType) -> None:
    """An object says by methods what may be done to it, so that all that changes a field is in one class."""
    written = [
        f"{path.name}:{one.lineno}: {ast.unparse(one)}"
        for path in sorted(Path(module.__path__[0]).glob("*.py"))
        for one in ast.walk(ast.parse(path.read_text()))
        if isinstance(one, ast.Attribute) and not isinstance(one.ctx, ast.Load) and ast.unparse(one.value) != "self"
    ]
    assert written == []

"""Random lives of sessions: services are late, repeat themselves, lie, fall silent and come back.

Whatever they do, what was emitted stays, and the end comes.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from crossdraft.session.events import (
    Cancelled,
    Event,
    Expired,
    IllegalEventError,
    Lane,
    Ready,
    Reason,
    Replied,
    Reply,
    Timer,
)
from crossdraft.speculation.choice import LONG_RUN, PLAIN, Choice
from crossdraft.text.letters import Letters
from crossdraft.types.messages import Branch, Drafted, PassDone, RowFetched, Scored
from crossdraft.types.rows import DraftToken, Row
from crossdraft.verification.chooser import RandomChooser
from crossdraft.verification.methods import COUPLED, COUPLED_SHARED, RDK, SLEM, SLRS, TLI, UNION, Method
from tests.clock import Stage
from tests.conftest import FULL
from tests.ports import LETTERS, assignment
from tests.session.sessions import Followed, snapshot
from tests.tables import ToyDrafter, ToyTarget, autoregressive_distribution
from tests.verification.scheduling import InTurn
from tests.verification.toys import drafter_of
from tests.vocabularies import pair_of

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
        self._said: list[Event] = []  # replies so far

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
            self._reply(owing[self._next() % len(owing)])
        else:
            stage.expire(min(stage.timers, key=lambda timer: stage.timers[timer].seconds))

    def _step(self, number: int) -> None:
        acts: tuple[Callable[[], None], ...] = (
            *[self._say] * 12,
            *[self._open] * 4,
            self._expire,
            self._expire,
            self._old_timer,
            self._repeat,
            self._repeat,
            self._lie,
            self._strange,
            self._lose,
            self._lose_rarely,
            self._cancel,
        )
        acts[number % len(acts)]()

    def _pick(self, things: list[Lane]) -> Lane | None:
        return things[self._next() % len(things)] if things else None

    def _say(self) -> None:
        lane = self._pick(self.stage.owing)
        if lane is not None:
            self._reply(lane)

    def _reply(self, lane: Lane) -> None:
        stage = self.stage
        reply = (stage.targets.get(lane) or stage.drafters[lane]).reply()
        self._said.append(Replied(lane, reply))
        stage.tell(Replied(lane, reply))

    def _open(self) -> None:
        lane = self._pick(list(self.stage.opening))
        if lane is not None:
            self.stage.open(lane)

    def _expire(self) -> None:
        timers = list(self.stage.timers)
        if not timers:
            return
        timer = timers[self._next() % len(timers)]
        if timer is not Timer.TARGET or self._next() % 32 == 31:  # that may end the session
            self.stage.expire(timer)

    def _old_timer(self) -> None:
        for timer in Timer:
            latest = self.stage.timers.get(timer)
            self._perhaps(Expired(timer, latest.number - 1 if latest else self._next() % 3))

    def _repeat(self) -> None:
        """Something that was said already."""
        if self._said:
            self._perhaps(self._said[-1 - self._next() % min(4, len(self._said))])

    def _lie(self) -> None:
        stage = self.stage
        lane = self._pick([lane for lane in stage.owing if lane in stage.drafters])
        if lane is None:
            return
        said = stage.drafters[lane].reply()
        if isinstance(said, Drafted):
            told = list(lies(said, self._size))
            self._perhaps(Replied(lane, told[self._next() % len(told)]))
            if lane in stage.drafters:  # what it should have said never comes: it is taken for lost
                stage.lose(lane)
        else:
            stage.tell(Replied(lane, said))

    def _strange(self) -> None:
        """What nobody asked for."""
        whole = Row(np.array([0, 1]), np.array([0.5, 0.5]))
        replies: tuple[Reply, ...] = (
            PassDone(10**6, (), 0.0),
            RowFetched(10**6, 0, whole),
            Drafted(10**6, (), 0.0),
            Drafted(0, (), 0.0),
            Scored(10**6, np.array([0.5]), 0.0),
        )
        reply = replies[self._next() % len(replies)]
        for lane in (*self.stage.targets, *self.stage.drafters, 10**6):
            self._perhaps(Replied(lane, reply))
        for lane in (*self.stage.targets, *self.stage.drafters):
            self._perhaps(Ready(lane))

    def _lose(self) -> None:
        self._lose_one(*self.stage.opening, *self.stage.drafters)

    def _lose_rarely(self) -> None:
        self._lose_one(*self.stage.targets)

    def _lose_one(self, *lanes: Lane) -> None:
        if (lane := self._pick([*lanes])) is not None:
            self.stage.lose(lane)

    def _cancel(self) -> None:
        if self._next() % 16 == 15:
            self.stage.tell(Cancelled())

    def _perhaps(self, event: Event) -> None:
        """An event that may be illegal: then it changes nothing."""
        before = snapshot(self.stage.session)
        try:
            self.stage.tell(event)
        except IllegalEventError:
            self.illegal += 1
            assert snapshot(self.stage.session) == before


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


def life(
    method: Method, choices: list[Choice], numbers: list[int], targets: int, temperature: float, seed: int
) -> Interleaving:
    chooser = RandomChooser(np.random.default_rng(seed))
    plan = assignment(
        method,
        pair=PAIR,
        chooser=chooser,
        controller=InTurn(tuple(choices), waits_for_drafter=not choices[0].overlap, unwanted=seed % 3).fresh(),
        max_tokens=LENGTH,
        targets=targets,
    )
    plan = replace(plan, open_target=replace(plan.open_target, head=1))
    target = ToyTarget(len(LETTERS), 1, chooser, temperature)

    def drafter() -> ToyDrafter:
        return drafter_of(method, PAIR, chooser)

    return Interleaving(Stage(Followed(plan), target, drafter, method.drafter_rows), numbers, PAIR.drafter.size)


@settings(max_examples=EXAMPLES)
@given(
    method=METHODS,
    data=st.data(),
    numbers=st.lists(st.integers(0, 2**12), max_size=150),
    targets=st.integers(1, 2),
    temperature=st.sampled_from([0.0, 1.0]),
    mute=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_whatever_happens_the_output_is_whole(method, data, numbers, targets, temperature, mute, seed):
    kinds = LOCK_STEP if method.whole_draft else st.one_of(CHOICES, TREES) if method.samples else CHOICES
    choices = data.draw(st.lists(kinds, min_size=1, max_size=4))
    lived = life(method, choices, numbers, targets, temperature, seed)
    lived.run(mute)
    stage = lived.stage
    finish, tokens = stage.finished, tuple(one.token for one in stage.emitted)
    assert finish.counts.tokens == len(tokens)
    assert len(tokens) == finish.counts.accepted + finish.counts.corrected + finish.counts.bonus
    if finish.reason is Reason.LENGTH:
        assert len(tokens) == LENGTH
    else:
        assert finish.reason in (Reason.CANCELLED, Reason.FAILED)
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

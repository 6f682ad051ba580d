"""Services that are late, say things twice, lie, fall silent and come back, steered by a list of numbers."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from crossdraft.session.events import Cancelled, Event, Expired, IllegalEventError, Lane, Ready, Replied, Reply, Timer
from crossdraft.text.letters import Letters
from crossdraft.types.messages import Branch, Drafted, PassDone, RowFetched, Scored
from crossdraft.types.rows import DraftToken, Row
from tests.clock import Stage
from tests.session.sessions import snapshot

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
        lane = self._pick([*self.stage.opening, *self.stage.drafters])
        if lane is not None:
            self.stage.lose(lane)

    def _lose_rarely(self) -> None:
        lane = self._pick(list(self.stage.targets))
        if lane is not None:
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

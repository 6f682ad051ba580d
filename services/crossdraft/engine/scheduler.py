"""What the next step takes, or how long it is put off. No thread, no clock, no torch: times are told, in seconds.

A step takes whatever is ready. What a work still needs is *text* (tokens before its last, which may come in any number
of steps) and an *end* (the last token and the tree, which go together). A work with little text is *short*, such as
a verification or a step of a draft, and is taken whole; one with more is *long*, such as a prompt.

How long the long ones may make a step, while others stream: `STRETCH` times what the short ones alone would take, and
where those that wait with prompts, each counted `WAITING` times, are more than those that stream, as many times more.

When a step is put off: of two sessions that ask for a pass again 3 ms after each answer, the first one back would be
stepped alone and the second wait for all of that pass, and so on for ever. Be r the works that are ready, d the
seconds of their step, and let the k sessions that should be back soonest be there in w seconds. Going at once, each of
the k waits d - w for the step to end; waiting delays r works by w, and spares the k that. In all, waiting wins
k (d - w) - r w = k d - (k + r) w seconds, so the k with the most is waited for, if it wins anything, and never longer
than `PATIENCE` of a step in all. A session that has nobody beside it thus never waits.
"""

from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from crossdraft.engine.requests import Work

SHORT = 16  # tokens of text that a short work may have
STRETCH = 1.5  # times a step without them that one with prompts may take: 3 would be a delay of two, and steps vary
WAITING = 2.0  # streams that a session with a prompt counts for
LEAST = 4  # tokens of long works that any step takes
PATIENCE = 0.7  # of a step's time, in all


@dataclass(frozen=True)
class Due:
    """A work that is ready for a step."""

    session: Hashable
    since: float  # when it was asked for, in seconds
    tokens: int  # that it would be fed now
    end: int  # of these, the last ones, which go together
    begun: bool = False  # some of its text was fed by an earlier step

    @property
    def long(self) -> bool:
        """Whether it may come in several steps. The rest of a long text is no short work: it is not what is usual."""
        text = self.tokens - self.end
        return text > (0 if self.begun else SHORT)


@dataclass(frozen=True)
class Step:
    """A step to be taken now."""

    tokens: dict[int, int]  # by index of the work: the most that it is fed


@dataclass(frozen=True)
class Pause:
    """No step, for so long or until something comes."""

    seconds: float | None  # None: until something comes


class Scheduler:
    """Decides; and learns what steps cost and when sessions come back.

    Args:
        chunk: tokens of one step, if its first work has no more.
    """

    def __init__(self, chunk: int) -> None:
        self.costs = StepCosts()
        self.returns = Returns()
        self._chunk = chunk
        self._paused: float | None = None  # since when, since the last step

    def stepped(self, tokens: int, seconds: float) -> None:
        """A step fed so many tokens and took so long."""
        self.costs.observe(tokens, seconds)
        self._paused = None

    def next(self, dues: Sequence[Due], now: float) -> Step | Pause:
        """A step of some of the works, at most one of a session, at least one work; or a pause."""
        if not dues:
            self._paused = None
            return Pause(None)
        here = {due.session for due in dues}
        expected = sorted(left for session, left in self.returns.expected(now).items() if session not in here)
        step = self._step(dues, expected)
        seconds = self.costs.seconds(sum(step.tokens.values()))
        began = now if self._paused is None else self._paused
        latest = began + PATIENCE * seconds - now
        wait = worth_waiting(len(step.tokens), seconds, [until for until in expected if until <= latest])
        self._paused = began if wait else None
        return Pause(wait) if wait else step

    def _step(self, dues: Sequence[Due], expected: Sequence[float]) -> Step:
        """The short ones, the oldest first, then a share of the long ones."""
        ordered = sorted(range(len(dues)), key=lambda index: dues[index].since)
        long = [index for index in ordered if dues[index].long]
        room = self._chunk - (LEAST if long else 0)
        taken: dict[int, int] = {}
        for index in ordered:
            tokens = max(1, dues[index].tokens)
            if dues[index].long or (taken and tokens > room):
                continue
            taken[index] = tokens
            room -= tokens if tokens <= room else 0  # a tree larger than a chunk keeps no others out of its step
        if not long:
            return Step(taken)
        usual = sum(taken.values())
        allowed = max(self._chunk - usual, LEAST)
        if taken or (expected and expected[0] < self.costs.seconds(allowed)):
            stretch = STRETCH * max(1.0, WAITING * len(long) / max(1, len(taken)))
            stretched = self.costs.tokens(stretch * self.costs.seconds(max(usual, 1)))
            allowed = min(allowed, max(LEAST, stretched - usual))
        return Step(taken | divided({index: dues[index].tokens for index in long}, allowed))


def divided(wants: dict[int, int], allowed: int) -> dict[int, int]:
    """Tokens for works, given what each wants, the oldest first: half for the oldest, so that none starves, and half
    for the one that is done soonest, so that a short prompt need not wait for a long one; then the others by age."""
    oldest = next(iter(wants))
    soonest = min(wants, key=lambda index: wants[index])
    shares: dict[int, int] = {}
    for index in dict.fromkeys((soonest, oldest, *wants)):
        room = allowed // 2 if index == soonest != oldest else allowed
        if share := min(wants[index], room):
            shares[index] = share
            allowed -= share
    return shares


def worth_waiting(ready: int, seconds: float, expected: Sequence[float]) -> float:
    """How long to wait for others, by the rule above; 0: not at all.

    Args:
        ready: works that a step would have now.
        seconds: of that step.
        expected: seconds until each of the others should be there, ascending.
    """
    best, wait = 0.0, 0.0
    for count, until in enumerate(expected, 1):
        won = count * seconds - (count + ready) * until
        if won > best:
            best, wait = won, until
    return wait


# What a step costs, learned from the steps themselves. No clock, no torch.

FADING = 0.98  # weight of a step against the one after it: the latest fifty count
DOUBLING = 8  # tokens that are taken to double a step's time, until steps of several sizes have been seen
DOUBT = 4.0  # tokens^2: steps must differ by more than this before they are trusted over DOUBLING
REACH = 2  # a step takes at most so many times the tokens of any lately


class StepCosts:
    """Seconds of a step as base + each * tokens, by least squares of relative errors, older steps fading.

    Relative, since noise grows with a step: a stall or one long prefill then weighs no more than a usual step. What a
    step far larger than all so far would take is not known (a device that waits for memory is flat at first), so
    `tokens` goes there by doubling.
    """

    def __init__(self) -> None:
        self._weight = self._tokens = self._squares = self._seconds = self._products = 0.0  # weighted sums
        self._largest = 1.0  # tokens of a step lately

    def observe(self, tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long; one that took no time, or fed nothing, says nothing."""
        if seconds <= 0 or tokens < 1:
            return
        weight = seconds**-2
        self._weight = FADING * self._weight + weight
        self._tokens = FADING * self._tokens + weight * tokens
        self._squares = FADING * self._squares + weight * tokens**2
        self._seconds = FADING * self._seconds + weight * seconds
        self._products = FADING * self._products + weight * tokens * seconds
        self._largest = max(FADING * self._largest, float(tokens), 1.0)

    def seconds(self, tokens: int) -> float:
        """That a step of so many tokens takes; 0 before any was seen."""
        base, each = self._line()
        return base + each * tokens

    def tokens(self, seconds: float) -> int:
        """That a step of so many seconds can take."""
        base, each = self._line()
        reach = int(REACH * self._largest)
        return min(reach, int((seconds - base) / each)) if each else reach

    def _line(self) -> tuple[float, float]:
        """base and each, both 0 or more, in seconds."""
        if not self._weight:
            return 0.0, 0.0
        tokens, seconds = self._tokens / self._weight, self._seconds / self._weight
        spread = max(0.0, self._squares / self._weight - tokens**2)
        together = self._products / self._weight - tokens * seconds
        guess = seconds / (tokens + DOUBLING)
        each = (together + DOUBT * guess) / (spread + DOUBT)
        each = min(max(0.0, each), seconds / max(tokens, 1.0))
        return seconds - each * tokens, each


# When sessions that were answered ask again. No clock: times are told, in seconds of any one clock.

# As TCP learns round trips (RFC 6298): a smoothed mean, and a smoothed deviation from it.
GAIN = 1 / 8
DEVIATION_GAIN = 1 / 4
STRAY = (
    2  # times as late as anybody was waited for: a later return counts as one that late, since it may be the only one
)
RETURNS_LEAST = 0.001  # seconds; ... and no return is a stray before
DEVIATIONS = 3  # beyond the mean: a session that is later than this is not waited for any more


@dataclass
class _Gap:
    """Between an answer and the next question."""

    mean: float  # seconds
    deviation: float  # seconds
    answered: float | None = None  # when, if there was no question since

    @property
    def longest(self) -> float:
        return self.mean + DEVIATIONS * self.deviation


class Returns:
    """Sessions, and how soon each comes back."""

    def __init__(self) -> None:
        self._gaps: dict[Hashable, _Gap] = {}
        self._answered: dict[Hashable, float] = {}  # sessions that never came back yet
        self._usual: _Gap | None = None  # of all: what is expected of a session that never came back yet

    def answered(self, session: Hashable, now: float) -> None:
        """It knows what it asked for."""
        if session in self._gaps:
            self._gaps[session].answered = now
        else:
            self._answered[session] = now

    def asked(self, session: Hashable, now: float) -> None:
        """It asks for more."""
        known = self._gaps.get(session)
        answered = self._answered.pop(session, None) if known is None else known.answered
        if answered is None:
            return
        gap = max(0.0, now - answered)
        self._usual = _learned(self._usual, gap)
        self._gaps[session] = _learned(known, gap)

    def over(self, session: Hashable) -> None:
        """It never comes back."""
        self._gaps.pop(session, None)
        self._answered.pop(session, None)

    def expected(self, now: float) -> dict[Hashable, float]:
        """Seconds until a session should be back at the latest; without those that are late already."""
        found = {session: gap.answered + gap.longest for session, gap in self._gaps.items() if gap.answered is not None}
        if self._usual is not None:
            found |= {session: answered + self._usual.longest for session, answered in self._answered.items()}
        return {session: at - now for session, at in found.items() if at > now}


def _learned(before: _Gap | None, gap: float) -> _Gap:
    if before is None:
        return _Gap(gap, gap / 2)
    gap = min(gap, STRAY * max(before.longest, RETURNS_LEAST))
    deviation = before.deviation + DEVIATION_GAIN * (abs(gap - before.mean) - before.deviation)
    return _Gap(before.mean + GAIN * (gap - before.mean), deviation)


# Who has places in the cache, and who gives them up for a session that has none. Times are told, in seconds.

WAIT = 0.5  # seconds that a session waits for places to become free by themselves
LEAST_TURN = 0.5  # seconds that a session keeps its places, from its first answer on
REFEEDING = 4  # ... and so many times as long as it takes to feed its text again: at most a fifth is spent on that


class Asking(Protocol):
    """A job that asks for a work."""

    @property
    def work(self) -> Work:
        """What it asks for."""
        ...

    @property
    def asked(self) -> float:
        """Since when."""
        ...


class Places(Protocol):
    """Of an engine."""

    def admits(self, work: Work) -> bool:
        """Whether its session has places for it, or can have them without those of another live one."""
        ...

    def close(self, session: Hashable) -> None:
        """The session's places are free."""


A = TypeVar("A", bound=Asking)


@dataclass
class _Tenant:
    """A session that has places."""

    used: float  # when it took part in a step last
    until: float = float("inf")  # its turn ends then; it begins with its first answer


class Tenancy:
    """Sessions that have places.

    One that asks for nothing and is not expected to gives its places whenever others need them, the least recently
    used first. Where there is not enough for all the others they take turns: a turn begins with the first answer, so
    that each gets something for its prompt, and is long enough that feeding the text again is a small part of it.
    """

    def __init__(self, places: Places) -> None:
        self.evictions = 0  # sessions that gave their places to others
        self._places = places
        self._tenants: dict[Hashable, _Tenant] = {}

    def stepped(self, session: Hashable, now: float) -> None:
        """It took part in a step, and so has places."""
        self._tenants.setdefault(session, _Tenant(now)).used = now

    def answered(self, session: Hashable, now: float, feeding: float) -> None:
        """It has an answer; to feed its whole text takes `feeding` seconds."""
        tenant = self._tenants[session]
        if tenant.until == float("inf"):
            tenant.until = now + max(LEAST_TURN, REFEEDING * feeding)

    def close(self, session: Hashable) -> None:
        """It has no places any more."""
        self._tenants.pop(session, None)
        self._places.close(session)

    def seated(self, asking: Iterable[A], expected: Collection[Hashable], now: float) -> list[A]:
        """Those who have places for their works, or can have them now; of each session the one who asked first.

        Args:
            asking: all, those who asked first before others.
            expected: sessions that should ask for something soon.
            now: the time.
        """
        first: dict[Hashable, A] = {}
        for one in asking:
            first.setdefault(one.work.session, one)
        busy = {*first, *expected}
        seated: dict[Hashable, A] = {}
        awaited = False  # somebody has waited long: what becomes free is not for those behind
        for session, one in first.items():
            newcomer = session not in self._tenants
            if not (newcomer and awaited) and self._seat(one, busy, now):
                seated[session] = one
            elif now >= one.asked + WAIT:
                awaited = True
        if not seated and first and not self._tenants.keys() - first.keys():
            session, one = next(iter(first.items()))
            self._force(one)
            seated[session] = one
        return [one for session, one in seated.items() if self._places.admits(one.work)]

    def _seat(self, one: Asking, busy: Collection[Hashable], now: float) -> bool:
        """Whether it has places, once those that give theirs have done so."""
        while not self._places.admits(one.work):
            victim = self._victim(one, busy, now)
            if victim is None:
                return False
            self._evict(victim)
        return True

    def _force(self, one: Asking) -> None:
        """Nobody else can go on: those whose turns end first give their places."""
        while not self._places.admits(one.work) and (others := self._others(one)):
            self._evict(min(others, key=lambda session: others[session].until))

    def _victim(self, one: Asking, busy: Collection[Hashable], now: float) -> Hashable | None:
        """Who gives its places now; None: nobody yet."""
        others = self._others(one)
        idle = [session for session in others if session not in busy]
        if idle:
            return min(idle, key=lambda session: others[session].used)
        first = min(others, key=lambda session: others[session].until, default=None)
        return first if first is not None and now >= max(one.asked + WAIT, others[first].until) else None

    def _others(self, one: Asking) -> dict[Hashable, _Tenant]:
        return {session: tenant for session, tenant in self._tenants.items() if session != one.work.session}

    def _evict(self, session: Hashable) -> None:
        self.evictions += 1
        self.close(session)

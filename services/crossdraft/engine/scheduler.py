"""Which requests the next step computes, how many tokens of each, and when a step is put off for others.

No thread, no clock, no torch: times are passed in, in seconds of any one clock.

A step computes whatever is ready. The tokens that a request still needs are *text* (before its last committed token,
which several steps may divide) and an *end* (the last committed token and the tree, which go together). A request with
little text is *short*, such as a verification or a step of a draft, and is scheduled whole; one with more is *long*,
such as a prompt, and is prefilled in chunks.

How far long requests may stretch a step while others stream: to `STRETCH` times what the short ones alone would take;
where the long ones, each counted `WAITING` times, outnumber the short ones, to as many times more.

When a step is put off: of two sessions that ask again 3 ms after each result, the first one back would be computed
alone, the second would wait for all of that step, and so on for ever. Let r requests be ready, their step take d
seconds, and the k sessions that should be back soonest be there in w seconds. Starting at once, each of the k waits
d - w for the step to end; waiting delays r requests by w, and spares the k that. Waiting wins
k (d - w) - r w = k d - (k + r) w seconds in all, so the k with the largest gain is waited for, if there is a gain, and
never longer than `MOST_PUT_OFF` of a step in all. A session that is alone thus never waits.

That looks one step ahead, but sessions go round. Between a target and a drafter on one device they form groups, each of
which takes a step of its own of either in every round; more than two gain nothing, as the device computes one group or
the other, and cost a step's base each. So there (`halves`), where most of a step is its base, a step has at least half
of its *peers*: the sessions that are ready, and those that should be back and are not away for much longer. On an H100
with 16 outputs that raised the speed from 0.63 to 0.84 of what it is without a drafter; two groups by force made less.
Where a device has one model, groups that it can take in lose nothing, and to wait would. Prompts, and sessions that ask
again at once, wait for nobody.
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from crossdraft.engine.requests import ForwardRequest

SHORT = 16  # tokens of text that a short request may have
STRETCH = 1.5  # times the step without prompts: 3 would be a delay of two steps, and steps vary
WAITING = 2.0  # streams that a session with a prompt counts for
LEAST = 4  # tokens of long requests that any step computes
MOST_PUT_OFF = 0.7  # of a step's time that it is put off at most, in all, but for the half of the peers
LONGER = 2.0  # times a session's own time away, and a step: whoever is away longer is not its peer


def is_long(request: ForwardRequest) -> bool:
    """Whether several steps may divide it. The rest of a prompt does not count as short, however little it is."""
    text = request.due - 1 - len(request.tree.tokens)
    return text > (SHORT if request.began is None else 0)


@dataclass(frozen=True)
class Pause:
    """No step, for so long or until something arrives."""

    seconds: float | None  # None: until something arrives


class Scheduler:
    """Decides what runs next; learns what steps cost and when sessions return.

    A step has `chunk` tokens, unless its first request alone has more. Where it takes as long as its requests one by
    one, none is put off for others.
    """

    def __init__(self, chunk: int, shared: bool = True) -> None:
        self.costs = StepCosts()
        self.returns = ReturnTimes()
        self.halves = False  # another model on the same device has the same sessions by turns
        self._chunk, self._shared = chunk, shared
        self._paused: float | None = None  # since when, since the last step

    def stepped(self, tokens: int, seconds: float) -> None:
        """A step computed so many tokens and took so long."""
        self.costs.observe(tokens, seconds)
        self._paused = None

    def next(self, ready: Sequence[ForwardRequest], now: float) -> list[ForwardRequest] | Pause:
        """What a step has, the oldest first, at most one of a session, each with its `tokens`; or a pause."""
        if not ready:
            self._paused = None
            return Pause(None)
        here = {request.session for request in ready}
        away = {session: left for session, left in self.returns.expected(now).items() if session not in here}
        expected = sorted(away.values())
        step = self._step(ready, expected)
        seconds = self.costs.seconds(sum([request.tokens for request in step]))
        began = now if self._paused is None else self._paused
        wait = self._peers(ready, away, seconds, now - began) if self.halves and self._shared else 0.0
        latest = began + MOST_PUT_OFF * seconds - now
        soon = [until for until in expected if until <= latest] if self._shared else []
        wait = max(wait, worth_waiting(len(step), seconds, soon))
        self._paused = began if wait else None
        return Pause(wait) if wait else step

    def _peers(
        self, ready: Sequence[ForwardRequest], away: Mapping[Hashable, float], seconds: float, waited: float
    ) -> float:
        """How long to wait until half of the peers are there; 0: not at all, or they were waited for a whole round."""
        if not all(request.back and not is_long(request) for request in ready) or 2 * self.costs.seconds(0) < seconds:
            return 0.0
        here = {request.session for request in ready}
        longest = LONGER * min(map(self.returns.usual, here)) + seconds
        peers = sorted(left for session, left in away.items() if self.returns.usual(session) <= longest)
        missing = (len(here) + len(peers) + 1) // 2 - len(here)
        return min(peers[missing - 1], max(0.0, longest - waited)) if missing > 0 else 0.0

    def _step(self, ready: Sequence[ForwardRequest], expected: Sequence[float]) -> list[ForwardRequest]:
        """The short requests, and tokens of the long ones."""
        ordered = sorted(ready, key=attrgetter("asked"))
        long = [request for request in ordered if is_long(request)]
        apart, room, short = {*long}, self._chunk - (LEAST if long else 0), list[ForwardRequest]()
        for request in ordered:
            tokens, request.tokens = max(1, request.due), 0
            if request not in apart and (tokens <= room or not short):
                request.tokens = tokens
                short.append(request)
                room -= tokens if tokens <= room else 0  # a tree larger than a chunk keeps no others out
        if long:
            given = divided([request.due for request in long], self._prefill(short, len(long), expected))
            for request, tokens in zip(long, given, strict=True):
                request.tokens = tokens
        return [request for request in ordered if request.tokens]

    def _prefill(self, short: Sequence[ForwardRequest], long: int, expected: Sequence[float]) -> int:
        """Tokens that all long requests together may have in the step of the short ones."""
        usual = sum([request.tokens for request in short])
        allowed = max(self._chunk - usual, LEAST)
        if short or (expected and expected[0] < self.costs.seconds(allowed)):
            stretch = STRETCH * max(1.0, WAITING * long / max(1, len(short)))
            stretched = self.costs.tokens(stretch * self.costs.seconds(max(usual, 1)))
            allowed = min(allowed, max(LEAST, stretched - usual))
        return allowed


def divided(wants: Sequence[int], allowed: int) -> list[int]:
    """Divides tokens among long requests, given what each wants, the oldest first.

    Half goes to the oldest, so that none starves, and half to the one that is complete soonest, so that a short prompt
    need not wait for a long one; what is left to the others by age.
    """
    soonest, given = min(range(len(wants)), key=wants.__getitem__), [0] * len(wants)
    for index in dict.fromkeys((soonest, *range(len(wants)))):
        given[index] = min(wants[index], allowed // 2 if index == soonest != 0 else allowed)
        allowed -= given[index]
    return given


def worth_waiting(ready: int, seconds: float, expected: Sequence[float]) -> float:
    """How long to wait for others, expected in so many seconds each, ascending, by the rule above; 0: not at all."""
    best, wait = 0.0, 0.0
    for count, until in enumerate(expected, 1):
        won = count * seconds - (count + ready) * until
        if won > best:
            best, wait = won, until
    return wait


# What a step costs.

FADING = 0.98  # weight of a step against the one after it: about the latest fifty count
DOUBLING = 8  # tokens that are assumed to double a step's time, until steps of several sizes have been seen
DOUBT = 4.0  # tokens^2: the variance of step sizes from which they are trusted over DOUBLING
REACH = 2  # a step has at most so many times the tokens of any recent one


class StepCosts:
    """Seconds of a step as base + each * tokens, by least squares of relative errors, older steps fading.

    Relative, since noise grows with a step: a stall or one long prefill then weighs no more than a usual step. The time
    of a step far larger than all so far is unknown (a device limited by memory bandwidth is flat at first), so `tokens`
    grows by doubling.
    """

    def __init__(self) -> None:
        self._weight = self._tokens = self._squares = self._seconds = self._products = 0.0  # weighted sums
        self._largest = 1.0  # tokens of a recent step

    def observe(self, tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long; ignored if either is not positive."""
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
        """Expected time of a step of so many tokens; 0 before any was seen."""
        base, each = self._line()
        return base + each * tokens

    def tokens(self, seconds: float) -> int:
        """Tokens that a step of so many seconds can have."""
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


# When sessions that have a result ask again: a smoothed mean and deviation, as TCP estimates round trips (RFC 6298).

GAIN = 1 / 8
DEVIATION_GAIN = 1 / 4
DEVIATIONS = 3  # beyond the mean: a session that is later than this is not waited for any more
OUTLIER = 2  # a gap counts as at most so many times the longest that was waited for: it may be the only one
SHORTEST = 0.001  # seconds; that longest is taken to be at least this


class _Gap:
    """Between a result and the session's next request."""

    def __init__(self, first: float) -> None:
        self.mean, self.deviation = first, first / 2  # seconds
        self.short = False  # the latest was less than half of the mean

    @property
    def longest(self) -> float:
        return self.mean + DEVIATIONS * self.deviation

    def learn(self, gap: float) -> None:
        apart = min(gap, OUTLIER * max(self.longest, SHORTEST)) - self.mean
        self.deviation += DEVIATION_GAIN * (abs(apart) - self.deviation)
        self.mean += GAIN * apart


class ReturnTimes:
    """How soon each session asks again."""

    def __init__(self) -> None:
        self._gaps: dict[Hashable, _Gap] = {}
        self._away: dict[Hashable, float] = {}  # sessions that have a result and no request since: when they had it
        self._usual: _Gap | None = None  # over all: what is expected of a session that never returned yet

    def answered(self, session: Hashable, now: float) -> None:
        """The session has its result."""
        self._away[session] = now

    def asked(self, session: Hashable, now: float) -> None:
        """The session has a new request."""
        answered = self._away.pop(session, None)
        if answered is not None:
            gap = max(0.0, now - answered)
            self._usual = self._usual or _Gap(gap)
            self._usual.learn(gap)
            self._gaps[session] = _learned(self._gaps.get(session), gap)

    def over(self, session: Hashable) -> None:
        """The session has ended."""
        self._gaps.pop(session, None)
        self._away.pop(session, None)

    def usual(self, session: Hashable) -> float:
        """Seconds between a result of the session's and its next request, on average."""
        gap = self._gaps.get(session, self._usual)
        return 0.0 if gap is None else gap.mean

    def expected(self, now: float) -> dict[Hashable, float]:
        """Seconds until each session should be back at the latest; without those that are late already."""
        known = [(session, at, self._gaps.get(session, self._usual)) for session, at in self._away.items()]
        left = {session: at + gap.longest - now for session, at, gap in known if gap is not None}
        return {session: seconds for session, seconds in left.items() if seconds > 0}


def _learned(before: _Gap | None, gap: float) -> _Gap:
    """A session that is back twice in less than half of its usual time does something else now, as with an overlapped
    draft after rounds: else it would be expected late for tens of steps, and sessions would stay apart in groups."""
    short = before is not None and gap < before.mean / 2
    if before is None or (short and before.short):
        return _Gap(gap)
    before.learn(gap)
    before.short = short
    return before


# Which sessions have KV slots, and which are preempted for one that has none.

WAIT = 0.5  # seconds that a session waits for slots to become free by themselves
LEAST_TURN = 0.5  # seconds that a session keeps its slots, from its first result on
RECOMPUTING = 4  # ... and so many times as long as recomputing its text takes, which costs at most a fifth of the time


@dataclass
class _InUse:
    """A session that has slots."""

    used: float  # when it last took part in a step
    until: float = float("inf")  # its turn ends then; it begins with its first result


class Admission:
    """Admits sessions to the KV slots.

    A session that has no request and is not expected to have one soon is preempted whenever others need its slots, the
    least recently used first. Where slots are too few for all the others they take turns: a turn begins with the first
    result, so that none prefills in vain, and is long enough that recomputing the text is a small part of it.
    """

    def __init__(self, admits: Callable[[ForwardRequest], bool], free: Callable[[Hashable], None]) -> None:
        self.preemptions = 0
        self._admits, self.free = admits, free
        self._sessions: dict[Hashable, _InUse] = {}

    def stepped(self, session: Hashable, now: float) -> None:
        """The session took part in a step, and so has slots."""
        known = self._sessions.get(session)
        if known is None:
            self._sessions[session] = _InUse(now)
        else:
            known.used = now

    def answered(self, request: ForwardRequest, now: float, costs: StepCosts) -> None:
        """The request's session has a result."""
        known = self._sessions[request.session]
        if known.until == float("inf"):
            known.until = now + max(LEAST_TURN, RECOMPUTING * costs.seconds(len(request.context)))

    def close(self, session: Hashable) -> None:
        """Frees the session's slots."""
        self._sessions.pop(session, None)
        self.free(session)

    def admitted(
        self, waiting: Iterable[ForwardRequest], expected: Collection[Hashable], now: float
    ) -> list[ForwardRequest]:
        """Those of all that wait, in the order in which they asked, that have slots or can have them now; of each
        session the one that asked first. Sessions that are expected should ask for something soon.
        """
        first: dict[Hashable, ForwardRequest] = {}
        for request in waiting:
            first.setdefault(request.session, request)
        admitted: list[ForwardRequest] = []
        overdue = False  # somebody has waited long: what becomes free is not for those behind
        before = self.preemptions
        for session, request in first.items():
            newcomer = session not in self._sessions
            if not (newcomer and overdue) and self._admit(request, first, expected, now):
                admitted.append(request)
            elif now >= request.asked + WAIT:
                overdue = True
        if not admitted and first and not self._sessions.keys() - first.keys():
            admitted.append(oldest := next(iter(first.values())))
            # Nobody else can go on: those are preempted whose turns end first.
            while not self._admits(oldest) and (others := self._others(oldest)):
                self._preempt(min(others, key=lambda session: others[session].until))
        elif before == self.preemptions:
            return admitted
        return [request for request in admitted if self._admits(request)]

    def _admit(
        self, request: ForwardRequest, waiting: Collection[Hashable], expected: Collection[Hashable], now: float
    ) -> bool:
        """Whether it has slots, after preempting those that must give way."""
        while not self._admits(request):
            victim = self._victim(request, {*waiting, *expected}, now)
            if victim is None:
                return False
            self._preempt(victim)
        return True

    def _victim(self, request: ForwardRequest, busy: Collection[Hashable], now: float) -> Hashable | None:
        """Which session is preempted now; None: none yet."""
        others = self._others(request)
        idle = [session for session in others if session not in busy]
        if idle:
            return min(idle, key=lambda session: others[session].used)
        first = min(others, key=lambda session: others[session].until, default=None)
        return first if first is not None and now >= max(request.asked + WAIT, others[first].until) else None

    def _others(self, request: ForwardRequest) -> dict[Hashable, _InUse]:
        return {session: known for session, known in self._sessions.items() if session != request.session}

    def _preempt(self, session: Hashable) -> None:
        self.preemptions += 1
        self.close(session)

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

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from crossdraft.models.costs import StepCosts
from crossdraft.models.returns import Returns

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

"""The steps of a session, and of its walks what they judged, as whoever watches it is told of them."""

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

from crossdraft.session.events import Command, Event
from crossdraft.text.letters import Letters, to_bytes
from crossdraft.types.rows import DraftToken, Row, Whose
from crossdraft.verification.walk import (
    Answer,
    Emit,
    Ground,
    Method,
    NeedDraftToken,
    NeedRow,
    Refused,
    Walk,
    WalkStep,
    draft_token_letters,
)


@dataclass(frozen=True, eq=False)
class Step:
    """One call of the session's state machine."""

    now: float  # seconds of the monotonic clock
    event: Event | None  # None: the start
    commands: tuple[Command, ...]
    seconds: float = 0.0  # duration of the call
    row_misses: int = 0  # so far


class Recorder(Protocol):
    """Is told every step of a session."""

    def record(self, step: Step) -> None:
        """Called after each step; does not block and does not raise."""
        ...

    def close(self) -> None:
        """The session is over."""
        ...


@dataclass(eq=False)
class Judged:
    """A draft token that a walk has asked for, and what came of it."""

    letters: Letters
    start: int  # letters of output before it
    q: float | None  # with which it was drafted; None: the method needs no row
    p: float | None = None  # the target's, of the same token; None: no row of the target's was needed there
    before: float = 1.0  # chance that those before it in its block are accepted
    verdict: str = ""

    @property
    def chance(self) -> float | None:
        """That it is accepted as a whole token."""
        return min(1.0, self.before * self.p / self.q) if self.q and self.p is not None else None

    def __str__(self) -> str:
        numbers = {"q": self.q, "p": self.p, "chance": self.chance}
        shown = (f"{name} {value:.3f}" for name, value in numbers.items() if value is not None)
        return f"{_shown(self.letters)}: {', '.join((*shown, self.verdict))}"


def watched(method: Method, judged: list[Judged]) -> Method:
    """The method, whose walks add each draft token to a list once it is known what became of it."""

    def walk(ground: Ground) -> Walk:
        notes, steps, answer = _Notes(ground, judged, not method.whole_draft), method.walk(ground), None
        with suppress(StopIteration):
            while True:
                step = steps.send(answer)
                answer = yield step
                notes.add(step, answer)

    return replace(method, walk=walk)


class _Notes:
    """What one walk asked for and decided; `each`: it judges token by token, and not parts of the draft's text."""

    def __init__(self, ground: Ground, judged: list[Judged], each: bool) -> None:
        self._pair, self._judged, self._each = ground.pair, judged, each
        self._began = self._drafted = ground.offset - len(ground.ahead)  # letters of output
        self._text = str(ground.ahead)  # output since then
        self._due: list[tuple[Judged, int | None]] = []  # with their target ids

    def add(self, step: WalkStep, answer: Answer) -> None:
        match step, answer:
            case NeedDraftToken(path), DraftToken():
                before = self._due[-1][0].chance if path and self._due else None
                target = answer.token if answer.whose is Whose.TARGET else self._pair.target_id(answer.token)
                letters, q = draft_token_letters(self._pair, answer), None if answer.row is None else answer.row
                one = Judged(letters, self._drafted, q and q.probability(answer.token), None, before or 1.0)
                self._drafted += len(letters)
                self._due.append((one, target))
                self._decide("")
            case NeedRow(path=path), Row() if self._due and self._each:
                one, target = self._due[-1]
                if one.start == self._began + len(self._text) + sum(len(self._pair.target.letters[id]) for id in path):
                    with suppress(KeyError):  # the row need not list it
                        one.p = 0.0 if target is None else answer.probability(target)
            case Emit(token), _:
                self._text += self._pair.target.letters[token]
                self._decide(_shown(self._pair.target.letters[token]))
            case Refused(), _:
                for one, _ in self._due:
                    one.verdict = "not judged"
                self._judged += [one for one, _ in self._due]

    def _decide(self, emitted: str) -> None:
        """Of those at the beginning of what is due that the output has reached."""
        while self._due:
            one = self._due[0][0]
            there = self._text[one.start - self._began :][: len(one.letters)]
            agrees = one.letters.startswith(there)
            if agrees and len(there) < len(one.letters):
                return
            one.verdict = "accepted" if agrees else f"refused: {emitted} takes its place" if emitted else "too late"
            self._judged.append(self._due.pop(0)[0])
            if not agrees:
                return


def _shown(letters: str) -> str:
    return repr(to_bytes(Letters(letters)).decode("utf-8", "replace"))

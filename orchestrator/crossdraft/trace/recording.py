"""The steps of a session, and of its walks what they judged, as whoever watches it is told of them."""

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

from crossdraft.session.events import Command, Event
from crossdraft.text.letters import Letters, to_bytes
from crossdraft.types import quick_dataclass
from crossdraft.types.rows import DraftToken, Row, Whose
from crossdraft.types.statistics import Kind
from crossdraft.verification import rejection
from crossdraft.verification.methods import METHODS
from crossdraft.verification.walk import (
    Answer,
    Emit,
    Ground,
    Method,
    NeedDraftToken,
    NeedRow,
    Walk,
    WalkStep,
    draft_token_letters,
)


@quick_dataclass(frozen=True, eq=False)
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
    start: int  # letters of the draft before it
    token: int | None  # its target id; None: the target has no such token
    q: float | None  # with which it was drafted; None: the method needs no row
    before: float | None  # chance that those before it in its block are accepted; None: it is judged by its text
    p: float | None = None  # the target's; None: the method does not ask for it
    verdict: str = ""

    @property
    def chance(self) -> float | None:
        """That it is accepted as a whole token."""
        known = self.q and self.p is not None and self.before is not None
        return min(1.0, self.before * self.p / self.q) if known else None  # type: ignore[operator]

    def __str__(self) -> str:
        numbers = {"q": self.q, "p": self.p, "chance": self.chance}
        shown = [f"{name} {value:.3f}" for name, value in numbers.items() if value is not None]
        return f"{_shown(self.letters)}: {', '.join([*shown, self.verdict])}"


def watched(method: Method, judged: list[Judged]) -> Method:
    """The method, whose walks add each draft token to a list once it is known what became of it."""

    def walk(ground: Ground) -> Walk:
        notes, steps = _Notes(ground, judged, method), method.walk(ground)
        answer: Answer = None
        with suppress(StopIteration):
            while True:
                step = steps.send(answer)
                answer = yield step
                notes.add(step, answer)

    return replace(method, walk=walk)


class _Notes:
    """What one walk asked for and decided."""

    def __init__(self, ground: Ground, judged: list[Judged], method: Method) -> None:
        self._pair, self._judged, self._whole_draft = ground.pair, judged, method.whole_draft
        self._by_tokens = (
            METHODS.get(method.name, method).walk is rejection.walk
        )  # not by texts; also where it is watched
        self._text, self._due, self._drafted = str(ground.ahead), list[Judged](), 0  # output since the draft began

    def add(self, step: WalkStep, answer: Answer) -> None:
        match step, answer:
            case NeedDraftToken(path), DraftToken(token, row, whose) as drafted:
                before = self._due[-1].chance if path and self._due else 1.0
                own = token if whose is Whose.TARGET else self._pair.target_id(token)
                letters, q = draft_token_letters(self._pair, drafted), None if row is None else row.probability(token)
                self._due.append(Judged(letters, self._drafted, own, q, before if self._by_tokens else None))
                self._drafted += len(letters)
                self._decide("")
            case NeedRow(path=path), Row() as p if self._due and not self._whole_draft:
                one, path_letters = self._due[-1], sum(len(self._pair.target.letters[token]) for token in path)
                if one.start == len(self._text) + path_letters:
                    with suppress(KeyError):  # the row need not list it
                        one.p = 0.0 if one.token is None else p.probability(one.token)
            case Emit(token, kind), _:
                self._text += self._pair.target.letters[token]
                wrong = kind is Kind.CORRECTED and self._by_tokens  # though its text may begin so
                self._decide(_shown(self._pair.target.letters[token]), wrong)

    def _decide(self, emitted: str, wrong: bool = False) -> None:
        """Of those at the beginning of what is due that the output has reached; `wrong`: the first is refused."""
        agrees = True
        while agrees and self._due:
            one = self._due[0]
            there = self._text[one.start :][: len(one.letters)]
            agrees = one.letters.startswith(there) and not wrong
            if agrees and len(there) < len(one.letters):
                return
            one.verdict = "accepted" if agrees else f"refused: {emitted or 'other text'} takes its place"
            self._judged.append(self._due.pop(0))


def _shown(letters: str) -> str:
    return repr(to_bytes(Letters(letters)).decode("utf-8", "replace"))

"""What a governor decided, and when, for people."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from crossdraft.pipeline.governing import Choice, Governor, Observation

MOST_KEPT = 10_000  # choices; a generation with more is explained up to there


@dataclass(frozen=True)
class Decision:
    """From a time on, epochs were run like this."""

    seconds: float  # since the first one
    epochs: int  # that the governor had run like this, one after another; those without a choice do not count
    choice: Choice


@runtime_checkable
class Learning(Protocol):
    """A governor that can say what it has learnt."""

    def explain(self) -> Sequence[str]:
        """What it believes and why it decides so, in lines for people."""
        ...


class Explained:
    """A governor whose choices are kept."""

    def __init__(self, governor: Governor) -> None:
        self.governor = governor
        self.decisions: list[Decision] = []
        self._began: float | None = None

    @property
    def waits_for_drafter(self) -> bool:
        """As the governor has it."""
        return self.governor.waits_for_drafter

    @property
    def estimates(self) -> Sequence[str]:
        """What the governor has learnt, in lines for people; none if it learns nothing."""
        return self.governor.explain() if isinstance(self.governor, Learning) else ()

    def observe(self, seen: Observation, now: float) -> None:
        """As the governor does."""
        self.governor.observe(seen, now)

    def choose(self, now: float) -> Choice:
        """As the governor does, and kept."""
        choice = self.governor.choose(now)
        self._began = now if self._began is None else self._began
        if self.decisions and self.decisions[-1].choice == choice:
            latest = self.decisions.pop()
            self.decisions.append(Decision(latest.seconds, latest.epochs + 1, choice))
        elif len(self.decisions) < MOST_KEPT:
            self.decisions.append(Decision(now - self._began, 1, choice))
        return choice

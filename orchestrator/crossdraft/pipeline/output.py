"""What a session has committed, and when that is enough."""

from dataclasses import dataclass

from crossdraft.pipeline.assignment import Assignment
from crossdraft.pipeline.events import Reason
from crossdraft.text.letters import NOTHING, Letters


@dataclass(frozen=True)
class Ending:
    """The token just committed is the last one."""

    reason: Reason
    kept: int  # letters of the output that count: a stop string does not


class Output:
    """The committed tokens of one session."""

    def __init__(self, assignment: Assignment) -> None:
        self.text = NOTHING
        self.ids: list[int] = []  # target ids
        self._given = assignment
        self._longest_stop = max(map(len, assignment.stop), default=0)

    @property
    def room(self) -> int:
        """Tokens that the target's context still holds."""
        return self._given.context - len(self._given.open_target.prompt) - len(self.ids)

    @property
    def left(self) -> int:
        """Tokens that may still be emitted."""
        return min(self._given.max_tokens - len(self.ids), self.room)

    def commit(self, token: int) -> Ending | None:
        """Append a target token; says whether the output ends with it."""
        begin = max(0, len(self.text) - self._longest_stop)
        self.text = Letters(self.text + self._given.pair.target.letters[token])
        self.ids.append(token)
        found = [place for stop in self._given.stop if (place := self.text.find(stop, begin)) >= 0]
        if found:
            return Ending(Reason.STOP, min(found))
        if token in self._given.pair.target.stops and not self._given.ignore_end:
            return Ending(Reason.STOP, len(self.text))
        return Ending(Reason.LENGTH, len(self.text)) if self.left <= 0 else None

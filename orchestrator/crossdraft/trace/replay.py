"""Verification once more, from a recording: the same events into a new session, its commands beside the recorded ones.

A session is a function of its assignment, its chooser's draws, its controller's choices and its events with their
times, so equal commands are expected to the last bit. An event that the session refuses changes nothing, and has no
commands. What a replay cannot know is whether the services told the truth: it takes their replies as they were
recorded.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from crossdraft.session.assignment import Assignment
from crossdraft.session.events import Command, Emitted, IllegalEventError, Open
from crossdraft.session.models import Models
from crossdraft.session.resolution import resolve
from crossdraft.session.session import Session
from crossdraft.speculation.choice import PLAIN, Choice, Observation
from crossdraft.trace.recording import CODEC, Header, Recording, RecordingError, Step
from crossdraft.trace.timeline import name_of
from crossdraft.types.messages import OpenDrafter
from crossdraft.types.request import RequestError

MOST_SHOWN = 120  # letters of a value


@dataclass(frozen=True)
class Difference:
    """The first place where recording and replay part."""

    round: int  # from 1
    event: str  # what the session was given there
    place: str  # in its commands
    recorded: str
    replayed: str

    def __str__(self) -> str:
        return (
            f"round {self.round}, after {self.event}: {self.place} is {self.recorded} in the recording "
            f"and {self.replayed} in the replay"
        )


@dataclass(frozen=True)
class Replayed:
    """How a replay went."""

    rounds: int  # that were the same
    tokens: int  # emitted in them
    difference: Difference | None  # None: all was the same


def replay(recording: Recording) -> Replayed:
    """Runs the session again.

    Raises:
        RecordingError: its header does not describe a session that could be begun.
    """
    given = assignment_of(recording.header)
    recalled = Recalled(given.controller.waits_for_drafter)
    session = Session(replace(given, controller=recalled))
    tokens = 0
    for place, steps in enumerate(recording.rounds):
        for step in steps:
            recalled.choices.extend(step.choices)
            recalled.opens = any(map(_opens_drafter, step.commands))
            found = _difference(session, step) or recalled.difference
            if found is not None:
                return Replayed(place, tokens, Difference(place + 1, name_of(step.event), *found))
        tokens += sum(isinstance(command, Emitted) for step in steps for command in step.commands)
    return Replayed(len(recording.rounds), tokens, None)


class Recalled:
    """A controller whose choices were recorded."""

    def __init__(self, waits_for_drafter: bool) -> None:
        self.waits_for_drafter = waits_for_drafter
        self.choices: deque[Choice] = deque()  # that are to come
        self.opens = False  # a drafter is opened in this step
        self._missing = False

    def observe(self, seen: Observation, now: float) -> None:
        """Nothing is learned."""

    def wants_drafter(self, now: float) -> bool:
        return self.opens

    def choose(self, now: float) -> Choice:
        """The next one; plain decoding if there is none."""
        self._missing = not self.choices
        return PLAIN if self._missing else self.choices.popleft()

    def review(self, now: float) -> Choice:
        return self.choose(now)

    @property
    def difference(self) -> tuple[str, str, str] | None:
        """Place, recorded and replayed value after a step that did not ask for as many choices as were recorded."""
        if self._missing:
            return "a choice of the controller", "missing", "asked for"
        return ("a choice of the controller", _shown(self.choices[0]), "not asked for") if self.choices else None


def _opens_drafter(command: Command) -> bool:
    return isinstance(command, Open) and isinstance(command.request, OpenDrafter)


def assignment_of(header: Header) -> Assignment:
    """What the recorded session worked from. Raises RecordingError."""
    try:
        given = header.request, Models.of(header.target, header.drafter), header.secrets, header.targets
        return replace(resolve(*given, target_seconds=header.target_seconds), no_drafter=header.no_drafter)
    except (RequestError, ValueError) as error:
        raise RecordingError(f"the recorded request cannot be resolved: {error}") from error


def _difference(session: Session, step: Step) -> tuple[str, str, str] | None:
    """Place, recorded and replayed value of the first difference after one step."""
    try:
        commands = session.start(step.now) if step.event is None else session.handle(step.event, step.now)
    except IllegalEventError as error:
        return ("the event", "allowed", f"refused ({error})") if step.commands else None
    for place, (recorded, replayed) in enumerate(zip(step.commands, commands, strict=False), 1):
        if not _same(recorded, replayed):
            return _first(f"command {place}, {type(recorded).__name__}", recorded, replayed)
    if len(step.commands) != len(commands):
        shorter = min(len(step.commands), len(commands))
        return f"command {shorter + 1}", _at(step.commands, shorter), _at(commands, shorter)
    return None


def _at(commands: Sequence[Command], place: int) -> str:
    return _shown(commands[place]) if place < len(commands) else "missing"


def _first(place: str, recorded: Any, replayed: Any) -> tuple[str, str, str]:
    """The innermost first place where two values differ, and both values there."""
    if type(recorded) is type(replayed):
        for name, one, other in _parts(recorded, replayed):
            if not _same(one, other):
                return _first(f"{place}{name}", one, other)
    return place, _shown(recorded), _shown(replayed)


def _same(one: object, other: object) -> bool:
    """As bytes: arrays and errors have no equality of their own, and NaN is then equal to itself."""
    return CODEC.pack(one) == CODEC.pack(other)


def _parts(recorded: Any, replayed: Any) -> Iterator[tuple[str, Any, Any]]:
    if is_dataclass(recorded):
        for field in fields(recorded):
            yield f".{field.name}", getattr(recorded, field.name), getattr(replayed, field.name)
    elif isinstance(recorded, tuple | list) and len(recorded) == len(replayed):
        for place, (one, other) in enumerate(zip(recorded, replayed, strict=True)):
            yield f"[{place}]", one, other


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…"

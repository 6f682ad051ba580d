"""Flight records: what went into a session and what came out, in a file that only grows.

A file is MAGIC, the version of the format, and records: length, CRC-32, bytes, compressed. The first record is the
header, every other one a round of steps. What was written before a crash can be read; damage is noticed.
"""

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass
from enum import Enum
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from types import ModuleType
from typing import BinaryIO, Protocol

from crossdraft.session import events
from crossdraft.session.assignment import Assignment, Secrets
from crossdraft.session.events import Command, Event, Finished, Lost, Replied
from crossdraft.speculation import choice
from crossdraft.speculation.choice import Choice
from crossdraft.text import grammar
from crossdraft.text.chat_template import ChatTemplate
from crossdraft.trace.codec import Codec, PackingError
from crossdraft.types import messages, request, rows, trees
from crossdraft.types.messages import Description, PassDone
from crossdraft.types.request import GenerationRequest
from crossdraft.types.statistics import Counts, Kind

MAGIC = b"crossdraft flight"
FORMAT = 4  # raised when a recorded type gets another name or a field another meaning
VERSION = struct.Struct("<H")
FRAME = struct.Struct("<II")  # length and CRC-32 of a record


@dataclass(frozen=True, eq=False)
class Header:
    """The inputs of a session."""

    software: str  # version of crossdraft that recorded
    began: float  # seconds since 1970, UTC
    request: GenerationRequest
    target: Description
    drafter: Description | None  # None: plain decoding
    secrets: Secrets
    targets: int = 1  # addresses of targets
    target_seconds: float = 30.0  # as of the assignment
    no_drafter: str = Assignment.no_drafter  # likewise


@dataclass(frozen=True, eq=False)
class Step:
    """One call of the session's state machine."""

    now: float  # seconds of the monotonic clock
    event: Event | None  # None: the start
    commands: tuple[Command, ...]
    seconds: float = 0.0  # duration of the call
    row_misses: int = 0  # so far
    sent: int = 0  # bytes sent to services so far
    received: int = 0  # bytes received from services so far
    choices: tuple[Choice, ...] = ()  # that the controller made: it knows of other outputs, which are not recorded


Round = tuple[Step, ...]


@dataclass(frozen=True, eq=False)
class Recording:
    """The contents of a file."""

    header: Header
    rounds: tuple[Round, ...]
    fault: str = ""  # why the rest of the file could not be read; empty: it was read to its end

    @property
    def steps(self) -> Iterator[Step]:
        for steps in self.rounds:
            yield from steps

    @property
    def finished(self) -> Finished | None:
        commands = (command for step in self.steps for command in step.commands)
        return next((command for command in commands if isinstance(command, Finished)), None)


class RecordingError(ValueError):
    """A file is no recording that can be read here; the message says why."""


def _values_of(module: ModuleType) -> list[type]:
    """The dataclasses and enums that a module defines."""
    own = [one for one in vars(module).values() if isinstance(one, type) and one.__module__ == module.__name__]
    return [one for one in own if is_dataclass(one) or issubclass(one, Enum)]


KNOWN = (
    *(known for module in (messages, events, choice, rows, trees, request, grammar) for known in _values_of(module)),
    ChatTemplate,
    Counts,
    Kind,
    Secrets,
    Header,
    Step,
)
CODEC = Codec(KNOWN)
QUICK = 1  # level of compression


def _record(value: object) -> bytes:
    """Raises PackingError."""
    record = zlib.compress(CODEC.pack(value), QUICK)
    return FRAME.pack(len(record), zlib.crc32(record)) + record


def read(path: Path) -> Recording:
    """Reads a recording, up to its end or the first damage.

    Raises:
        OSError: the file cannot be read.
        RecordingError: it is no recording, has another format, or no readable header.
    """
    data = path.read_bytes()
    begin = len(MAGIC) + VERSION.size
    if data[: len(MAGIC)] != MAGIC or len(data) < begin:
        raise RecordingError(f"{path} is no recording of crossdraft")
    (version,) = VERSION.unpack_from(data, len(MAGIC))
    if version != FORMAT:
        raise RecordingError(
            f"{path} has format {version}; this version reads format {FORMAT}: use the version that wrote it"
        )
    records = _records(data, begin)
    try:
        header = next(records, None)
    except PackingError as error:
        raise RecordingError(f"{path} cannot be read: {error}") from error
    if not isinstance(header, Header):
        raise RecordingError(f"{path} cannot be read: it has no header")
    rounds: list[Round] = []
    try:
        rounds.extend(map(_round, records))
    except PackingError as error:
        return Recording(header, tuple(rounds), f"round {len(rounds) + 1}: {error}")
    return Recording(header, tuple(rounds))


def _round(steps: object) -> Round:
    if not (isinstance(steps, tuple) and all(isinstance(step, Step) for step in steps)):
        raise PackingError("it is no round")
    return steps


def _records(data: bytes, place: int) -> Iterator[object]:
    """The values of a file from an offset on; raises PackingError where it is damaged."""
    while place < len(data):
        begin = place + FRAME.size
        length, check = FRAME.unpack_from(data, place) if begin <= len(data) else (0, 0)
        if begin + length > len(data):
            raise PackingError("the file ends in the middle of a record")
        if zlib.crc32(record := data[begin : begin + length]) != check:
            raise PackingError("a record is damaged")
        try:
            yield CODEC.unpack(zlib.decompress(record))
        except zlib.error as error:
            raise PackingError(f"a record is damaged: {error}") from error
        place = begin + length


class Recorder(Protocol):
    """Is told every step of a session."""

    def record(self, step: Step) -> None:
        """Called after each step; does not block and does not raise."""
        ...

    def close(self) -> None:
        """Ends the recording; does not wait until it is written."""
        ...


class FileRecorder:
    """Writes one record per round to a file, from a thread, so that the event loop only appends.

    A round ends with the return of a pass (of a run: its last reply) or the loss of a service.

    Raises:
        OSError: the file cannot be created.
    """

    def __init__(self, path: Path, header: Header) -> None:
        self._round: list[Step] = []
        self._queue: SimpleQueue[tuple[Step, ...] | None] = SimpleQueue()
        self._fault = ""
        self._closed = False
        self._thread = Thread(target=self._write, args=(path.open("wb"), header), name="recorder")
        self._thread.start()

    def record(self, step: Step) -> None:
        self._round.append(step)
        event = step.event
        match event:
            case Lost() | Replied(reply=PassDone(more=False)):
                self._end_round()

    def close(self) -> None:
        """As Recorder says; a second time it does nothing."""
        if not self._closed:
            self._closed = True
            self._end_round()
            self._queue.put(None)

    def wait(self) -> str:
        """Waits, after `close`, until all is written; returns why something could not be, or an empty text."""
        self._thread.join()
        return self._fault

    def _end_round(self) -> None:
        if self._round:
            self._queue.put(tuple(self._round))
            self._round.clear()

    def _write(self, file: BinaryIO, header: Header) -> None:
        """Runs in the thread. What cannot be written ends the recording, not the session."""
        try:
            with file:
                file.write(MAGIC + VERSION.pack(FORMAT) + _record(header))
                file.flush()
                while (steps := self._queue.get()) is not None:
                    file.write(_record(steps))
                    file.flush()
        except (OSError, PackingError) as error:
            self._fault = str(error)

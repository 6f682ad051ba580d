"""A recorded session: a header, then one record a round.

The file begins with MAGIC and the version of the format. Then come records: a length, the CRC-32 of the bytes, the
bytes. The first is the table of types, the second the header, every other a round. What was written before a crash
can be read, and damage is noticed.
"""

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import BinaryIO

from crossdraft.pipeline import chat, events, governing, request
from crossdraft.pipeline.estimates import Estimates
from crossdraft.pipeline.events import Command, Event, Finished
from crossdraft.pipeline.packing import Packer, PackingError, Unpacker
from crossdraft.pipeline.request import GenerationRequest
from crossdraft.pipeline.resolution import Secrets
from crossdraft.text.chat_template import ChatTemplate
from crossdraft.verification import exchange, rows, trees
from crossdraft.verification.exchange import Description
from crossdraft.verification.walk import Kind

MAGIC = b"crossdraft flight"
FORMAT = 1
VERSION = struct.Struct("<H")
FRAME = struct.Struct("<II")  # length and CRC-32 of a record


@dataclass(frozen=True, eq=False)
class Header:
    """What a session began with."""

    software: str  # version of crossdraft
    began: float  # seconds since 1970, UTC
    request: GenerationRequest
    target: Description
    drafter: Description | None  # None: plain decoding
    secrets: Secrets
    targets: int = 1  # addresses that there were
    before: Estimates | None = None  # what the governor had learnt
    follows: bool = False  # another output was getting to know the services


@dataclass(frozen=True, eq=False)
class Step:
    """One call of the session."""

    now: float  # seconds of the monotonic clock, as the session was told
    event: Event | None  # None: it was started
    commands: tuple[Command, ...]
    seconds: float = 0.0  # that the call took
    row_misses: int = 0  # so far
    sent: int = 0  # bytes of messages to services so far
    received: int = 0  # bytes of their answers so far


Round = tuple[Step, ...]


@dataclass(frozen=True, eq=False)
class Recording:
    """What a file holds."""

    header: Header
    rounds: tuple[Round, ...]
    fault: str = ""  # why the rest of the file could not be read

    @property
    def steps(self) -> Iterator[Step]:
        """All of them, in order."""
        for steps in self.rounds:
            yield from steps

    @property
    def finished(self) -> Finished | None:
        """The session's end, if it was recorded."""
        commands = (command for step in self.steps for command in step.commands)
        return next((command for command in commands if isinstance(command, Finished)), None)


class RecordingError(ValueError):
    """A file is no recording that can be read here; the text says why."""


def _values_of(module: ModuleType) -> list[type]:
    """The dataclasses and enums that a module defines."""
    own = [one for one in vars(module).values() if isinstance(one, type) and one.__module__ == module.__name__]
    return [one for one in own if is_dataclass(one) or issubclass(one, Enum)]


KNOWN = (
    *(known for module in (exchange, events, governing, rows, trees, request, chat) for known in _values_of(module)),
    ChatTemplate,
    Kind,
    Secrets,
    Estimates,
    Header,
    Step,
)


class Writer:
    """Writes a recording to a file that is open for bytes; raises OSError and PackingError."""

    def __init__(self, file: BinaryIO, header: Header) -> None:
        self._file = file
        self._packer = Packer(KNOWN)
        file.write(MAGIC + VERSION.pack(FORMAT))
        self._frame(self._packer.table)
        self._frame(zlib.compress(self._packer.pack(header)))  # two tokenizers, megabytes of text
        file.flush()

    def write(self, steps: Round) -> None:
        """One round."""
        self._frame(self._packer.pack(steps))
        self._file.flush()

    def _frame(self, record: bytes) -> None:
        self._file.write(FRAME.pack(len(record), zlib.crc32(record)) + record)


def read(path: Path) -> Recording:
    """A recording, or as much of it as is whole.

    Raises:
        OSError: the file cannot be read.
        RecordingError: it is no recording, or has no readable header.
    """
    data = path.read_bytes()
    begin = len(MAGIC) + VERSION.size
    if data[: len(MAGIC)] != MAGIC or len(data) < begin:
        raise RecordingError(f"{path} is no recording of crossdraft")
    (version,) = VERSION.unpack_from(data, len(MAGIC))
    if version != FORMAT:
        raise RecordingError(f"{path} has format {version}, and this version of crossdraft reads format {FORMAT}")
    records = Frames(data, begin)
    try:
        unpacker = Unpacker(KNOWN, next(records, b""))
        header = unpacker.unpack(zlib.decompress(next(records, b"")))
    except (PackingError, zlib.error) as error:
        raise RecordingError(f"{path} cannot be read: {records.fault or error}") from error
    if not isinstance(header, Header):
        raise RecordingError(f"{path} cannot be read: it has no header")
    return _recording(header, records, unpacker)


def _recording(header: Header, records: "Frames", unpacker: Unpacker) -> Recording:
    rounds: list[Round] = []
    for record in records:
        try:
            steps = unpacker.unpack(record)
        except PackingError as error:
            return Recording(header, tuple(rounds), f"round {len(rounds) + 1}: {error}")
        if not (isinstance(steps, tuple) and all(isinstance(step, Step) for step in steps)):
            return Recording(header, tuple(rounds), f"round {len(rounds) + 1}: it is no round")
        rounds.append(steps)
    return Recording(header, tuple(rounds), records.fault)


class Frames:
    """The records of a file, from a place on; `fault` says why they ended before the file did."""

    def __init__(self, data: bytes, begin: int) -> None:
        self.fault = ""
        self._data = data
        self._place = begin

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        left = len(self._data) - self._place
        if not left or self.fault:
            raise StopIteration
        length, check = FRAME.unpack_from(self._data, self._place) if left >= FRAME.size else (0, 0)
        begin = self._place + FRAME.size
        record = self._data[begin : begin + length]
        if left < FRAME.size + length or left < FRAME.size:
            self.fault = "the file ends in the middle of a record"
        elif zlib.crc32(record) != check:
            self.fault = "a record is damaged"
        if self.fault:
            raise StopIteration
        self._place = begin + length
        return record
